"""Cases for the reference layer, and the same layer as a dense formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from activation_cases import on_paper
from torch import Tensor

from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases

GRIDS = [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (1, 4), (2, 3), (3, 2)]


@dataclass(frozen=True)
class Case:
    tokens: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.ids, self.weights, self.w1, self.w2

    def to(self, dtype: torch.dtype) -> Case:
        weights = self.weights.to(torch.promote_types(dtype, torch.float32))
        return Case(self.tokens.to(dtype), self.ids, weights, self.w1.to(dtype), self.w2.to(dtype))

    def with_ids(self, ids: Tensor) -> Case:
        return Case(self.tokens, ids, self.weights, self.w1, self.w2)


def make_case(
    seed: int,
    num_tokens: int = 13,
    top_k: int = 3,
    num_experts: int = 6,
    hidden: int = 10,
    ffn: int = 12,
    masked: float = 0.2,
) -> Case:
    """Random float64 case; every slot is masked with probability ``masked``, ids of a token are distinct."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    ids = order[:, :top_k].int()
    ids[torch.rand(num_tokens, top_k, generator=generator) < masked] = -1
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    w1, w2 = normal(num_experts, 2 * ffn, hidden), normal(num_experts, hidden, ffn)
    return Case(normal(num_tokens, hidden), ids, weights, w1 / hidden**0.5, w2 / ffn**0.5)


def dense_formula(case: Case, activation: Activation = SWIGLU, biases: Biases | None = None) -> Tensor:
    """The layer as one would write it on paper: no ranks, no rounding, every expert on every token."""
    b1, b2 = (0, 0) if biases is None else biases
    pre = torch.einsum("td,efd->tef", case.tokens, case.w1) + b1
    outputs = torch.einsum("tef,edf->ted", on_paper(activation, *pre.chunk(2, dim=-1)), case.w2) + b2
    mixture = torch.zeros(case.tokens.shape[0], case.w1.shape[0], dtype=case.weights.dtype)
    held = case.ids >= 0
    mixture.scatter_add_(1, case.ids.clamp(min=0).long(), case.weights.where(held, 0.0))
    return torch.einsum("te,ted->td", mixture, outputs)
