"""Words that the blocks of a decode step share about a layer's expert cache, and how they are read."""

import triton
import triton.language as tl

# The words of ``CacheTables.header``.
COUNT, CLOCK, READY, DONE, FIRST, LAST, HOSTED, LAYER = (tl.constexpr(word) for word in range(8))


@triton.jit
def header_of(state_ptr, E, S):
    """Pointer to ``CacheTables.header``."""
    return state_ptr + 3 * E + 5 * S


@triton.jit
def load_acquired(ptr, INTERPRET: tl.constexpr):
    """An int32 that another block stores with release; what it wrote before can be read after this."""
    if INTERPRET:
        return tl.load(ptr)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def readable_by_tma(value, INTERPRET: tl.constexpr):
    """``value``, after which TMA loads see what was stored before it without TMA."""
    if INTERPRET:
        return value
    else:
        return tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
