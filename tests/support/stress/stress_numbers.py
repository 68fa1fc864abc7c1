"""Numbers of a stress case: weights, inputs of every rank, and what must come out, all on the device under test.

How far gradients of w1, w2 and routing weights may be off follows from the sizes of what is rounded on the way to them.
The error of another calculation says little where an element is made of few rows, or where its terms cancel.

With ``s = silu(gate)`` and ``h = g @ w2``, a routed row adds ``weight * s * up * g`` to its element of w2's gradient,
and ``weight * h * s * x`` or ``weight * h * up * s' * x`` to those of w1's; its weight's own is the sum of ``h * s *
up``. Each factor is rounded to the layer's dtype, and so is the sum. The roundings of terms are independent, so their
errors add up like the root of the sum of squares: a last bit of that root is the *unit*, in float32 eight of them. An
element may be ``UNITS`` of them off, and of ``MANY`` columns the square mean may be ``MEAN_SQUARE``, which shows errors
too small for each alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from layer_cases import MASKED, RankInputs, shard
from stress_cases import StressCase
from torch import Tensor
from torch.nn.functional import silu

from comet.layer.sharding import local
from comet.reference.layer import kept_slots, reference_experts

ZIPF_EXPONENT = 1.5
MASKED_SHARE = 0.4
SEED_BITS = 63
UNITS, MEAN_SQUARE, MANY = 3.0, 0.5, 64
ROUNDINGS = {torch.float32: 8}  # of a term; sums of many, which are made in float32 as well, have as many more


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


def gradient_units(case: StressCase, inputs: list[RankInputs], weights: FullWeights, rank: int) -> dict[str, Tensor]:
    """A unit of each element of the gradients of a rank's routing and expert weights, by name; 0 where there is no row.

    Ids that a capacity drops have no row.
    """
    x, of_slots, g = (
        torch.cat([getattr(of_rank, name) for of_rank in inputs]).double()
        for name in ("tokens", "top_k_weights", "grad_output")
    )
    bit, tiny = torch.finfo(case.dtype).eps * ROUNDINGS.get(case.dtype, 1), torch.finfo(case.dtype).tiny
    ids, found = kept_ids(case, inputs), [torch.zeros_like(each) for each in (of_slots, *weights.wide)]
    for expert, of_expert in enumerate(zip(*weights.wide, strict=True)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        places = ((tokens, slots), expert, expert)
        squares = term_squares(x[tokens], g[tokens], of_slots[tokens, slots], *of_expert, tiny)
        for whole, place, part in zip(found, places, squares, strict=True):
            whole[place] = bit * (part + tiny**2).sqrt()
    grad_w1, grad_w2 = shard(case, rank, *found[1:])
    return {"grad_top_k_weights": found[0].split(case.num_tokens)[rank], "grad_w1": grad_w1, "grad_w2": grad_w2}


def term_squares(x: Tensor, g: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, tiny: float) -> tuple[Tensor, ...]:
    """Sums of the squares of the terms of gradients: of routing weights ``(R,)``, w1 ``(2, F, D)`` and w2 ``(D, F)``.

    A term is as large as its error would be if each of its factors were off by its own size.

    Args:
        x: ``(R, D)`` tokens of one expert, ``g`` gradients of the layer's output, ``weight`` ``(R,)``; in float64.
        tiny: What numbers below it are rounded as.
    """
    (gate, gate_size), (_, up), (_, h) = (products(*pair) for pair in ((x, w1[0].T), (x, w1[1].T), (g, w2)))
    sigmoid = gate.sigmoid()
    slope = (sigmoid * (1 + gate * (1 - sigmoid))).abs()
    activation = silu(gate).abs() + slope * gate_size
    slope = slope + sigmoid * (1 - sigmoid) * (2 + gate.abs()) * gate_size
    hidden, h, weight = (activation * up).clamp(min=tiny), h.clamp(min=tiny), weight[:, None]
    of_w1, of_w2 = (weight * h * up * slope, weight * h * activation), weight * hidden
    squares = [part.clamp(min=tiny).square() for part in (*of_w1, of_w2)]
    grad_w1 = torch.stack([part.T @ x.square() for part in squares[:2]])
    return (h * hidden).square().sum(1), grad_w1, g.square().T @ squares[2]


def products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``a @ b``, and of what size the sums are whose roundings it has."""
    value = a @ b
    return value, torch.maximum(value.abs(), (a.square() @ b.square()).sqrt())


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, f"no gradient reached a leaf of shape {tuple(leaf.shape)}"
    return local(leaf.grad)


def wrong_gradient(actual: Tensor, exact: Tensor, unit: Tensor) -> list[str]:
    """What is wrong with a gradient ``(e, 2, F, D)``, ``(e, D, F)`` or ``(T, K)``: the worst element, the mean of many.

    The elements of a column have roundings in common: of ``MANY`` columns the mean is taken, not of few. Numbers
    ``(T, K)`` have none in common.
    """
    wrong, error, limit = [], (actual.double() - exact).abs(), UNITS * unit
    beyond = ~(error <= limit)  # NaN is beyond
    if bool(beyond.any()):
        worst = int((error / limit).masked_fill(~beyond, -1).nan_to_num(float("inf"), float("inf")).argmax())
        got, true, allowed = (float(tensor.flatten()[worst]) for tensor in (actual, exact, limit))
        wrong.append(
            f"{int(beyond.sum())} of {beyond.numel()} are beyond their roundings, worst at element {worst} of shape "
            f"{tuple(actual.shape)}: {got} instead of {true}, off by {abs(got - true):.3e} > {allowed:.3e}"
        )
    used = unit > 0
    columns = int((used if actual.dim() == 2 else used.any(dim=-1 if actual.dim() == 4 else -2)).sum())
    mean_square = float((error[used] / unit[used]).square().mean()) if columns >= MANY else 0.0
    if mean_square > MEAN_SQUARE:
        wrong.append(
            f"errors of {columns} columns have a square mean of {mean_square:.2f} units, more than {MEAN_SQUARE}"
        )
    return wrong
