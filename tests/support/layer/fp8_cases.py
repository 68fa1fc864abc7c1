"""The layer in block FP8 on ranks, against float64 on the quantised operands, with a limit that follows from roundings.

Tokens and weights are quantised exactly alike everywhere, hidden is not: where a sum comes out next to the middle of
two e4m3 numbers, either is right. So the limit of a result is what its hidden elements may jump, given how far off a
sum of products may be, times the weights they meet, and the roundings of the combine. That all of them jump, in the
same direction, is what no element may exceed; that they jump independently, and that the steps a sum is made of are off
independently, is the limit of the root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from layer_cases import LayerCase, RankInputs, full_weights, rank_inputs, shard
from layer_ranks import calls_of, open_group
from torch import Tensor
from torch.nn.functional import silu

from comet.layer.group import ExpertGroup
from comet.layer.routed_experts import SymmetricPath
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8, quantize_rows

FLOAT32_ROUNDING = 2.0**-24
LAST_BITS = 2.0**-18  # of a scale, and of what a GPU takes for exp and a quotient
VAGUE = 0.1  # a limit above this part of the result would say nothing


@dataclass(frozen=True)
class Expected:
    """``(T, D)`` float64, how far off each element may be at worst, and the square of that if errors do not add up."""

    output: Tensor
    limit: Tensor
    square: Tensor


def fp8_shard(case: LayerCase, rank: int) -> tuple[FP8, FP8]:
    """What ``rank`` holds: w1 ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)``."""
    w1, w2 = shard(case, rank, *full_weights(case))
    return quantize_fp8(w1.flatten(1, 2)), quantize_fp8(w2)


def float32_products(terms: int) -> float:
    """How far off a float32 sum of so many exact products may be, as a part of the sum of their magnitudes."""
    return (terms + 4) * FLOAT32_ROUNDING


def tensor_core_products(device: str) -> float:
    """Twice what a GPU's own product of 128 terms is off by, as a part of the sum of their magnitudes."""
    generator = torch.Generator(device).manual_seed(1)
    rows = (torch.randn(512, FP8_BLOCK, generator=generator, device=device) for _ in range(2))
    a, b = (quantize_rows(each).elements for each in rows)
    one = torch.ones((), device=device)
    sums = torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
    exact, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    return 2 * float(((sums.double() - exact).abs() / magnitude).max())


def expected(case: LayerCase, rank: int, call: int, products: float, device: str = "cpu") -> Expected:
    """The layer for the tokens of one rank, where a sum of products may be off by ``products`` of its magnitudes.

    On a GPU on that: float64 on a CPU takes minutes where many tests share it.
    """
    inputs = rank_inputs(case, rank, call)
    ids = case.relabelled(inputs.top_k_ids).to(device)
    shards = [(on(device, w1), on(device, w2)) for w1, w2 in (fp8_shard(case, h) for h in range(case.world_size))]
    return layer_of(case, inputs.to(device), ids, shards, products)


def layer_of(
    case: LayerCase, inputs: RankInputs, ids: Tensor, shards: list[tuple[FP8, FP8]], products: float
) -> Expected:
    """``expected`` for any inputs, ids as the layer numbers its experts, and what each rank holds."""
    tokens = quantize_rows(inputs.tokens).dequantize().double()
    output, limit, square, magnitude = (torch.zeros_like(tokens) for _ in range(4))
    # Of y, of the partial sum of a rank and of the result to the type of the tokens, and of sums in float32.
    rounding = torch.finfo(case.dtype).eps / 2 + (case.top_k + case.world_size) * FLOAT32_ROUNDING
    for holder, shard_of in enumerate(shards):
        w1, w2 = (weight.dequantize().double() for weight in shard_of)
        first = holder // case.tp * w1.shape[0]
        for local in range(w1.shape[0]):
            rows, slots = (ids == first + local).nonzero(as_tuple=True)
            y, off, off_square = expert(tokens[rows], w1[local], w2[local], products)
            weights = inputs.top_k_weights[rows, slots, None].double()
            output.index_add_(0, rows, weights * y)
            limit.index_add_(0, rows, weights * off)
            square.index_add_(0, rows, weights.square() * (off_square + (rounding * y).square()))
            magnitude.index_add_(0, rows, weights * y.abs())
    return Expected(output, limit + 3 * rounding * magnitude, square + 2 * (rounding * output).square())


def expert(tokens: Tensor, w1: Tensor, w2: Tensor, products: float) -> tuple[Tensor, Tensor, Tensor]:
    """One expert's output for its tokens, how far off it may be, and the square of that if errors do not add up."""
    gate, up = (tokens @ w1.T).chunk(2, dim=1)
    hidden = silu(gate) * up
    quantised = quantize_rows(hidden.float())
    jump, free_jump = (
        jump_of(hidden, hidden_off(gate, up, *off.chunk(2, dim=1)), quantised) for off in sums_off(tokens, w1, products)
    )
    dequantised = quantised.dequantize().double()
    off, free_off = sums_off(dequantised, w2, products)
    return (
        dequantised @ w2.T,
        jump @ w2.abs().T + off,
        free_jump.square() @ w2.square().T + free_off.square(),
    )


