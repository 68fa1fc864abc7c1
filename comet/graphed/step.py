"""One decode step over memory that stays where it is: run as it stands, or replayed from a CUDA graph.

A step of a whole model launches so many small kernels that the host is slower than the GPU. Captured once, all of them
are one launch. What is captured is the very function that runs elsewhere: it reads the tokens from a buffer, keeps
positions and cache on the device, changes them in place and never asks the host. Hence both ways make the same tokens.

Letters: B sequences, S tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comet.utils.graphs import TOO_FEW, GraphMode, Replayed


class DecodeStep:
    """Appends one token, or some, to every sequence of a batch.

    Args:
        run: Reads ``ids``, appends them and returns the logits of the next tokens, ``(B, V)`` or ``(B, S, V)``; see
            ``Replayed``.
        ids: ``(B,)`` or ``(B, S)`` int64, the buffer ``run`` reads.
        before: Called before every step, replayed or not: refuses it where the group is closed, puts it behind what
            else the group was given, and renews what the step reads copies of.
    """

    def __init__(
        self,
        run: Callable[[], Tensor],
        ids: Tensor,
        *,
        before: Callable[[], None] = lambda: None,
        cuda_graph: GraphMode = "auto",
        obstacle: str = "",
        reads: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._ids = ids
        self._before = before
        self._run = Replayed(run, ids.device, "decode steps", cuda_graph=cuda_graph, obstacle=obstacle, reads=reads)

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why the last step was launched kernel by kernel; empty if it was replayed from a graph."""
        return self._run.graph_fallback_reason

    def renew(self) -> None:
        """Capture the step again if tensors that its graph reads were replaced or moved."""
        self._run.renew()

    def __call__(self, ids: Tensor) -> Tensor:
        """Take a step with int64 tokens shaped like the buffer; returns logits that no later step overwrites."""
        self._before()
        self._ids.copy_(ids)
        logits = self._run()
        return logits if self.graph_fallback_reason else logits.clone()


class Passes:
    """The passes of a batch, each number of tokens by a ``DecodeStep`` of its own, and apart from those the drafts.

    Args:
        append: Appends ``ids (B, S)``, drafting or not, and returns ``(B, S, V)``; from and to memory that stays.
        reads: Parameters, buffers and hooks of the model, which may be replaced before ``renew``; see ``Replayed``.
    """

    def __init__(
        self,
        append: Callable[[Tensor, bool], Tensor],
        *,
        before: Callable[[], None],
        cuda_graph: GraphMode,
        obstacle: Callable[[int], str],
        reads: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.steps: dict[tuple[int, bool], DecodeStep] = {}
        self._append, self._obstacle = append, obstacle
        self._settings: dict[str, Any] = dict(before=before, cuda_graph=cuda_graph, reads=reads)

    def __call__(self, ids: Tensor, *, drafts: bool = False) -> Tensor:
        """Append ``(B, S)`` int64 tokens by the pass of this shape; ``(B, S, V)`` logits that stay."""
        return self.of(ids, drafts)(ids)

    def of(self, ids: Tensor, drafts: bool = False) -> DecodeStep:
        """The pass for tokens of this shape."""
        kind = ids.shape[1], drafts
        if kind not in self.steps:
            mine, obstacle = torch.zeros_like(ids), self._obstacle(ids.numel())
            self.steps[kind] = DecodeStep(
                partial(self._append, mine, drafts), mine, obstacle=obstacle, **self._settings
            )
        return self.steps[kind]

    def renew(self) -> None:
        """Capture each kind of pass again if tensors that its graph reads were replaced or moved."""
        for step in self.steps.values():
            step.renew()

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why any kind of pass was not replayed; empty if all were."""
        reasons = [step.graph_fallback_reason for step in self.steps.values()]
        return next(filter(None, reasons), "") if reasons else TOO_FEW


def batch_obstacle(num_tokens: int, decode_tokens: int) -> str:
    """The reason why a step of so many tokens must not be captured; empty if warp decode takes them."""
    if num_tokens <= decode_tokens:
        return ""
    if not decode_tokens:
        return "warp decode is off, and other paths wait for the host"
    return f"{num_tokens} tokens are more than the {decode_tokens} of warp decode"
