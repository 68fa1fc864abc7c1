"""Every combination of prepare/finalize, experts and reduction, run on real ranks against the reference."""

import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fp8_cases import on_device
from layer_cases import (
    LayerCase,
    as_strided,
    assert_as_close,
    full_biases,
    full_weights,
    new_memory_is_nan,
    rank_inputs,
    shard,
)
from layer_ranks import open_group
from torch import Tensor

from comet.layer.group import ExpertGroup
from comet.layout import Biases, ExpertLayout
from comet.modular import EXPERTS, PREPARE_FINALIZE, REDUCTIONS, ActivationFormat, ModularMoE, RoutedTokens
from comet.quantization.formats import FP8, MXFP8, WEIGHT_TYPES, Weight, quantize_fp8, quantize_mxfp8
from comet.reference.layer import reference_experts

ROUTED = ("tokens", "top_k_ids", "top_k_weights")
PLAIN_ONLY = {"uniform", "one expert", "idle experts", "biases"}  # cases that are about rows, not about weights


@dataclass(frozen=True)
class Combination:
    prepare_finalize: type
    experts: type
    reduction: type
    weight_type: type[Weight] = Tensor

    def __str__(self) -> str:
        parts = (self.prepare_finalize, self.experts, self.reduction, self.weight_type)
        return " + ".join(part.__name__ for part in parts)

    def reason(self, world_size: int) -> str | None:
        """Words the refusal must contain, from the classes' own declarations; ``None`` if they must work."""
        given, formats = self.prepare_finalize.activation_format, self.experts.formats
        if self.prepare_finalize.__name__ == "SingleRank" and world_size > 1:
            return "SingleRank sends nothing to other ranks"
        if given not in formats:
            handles = ActivationFormat.HANDLE in {given, *formats}
            return "one half of the fused layer" if handles else f"hands out {given.value} rows"
        if self.reduction not in self.experts.reductions:
            return f"cannot leave its reduction to {self.reduction.__name__}"
        if given not in self.reduction.formats:
            return f"cannot reduce the {given.value} rows"
        return None if self.weight_type in self.experts.weight_types else f"not with {self.weight_type.__name__}"


def combinations() -> list[Combination]:
    return [Combination(*parts) for parts in itertools.product(PREPARE_FINALIZE, EXPERTS, REDUCTIONS, WEIGHT_TYPES)]


def compose(combination: Combination, case: LayerCase, group: ExpertGroup, **options: Any) -> ModularMoE:
    parts = []
    for kind, own in ((combination.prepare_finalize, {}), (combination.experts, {"reduce": combination.reduction()})):
        taken = {name: value for name, value in options.items() if name in kind.__init__.__annotations__}
        parts.append(kind(case.config, group, **own, **taken))
    return ModularMoE(*parts, weight_type=combination.weight_type)


@functools.cache
def rank_weights(case: LayerCase, rank: int, weight_type: type[Weight], device: str = "cpu") -> tuple[Weight, Weight]:
    """w1 ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)`` of a rank; quantised there, each rank its own part."""
    w1, w2 = shard(case, rank, *full_weights(case))
    if weight_type is Tensor:
        return w1.flatten(1, 2).to(device), w2.to(device)
    quantize = {FP8: quantize_fp8, MXFP8: quantize_mxfp8}[weight_type]
    first, second = (quantize(weight) for weight in (w1.flatten(1, 2), w2))
    return on_device(first, device), on_device(second, device)


@functools.cache
def dequantized_weights(case: LayerCase, weight_type: type[Weight]) -> tuple[Tensor, Tensor]:
    """Return ``full_weights`` in float32, after quantisation to ``weight_type`` rank by rank."""
    w1, w2 = (weight.float() for weight in full_weights(case))
    for rank in range(case.world_size if weight_type is not Tensor else 0):
        layout = ExpertLayout.create(case.config, case.parallel, rank)
        width = case.ffn_size // case.tp
        experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
        columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        first, second = (weight.dequantize() for weight in rank_weights(case, rank, weight_type))
        w1[experts, :, columns], w2[experts, :, columns] = first.unflatten(1, (2, -1)), second
    return w1, w2


