"""Numbers of a stress case: weights, inputs of every rank, and what must come out, all on the device under test.

How far gradients of w1, w2 and routing weights may be off, from the sizes of what is rounded on the way to them.

The error of another calculation says little where an element is made of few rows, or where its terms cancel: of 7
routed rows, plain torch had an error of a third of a rounding in the largest element, where the layer's five roundings
of it happened to agree.

With ``s = silu(gate)`` and ``h = g @ w2``, a routed row adds ``weight * s * up * g`` to its element of w2's gradient,
and ``weight * h * s * x`` or ``weight * h * up * s' * x`` to those of w1's; its weight's own is the sum of ``h * s *
up``. Rounded to the layer's dtype are gate, up, h, ``s * up``, each product before the last factor, and the sum of the
rows. Two limits follow; an element must keep both:

* The *most*: every rounding as large as it can be, and all in the same direction. No right number is beyond it.
* ``UNITS`` times the *unit*, the smaller one of many rows. Roundings are independent and of mean 0: by Hoeffding's
  inequality a sum of some of at most ``b_i`` is beyond ``c * sqrt(sum b_i^2)`` with a probability below
  ``2 exp(-c^2 / 2)``. The root is the unit; with 7 of them a number in 2e10 is a false alarm. The square mean of errors
  in units is at most 1/3: over ``MANY`` columns it stays below 1, which shows errors that are too small for each alone.

Sums run in float32. A tensor core cuts off what a CPU rounds, so an addition may cost twice the rounding; a formula in
float32 costs ``STEPS`` roundings of its largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


STEPS = 8
UNITS = 7.0
MANY = 64


def square_rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The most a number moves when rounded to ``dtype``, squared; below the normal numbers, what they move at least."""
    limits = torch.finfo(dtype)
    return (limits.eps / 2 * value.abs().clamp(min=limits.tiny)).square()


@dataclass(frozen=True)
class Rounded:
    """Numbers as the layer has them: the exact value, the most they are off, and the square of their unit; float64."""

    value: Tensor
    most: Tensor
    square: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Self:
        return cls(value, torch.zeros_like(value), torch.zeros_like(value))

    @classmethod
    def stack(cls, parts: Iterable[Rounded]) -> Self:
        values, mosts, squares = zip(*((part.value, part.most, part.square) for part in parts), strict=True)
        return cls(torch.stack(values), torch.stack(mosts), torch.stack(squares))

    def each(self, function: Callable[[Tensor], Tensor]) -> Rounded:
        """A part or another shape of the three."""
        return Rounded(function(self.value), function(self.most), function(self.square))

    def rounded(self, dtype: torch.dtype) -> Rounded:
        step = square_rounding(self.value.abs() + self.most, dtype).sqrt()
        return Rounded(self.value, self.most + step, self.square + square_rounding(self.value, dtype))

    def times(self, other: Rounded) -> Rounded:
        """The product with numbers whose roundings are others."""
        value = self.value * other.value
        most = (self.value.abs() + self.most) * (other.value.abs() + other.most) - value.abs()
        square = self.value.square() * other.square + other.value.square() * self.square
        return Rounded(value, most, square)

    def through(self, function: Callable[[Tensor], Tensor], largest_part: Tensor) -> Rounded:
        """A function of each, computed in float32 from parts of at most this size.

        It moves furthest at one of the two ends, also around an extremum, where it is a parabola.
        """
        value = function(self.value)

        def move(by: Tensor) -> Tensor:
            above, below = function(self.value + by) - value, function(self.value - by) - value
            return torch.maximum(above.abs(), below.abs())

        own = STEPS * square_rounding(largest_part, torch.float32)
        return Rounded(value, move(self.most) + (STEPS * own).sqrt(), move(self.square.sqrt()).square() + own)

    def sum_with(self, factors: Tensor) -> Rounded:
        """``(A, N)`` of these ``(R, N)`` and exact factors ``(R, A)``: sums over rows, in float32."""
        rows = factors.shape[0]
        value, squares = factors.T @ self.value, factors.T.square() @ self.value.square()
        sizes = factors.T.abs() @ (self.value.abs() + self.most)
        cut = rows * torch.finfo(torch.float32).eps * sizes
        running = (rows * (squares + value.square())).sqrt()
        square = factors.T.square() @ self.square + square_rounding(running, torch.float32)
        return Rounded(value, factors.T.abs() @ self.most + cut, square)


def slope_of_silu(gate: Tensor) -> Tensor:
    sigmoid = gate.sigmoid()
    return sigmoid * (1 + gate * (1 - sigmoid))


