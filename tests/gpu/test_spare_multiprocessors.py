"""Layer 1 ends while kernels of other streams hold the multiprocessors that it spares."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from held_multiprocessors import held_multiprocessors

from comet import MoE, MoEConfig, OverlapConfig, ParallelConfig, make_expert_group
from comet.errors import CommTimeoutError
from comet.quantize import quantize_fp8 as quantize_experts

pytestmark = pytest.mark.gpu

# Enough products of a rank for CUDA C++ in layer 1, in pairs of blocks and, in block FP8, one by one.
CONFIG = MoEConfig(hidden_size=2048, ffn_size=768, num_experts=16, top_k=8)
NUM_TOKENS = 2048
HELD = 24
SPLITS = {
    "CUDA C++": OverlapConfig(),
    "block FP8": OverlapConfig(),
    "Triton, beside": OverlapConfig(block_rows=64),
    "Triton, split": OverlapConfig(beside=False),
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
    w1, w2 = quantize_experts(layer.w1.flatten(1, 2)), quantize_experts(layer.w2)
    return lambda: layer.experts.fp8(x, routing.top_k_ids, routing.top_k_weights, w1, w2)


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("spare", [HELD, 0])
def test_a_layer_beside_a_kernel_that_does_not_end(name: str, spare: int) -> None:
    """With none to spare the wait for a panel ends at its deadline, by which the test knows that it holds enough."""
    group = make_expert_group(
        CONFIG, ParallelConfig(), max_tokens=NUM_TOKENS, dtype=torch.bfloat16, device="cuda", timeout_s=2.0,
        spare_multiprocessors=spare,
    )  # fmt: skip
    layer = MoE(CONFIG, group, path="fused", overlap=SPLITS[name], param_dtype=torch.bfloat16)
    x = torch.randn(NUM_TOKENS, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        call = in_fp8(layer, x) if name == "block FP8" else lambda: layer(x)[0]
        wanted = call().clone()
        group.workspace.check()
        with held_multiprocessors(HELD):
            found = call()
            assert ends_within(10)
        if spare:
            group.workspace.check()
            assert torch.equal(found, wanted)
        else:
            with pytest.raises(CommTimeoutError, match="layer 1 panel"):
                group.workspace.check()
    group.close()
