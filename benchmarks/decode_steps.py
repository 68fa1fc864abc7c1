"""What the decode benchmark runs: sets of weights, quantised or not, and steps with their routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from routing import make_routing
from torch import Tensor

from comet.config import MoEConfig
from comet.decode import DecodeWeights, warp_decode_torch
from comet.decode.twin import slot_weights
from comet.quantize import quantize_fp8, quantize_mxfp8

QUANTISERS = {"mxfp8": quantize_mxfp8, "fp8": quantize_fp8}
WEIGHTS = ("bf16", *QUANTISERS)


@dataclass(frozen=True)
class WeightSet:
    """What is decoded, and the same numbers in the dtype of the tokens for paths that take no other.

    Without quantisation both are one. The numbers of block FP8 are rounded there.
    """

    weights: DecodeWeights
    plain: DecodeWeights


@dataclass(frozen=True)
class Step:
    """One step's inputs with one set of weights, every expert in the slot of its number."""

    tokens: Tensor
    ids: Tensor
    routing_weights: Tensor
    set: WeightSet

    @property
    def weights(self) -> DecodeWeights:
        """What is decoded."""
        return self.set.weights

    @property
    def touched_bytes(self) -> int:
        """Bytes of the distinct experts of this step, their scales among them."""
        weights = self.weights
        tensors = (weights.w1, weights.w2, weights.w1_scales, weights.w2_scales)
        return len(self.ids.unique()) * sum(tensor[0].nbytes for tensor in tensors if tensor is not None)

    def exact(self) -> Tensor:
        """The output in float64 of the very numbers that are decoded, from the touched experts only."""
        touched, ids = self.ids.unique(return_inverse=True)
        by_slot = [slot_weights(self.weights, slot, torch.float64) for slot in touched.tolist()]
        w1, w2 = (torch.stack(of_slots) for of_slots in zip(*by_slot, strict=True))
        slots = torch.arange(len(touched), dtype=torch.int32, device=ids.device)
        wide = DecodeWeights(w1=w1, w2=w2, slots=slots)
        return warp_decode_torch(self.tokens.double(), ids, self.routing_weights.double(), wide)


def make_weights(config: MoEConfig, device: torch.device, dtype: torch.dtype, seed: int) -> DecodeWeights:
    """One set of random weights."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, ffn = config.num_experts, config.hidden_size, config.ffn_size
    w1 = torch.empty(experts, 2 * ffn, hidden, device=device, dtype=dtype)
    w2 = torch.empty(experts, hidden, ffn, device=device, dtype=dtype)
    for weight, fan_in in ((w1, hidden), (w2, ffn)):
        weight.normal_(std=fan_in**-0.5, generator=generator)
    return DecodeWeights(w1=w1, w2=w2, slots=torch.arange(experts, dtype=torch.int32, device=device))


def make_set(config: MoEConfig, device: torch.device, dtype: torch.dtype, seed: int, kind: str) -> WeightSet:
    """``make_weights``, quantised for the ``WEIGHTS`` ``mxfp8`` and ``fp8``."""
    plain = make_weights(config, device, dtype, seed)
    if kind not in QUANTISERS:
        return WeightSet(plain, plain)
    fields: dict[str, Tensor] = {}
    for name, weight in (("w1", plain.w1), ("w2", plain.w2)):
        packed = []
        for expert in weight:  # one by one, because the quantiser works in float32
            packed.append(QUANTISERS[kind](expert))
            expert.copy_(packed[-1].dequantize(dtype))
        fields[name] = torch.stack([each.elements.view(torch.uint8) for each in packed]).view(torch.float8_e4m3fn)
        fields[f"{name}_scales"] = torch.stack([each.scales for each in packed])
    return WeightSet(DecodeWeights(slots=plain.slots, **fields), plain)


def make_steps(config: MoEConfig, sets: Sequence[WeightSet], num_tokens: int, routing: str) -> list[Step]:
    """One step per set of weights, each with its own tokens and routing."""
    steps = []
    for seed, weight_set in enumerate(sets):
        device, dtype = weight_set.plain.w1.device, weight_set.plain.w1.dtype
        ids, routing_weights = make_routing(
            routing, num_tokens=num_tokens, num_experts=config.num_experts, top_k=config.top_k, seed=seed, device=device
        )
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.randn(num_tokens, config.hidden_size, device=device, generator=generator).to(dtype)
        steps.append(Step(tokens, ids, routing_weights, weight_set))
    return steps