def gradients_of_expert(
    x: Tensor, g: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, dtype: torch.dtype
) -> tuple[Rounded, Rounded, Rounded]:
    """Gradients of routing weights ``(R,)``, w1 ``(2, F, D)`` and w2 ``(D, F)`` from the rows of one expert.

    Example (D = F = R = 1, float16): x 1, gate 32 and up 1 in w1, w2 0.5, g 1, weight 0.5. silu(32) is 32 with slope 1,
    and w2's gradient 16. Of one part in 2048 each are the roundings of gate, up, hidden, the weighted hidden and the
    sum: the most is 5 * 16/2048, and a little where they meet; the unit is ``sqrt(5) * 16/2048``. The weight's gradient
    is 16, too, with four roundings. With F = 2, the same w1 twice and w2 0.5 and -0.5, it is 0, its unit
    ``sqrt(2) * 16/1024``.

    Args:
        x: ``(R, D)`` tokens; ``g`` alike, gradients of the layer's output; all in float64.
        weight: ``(R,)`` routing weights.
        dtype: What the layer computes in.
    """
    gate, up = (Rounded.exact(matrix.T).sum_with(x.T).rounded(dtype) for matrix in w1)
    grad_hidden = Rounded.exact(w2).sum_with(g.T).rounded(dtype)
    weights = Rounded.exact(weight[:, None])
    activation = gate.through(silu, silu(gate.value))
    slope = gate.through(slope_of_silu, gate.value.sigmoid() * (1 + gate.value.abs()))
    hidden = activation.times(up).rounded(dtype)
    of_weight = grad_hidden.times(hidden).each(Tensor.t).sum_with(torch.ones_like(w2[0])[:, None])
    scaled = grad_hidden.times(weights)
    of_pre = (scaled.times(up).times(slope).rounded(dtype), scaled.times(activation).rounded(dtype))
    of_w1 = Rounded.stack(part.sum_with(x).each(Tensor.t) for part in of_pre)
    of_w2 = hidden.times(weights).rounded(dtype).sum_with(g)
    return of_weight.each(Tensor.flatten), of_w1.rounded(dtype), of_w2.rounded(dtype)


def expert_gradients(
    x: Tensor, routing: tuple[Tensor, Tensor], g: Tensor, weights: tuple[Tensor, Tensor], dtype: torch.dtype
) -> list[Rounded]:
    """Gradients of routing weights ``(T, K)``, w1 ``(E, 2, F, D)`` and w2 ``(E, D, F)``, from ``(T, D)`` tokens of all
    ranks and their routing, ids (-1: none) and weights ``(T, K)``; without rows they are 0, and nothing is off.
    """
    ids, of_slots = routing
    found = [Rounded.exact(torch.zeros_like(weight)) for weight in (of_slots.double(), *weights)]
    for expert, (w1, w2) in enumerate(zip(*weights, strict=True)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        rows = (x[tokens].double(), g[tokens].double(), of_slots[tokens, slots].double())
        places = ((tokens, slots), expert, expert)
        for whole, place, part in zip(found, places, gradients_of_expert(*rows, w1, w2, dtype), strict=True):
            for name in ("value", "most", "square"):
                getattr(whole, name)[place] = getattr(part, name)
    return found


def wrong_gradient(actual: Tensor, wanted: Rounded) -> list[str]:
    """What is wrong with a gradient ``(e, 2, F, D)``, ``(e, D, F)`` or ``(T, K)``: the worst element, the mean of many.

    The elements of a column have roundings in common: of ``MANY`` columns the mean is taken, not of few. Numbers
    ``(T, K)`` have none in common.
    """
    wrong, unit = [], wanted.square.sqrt()
    error, limit = (actual.double() - wanted.value).abs(), torch.minimum(wanted.most, UNITS * unit)
    beyond = ~(error <= limit)  # NaN is beyond
    if bool(beyond.any()):
        worst = int((error / limit).masked_fill(~beyond, -1).nan_to_num(float("inf"), float("inf")).argmax())
        got, true, allowed = (float(tensor.flatten()[worst]) for tensor in (actual, wanted.value, limit))
        wrong.append(
            f"{int(beyond.sum())} of {beyond.numel()} are beyond their roundings, worst at element {worst} of shape "
            f"{tuple(actual.shape)}: {got} instead of {true}, off by {abs(got - true):.3e} > {allowed:.3e}"
        )
    used = unit > 0
    columns = int((used if actual.dim() == 2 else used.any(dim=-1 if actual.dim() == 4 else -2)).sum())
    mean_square = float((error[used] / unit[used]).square().mean()) if columns >= MANY else 0.0
    if mean_square > 1:
        wrong.append(f"errors of {columns} columns have a square mean of {mean_square:.2f} units, 1 is allowed")
    return wrong
