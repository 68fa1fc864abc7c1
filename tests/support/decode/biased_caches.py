"""Caches of experts with biases, beside the same experts all on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from activation_cases import draw_biases
from torch import Tensor

from comet.decode.local import run_kernels
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import DecodeWeights
from comet.experts import ExpertCache
from comet.kernels.decode.blocks import DecodeConfig
from comet.kernels.runtime.activation import Activation
from comet.quantization.formats import MXType, quantize_mx

D, F = 64, 96
GPT_OSS = Activation("clamped_swiglu", limit=0.5)


@dataclass(frozen=True)
class BiasedCase:
    """T tokens with K of E experts each, the first of which another rank has; ``num_slots`` of them."""

    name: str
    T: int
    K: int
    E: int
    num_slots: int
    config: DecodeConfig | None = None
    quantised: MXType | None = None


def parts_of(case: BiasedCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of all experts, on the CPU."""
    made = torch.Generator().manual_seed(case.E)
    sizes = {"w1": (2 * F, D), "w2": (D, F)}
    drawn = {name: torch.randn(case.E, *size, generator=made) / 8 for name, size in sizes.items()}
    parts = {name: weight.to(dtype) for name, weight in drawn.items()}
    if case.quantised:
        packed = {name: quantize_mx(weight, case.quantised) for name, weight in drawn.items()}
        parts = {name: each.elements for name, each in packed.items()}
        parts |= {f"{name}_scales": each.scales for name, each in packed.items()}
    return parts | draw_biases(case.E, F, D, dtype, case.E)._asdict()


def compare_biased(case: BiasedCase, device: torch.device, dtype: torch.dtype) -> None:
    """Steps of a cache by kernels, beside those of resident experts: bit for bit; and by the twin."""
    parts = parts_of(case, dtype)
    held = {name: part[1:].contiguous() for name, part in parts.items()}
    place = dict(num_slots=case.num_slots, num_experts=case.E, first_expert=1, activation=GPT_OSS)
    cache, twin = (ExpertCache(**held, device=each, **place) for each in (device, torch.device("cpu")))
    slots = torch.arange(case.E, dtype=torch.int32, device=device)
    slots[0] = -1
    resident = DecodeWeights(**{name: part.to(device) for name, part in parts.items()}, slots=slots, activation=GPT_OSS)
    made, close = torch.Generator().manual_seed(3), 1e-4 if dtype == torch.float32 else 2e-2
    for _ in range(6):
        tokens = torch.randn(case.T, D, generator=made).to(dtype)
        ids = torch.randint(-1, case.E, (case.T, case.K), generator=made, dtype=torch.int32)
        weights = torch.rand(case.T, case.K, generator=made)
        on_device = [each.to(device) for each in (tokens, ids, weights)]
        found, wanted = (run_kernels(*on_device, each, config=case.config) for each in (cache.weights, resident))
        assert torch.equal(found, wanted)
        torch.testing.assert_close(
            warp_decode_torch(tokens, ids, weights, twin.weights), found.cpu(), rtol=close, atol=close
        )
    assert cache.tables.totals[1] > case.num_slots, "slots were given away"
