"""Every way to run the experts of one rank, by name."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import layer_cases
import torch
from layer_cases import LayerCase
from layer_ranks import open_group
from torch import Tensor

from comet.decode import DataParallelDecode, DecodeWeights, RankDecode, ReplicatedRunner, warp_decode
from comet.layer.paths import make_path
from comet.layer.routed_experts import SymmetricPath
from comet.layout import RoutedTokens
from comet.modular import (
    FusedExperts,
    FusedPrepareFinalize,
    GroupedBatched,
    GroupedContiguous,
    ModularMoE,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)
from comet.quantization.formats import MXFP8
from comet.reference.layer import reference_experts

# Computes tokens (T, D) with w1 and w2, and with the ids and routing weights of the case.
Layer = Callable[[Tensor, Any, Any], Tensor]
rank_inputs = functools.cache(layer_cases.rank_inputs)  # drawn once, whatever torch is set to later


def every_path(case: LayerCase, *, kernels: bool = False, kind: type = Tensor) -> dict[str, Layer]:
    """Every path of one rank for weights of a kind; by kernels those that do not choose themselves."""
    inputs, config, group = rank_inputs(case, 0), case.config, open_group(case)
    routing, own = (inputs.top_k_ids, inputs.top_k_weights), dict(use_kernels=kernels)

    def path(run: Callable[..., Tensor]) -> Layer:
        return lambda tokens, w1, w2: run(RoutedTokens(tokens, *routing), w1, w2)

    def modular(transport: Any, experts: Any) -> Layer:
        return path(ModularMoE(transport, experts, weight_type=kind))

    def decode(run: Callable[..., Tensor]) -> Layer:
        return lambda tokens, w1, w2: run(tokens, *routing, decode_weights(w1, w2, case.num_experts))

    symmetric = SymmetricPath(config, group, case.overlap, **own)
    contiguous, batched = SymmetricContiguous(config, group, **own), SymmetricBatched(config, group, **own)
    found = {
        "decode": decode(partial(warp_decode, **own)),
        "decode over ranks": decode(RankDecode(group.comm, hidden_size=case.hidden_size, **own)),
        "grouped": modular(SingleRank(config, group), GroupedContiguous(config, group, **own)),
        "symmetric": modular(contiguous, GroupedContiguous(config, group, **own)),
        "batched": modular(batched, GroupedBatched(config, group, **own)),
        "modular decode": modular(SingleRank(config, group), WarpDecodeExperts(config, group, **own)),
    }
    if kind is not MXFP8:
        found["symmetric path"] = path(symmetric if kind is Tensor else symmetric.fp8)
    if kind is Tensor:
        found["specification"] = path(lambda routed, *weights: reference_experts(*routed, *weights))
        found |= {name: path(make_path(name, config, group)) for name in ("reference", "plain")}
        found["fused"] = modular(FusedPrepareFinalize(config, group, **own), FusedExperts(config, group))
        if not kernels:
            found["own tokens"] = path(DataParallelDecode(config, group))
            found["replicated"] = path(ReplicatedRunner(config, group))
    return found


def decode_weights(w1: Any, w2: Any, num_experts: int) -> DecodeWeights:
    """Weights ``(e, 2F, D)`` and ``(e, D, F)`` of any kind in their slots; experts that are not there have none."""
    parts = dict(w1=w1, w2=w2)
    if not isinstance(w1, Tensor):
        parts = dict(w1=w1.elements, w2=w2.elements, w1_scales=w1.scales, w2_scales=w2.scales)
    held = torch.arange(num_experts, dtype=torch.int32)
    return DecodeWeights(**parts, slots=held.where(held < parts["w1"].shape[0], -1))