def sums_off(rows: Tensor, weights: Tensor, products: float) -> tuple[Tensor, Tensor]:
    """How far off ``rows @ weights.T`` may be: at worst, and if the errors of its steps of 128 columns do not add up.

    A step is a sum of its own on tensor cores, and float32 adds up the steps. S steps alike are off by S times as much
    as one at worst, but by sqrt(S) times as much if their errors do not add up. Nor do steps of either sign: so only
    the second limit is the same part of a result whatever its number of columns.

    Example: two steps of 1 * 2 and 1 * 3 in each of 128 columns have magnitudes 256 and 384, so with ``products`` of
    2^-7 they are 2 and 3 off, together 5, or if errors do not add up sqrt(13).
    """
    a, b = (values.abs().unflatten(1, (-1, FP8_BLOCK)).transpose(0, 1) for values in (rows, weights))
    off = products * (a @ b.mT)
    return off.sum(0), off.square().sum(0).sqrt()


def hidden_off(gate: Tensor, up: Tensor, gate_off: Tensor, up_off: Tensor) -> Tensor:
    """How far off ``silu(gate) * up`` may be in float32, given how far off its factors may be.

    silu's second derivative is between -0.04 and 0.5, so its first one says how far off silu is, but for a quarter of
    the square of ``gate_off``.
    """
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    silu_off = slope.abs() * gate_off + gate_off.square() / 4
    return silu_off * (up.abs() + up_off) + silu(gate).abs() * up_off + LAST_BITS * (silu(gate) * up).abs()


def jump_of(hidden: Tensor, off: Tensor, quantised: FP8) -> Tensor:
    """How far from ``quantised`` hidden may come out if it is ``off`` before it is quantised, and so its scales are."""
    scales, scales_off = (
        values.repeat_interleave(FP8_BLOCK, dim=1) for values in (quantised.scales.double(), largest_off(hidden, off))
    )
    reach = off + scales_off * (hidden.abs() + off)
    low, high = (e4m3((hidden + sign * reach) / scales) for sign in (-1, 1))
    elements = quantised.elements.double()
    steps = torch.maximum(high - elements, elements - low)
    return scales * (steps + scales_off * (elements.abs() + steps))


def largest_off(hidden: Tensor, off: Tensor) -> Tensor:
    """How far off the scales may be, as a part of them or of what they become."""
    largest, most = (values.unflatten(1, (-1, FP8_BLOCK)).amax(-1) for values in (hidden.abs(), off))
    return most / (largest - most).clamp(min=1e-30) + LAST_BITS


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()


def build_path(case: LayerCase, path: str, device: str) -> tuple[ExpertGroup, SymmetricPath]:
    group = open_group(case, device)
    return group, SymmetricPath(case.config, group, case.overlap, use_kernels=path == "fused")


def run_fp8_case(
    rank: int,
    world_size: int,
    case: LayerCase,
    path: str,
    device: str = "cpu",
    products: float | None = None,
    delays: bool = False,
) -> list[Tensor]:
    group, experts = build_path(case, path, device)
    w1, w2 = (on(device, weight) for weight in fp8_shard(case, rank))
    outputs = []
    for call, (*given, _) in calls_of(case, rank, device, delays):
        y = experts.fp8(*given, w1, w2)
        group.workspace.check()
        outputs.append(y.cpu())
        terms = max(case.hidden_size, case.ffn_size)
        wanted = expected(case, rank, call, float32_products(terms) + (products or 0.0), device)
        compare(y, wanted, f"{case.name}, seed {case.seed}, call {call}, rank {rank}")
    group.close()
    return outputs


def on(device: str, weight: FP8) -> FP8:
    return FP8(elements=weight.elements.to(device), scales=weight.scales.to(device))


def compare(actual: Tensor, wanted: Expected, what: str) -> None:
    """Each element is within its limit, so is the root mean square, and that is tight enough to say something."""
    assert actual.shape == wanted.output.shape, what
    if not actual.numel():
        return
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    over = (actual.double() - wanted.output).abs() - wanted.limit
    worst = int(over.argmax())
    assert float(over.max()) <= 0, (
        f"{what}: element {worst} of shape {tuple(actual.shape)} is {float(actual.flatten()[worst])} instead of "
        f"{float(wanted.output.flatten()[worst])} +- {float(wanted.limit.flatten()[worst]):.3e}"
    )
    rms, allowed, size = (
        float(value.mean().sqrt())
        for value in ((actual.double() - wanted.output).square(), wanted.square, wanted.output.square())
    )
    assert rms <= allowed, f"{what}: root mean square {rms:.3e}, more than {allowed:.3e}"
    assert allowed <= VAGUE * size, f"{what}: a limit of {allowed:.3e} says nothing about a result of {size:.3e}"
