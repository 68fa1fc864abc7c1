"""Experts in block FP8 against float64 on the quantised tokens and weights.

Those are quantised exactly alike everywhere; of hidden, where a sum comes out next to the middle of two e4m3 numbers,
either is right. So results are compared as in other types: at most twice as far from float64 as plain torch, which
quantises hidden as well.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from layer_cases import LayerCase, RankInputs, assert_as_close, full_weights, shard
from torch import Tensor

from comet.kernels.runtime.activation import SWIGLU
from comet.quantization.formats import FP8, MXFP8, quantize_fp8, quantize_rows
from comet.quantization.packed import pack, packed_columns
from comet.reference.layer import rank_partial, sum_partials

Quantised = TypeVar("Quantised", FP8, MXFP8)


class QuantisedSwiglu:
    """SwiGLU, of which block FP8 keeps this."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return quantize_rows(SWIGLU.forward(gate, up)).dequantize()


def fp8_shard(case: LayerCase, rank: int, device: str | torch.device = "cpu") -> tuple[FP8, FP8]:
    """Return the weights of ``rank``: w1 ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)``."""
    w1, w2 = shard(case, rank, *full_weights(case))
    w1, w2 = (quantize_fp8(weight) for weight in (w1.flatten(1, 2), w2))
    return on_device(w1, device), on_device(w2, device)


def on_device(weight: Quantised, device: str | torch.device) -> Quantised:
    return replace(weight, elements=weight.elements.to(device), scales=weight.scales.to(device))


def check_pack(values: Tensor) -> None:
    """The kernel that packs rows gives the bits of the quantiser."""
    from comet.kernels.gemm.fp8 import pack_rows  # needs triton

    rows, columns = values.shape
    found = values.new_zeros(rows, packed_columns(columns, values.dtype))
    pack_rows(values, found.view(torch.int32))
    wanted = pack(quantize_rows(values), values.dtype).view(torch.uint8)
    assert torch.equal(found.view(torch.uint8), wanted), f"{values.dtype}, {rows} x {columns}"


def layer_of(
    case: LayerCase, inputs: RankInputs, shards: list[tuple[FP8, FP8]], dtype: torch.dtype, activation: Any
) -> Tensor:
    """``(T, D)`` in plain torch, in ``dtype``, from what each rank holds."""
    tokens, routing = quantize_rows(inputs.tokens).dequantize().to(dtype), inputs.top_k_weights.to(dtype)
    ids, partials = case.relabelled(inputs.top_k_ids), []
    for rank, weights in enumerate(shards):
        w1, w2 = (weight.dequantize().to(dtype) for weight in weights)
        first = rank // case.tp * w1.shape[0]
        partials.append(rank_partial(tokens, ids, routing, w1, w2, first_expert=first, activation=activation))
    return sum_partials(partials)


def compare(case: LayerCase, inputs: RankInputs, shards: list[tuple[FP8, FP8]], found: Tensor, what: str) -> None:
    """``found (T, D)`` is right."""
    exact = layer_of(case, inputs, shards, torch.float64, SWIGLU)
    plain = layer_of(case, inputs, shards, torch.float32, QuantisedSwiglu)
    assert_as_close(found, exact, plain.to(case.dtype), case.dtype, what)
