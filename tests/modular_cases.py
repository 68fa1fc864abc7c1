"""Every combination of prepare/finalize, experts and reduction, run on real ranks against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from layer_cases import LayerCase, assert_as_close, full_weights, rank_inputs, shard
from layer_ranks import poison
from torch import Tensor

from comet.group import ExpertGroup, make_expert_group
from comet.modular import EXPERTS, PREPARE_FINALIZE, REDUCTIONS, ActivationFormat, ModularMoE
from comet.quantize import quantize_rows
from comet.reference import reference_experts

NAN_BYTES = 0xFF  # every float made of these bytes is NaN


@dataclass(frozen=True)
class Combination:
    """Three classes."""

    prepare_finalize: type
    experts: type
    reduction: type

    def __str__(self) -> str:
        return " + ".join(part.__name__ for part in (self.prepare_finalize, self.experts, self.reduction))

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
        if self.experts.takes_fp8 and not self.prepare_finalize.carries_fp8:
            return "wants its rows in FP8"
        return None


def combinations() -> list[Combination]:
    """All of them, compatible or not, from the registries."""
    return [Combination(*parts) for parts in _product(PREPARE_FINALIZE, EXPERTS, REDUCTIONS)]


def _product(*choices: tuple[type, ...]) -> Iterator[tuple[type, ...]]:
    if not choices:
        yield ()
        return
    for first in choices[0]:
        for rest in _product(*choices[1:]):
            yield (first, *rest)


def make_group(case: LayerCase, device: str = "cpu") -> ExpertGroup:
    max_tokens = max(1, *case.num_tokens)
    return make_expert_group(
        case.config, case.parallel, max_tokens=max_tokens, dtype=case.dtype, device=device, timeout_s=60.0
    )


def compose(combination: Combination, case: LayerCase, group: ExpertGroup, **options: Any) -> ModularMoE:
    """The layer; ``options`` go to every part that takes them."""
    parts = []
    for kind, own in ((combination.prepare_finalize, {}), (combination.experts, {"reduce": combination.reduction()})):
        taken = {name: value for name, value in options.items() if name in kind.__init__.__annotations__}
        parts.append(kind(case.config, group, **own, **taken))
    return ModularMoE(*parts)


def try_compose(
    combination: Combination, case: LayerCase, group: ExpertGroup, **options: Any
) -> tuple[ModularMoE | None, str]:
    """The layer and no words, or no layer and the words it was refused with."""
    try:
        return compose(combination, case, group, **options), ""
    except ValueError as refusal:
        return None, str(refusal)


def expected(case: LayerCase, rank: int, dtype: torch.dtype, call: int, *, quantized: bool) -> Tensor:
    """The reference of this rank's tokens; after a round trip through FP8 where the layer makes one."""
    inputs = rank_inputs(case, rank, call)
    tokens = quantize_rows(inputs.tokens).dequantize(case.dtype) if quantized else inputs.tokens
    w1, w2 = (weight.to(dtype) for weight in full_weights(case))
    weights = inputs.top_k_weights.to(torch.promote_types(dtype, torch.float32))
    return reference_experts(tokens.to(dtype), inputs.top_k_ids, weights, w1.flatten(1, 2), w2, ep=case.ep, tp=case.tp)


def check_layer(layer: ModularMoE, case: LayerCase, rank: int, what: str, device: str = "cpu") -> None:
    """Run all calls of the case and compare; scratch memory is full of NaN before each."""
    w1, w2 = (weight.to(device) for weight in shard(case, rank, *full_weights(case)))
    quantized = layer.experts.takes_fp8
    for call in range(case.calls):
        inputs = rank_inputs(case, rank, call)
        layer._pool.fill_(NAN_BYTES)
        parts = (inputs.tokens, inputs.top_k_ids, inputs.top_k_weights)
        tokens, ids, weights = (strided(part.to(device)) for part in parts)
        y = layer(tokens, ids, weights, w1.flatten(1, 2), w2)
        exact, same = (expected(case, rank, dtype, call, quantized=quantized) for dtype in (torch.float64, case.dtype))
        where = f"{what}, {case.name}, seed {case.seed}, call {call}, rank {rank}"
        assert y.dtype == case.dtype, where
        assert_as_close(y, exact, same, case.dtype, where)


def strided(matrix: Tensor) -> Tensor:
    """The same numbers, every second of a buffer whose others are poison."""
    buffer = torch.full((*matrix.shape, 2), 77, dtype=matrix.dtype, device=matrix.device)
    buffer[..., 0] = matrix
    return buffer[..., 0]


def run_combinations(
    rank: int, world_size: int, cases: list[LayerCase], options: dict[str, Any], device: str = "cpu"
) -> dict[str, str]:
    """Every combination on every case; returns why each was refused, or no words."""
    outcome: dict[str, str] = {}
    for case in cases:
        group = make_group(case, device)
        poison(group)
        for combination in combinations():
            wanted, name = combination.reason(world_size), str(combination)
            layer, refusal = try_compose(combination, case, group, **options)
            if layer is not None:
                assert wanted is None, f"{name} was accepted, but: {wanted}"
                check_layer(layer, case, rank, name, device)
            else:
                assert wanted is not None, f"{name} refused: {refusal}"
                assert wanted in refusal, f"{name} refused for another reason: {refusal}"
            outcome[name] = refusal
        group.workspace.check()
        group.close()
    return outcome


def attacks(world_size: int, seed: int) -> list[LayerCase]:
    """Unequal and no tokens, masked slots, one busy expert, idle experts, several calls."""
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
    ]
