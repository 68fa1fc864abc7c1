"""Layer 1 ends while a kernel of another stream holds SMs: those that it spares, or any, because its blocks draw."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch

from comet import MoE, MoEConfig, OverlapConfig, ParallelConfig, make_expert_group
from comet.kernels.layer import gemm_combine
from comet.kernels.runtime.nvrtc import compile_cubin, load_kernel
from comet.layout import RoutedTokens
from comet.quantization.formats import quantize_fp8

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
SHARED_BYTES = 200 * 1024  # leaves no room for a block of a layer on the same SM


@contextmanager
def held_sms(count: int) -> Iterator[Callable[[], bool]]:
    """Hold ``count`` SMs of the current GPU for at most 20 seconds; yields a function: are they still held?

    Garbage is not collected meanwhile: to free memory of the GPU may mean to wait for all of its kernels.
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


pytestmark = pytest.mark.gpu

# In pairs of blocks and, in block FP8, one by one.
CONFIG = MoEConfig(hidden_size=2048, ffn_size=768, num_experts=16, top_k=8)
NUM_TOKENS = 4096
HELD = 64  # so many blocks that are missing have some of a panel's work, or none of them would wait


@dataclass(frozen=True)
class Launch:
    """How layer 1 runs."""

    overlap: OverlapConfig
    cuda_kernels: bool = True


LAUNCHES = {
    "CUDA C++": Launch(OverlapConfig()),
    "block FP8": Launch(OverlapConfig()),
    "CUDA C++, split": Launch(OverlapConfig(comm_blocks=16)),
    "Triton": Launch(OverlapConfig(), cuda_kernels=False),
    "Triton, split": Launch(OverlapConfig(comm_blocks=32), cuda_kernels=False),
}


def ends_within(seconds: float) -> bool:
    event, end = torch.cuda.Event(), time.monotonic() + seconds
    event.record()
    while not event.query():
        if time.monotonic() > end:
            return False
    return True


def in_fp8(layer: MoE, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    routing = layer.router(x)
    w1, w2 = quantize_fp8(layer.w1.flatten(1, 2)), quantize_fp8(layer.w2)
    routed = RoutedTokens(x, routing.top_k_ids, routing.top_k_weights)
    return lambda: layer.experts.fp8(routed, w1, w2)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("spare", [HELD, 0])
def test_a_layer_beside_a_kernel_that_does_not_end(name: str, spare: int) -> None:
    launch = LAUNCHES[name]
    group = make_expert_group(
        CONFIG, ParallelConfig(), max_tokens=NUM_TOKENS, dtype=torch.bfloat16, device="cuda", timeout_s=2.0,
        reserved_sms=spare,
    )  # fmt: skip
    layer = MoE(CONFIG, group, path="fused", overlap=launch.overlap, param_dtype=torch.bfloat16)
    backend = layer.experts.backend
    backend.settings = replace(backend.settings, cuda_kernels=launch.cuda_kernels)
    x = torch.randn(NUM_TOKENS, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        call = in_fp8(layer, x) if name == "block FP8" else lambda: layer(x)[0]
        wanted = call().clone()
        call()  # with as much memory as the next one needs
        group.workspace.check()
        with (
            patch.object(gemm_combine, "gemm_combine_cuda", wraps=gemm_combine.gemm_combine_cuda) as spy,
            held_sms(HELD) as are_held,
        ):
            found = call()
            assert ends_within(10)
            assert are_held(), "the host has waited for the kernel that holds them"
        assert spy.call_count == launch.cuda_kernels
        group.workspace.check()
        assert torch.equal(found, wanted)
    group.close()
