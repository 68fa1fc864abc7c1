"""Cases and the oracle for whole-layer tests: every rank's inputs follow from one seed, so any rank knows them all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from activation_cases import draw_biases
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases, ExpertLayout
from comet.reference.layer import reference_experts

MASKED = -1
FEW_ELEMENTS = 64
# With the weights below one gate in thirty is past the limit, and few are a rounding away from it.
GPT_OSS = Activation("clamped_swiglu", limit=3.0)
EDGE_ROWS = (0, 1, 63, 64, 65, 127, 128, 129, 300)  # of experts in turn, around the heights of pieces and tiles


@dataclass(frozen=True)
class LayerCase:
    """One layer call on all ranks."""

    name: str
    ep: int
    tp: int
    num_tokens: tuple[int, ...]  # one entry per rank
    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 32
    ffn_size: int = 32
    routing: str = "uniform"
    dtype: torch.dtype = torch.float32
    num_panels: int = 2
    comm_blocks: int = 0
    seed: int = 0
    calls: int = 1
    strided: bool = False  # what the layer is passed is not contiguous, nor are its weights
    relabel: int = 0  # seed of a random relabelling of the experts, by which they move to other ranks; 0: none
    activation: Activation = SWIGLU
    expert_bias: bool = False  # whether they have biases

    @property
    def world_size(self) -> int:
        return self.ep * self.tp

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            hidden_size=self.hidden_size, ffn_size=self.ffn_size, num_experts=self.num_experts, top_k=self.top_k,
            activation=self.activation, expert_bias=self.expert_bias,
        )  # fmt: skip

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(ep=self.ep, tp=self.tp)

    @property
    def overlap(self) -> OverlapConfig:
        return OverlapConfig(
            comm_blocks=self.comm_blocks,
            num_panels=self.num_panels,
        )

    @property
    def placed_experts(self) -> Tensor:
        """``(E,)`` the expert, as inputs and oracle number them, at each id of the layer."""
        if not self.relabel:
            return torch.arange(self.num_experts)
        return torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(self.relabel))

    def relabelled(self, ids: Tensor) -> Tensor:
        return torch.where(ids < 0, ids, self.placed_experts.argsort()[ids.clamp(min=0).long()].to(ids.dtype))

    def with_seed(self, seed: int) -> LayerCase:
        return replace(self, seed=seed)


@dataclass(frozen=True)
class RankInputs:
    """What one rank passes to the layer, and the gradient that comes back to its output."""

    tokens: Tensor
    top_k_ids: Tensor
    top_k_weights: Tensor
    grad_output: Tensor

    def to(self, device: str) -> RankInputs:
        return RankInputs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def rank_inputs(case: LayerCase, rank: int, call: int = 0) -> RankInputs:
    generator = torch.Generator().manual_seed(case.seed * 7919 + call * 101 + rank)
    tokens = case.num_tokens[rank]
    ids = torch.rand(tokens, case.num_experts, generator=generator).argsort(dim=1)[:, : case.top_k].to(torch.int32)
    if case.routing in ("one", "none"):
        ids = torch.full_like(ids, MASKED)
        ids[:, :1] = case.num_experts - 1 if case.routing == "one" else MASKED
    elif case.routing == "masked":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = MASKED
    elif case.routing == "first_half":
        ids = ids % max(1, case.num_experts // 2)
    elif case.routing == "edges":
        ids = edge_ids(case, call)[rank]
    x, grad = (torch.randn(tokens, case.hidden_size, generator=generator) for _ in range(2))
    weights = torch.rand(tokens, case.top_k, generator=generator)
    return RankInputs(x.to(case.dtype), ids, weights, grad.to(case.dtype))


def edge_ids(case: LayerCase, call: int = 0) -> list[Tensor]:
    """``(T, K)`` of every rank: expert e has exactly ``EDGE_ROWS[e % 9]`` rows of them all; a token may name it twice.

    Example: 9 experts have 877 rows, so 300 + 150 tokens with K = 2 leave 23 of their slots masked.
    """
    rows = [EDGE_ROWS[expert % len(EDGE_ROWS)] for expert in range(case.num_experts)]
    slots = case.top_k * sum(case.num_tokens)
    assert slots >= sum(rows), f"{slots} slots are too few for {sum(rows)} rows"
    ids = torch.full((slots,), MASKED, dtype=torch.int32)
    ids[: sum(rows)] = torch.arange(case.num_experts, dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    generator = torch.Generator().manual_seed(case.seed * 7919 + call * 101)
    shuffled = ids[torch.randperm(slots, generator=generator)]
    return list(shuffled.view(-1, case.top_k).split(case.num_tokens))


def full_weights(case: LayerCase) -> tuple[Tensor, Tensor]:
    """w1 ``(E, 2, F, D)`` and w2 ``(E, D, F)`` of all experts."""
    generator = torch.Generator().manual_seed(case.seed + 13)
    w1 = torch.randn(case.num_experts, 2, case.ffn_size, case.hidden_size, generator=generator) / 4
    w2 = torch.randn(case.num_experts, case.hidden_size, case.ffn_size, generator=generator) / 4
    return w1.to(case.dtype), w2.to(case.dtype)


def full_biases(case: LayerCase) -> tuple[Tensor, ...]:
    """b1 ``(E, 2, F)`` and b2 ``(E, D)`` of all experts, if they have them."""
    if not case.expert_bias:
        return ()
    b1, b2 = draw_biases(case.num_experts, case.ffn_size, case.hidden_size, case.dtype, case.seed)
    return b1.unflatten(1, (2, -1)), b2


def shard(case: LayerCase, rank: int, w1: Tensor, w2: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    """The part of full weights that ``rank`` owns: ``(e, 2, F/TP, D)``, ``(e, D, F/TP)``, and of biases."""
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    experts = case.placed_experts[layout.first_expert : layout.first_expert + layout.experts_local]
    width = case.ffn_size // case.tp
    columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    weights = w1[experts][:, :, columns].contiguous(), w2[experts][:, :, columns].contiguous()
    return (*weights, biases[0][experts][:, :, columns], biases[1][experts]) if biases else weights


def as_strided(tensor: Tensor) -> Tensor:
    """The same numbers as every other column of a wider matrix, whose other columns are NaN or no id at all."""
    wide = tensor.new_full((*tensor.shape, 2), float("nan") if tensor.is_floating_point() else -(2**31))
    wide[..., 0] = tensor
    return wide[..., 0]


class Oracle(NamedTuple):
    output: Tensor
    grad_tokens: Tensor
    grad_top_k: Tensor
    grad_w1: Tensor
    grad_w2: Tensor
    grad_b1: Tensor | None = None
    grad_b2: Tensor | None = None


def oracle(case: LayerCase, rank: int, dtype: torch.dtype, call: int = 0) -> Oracle:
    """The layer in one process: all ranks' tokens through all experts, in ``dtype``; the output and all gradients."""
    w1, w2, *biases = (each.to(dtype).requires_grad_() for each in (*full_weights(case), *full_biases(case)))
    mine = None
    options: dict[str, Any] = dict(ep=case.ep, tp=case.tp, activation=case.activation)
    for source in range(case.world_size):
        inputs = rank_inputs(case, source, call)
        x = inputs.tokens.to(dtype).requires_grad_()
        weights = inputs.top_k_weights.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        given = Biases(biases[0].flatten(1), biases[1]) if biases else None
        y = reference_experts(x, inputs.top_k_ids, weights, w1.flatten(1, 2), w2, **options, biases=given)
        y.backward(inputs.grad_output.to(dtype))
        if source == rank:
            mine = (y.detach(), x.grad, weights.grad)
    assert mine is not None, f"rank={rank} is none of the {case.world_size} ranks of the case"
    grads = [leaf.grad for leaf in (w1, w2, *biases) if leaf.grad is not None]
    assert len(grads) == 2 + len(biases), "a gradient reached no leaf"
    return Oracle(*mine, *shard(case, rank, *grads))


