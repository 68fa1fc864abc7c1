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


class Passes:
    """The passes of a batch: a ``Replayed`` for each number of tokens, and separate ones for drafts.

    Args:
        append: Appends ``ids (B, S)``, drafting or not, and returns ``(B, S, V)``; from and to memory that stays.
        before: Called before every pass, replayed or not: refuses it where the group is closed, puts it behind what
            else the group was given, and renews what the pass reads copies of.
        obstacle: Says why a pass of so many tokens must not be captured; empty if it may be.
        reads: Parameters, buffers and hooks of the model, which may be replaced before ``renew``; see ``Replayed``.
    """

    def __init__(
        self,
        append: Callable[[Tensor, bool], Tensor],
        *,
        before: Callable[[], None] = lambda: None,
        cuda_graph: GraphMode = "auto",
        obstacle: Callable[[int], str] = lambda num_tokens: "",
        reads: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.steps: dict[tuple[int, bool], Replayed[Tensor]] = {}
        self._ids: dict[tuple[int, bool], Tensor] = {}  # buffers of the steps
        self._append, self._before, self._obstacle = append, before, obstacle
        self._settings: dict[str, Any] = dict(cuda_graph=cuda_graph, reads=reads)

    def __call__(self, ids: Tensor, *, drafts: bool = False) -> Tensor:
        """Append ``(B, S)`` int64 tokens by the pass of this shape; ``(B, S, V)`` logits that no later pass changes."""
        step = self.of(ids, drafts)
        self._before()
        self._ids[ids.shape[1], drafts].copy_(ids)
        logits = step()
        return logits if step.graph_fallback_reason else logits.clone()

    def of(self, ids: Tensor, drafts: bool = False) -> Replayed[Tensor]:
        """The pass for tokens of this shape."""
        kind = ids.shape[1], drafts
        if kind not in self.steps:
            self._ids[kind] = mine = torch.zeros_like(ids)
            self.steps[kind] = Replayed(
                partial(self._append, mine, drafts), ids.device, "decode steps", obstacle=self._obstacle(ids.numel()),
                **self._settings,
            )  # fmt: skip
        return self.steps[kind]

    def renew(self) -> None:
        for step in self.steps.values():
            step.renew()

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why any kind of pass was not replayed; empty if all were."""
        reasons = [step.graph_fallback_reason for step in self.steps.values()]
        return next(filter(None, reasons), "") if reasons else TOO_FEW


def batch_obstacle(num_tokens: int, captured_tokens: int) -> str:
    """The reason why a step of so many tokens must not be captured; empty if a graph may hold a step of them."""
    if num_tokens <= captured_tokens:
        return ""
    if not captured_tokens:
        return "steps wait for the host, because warp decode is off or collectives join nodes"
    return f"{num_tokens} tokens are more than the {captured_tokens} of warp decode"
