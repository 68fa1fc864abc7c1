"""One decode step over memory that stays where it is: run as it stands, or replayed from a CUDA graph.

A step of a whole model launches so many small kernels that the host is slower than the GPU. Captured once, all of them
are one launch. What is captured is the very function that runs elsewhere: it reads the tokens from a buffer, keeps
positions and cache on the device, changes them in place and never asks the host. Hence both ways make the same tokens.

Letters: B sequences, S tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from comet.graphs import GraphMode, Replayed


class DecodeStep:
    """Appends one token, or some, to every sequence of a batch.

    Args:
        run: Reads ``ids``, appends them and returns the logits of the next tokens, ``(B, V)`` or ``(B, S, V)``; see
            ``Replayed``.
        ids: ``(B,)`` or ``(B, S)`` int64, the buffer ``run`` reads.
        before: Called before every step, replayed or not: refuses it where the group is closed, puts it behind what
            else the group was given, and renews what the step reads copies of.
        cuda_graph: Whether it is replayed; see ``Replayed``.
        obstacle: Why ``run`` must not be captured; empty if nothing speaks against it.

    Raises:
        ValueError: If a graph is insisted on and there is an obstacle, or no GPU.
    """

    def __init__(
        self,
        run: Callable[[], Tensor],
        ids: Tensor,
        *,
        before: Callable[[], None] = lambda: None,
        cuda_graph: GraphMode = "auto",
        obstacle: str = "",
    ) -> None:
        self._ids = ids
        self._before = before
        self._run = Replayed(run, ids.device, "decode steps", cuda_graph=cuda_graph, obstacle=obstacle)

    @property
    def why_eager(self) -> str:
        """Why the last step was launched kernel by kernel; empty if it was replayed from a graph."""
        return self._run.why_eager

    def __call__(self, ids: Tensor) -> Tensor:
        """Take a step with int64 tokens shaped like the buffer; returns logits that no later step overwrites.

        Raises:
            ValueError: If a graph is insisted on and the step cannot be captured.
            RuntimeError: If the group has been closed.
        """
        self._before()
        self._ids.copy_(ids)
        logits = self._run()
        return logits if self.why_eager else logits.clone()


def batch_obstacle(num_tokens: int, decode_tokens: int) -> str:
    """Why a step of so many tokens must not be captured, where warp decode takes ``decode_tokens``; else empty."""
    if num_tokens <= decode_tokens:
        return ""
    if not decode_tokens:
        return "warp decode is off, and other paths wait for the host"
    return f"{num_tokens} tokens are more than the {decode_tokens} of warp decode"
