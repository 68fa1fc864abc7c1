"""Kernels of one stream that overlap: the next one starts before this one has ended, and waits for its stores."""

import triton
import triton.language as tl


@triton.jit
def allow_next(DEPENDENT: tl.constexpr):
    """Let the next kernel of the stream start as soon as every block of this one has."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Return when the kernel before has finished and its stores can be read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
