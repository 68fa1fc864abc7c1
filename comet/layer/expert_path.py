"""The interface of what computes a layer's routed experts: everything that is asked of ``MoE.experts``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

from torch import Tensor

from comet.layout import Biases, RoutedTokens
from comet.quantization.formats import FP8

# Functions that make the gradients of w1 and of w2 in new memory. A backward pass leaves them to its caller, who calls
# them before the layer runs again. No rank waits for another in them.
DeferredWgrad = list["partial[Tensor]"]


class ExpertPath:
    """Computes the weighted sum of each token's experts, differentiably; a subclass needs ``__call__`` alone.

    Attributes:
        waits_for_counts: Whether a call waits on the host for how many rows travel, so that no CUDA graph can hold it.
        takes_fp8: Whether kernels compute ``fp8``; their twins would only be less exact than dequantised experts.
    """

    waits_for_counts = False
    takes_fp8 = False

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        """Tokens and ``(e, 2F/TP, D)``, ``(e, D, F/TP)`` -> ``(T, D)``.

        ``biases`` of ``(e, 2F/TP)`` and ``(e, D)`` are there where the layer has ``expert_bias``, and only there.
        """
        raise NotImplementedError

    def fp8(self, routed: RoutedTokens, w1: FP8, w2: FP8, biases: Biases | None = None) -> Tensor:
        """``__call__`` for inference with experts in block FP8, where ``takes_fp8``."""
        raise NotImplementedError

    def require_current(self) -> None:
        """Raise ``ValueError`` if the path keeps what was made of weights that have changed; asked before a replay."""

    def includes_shared(self, tokens: Tensor) -> bool:
        """Whether the next call, with tokens ``(T, D)``, includes the layer's shared expert: ``MoE`` leaves it out."""
        return False

    def defer_wgrad(self) -> AbstractContextManager[DeferredWgrad]:
        """Let calls made inside leave the gradients of w1 and w2 in the list, if they can."""
        return nullcontext([])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied layer runs by the same path; paths that keep tensors of the layer copy these."""
        return self


class FunctionPath(ExpertPath):
    """A function of the arguments of ``ExpertPath.__call__`` as a path."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        return self.compute(routed, w1, w2, *(() if biases is None else (biases,)))
