"""Numbers of a stress case: weights, inputs of every rank, and what must come out, all on the device under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from expert_gradients import Rounded, expert_gradients
from layer_cases import MASKED, RankInputs, shard
from stress_cases import StressCase
from torch import Tensor

from comet.layer.sharding import local
from comet.reference.layer import kept_slots, reference_experts

ZIPF_EXPONENT = 1.5
MASKED_SHARE = 0.4
SEED_BITS = 63


@dataclass(frozen=True)
class FullWeights:
    """w1 ``(E, 2, F, D)`` and w2 ``(E, D, F)`` of all experts of a layer, as it has them and as float64."""

    w1: Tensor
    w2: Tensor
    wide: tuple[Tensor, Tensor]

    @classmethod
    def draw(cls, layer: StressCase, device: torch.device) -> Self:
        generator = seeded(device, layer.weight_seed)
        experts, ffn, hidden = layer.num_experts, layer.ffn_size, layer.hidden_size
        w1 = (torch.randn(experts, 2, ffn, hidden, generator=generator, device=device) / 4).to(layer.dtype)
        w2 = (torch.randn(experts, hidden, ffn, generator=generator, device=device) / 4).to(layer.dtype)
        return cls(w1, w2, (w1.double(), w2.double()))

    def leaves(self, dtype: torch.dtype, *, requires_grad: bool) -> tuple[Tensor, Tensor]:
        """w1 and w2 in ``dtype``: float64 or the layer's own."""
        w1, w2 = self.wide if dtype == torch.float64 else (self.w1, self.w2)
        return w1.detach().requires_grad_(requires_grad), w2.detach().requires_grad_(requires_grad)


def seeded(device: torch.device, *numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**SEED_BITS
    return torch.Generator(device).manual_seed(seed)


def stress_inputs(case: StressCase, rank: int, number: int, device: torch.device) -> RankInputs:
    generator = seeded(device, case.seed, number, rank)
    tokens, like = case.num_tokens[rank], dict(generator=generator, device=device)
    ids = draw_ids(case, tokens, generator)
    x, grad = (torch.randn(tokens, case.hidden_size, **like).to(case.dtype) for _ in range(2))
    return RankInputs(x, ids, torch.rand(tokens, case.top_k, **like), grad)


def draw_ids(case: StressCase, num_tokens: int, generator: torch.Generator) -> Tensor:
    """``(T, K)`` int32 of the case's routing; the popular experts of a case are the same for all ranks."""
    device, chosen = generator.device, case.seed % case.num_experts
    popularity = torch.zeros(case.num_experts, device=device)
    if case.routing == "zipf":
        order = torch.randperm(case.num_experts, generator=seeded(device, case.seed), device=device)
        popularity = -ZIPF_EXPONENT * (1 + order).log()
    # The largest of these are a draw without repetition in proportion to exp(popularity).
    uniform = torch.rand(num_tokens, case.num_experts, generator=generator, device=device).clamp(1e-6, 1 - 1e-6)
    ids = (popularity - (-uniform.log()).log()).argsort(dim=1, descending=True)[:, : case.top_k].to(torch.int32)
    if case.routing == "one":
        ids.fill_(MASKED)
        ids[:, 0] = chosen
    elif case.routing == "masked":
        ids[torch.rand(ids.shape, generator=generator, device=device) < MASKED_SHARE] = MASKED
    elif case.routing == "first_half":
        ids = ids % max(1, case.num_experts // 2)
    elif case.routing == "hot":
        ids[:, 0] = chosen  # some tokens name it twice
    elif case.routing == "none":
        ids.fill_(MASKED)
    if case.num_experts // case.ep < case.top_k:
        # Rows are reserved for K distinct experts: a rank with fewer has no room for a token that names one twice.
        same = ids[:, :, None] == ids[:, None, :]
        ids = ids.masked_fill(same.tril(-1).any(dim=2), MASKED)
    return ids.contiguous()


def expected(
    case: StressCase, inputs: list[RankInputs], weights: FullWeights, dtype: torch.dtype
) -> dict[str, list[Tensor]]:
    """The layer in one process, in ``dtype``, on the inputs of all ranks: outputs and with ``backward`` gradients.

    A token's result does not depend on the others: the ranks' tokens go through the reference together.
    """
    w1, w2 = weights.leaves(dtype, requires_grad=case.backward)
    x = torch.cat([of_rank.tokens for of_rank in inputs]).to(dtype).requires_grad_(case.backward)
    routing = torch.cat([of_rank.top_k_weights for of_rank in inputs]).to(torch.promote_types(dtype, torch.float32))
    routing.requires_grad_(case.backward)
    y = reference_experts(
        x,
        torch.cat([of_rank.top_k_ids for of_rank in inputs]),
        routing,
        w1.flatten(1, 2),
        w2,
        ep=case.ep,
        tp=case.tp,
        expert_capacity=case.expert_capacity,
    )
    found = {"output": list(y.detach().split(case.num_tokens))}
    if case.backward:
        y.backward(torch.cat([of_rank.grad_output for of_rank in inputs]).to(dtype))
        found["grad_tokens"] = list(gradient(x).split(case.num_tokens))
        found["grad_top_k_weights"] = list(gradient(routing).split(case.num_tokens))
        shards = [shard(case, rank, gradient(w1), gradient(w2)) for rank in range(case.world_size)]
        found["grad_w1"], found["grad_w2"] = ([pair[which] for pair in shards] for which in range(2))
    return found


def kept_ids(case: StressCase, inputs: list[RankInputs]) -> Tensor:
    """``(T, K)`` of all ranks, masked where a capacity drops the slot."""
    ids = torch.cat([of_rank.top_k_ids for of_rank in inputs])
    if case.expert_capacity is None:
        return ids
    return ids.masked_fill(~kept_slots(ids, case.num_experts, case.expert_capacity), MASKED)


def rounded_gradients(
    case: StressCase, inputs: list[RankInputs], weights: FullWeights, rank: int
) -> dict[str, Rounded]:
    """What ``expert_gradients`` expects of the gradients of a rank's routing and expert weights, by name."""
    x, routing, g = (
        torch.cat([getattr(of_rank, name) for of_rank in inputs]) for name in ("tokens", "top_k_weights", "grad_output")
    )
    of_routing, *both = expert_gradients(x, (kept_ids(case, inputs), routing), g, weights.wide, case.dtype)
    fields = ("value", "most", "square")
    shards = [shard(case, rank, *(getattr(of_weight, name) for of_weight in both)) for name in fields]
    grad_w1, grad_w2 = (Rounded(*parts) for parts in zip(*shards, strict=True))
    mine = of_routing.each(lambda part: part.split(case.num_tokens)[rank])
    return {"grad_top_k_weights": mine, "grad_w1": grad_w1, "grad_w2": grad_w2}


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, f"no gradient reached a leaf of shape {tuple(leaf.shape)}"
    return local(leaf.grad)
