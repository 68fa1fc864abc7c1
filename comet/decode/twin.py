"""Warp decode in plain torch, rounding where the kernels round: specification, CPU path and oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from comet.config import require
from comet.decode.weights import DecodeWeights, check_inputs
from comet.kernels.experts.cache import bring_torch
from comet.kernels.experts.host import add_hosted_torch
from comet.kernels.experts.waves import split_waves_torch, waves_of
from comet.layout import gate_first
from comet.quantization.formats import CODES, FP8, MXFP4, MXFP8
from comet.reference.layer import run_expert, sum_slots
from comet.utils.match import check_id_range


def warp_decode_torch(tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, weights: DecodeWeights) -> Tensor:
    """Torch twin of ``warp_decode``; reads ids and slots on the host, and takes float64 as well.

    Example (T = 1, K = E = 2, one slot; were D = F = 1 legal): token ``[[1]]``, ids ``[[1, 0]]``, weights
    ``[[0.5, 9]]``, slots ``[-1, 0]``, w1 ``[[[32], [2]]]``, w2 ``[[[0.5]]]``: expert 0 is not held, silu(32) is 32 in
    float32, so hidden is 64, the output 32 and the sum ``[[16]]``.
    """
    return decode_partial_torch(tokens, top_k_ids, top_k_weights, weights).to(tokens.dtype)


def decode_partial_torch(tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, weights: DecodeWeights) -> Tensor:
    """``warp_decode_torch`` before its last rounding: ``(T, D)`` float32, float64 for float64."""
    check_inputs(tokens, top_k_ids, top_k_weights, weights)
    check_id_range(top_k_ids, weights.num_experts)
    wide = torch.promote_types(tokens.dtype, torch.float32)
    outputs = tokens.new_zeros(*top_k_ids.shape, tokens.shape[1], dtype=wide)
    held = torch.zeros_like(top_k_ids, dtype=torch.bool)
    for slots in _slots_in_waves(top_k_ids, weights):
        held |= slots >= 0
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows, ranks = (slots == slot).nonzero(as_tuple=True)
                w1, w2 = slot_weights(weights, slot, wide)
                row = slot if weights.host is None else weights.host.place_in_rank(slot)
                b1, b2 = (None if each is None else each[row] for each in (weights.b1, weights.b2))
                b1 = gate_first(b1, -1) if weights.interleaved and b1 is not None else b1
                outputs[rows, ranks] = run_expert(tokens[rows], w1, w2, b1, b2, activation=weights.activation)
    partial = sum_slots(outputs, top_k_weights, held)
    if weights.host is not None and waves_of(top_k_ids, weights.host) == 1:
        partial = add_hosted_torch(partial, weights.host, tokens, top_k_ids, top_k_weights)
    return partial


def _slots_in_waves(top_k_ids: Tensor, weights: DecodeWeights) -> Iterator[Tensor]:
    """``(T, K)`` slot of every routed row of each wave; from a cache, whose experts come when it is asked for."""
    host, ids = weights.host, top_k_ids[None]
    if host is not None:
        num_waves = waves_of(top_k_ids, host)
        if num_waves > 1:
            ids, host = split_waves_torch(top_k_ids, host, num_waves), replace(host, mail=None)
    for wave in ids:
        if host is not None:
            bring_torch(wave, weights.w1, weights.w2, host, weights.parts[2:])
        yield _entry_slots(wave, weights)


def slot_weights(weights: DecodeWeights, slot: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w1 ``(2F, D)``, gate rows first, and w2 ``(D, F)`` of a slot, or of each of ``slot (n,)``, dequantised."""
    pairs = ((weights.w1[slot], weights.w1_scales), (weights.w2[slot], weights.w2_scales))
    w1, w2 = (_floating(elements, None if scales is None else scales[slot], dtype) for elements, scales in pairs)
    return gate_first(w1, -2) if weights.interleaved else w1, w2


def _floating(elements: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return elements.to(dtype)
    mx = MXFP4 if elements.dtype == CODES else MXFP8
    kind = mx if scales.dtype == torch.uint8 else FP8
    return kind(elements=elements, scales=scales, trusted=True).dequantize(dtype)  # DecodeWeights looked at them


def _entry_slots(top_k_ids: Tensor, weights: DecodeWeights) -> Tensor:
    """``(T, K)`` slot of every routed row, -1 where it is masked or its expert is not held."""
    num_slots = weights.w1.shape[0]
    known = bool(((weights.slots >= -1) & (weights.slots < num_slots)).all())
    require(known, f"slots={weights.slots.tolist()} must be -1 (not held) or in [0, S={num_slots})")
    masked = top_k_ids < 0
    return weights.slots[top_k_ids.long().clamp(min=0)].masked_fill(masked, -1)
