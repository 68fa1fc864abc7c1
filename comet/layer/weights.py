"""Checks of the expert weights that come with each call: their shapes, and a width that kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from comet.config import DIM_MULTIPLE, MoEConfig, require
from comet.layer.sharding import require_held
from comet.layout import Biases, ExpertLayout
from comet.quantization.formats import FP8_BLOCK
from comet.utils.match import MatchOnce, Sizes


def match_once(match: Callable[..., None], config: MoEConfig, layout: ExpertLayout, **rules: Any) -> MatchOnce:
    """``match`` with the sizes of a layer, for weights that come with every call."""
    sizes = Sizes(
        e=(layout.experts_local, "num_experts / ep"),
        F=(config.ffn_size // layout.tp, "ffn_size / tp"),
        D=(config.hidden_size, "hidden_size"),
    )
    return MatchOnce(partial(match, sizes, **rules))


def match_weights(
    sizes: Sizes,
    w1: Tensor,
    w2: Tensor,
    *biases: Tensor,
    biased: bool,
    **rules: Any,
) -> None:
    """Raise ``ValueError`` unless weights and biases are those of a layer of these sizes: ``(e, 2F/TP, D)``,
    ``(e, D, F/TP)``, and where the layer is ``biased`` ``(e, 2F/TP)``, ``(e, D)``; with ``rules`` of ``Sizes.match``.
    """
    sizes.match("w1", w1, "e 2F D", **rules)
    sizes.match("w2", w2, "e D F", **rules)
    require_held(w1, w2)
    match_biases(sizes, *biases, biased=biased, **rules)


def match_fp8_weights(
    sizes: Sizes,
    w1: Tensor,
    w2: Tensor,
    w1_scales: Tensor,
    w2_scales: Tensor,
    *biases: Tensor,
    biased: bool,
    dtype: torch.dtype,
    **rules: Any,
) -> None:
    """Check weights in block FP8 as ``match_weights`` does; no scale may span two ranks.

    ``dtype`` is that of the biases.
    """
    for letter in "DF":
        name, size = sizes.origins[letter], sizes.values[letter]
        require(size % FP8_BLOCK == 0, f"{name}={size} must be a multiple of {FP8_BLOCK} for experts in block FP8")
    rules["contiguous"] = True
    for name, elements, scales, spec, spec_of_scales in (
        ("w1", w1, w1_scales, "e 2F D", f"e 2F/{FP8_BLOCK} D/{FP8_BLOCK}"),
        ("w2", w2, w2_scales, "e D F", f"e D/{FP8_BLOCK} F/{FP8_BLOCK}"),
    ):
        sizes.match(f"{name}.elements", elements, spec, dtype=torch.float8_e4m3fn, **rules)
        sizes.match(f"{name}.scales", scales, spec_of_scales, dtype=torch.float32, **rules)
    match_biases(sizes, *biases, biased=biased, dtype=dtype, **rules)


def match_biases(sizes: Sizes, *biases: Tensor, biased: bool, **rules: Any) -> None:
    """Raise ``ValueError`` unless there are ``(e, 2F/TP)`` and ``(e, D)`` of a layer that is ``biased``, else none."""
    given = bool(biases)
    require(given == biased, f"biases={given} of the call must be the layer's expert_bias={biased}")
    for name, bias, spec in zip(("b1", "b2"), biases, ("e 2F", "e D"), strict=given):
        sizes.match(name, bias, spec, **rules)


def pad_width(w1: Tensor, w2: Tensor, biases: Biases | None = None) -> tuple[Tensor, Tensor, Biases | None]:
    """The weights, copied where F/TP is no multiple of 16: padded with zeros, to the next one, which the kernels take.

    Exact: whatever an activation makes of a gate and an up of 0 meets a zero column of w2, and gradients are those of
    the weights themselves: what the padding would get is cut off.

    Returns:
        All, of a width that is a multiple of 16; F/TP = 24: ``(e, 64, D)``, ``(e, D, 32)``, ``(e, 64)``.
    """
    missing = -w2.shape[2] % DIM_MULTIPLE
    if not missing:
        return w1, w2, biases
    if biases is not None:
        biases = biases._replace(b1=pad(biases.b1.unflatten(1, (2, -1)), (0, missing)).flatten(1, 2))
    return pad(w1.unflatten(1, (2, -1)), (0, 0, 0, missing)).flatten(1, 2), pad(w2, (0, missing)), biases
