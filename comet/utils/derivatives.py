"""Backward passes that have no derivative themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def first_only(backward: Backward) -> Backward:
    """Let a ``torch.autograd.Function``'s backward pass refuse when a second derivative may be wanted.

    torch's ``once_differentiable`` refuses only if the output's gradient requires one. Else, as behind a sum, gradients
    count as constants, and a second derivative silently lacks their part.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True must be False: a Comet layer has first derivatives only")
        return backward(ctx, *grads)

    return call
