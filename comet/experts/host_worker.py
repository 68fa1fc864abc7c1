"""The process that computes missing experts on the host's cores: it polls a mailbox, and never touches a GPU.

It reads a ``WorkerPlan`` as JSON from its input, maps the store's file, which it was given open, and serves requests
(``comet.kernels.expert_host``) until it is told to end or its parent is gone.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from comet.experts.host_codes import CodeProducts
from comet.kernels.expert_mailbox import (
    ANSWERED,
    EXPERTS,
    NUM_EXPERTS,
    NUM_TOKENS,
    OF_LAYER,
    READY,
    REQUEST,
    STOP,
    TOP_K,
)

PATIENCE_NS = 20_000_000  # of polling without a pause, behind the last request
PAUSE_S = 100e-6


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the file.

    Args:
        offset: In bytes.
        shape: Of the tensor.
        dtype: Its name in torch.
    """

    offset: int
    shape: Sequence[int]
    dtype: str

    def view(self, memory: mmap.mmap) -> Tensor:
        """The tensor in a mapping of the whole file."""
        count = torch.Size(self.shape).numel()
        flat = torch.frombuffer(memory, dtype=getattr(torch, self.dtype), count=count, offset=self.offset)
        return flat.view(*self.shape)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What the process is to know.

    Args:
        file: Number of the open file.
        parent: Process that it ends with.
        num_cores: Threads that compute.
        num_experts: E, of all ranks.
        layers: w1 ``(e, 2F, D)`` and w2 ``(e, D, F)`` of each, and the scales of both where they are quantised.
        first_expert: Number of the first of these e.
        mail: Words, tokens, weights, answer and counts of the mailbox.
    """

    file: int
    parent: int
    num_cores: int
    num_experts: int
    first_expert: int
    layers: Sequence[Sequence[Place]]
    mail: Sequence[Place]

    def to_json(self) -> str:
        """What ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        """The plan again."""
        fields: dict[str, Any] = json.loads(text)
        fields["layers"] = [tuple(Place(**place) for place in layer) for layer in fields["layers"]]
        fields["mail"] = [Place(**place) for place in fields["mail"]]
        return cls(**fields)


class Worker:
    """Answers requests, one after the other.

    Args:
        plan: Of the process.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        # All pages are mapped now: a first read of an expert would take twenty times as long, in page faults.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(plan.file, os.fstat(plan.file).st_size, flags=flags)
        self.layers = [[part.view(memory) for part in parts] for parts in plan.layers]
        self._codes = CodeProducts(plan.num_cores)
        _, self.tokens, self.weights, self.answer, self.counts = (place.view(memory) for place in plan.mail)
        start, length = plan.mail[0].offset, 4 * torch.Size(plan.mail[0].shape).numel()
        self.words = memoryview(memory)[start : start + length].cast("i")
        self._fence = threading.Lock()

    def serve(self) -> None:
        """Until the parent says so, or is gone."""
        words, served, busy_ns = self.words, self.words[REQUEST.value], time.monotonic_ns()
        words[READY.value] = 1
        while not words[STOP.value]:
            wanted = words[REQUEST.value]
            if wanted != served:
                self._order()
                self.compute()
                self._order()
                words[ANSWERED.value] = served = wanted
                busy_ns = time.monotonic_ns()
            elif time.monotonic_ns() - busy_ns > PATIENCE_NS:
                if os.getppid() != self.plan.parent:
                    return
                time.sleep(PAUSE_S)

    def compute(self) -> None:
        """The request that the mailbox holds."""
        started, words = time.monotonic_ns(), self.words
        layer, num_experts, num_tokens, top_k = (
            words[place.value] for place in (OF_LAYER, NUM_EXPERTS, NUM_TOKENS, TOP_K)
        )
        experts = words[EXPERTS.value : EXPERTS.value + num_experts].tolist()
        first = EXPERTS.value + self.plan.num_experts
        ids = torch.tensor(words[first : first + num_tokens * top_k].tolist()).view(num_tokens, top_k)
        weights = self.weights[: num_tokens * top_k].view(num_tokens, top_k)
        answer = self.answer[:num_tokens].zero_()
        for expert in experts:
            parts = [part[expert - self.plan.first_expert] for part in self.layers[layer]]
            add_expert(answer, self.tokens[:num_tokens], weights.where(ids == expert, 0.0), *parts, codes=self._codes)
        self.counts += torch.tensor([num_experts, time.monotonic_ns() - started])

    def _order(self) -> None:
        """Keep what is read or written before in front of what comes behind, on any processor."""
        for _ in range(2):
            with self._fence:
                pass


def add_expert(
    answer: Tensor, tokens: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *scales: Tensor, codes: CodeProducts
) -> None:
    """Add one expert's outputs, each times its weight.

    Example (T = K = 1; were D = F = 1 legal): token ``[[1]]``, weights ``[[0.5]]``, w1 ``[[32], [2]]`` and w2
    ``[[0.5]]``: silu(32) is 32 in float32, so hidden is 64, the output 32, and 16 is added.

    Args:
        answer: ``(T, D)`` float32.
        tokens: ``(T, D)``.
        weights: ``(T, K)`` float32; 0 where a token did not choose the expert.
        w1: ``(2F, D)``, gate rows first.
        w2: ``(D, F)``.
        scales: Of w1 and of w2, where they are codes.
        codes: Multiplies with these.
    """
    weight = weights.sum(1, keepdim=True)
    rows: Any = slice(None) if len(tokens) == 1 else weight[:, 0].nonzero()[:, 0]
    gate, up = product(tokens[rows], w1, scales[:1], codes).chunk(2, dim=-1)
    answer[rows] += weight[rows] * product((silu(gate) * up).to(tokens.dtype), w2, scales[1:], codes)


def product(tokens: Tensor, weight: Tensor, scales: Sequence[Tensor], codes: CodeProducts) -> Tensor:
    """``tokens @ weight.T`` in float32, of a weight in the tokens' type, or of codes that have scales."""
    return codes(tokens, weight, *scales) if scales else linear(tokens, weight).float()


def main() -> None:
    """Serve by the plan on standard input."""
    plan = WorkerPlan.from_json(sys.stdin.read())
    torch.set_num_threads(plan.num_cores)
    gc.disable()  # nothing here makes cycles, and a collection would stop a step of the GPU
    with torch.inference_mode():
        Worker(plan).serve()


if __name__ == "__main__":
    main()
