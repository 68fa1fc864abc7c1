"""The layer in block FP8 on ranks, against float64 on the quantised tokens and weights.

Those are quantised exactly alike everywhere; of hidden, where a sum comes out next to the middle of two e4m3 numbers,
either is right. So results are compared as in other types: at most twice as far from float64 as plain torch, which
quantises hidden as well.
"""

from __future__ import annotations

from typing import Any

import torch
from layer_cases import LayerCase, RankInputs, assert_as_close, full_weights, rank_inputs, shard
from layer_ranks import calls_of, open_group
from torch import Tensor

from comet.kernels.runtime.activation import SWIGLU
from comet.layer.group import ExpertGroup
from comet.layer.routed_experts import SymmetricPath
from comet.quantization.formats import FP8, quantize_fp8, quantize_rows
from comet.reference.layer import rank_partial, sum_partials


class QuantisedSwiglu:
    """SwiGLU, of which block FP8 keeps this."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return quantize_rows(SWIGLU.forward(gate, up)).dequantize()


def fp8_shard(case: LayerCase, rank: int) -> tuple[FP8, FP8]:
    """What ``rank`` holds: w1 ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)``."""
    w1, w2 = shard(case, rank, *full_weights(case))
    return quantize_fp8(w1.flatten(1, 2)), quantize_fp8(w2)


def layer_of(
    case: LayerCase, inputs: RankInputs, ids: Tensor, shards: list[tuple[FP8, FP8]], dtype: torch.dtype, activation: Any
) -> Tensor:
    """``(T, D)`` in plain torch, in ``dtype``; ids as the layer numbers its experts, and what each rank holds."""
    tokens, routing = quantize_rows(inputs.tokens).dequantize().to(dtype), inputs.top_k_weights.to(dtype)
    partials = []
    for rank, weights in enumerate(shards):
        w1, w2 = (weight.dequantize().to(dtype) for weight in weights)
        first = rank // case.tp * w1.shape[0]
        partials.append(rank_partial(tokens, ids, routing, w1, w2, first_expert=first, activation=activation))
    return sum_partials(partials)


def compare(
    case: LayerCase, inputs: RankInputs, ids: Tensor, shards: list[tuple[FP8, FP8]], found: Tensor, what: str
) -> None:
    """``found (T, D)`` is right."""
    exact = layer_of(case, inputs, ids, shards, torch.float64, SWIGLU)
    plain = layer_of(case, inputs, ids, shards, torch.float32, QuantisedSwiglu)
    assert_as_close(found, exact, plain.to(case.dtype), case.dtype, what)


def build_path(case: LayerCase, path: str, device: str) -> tuple[ExpertGroup, SymmetricPath]:
    group = open_group(case, device)
    return group, SymmetricPath(case.config, group, case.overlap, use_kernels=path == "fused")


def run_fp8_case(
    rank: int, world_size: int, case: LayerCase, path: str, device: str = "cpu", delays: bool = False
) -> list[Tensor]:
    group, experts = build_path(case, path, device)
    shards = [tuple(on(device, weight) for weight in fp8_shard(case, holder)) for holder in range(world_size)]
    outputs = []
    for call, (*given, _) in calls_of(case, rank, device, delays):
        y = experts.fp8(*given, *shards[rank])
        group.workspace.check()
        outputs.append(y.cpu())
        inputs = rank_inputs(case, rank, call).to(device)
        where = f"{case.name}, seed {case.seed}, call {call}, rank {rank}"
        compare(case, inputs, case.relabelled(inputs.top_k_ids.cpu()).to(device), shards, y, where)
    group.close()
    return outputs


def on(device: str, weight: FP8) -> FP8:
    return FP8(elements=weight.elements.to(device), scales=weight.scales.to(device))
