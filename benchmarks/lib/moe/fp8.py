"""The layer in block FP8 as a variant of the benchmark, and how far quantising alone takes it from the plain path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from comet.config import MoEConfig
from comet.layer.routed_experts import SymmetricPath
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8, quantize_rows

SAMPLED_TOKENS = 256
# The deviation from the plain path may be so many times what quantising makes: of the root mean square, over millions
# of numbers, hardly more than 1; of the largest, 6 for as many normal numbers, and some rows are larger than others.
RMS_FACTOR, LARGEST_FACTOR = 1.25, 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Layer:
    """A rank's experts in block FP8, and what ``noise`` says of them."""

    path: SymmetricPath
    w1: FP8
    w2: FP8
    noise: float

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)``, ``(T, K)``, ``(T, K)`` -> ``(T, D)``."""
        return self.path.fp8(tokens, top_k_ids, top_k_weights, self.w1, self.w2)


def fits(config: MoEConfig, layout: ExpertLayout) -> bool:
    """Whether D and F/TP are whole blocks."""
    return config.hidden_size % FP8_BLOCK == 0 and config.ffn_size // layout.tp % FP8_BLOCK == 0


def quantize_layer(path: SymmetricPath, w1: Tensor, w2: Tensor) -> FP8Layer:
    """Quantise ``w1 (e, 2F/TP, D)`` and ``w2 (e, D, F/TP)``, and measure on the first expert what it costs."""
    quantised = quantize_experts(w1), quantize_experts(w2)
    generator = torch.Generator(w1.device).manual_seed(0)
    tokens = torch.randn(SAMPLED_TOKENS, w1.shape[2], generator=generator, device=w1.device).to(w1.dtype)
    return FP8Layer(path=path, w1=quantised[0], w2=quantised[1], noise=noise(tokens, (w1[0], w2[0]), quantised))


def noise(tokens: Tensor, plain: tuple[Tensor, Tensor], quantised: tuple[FP8, FP8]) -> float:
    """What quantising tokens, weights and hidden changes in the first expert's output, in plain torch and float32.

    Args:
        tokens: ``(T, D)``.
        plain: ``(2F, D)`` and ``(D, F)`` of that expert.
        quantised: The same of all experts.

    Returns:
        Root mean square of the change over that of the output; some 0.06 for normal numbers.
    """
    w1, w2 = (FP8(elements=weight.elements[0], scales=weight.scales[0]).dequantize() for weight in quantised)
    found = _expert(quantize_rows(tokens).dequantize(), w1, w2, quantises=True)
    wanted = _expert(tokens.float(), plain[0].float(), plain[1].float(), quantises=False)
    return float((found - wanted).norm() / wanted.norm())


def deviation(output: Tensor, wanted: Tensor, noise: float) -> tuple[str, float]:
    """Why quantising cannot have made an output of the plain path's ("" if it can), and how far apart they are."""
    error, size = (output.float() - wanted.float()).flatten(), wanted.float().norm() + 1e-30
    rms = float(error.norm() / size)
    largest = float(error.abs().max() / size) * error.numel() ** 0.5 if error.numel() else 0.0
    if rms <= RMS_FACTOR * noise and largest <= LARGEST_FACTOR * noise:
        return "", rms
    return f"differs by {rms:.3g} (largest {largest:.3g}) root mean squares, quantising makes {noise:.3g}", rms


def _expert(tokens: Tensor, w1: Tensor, w2: Tensor, *, quantises: bool) -> Tensor:
    gate, up = (tokens @ w1.T).chunk(2, dim=1)
    hidden = silu(gate) * up
    return (quantize_rows(hidden).dequantize() if quantises else hidden) @ w2.T


def quantize_experts(weight: Tensor) -> FP8:
    """``(e, N, K)``, one expert after the other: a float32 copy of all of them may not fit."""
    experts, rows, columns = weight.shape
    elements = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), device=weight.device)
    for expert in range(experts):
        one = quantize_fp8(weight[expert])
        elements[expert], scales[expert] = one.elements, one.scales
    return FP8(elements=elements, scales=scales)