def assert_as_close(actual: Tensor, exact: Tensor, same_dtype: Tensor, dtype: torch.dtype, what: str) -> None:
    """The error to fp64 is at most twice that of plain torch in the same dtype, plus a rounding of the largest value.

    In float32 four roundings, and in every type more for a handful of elements, over which plain torch's own error is
    luck: 3000 random cases had one of 8 elements where it was a fifth of ours. ``dtype`` is the one the layer computes
    in: gradients of routing weights are float32 numbers made of products in that type.
    """
    error, allowed = (value.double() - exact.double() for value in (actual.to(exact.device), same_dtype))
    if exact.numel() == 0:
        assert actual.shape == exact.shape, what
        return
    few = max(1.0, math.sqrt(FEW_ELEMENTS / exact.numel()))
    roundings = few * (4 if dtype == torch.float32 else 1)
    rounding = roundings * torch.finfo(dtype).eps * float(exact.abs().max())
    worst = int(error.abs().argmax())
    limit = 2 * float(allowed.abs().max()) + rounding
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    assert float(error.abs().max()) <= limit, (
        f"{what}: error {float(error.abs().max()):.3e} > {limit:.3e} "
        f"at element {worst} of shape {tuple(actual.shape)}: "
        f"{float(actual.flatten()[worst])} instead of {float(exact.flatten()[worst])}"
    )
    rms, allowed_rms = (float(value.square().mean().sqrt()) for value in (error, allowed))
    assert rms <= 2 * allowed_rms + rounding, f"{what}: RMS error {rms:.3e}, plain torch {allowed_rms:.3e}"
