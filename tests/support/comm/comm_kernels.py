"""The two smallest kernels that exercise signals: put a row and signal it, wait for a row and take it."""

import triton
import triton.language as tl

from comet.kernels.runtime.primitives import PLACE_EXCHANGE, signal, wait_flag


@triton.jit(do_not_specialize=["slot", "flag", "value", "epoch"])
def put_kernel(row_address, flag_address, slot, flag, value, epoch, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    row = tl.load(row_address).to(tl.pointer_type(tl.int32)) + slot * WIDTH
    tl.store(row + column, value + column)
    signal(tl.load(flag_address).to(tl.pointer_type(tl.int32)) + flag, epoch)


@triton.jit(do_not_specialize=["slot", "flag", "epoch", "timeout_ns"])
def take_kernel(rows, flags, out, fault, slot, flag, epoch, timeout_ns, WIDTH: tl.constexpr, INTERPRET: tl.constexpr):
    wait_flag(flags + flag, epoch, fault, timeout_ns, PLACE_EXCHANGE, flag, slot, INTERPRET)
    tl.debug_barrier()
    column = tl.arange(0, WIDTH)
    tl.store(out + column, tl.load(rows + slot * WIDTH + column))
