"""The layers that are measured: those of ``configs/model``, with routing, weights and splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, check_removed, require
from comet.layout import Biases, ExpertLayout
from comet.quantization.formats import FP8, MXFP4, MXFP8
from comet.tuner.layers import read_models

ROUTINGS = ("uniform", "zipf", "hot")
PERMUTATION_SEED = 20_000
SEEDS_PER_RANK = 1000  # no two ranks draw by the same seed
SIZES = ("hidden_size", "ffn_size", "num_experts", "top_k")
OF_ATTENTION = ("num_heads", "num_kv_heads", "head_dim")
Packed = TypeVar("Packed", bound=MXFP8 | MXFP4 | FP8)


def make_routing(
    kind: str, *, num_tokens: int, num_experts: int, top_k: int, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Draw K distinct experts for each token, ``(T, K)`` int32, and ``(T, K)`` float32 weights that add up to 1.

    ``uniform``: all experts alike. ``zipf``: sampled without replacement, the n-th most popular expert with weight 1 /
    n; which one that is comes from one permutation, equal for all seeds and ranks. ``hot``: expert 0 is always the
    first of the K, the others are uniform.
    """
    require(kind in ROUTINGS, f"routing={kind!r} must be one of {', '.join(ROUTINGS)}")
    generator = torch.Generator(device).manual_seed(seed)
    # The K largest of log-weight + Gumbel noise are a sample without replacement, in proportion to the weights.
    uniform = torch.rand(num_tokens, num_experts, generator=generator, device=device).clamp_(1e-20, 1 - 1e-7)
    scores = popularity(kind, num_experts, device) - (-uniform.log()).log()
    ids = scores.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, top_k, generator=generator, device=device) + 0.1
    return ids, weights / weights.sum(1, keepdim=True)


def popularity(kind: str, num_experts: int, device: torch.device | str) -> Tensor:
    """Log-weight of every expert, ``(E,)`` float32, before noise."""
    if kind == "uniform":
        return torch.zeros(num_experts, device=device)
    if kind == "hot":
        return torch.tensor([1e6] + [0.0] * (num_experts - 1), device=device)
    # Drawn on the CPU, so that all devices agree on it.
    place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    return -(place + 1).float().log().to(device)


def make_weights(
    config: MoEConfig, layout: ExpertLayout, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """Random experts of a rank: ``(e, 2F/TP, D)`` and ``(e, D, F/TP)``."""
    experts, width = layout.experts_local, config.ffn_size // layout.tp
    w1 = torch.empty(experts, 2 * width, config.hidden_size, device=device, dtype=dtype)
    w2 = torch.empty(experts, config.hidden_size, width, device=device, dtype=dtype)
    draw_weights(w1, w2, config, seed)
    return w1, w2


@torch.no_grad()
def draw_weights(w1: Tensor, w2: Tensor, config: MoEConfig, seed: int, biases: Biases | None = None) -> None:
    """Fill them where they are: normal, of variance 1 / D and 1 / F, biases of variance 1."""
    generator = torch.Generator(w1.device).manual_seed(seed)
    for bias in biases or ():
        bias.normal_(generator=generator)
    w1.normal_(0, config.hidden_size**-0.5, generator=generator)
    w2.normal_(0, config.ffn_size**-0.5, generator=generator)


def quantize_experts(weight: Tensor, quantise: Callable[[Tensor], Packed]) -> Packed:
    """``(e, N, K)``, one expert after the other: a float32 copy of all of them may not fit."""
    packed = [quantise(expert) for expert in weight]
    elements, scales = (torch.stack([getattr(one, name) for one in packed]) for name in ("elements", "scales"))
    return type(packed[0])(elements=elements, scales=scales)


NUMBERS = ("comm_blocks", "num_panels")
RULE = "must be comm_blocks=N or num_panels=N"


def parse_overlap(text: str) -> OverlapConfig:
    """Read ``comm_blocks=16,num_panels=2``: 16 blocks that only communicate at first, and two panels."""
    values: dict[str, int] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        check_removed([name], f"overlap={pair!r}: ")
        require(name in NUMBERS and value.isdigit(), f"overlap={pair!r} {RULE}")
        values[name] = int(value)
    return OverlapConfig(**values)


SHAPES = read_models()
OF_EXPERTS = ("activation", "expert_bias")  # fields that a model may have
MODELS = {
    name: MoEConfig(
        hidden_size=shape["hidden_size"],
        **{field: shape["moe"][field] for field in (*SIZES[1:], *OF_EXPERTS) if field in shape["moe"]},
    )
    for name, shape in SHAPES.items()
}


def swiglu_model(name: str) -> MoEConfig:
    """``model``, for suites that run no other experts."""
    config = model(name)
    is_swiglu = config.activation.name == "swiglu" and not config.expert_bias
    require(is_swiglu, f"models={name!r} must have experts of SwiGLU without biases: this suite runs no others")
    return config


def model(name: str) -> MoEConfig:
    """The layer called ``name``, or one rank's share of its experts: ``mixtral_8x7b/4`` has 2 of the 8."""
    whole, _, ranks = name.partition("/")
    require(whole in MODELS, f"models={name!r} must be one of {', '.join(MODELS)}")
    if not ranks:
        return MODELS[whole]
    num_experts = MODELS[whole].num_experts
    require(
        ranks.isdigit() and int(ranks) > 0 and num_experts % int(ranks) == 0,
        f"models={name!r}: {num_experts} experts must be divisible by the number after '/'",
    )
    return replace(MODELS[whole], num_experts=num_experts // int(ranks))
