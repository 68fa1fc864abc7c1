"""What every path asks of expert weights, which come with each call: their shapes, and a width that kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from comet.config import DIM_MULTIPLE, MoEConfig
from comet.layout import ExpertLayout
from comet.utils.match import MatchOnce, Sizes


def match_once(match: Callable[..., None], config: MoEConfig, layout: ExpertLayout, **rules: Any) -> MatchOnce:
    """``match`` with the sizes of a layer, for weights that come with every call."""
    sizes = Sizes(
        e=(layout.experts_local, "num_experts / ep"),
        F=(config.ffn_size // layout.tp, "ffn_size / tp"),
        D=(config.hidden_size, "hidden_size"),
    )
    return MatchOnce(partial(match, sizes, **rules))


def match_weights(sizes: Sizes, w1: Tensor, w2: Tensor, **rules: Any) -> None:
    """Raise ``ValueError`` unless w1 is ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)``; ``rules`` are of ``Sizes.match``."""
    sizes.match("w1", w1, "e 2F D", **rules)
    sizes.match("w2", w2, "e D F", **rules)


def pad_width(w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights, copied where F/TP is no multiple of 16: padded with zeros, to the next one, which the kernels take.

    Exact: a hidden column of zero weights is silu(0) * 0 = 0 and meets a zero column of w2; gradients are those of the
    weights themselves.

    Args:
        w1: ``(e, 2F/TP, D)``, gate rows first, then up rows.
        w2: ``(e, D, F/TP)``.

    Returns:
        Both, of a width that is a multiple of 16; F/TP = 24: ``(e, 64, D)``, ``(e, D, 32)``.
    """
    missing = -w2.shape[2] % DIM_MULTIPLE
    if not missing:
        return w1, w2
    return pad(w1.unflatten(1, (2, -1)), (0, 0, 0, missing)).flatten(1, 2), pad(w2, (0, missing))
