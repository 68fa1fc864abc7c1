"""One decode step over memory that stays where it is: run as it stands, or replayed from a CUDA graph.

A step of a whole model launches so many small kernels that the host is slower than the GPU. Captured once, all of them
are one launch. What is captured is the very function that runs elsewhere: it reads the tokens from a buffer, keeps
positions and cache on the device, changes them in place and never asks the host. Hence both ways make the same tokens.

The first steps are real ones: they run on a stream of their own and are what torch calls the warm-up of a capture
(kernels are compiled and memory is allocated). The next call captures the step, which computes nothing, and replays it.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from comet.graphs import capture, device_obstacle, first_line, release_random_numbers, run_beside

logger = logging.getLogger(__name__)

GraphMode = Literal["auto", "on", "off"]
WARM_STEPS = 1
TOO_FEW = "no step came after the warm-up"


class DecodeStep:
    """Appends one token to every sequence of a batch.

    Args:
        run: Reads ``ids``, appends them and returns the ``(B, V)`` logits of the next tokens. All that it changes, it
            changes in place and on the device.
        ids: ``(B,)`` int64, the buffer ``run`` reads.
        cuda_graph: ``auto`` replays a graph where that works, ``on`` insists on it, ``off`` never does.
        obstacle: Why ``run`` must not be captured; empty if nothing speaks against it.

    Raises:
        ValueError: If a graph is insisted on and there is an obstacle, or no GPU.
    """

    def __init__(
        self, run: Callable[[], Tensor], ids: Tensor, *, cuda_graph: GraphMode = "auto", obstacle: str = ""
    ) -> None:
        self._run = run
        self._ids = ids
        self._insists = cuda_graph == "on"
        self._warm_steps = 0
        self._replay: Callable[[], None] | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._logits = ids
        self._reason = "cuda_graph='off'" if cuda_graph == "off" else ""
        obstacle = obstacle or device_obstacle(ids.device)
        if obstacle and not self._reason:
            self._give_up(obstacle)
        self._side = torch.cuda.Stream(ids.device) if ids.is_cuda and not self._reason else None

    @property
    def why_eager(self) -> str:
        """Why the last step was launched kernel by kernel; empty if it was replayed from a graph."""
        return "" if self._replay is not None else self._reason or TOO_FEW

    def __call__(self, ids: Tensor) -> Tensor:
        """Take a step with ``(B,)`` int64 tokens; returns ``(B, V)`` logits that no later step overwrites.

        Raises:
            ValueError: If a graph is insisted on and the step cannot be captured.
        """
        self._ids.copy_(ids)
        if self._replay is None and not self._reason and self._warm_steps >= WARM_STEPS:
            self._capture()
        if self._replay is not None:
            self._replay()
            return self._logits.clone()
        self._warm_steps += 1
        return self._run() if self._side is None else run_beside(self._run, self._side)

    def _capture(self) -> None:
        try:
            self._replay, self._logits = capture(self._run, self._side, self._graphs)
        except RuntimeError as error:  # what torch raises for a call that a capture does not permit
            release_random_numbers(self._ids.device)
            self._give_up(f"the step cannot be captured: {first_line(error)}", error)

    def _give_up(self, reason: str, error: RuntimeError | None = None) -> None:
        if self._insists:
            raise ValueError(f"cuda_graph='on' must be 'auto' or 'off' here: {reason}") from error
        self._reason = reason
        level = logging.WARNING if self._ids.is_cuda else logging.INFO
        logger.log(level, "decode steps are launched kernel by kernel, without a CUDA graph: %s", reason)


def batch_obstacle(num_sequences: int, decode_tokens: int) -> str:
    """Why a step of so many sequences must not be captured, where warp decode takes ``decode_tokens``; else empty."""
    if num_sequences <= decode_tokens:
        return ""
    return f"{num_sequences} sequences are more than the {decode_tokens} of warp decode"