@functools.cache
def expected(
    case: LayerCase,
    rank: int,
    dtype: torch.dtype,
    call: int,
    *,
    weight_type: type[Weight] = Tensor,
) -> Tensor:
    """The reference of this rank's tokens."""
    inputs = rank_inputs(case, rank, call)
    w1, w2 = (weight.to(dtype) for weight in dequantized_weights(case, weight_type))
    weights = inputs.top_k_weights.to(torch.promote_types(dtype, torch.float32))
    added = [bias.to(dtype).flatten(1) for bias in full_biases(case)]
    return reference_experts(
        inputs.tokens.to(dtype), inputs.top_k_ids, weights, w1.flatten(1, 2), w2, ep=case.ep, tp=case.tp,
        activation=case.activation, biases=Biases(*added) if added else None,
    )  # fmt: skip


def check_layer(layer: ModularMoE, case: LayerCase, rank: int, what: str, device: str = "cpu") -> None:
    """Run all calls of the case and compare; whatever the layer allocates is full of NaN."""
    w1, w2 = rank_weights(case, rank, layer.weight_type, device)
    added = [bias.flatten(1).to(device) for bias in shard(case, rank, *full_weights(case), *full_biases(case))[2:]]
    for call in range(case.calls):
        routed = RoutedTokens(*(as_strided(part.to(device)) for part in rank_inputs(case, rank, call).routed))
        with new_memory_is_nan():
            y = layer(routed, w1, w2, *([Biases(*added)] if added else []))
        dtypes = (torch.float64, case.dtype)
        exact, same = (expected(case, rank, dtype, call, weight_type=layer.weight_type) for dtype in dtypes)
        where = f"{what}, {case.name}, seed {case.seed}, call {call}, rank {rank}"
        assert y.dtype == case.dtype, where
        assert_as_close(y, exact, same, case.dtype, where)


def run_combinations(
    rank: int, world_size: int, cases: list[LayerCase], options: dict[str, Any], device: str = "cpu"
) -> dict[str, str]:
    """Every combination on every case; returns why each was refused, or no words."""
    outcome: dict[str, str] = {}
    for case in cases:
        group = open_group(case, device)
        for combination in combinations():
            if combination.weight_type is not Tensor and case.name in PLAIN_ONLY:
                continue
            wanted, name = combination.reason(world_size), str(combination)
            with nullcontext() if wanted is None else pytest.raises(ValueError, match=wanted) as caught:
                layer = compose(combination, case, group, **options)
            if caught is None:
                check_layer(layer, case, rank, name, device)
            outcome[name] = "" if caught is None else str(caught.value)
        group.workspace.check()
        group.close()
    return outcome


def larger(case: LayerCase, dtype: torch.dtype) -> LayerCase:
    """The case in sizes that compiled kernels are made for."""
    sizes = (max(size, least) for size, least in ((case.hidden_size, 128), (case.ffn_size, 64)))
    return replace(case, dtype=dtype, **dict(zip(("hidden_size", "ffn_size"), sizes, strict=True)))


def attacks(world_size: int, seed: int) -> list[LayerCase]:
    tokens = {1: (70,), 2: (150, 3)}[world_size]  # more than a decode step, more than a chunk
    empty = (0,) * (world_size - 1)
    base = LayerCase("uniform", world_size, 1, tokens, seed=seed, calls=2)
    return [
        base,
        replace(base, name="no tokens on a rank", num_tokens=(*empty, 9), calls=1),
        replace(base, name="no tokens at all", num_tokens=(*empty, 0), calls=1),
        replace(base, name="masked", num_tokens=tokens[::-1], top_k=4, routing="masked", calls=1),
        replace(base, name="one expert", num_tokens=tuple(min(count, 40) for count in tokens), routing="one", calls=1),
        replace(base, name="idle experts", num_experts=8, routing="first_half", calls=1),
        replace(base, name="part of a block", num_tokens=(5,) * world_size, hidden_size=160, ffn_size=288, calls=1),
    ]
