"""SMs that another kernel holds until it is told, as a collective does that waits for other ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from comet.kernels.runtime.nvrtc import compile_cubin, load_kernel

MOST_NS = 20_000_000_000
SOURCE = """
extern "C" __global__ void hold(volatile int* let_go, volatile int* holds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    holds[blockIdx.x] = 1;
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*let_go == 0 && now - begin < MOST_NS);
    holds[blockIdx.x] = 0;
}
"""
SHARED_BYTES = 200 * 1024  # no block of a layer fits beside so much


@contextmanager
def held_sms(count: int) -> Iterator[Callable[[], bool]]:
    """Hold ``count`` SMs of the current GPU, for 20 seconds at most; yields whether they are still held.

    Nothing is collected meanwhile: whoever frees memory of the GPU may wait for all of its kernels.
    """
    let_go, holds = (torch.zeros(size, dtype=torch.int32).pin_memory() for size in (1, count))
    source = f"constexpr unsigned long long MOST_NS = {MOST_NS};\n{SOURCE}"
    kernel = load_kernel(compile_cubin(source, "hold"), "hold", num_threads=32, cluster=1, shared_bytes=SHARED_BYTES)
    stream = torch.cuda.Stream()
    gc.collect()
    gc.disable()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        kernel.launch(count, [let_go, holds])
    while not holds.all():
        pass
    try:
        yield lambda: bool(holds.all())
    finally:
        let_go.fill_(1)
        gc.enable()
        stream.synchronize()
