"""A layer whose operations can be recorded as those of a CUDA graph, on a CPU, forward and backward."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generate_cases import Captures, all_experts, graphs_on_cpu
from torch import Tensor

from comet import MoE, MoEConfig, ParallelConfig, make_expert_group
from comet.config import OverlapConfig
from comet.layer.routed_experts import SymmetricPath

CONFIG = MoEConfig(
    num_experts=8, top_k=2, hidden_size=32, ffn_size=16, shared_ffn_size=16, aux_loss_coef=0.5, z_loss_coef=0.5
)


class LaterExperts(SymmetricPath):
    """All experts for all tokens, by operations that can be recorded; gradients of weights are made later if wanted.

    ``made`` gets the names of those that were.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[str] = []

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        output: Tensor = _LaterExperts.apply(tokens, top_k_ids, top_k_weights, w1, w2, self)
        return output


class _LaterExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ids: Tensor, factors: Tensor, w1: Tensor, w2: Tensor, path: Any) -> Tensor:
        ctx.save_for_backward(tokens, ids, factors, w1, w2)
        ctx.deferred, ctx.made = path.deferred, path.made
        return all_experts(None, tokens, ids, factors, w1, w2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ids, factors, w1, w2 = ctx.saved_tensors

        def make(*places: int) -> list[Tensor]:
            inputs = [each.detach().requires_grad_() for each in (tokens, factors, w1, w2)]
            with torch.enable_grad():
                output = all_experts(None, inputs[0], ids, *inputs[1:])
            return list(torch.autograd.grad(output, [inputs[place] for place in places], grad))

        of_tokens, of_factors = make(0, 1)
        if ctx.deferred is None:
            return of_tokens, None, of_factors, *make(2, 3), None
        ctx.deferred.last = SimpleNamespace(
            w1=lambda: ctx.made.append("w1") or make(2)[0], w2=lambda: ctx.made.append("w2") or make(3)[0]
        )
        return of_tokens, None, of_factors, None, None, None


def make_layer(path: str = "dense", **settings: Any) -> MoE:
    group = make_expert_group(CONFIG, ParallelConfig(), max_tokens=64, dtype=torch.float32, device=torch.device("cpu"))
    moe = MoE(CONFIG, group, overlap=OverlapConfig(num_panels=1), seed=5, **settings)
    later = LaterExperts(CONFIG, group, OverlapConfig(num_panels=1), use_kernels=False)
    moe.experts = later if path == "later" else partial(all_experts, None)  # type: ignore[assignment]
    return moe


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = graphs_on_cpu(monkeypatch)
    monkeypatch.setattr("comet.graphed.moe.capture", found)
    monkeypatch.setattr("comet.graphed.training.capture", found)
    monkeypatch.setattr("comet.graphed.moe.device_obstacle", lambda device: "")
    return found


def draw(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def leaf(num_tokens: int, seed: int) -> Tensor:
    return draw(num_tokens, seed).requires_grad_()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, actual in found.items():
        assert torch.equal(actual, wanted[name]), f"{what}: {name}"
