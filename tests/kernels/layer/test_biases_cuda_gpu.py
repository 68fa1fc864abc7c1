"""Expert biases in CUDA C++: bit for bit what the Triton twins make of them, ranks of a group emulated on one GPU.

Both add a bias to a finished sum in float32, gate's and up's before they are rounded, so gate, up and outputs have the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import fp8_launches
import layer0_launches
import layer1_launches
import pytest
import torch
from activation_cases import ACTIVATIONS
from emulated_ranks import EmulatedCase, plans_of
from fp8_launches import rows_of_experts, run_fp8_layer0, run_fp8_layer1
from layer0_launches import run_layer0
from layer1_launches import run_layer1
from torch import Tensor

from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.runtime.activation import Activation
from comet.kernels.runtime.arguments import Scaled, SymmBuffer, parts
from comet.layer.fused import launch_dispatch_gemm, launch_gemm_combine

pytestmark = pytest.mark.gpu

GPT_OSS = Activation("clamped_swiglu", limit=1.0)
TWO = EmulatedCase("two ranks", 2, 1, (900, 5), 8, 4, 768, 128, num_panels=3)
CASES = [
    TWO,
    replace(TWO, name="float16", num_tokens=(400, 300), dtype=torch.float16),
    replace(TWO, name="odd widths", num_experts=64, top_k=8, hidden_size=336, ffn_size=208, num_panels=1),
    replace(TWO, name="256 +- 15 rows of an expert", num_tokens=(1024, 1024), num_experts=16, top_k=2, ffn_size=272),
    replace(TWO, name="one rank, split", ep=1, num_tokens=(700,), num_panels=1, comm_blocks=4),
]
FP8_CASES = [
    TWO,
    replace(TWO, name="float16", num_tokens=(400, 300), dtype=torch.float16),
    replace(TWO, name="half a tile outside", num_tokens=(600, 500), hidden_size=640, ffn_size=384, num_panels=2),
    replace(TWO, name="biases in float32", num_tokens=(300, 80), hidden_size=256, num_panels=1, dtype=torch.float32),
    replace(TWO, name="few rows of an expert, split", num_tokens=(90, 60), num_experts=16, comm_blocks=4),
]


def draw(weights: Tensor | Scaled, dtype: torch.dtype) -> Tensor:
    """``(e, N)`` for weights ``(e, N, K)``, of about the size of their products."""
    elements, _ = parts(weights)
    made = torch.Generator(elements.device).manual_seed(5)
    return torch.randn(elements.shape[:2], generator=made, device=elements.device).to(dtype)


@contextmanager
def biased(case: EmulatedCase, activation: Activation) -> Iterator[None]:
    """Launches of both layers have them, of layer 1 not on rank 1, as under tensor parallelism."""

    def layer0(x: Tensor | None, w1: Tensor | Scaled, *given: object) -> None:
        *rest, config = given
        assert isinstance(config, DispatchGemmConfig)
        launch_dispatch_gemm(x, w1, *rest, replace(config, activation=activation), draw(w1, case.dtype))

    def layer1(a: Tensor | Scaled, b: Tensor | Scaled, y: Tensor, out: Tensor, symm: SymmBuffer, *rest: object) -> None:
        launch_gemm_combine(a, b, y, out, symm, *rest, None if symm.rank == 1 else draw(b, case.dtype))

    with (
        patch.multiple(layer0_launches, launch_dispatch_gemm=layer0),
        patch.multiple(layer1_launches, launch_gemm_combine=layer1),
        patch.multiple(fp8_launches, launch_dispatch_gemm=layer0, launch_gemm_combine=layer1),
    ):
        yield


def check_hidden(found: Tensor, twin: Tensor, activation: Activation, what: str) -> None:
    """The same bits of activations that have them in both languages; of others the last one may differ."""
    last = 0.0 if activation.name in ("swiglu", "clamped_swiglu") else torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, twin, rtol=last, atol=last, msg=lambda error: f"hidden of {what}: {error}")


@pytest.mark.parametrize("save_pre", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("case", "activation"), [*((TWO, activation) for activation in ACTIVATIONS), *((case, GPT_OSS) for case in CASES)]
)
def test_layer_0_equals_its_twin(case: EmulatedCase, activation: Activation, save_pre: bool) -> None:
    with biased(case, activation):
        found, twin = (run_layer0(case, kind, save_pre=save_pre) for kind in ("cuda", "triton"))
    for rank, (mine, other) in enumerate(zip(found, twin, strict=True)):
        check_hidden(mine.hidden, other.hidden, activation, f"rank {rank} of {case}")
        if mine.pre is not None and other.pre is not None:
            assert torch.equal(mine.pre, other.pre), f"gate | up of rank {rank} of {case}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_1_equals_its_twin(case: EmulatedCase) -> None:
    with biased(case, GPT_OSS):
        found, twin = run_layer1(case, "cuda"), run_layer1(case, "triton")
    for rank, (mine, other) in enumerate(zip(found, twin, strict=True)):
        assert torch.equal(mine, other), f"rank {rank} of {case}"
    assert not torch.equal(found[0], run_layer1(case, "cuda")[0]), "biases count"


@pytest.mark.parametrize("activation", [Activation(), GPT_OSS], ids=lambda activation: activation.name)
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_block_fp8_equals_its_twin(case: EmulatedCase, activation: Activation) -> None:
    with biased(case, activation):
        hidden, twin = (run_fp8_layer0(case, kind) for kind in ("cuda", "triton"))
        found, others = run_fp8_layer1(case, hidden, "cuda"), run_fp8_layer1(case, twin, "triton")
    for plan, mine, other in zip(plans_of(case), hidden, twin, strict=True):
        for one, two in zip(rows_of_experts(plan, mine), rows_of_experts(plan, other), strict=True):
            assert torch.equal(one, two), f"hidden of {plan.layout} of {case}"
    for rank, (mine, other) in enumerate(zip(found, others, strict=True)):
        assert torch.equal(mine, other), f"rank {rank} of {case}"
