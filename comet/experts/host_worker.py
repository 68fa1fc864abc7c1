"""The processes that compute missing experts on the host's cores: they poll a mailbox, and never touch a GPU.

The first one reads a ``WorkerPlan`` as JSON from its input, maps the store's file, which it was given open, and forks
the others, a process a core. They serve each request (``comet.kernels.expert_host``) together until they are told to
end or the parent is gone. Of every expert each has some rows: of w1, which make its part of gate and up, and, once all
parts are there, of w2, which make its part of the answer. So what one reads is its own, from memory that no other core
has to fetch, and they wait for each other twice in a request: threads of one process, which meet in every product, read
half as fast. Hidden units each computes for itself, from gate and up: that is less than a product more would cost.
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
from itertools import chain
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
POLLS = 200  # of other processes' progress, between looks for those that are gone
LINE_WORDS, LINE_COLUMNS = 32, 16  # so that no two processes write to one line of memory, 16 float32


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

    def words(self, memory: mmap.mmap) -> memoryview:
        """Integers, of 4 or 8 bytes, which Python reads and writes sooner than torch does."""
        size = getattr(torch, self.dtype).itemsize
        end = self.offset + size * torch.Size(self.shape).numel()
        return memoryview(memory)[self.offset : end].cast("q" if size == 8 else "i")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What the processes are to know.

    Args:
        file: Number of the open file.
        parent: Process that they end with.
        num_cores: N, processes that compute.
        num_experts: E, of all ranks.
        layers: w1 ``(e, 2F, D)`` and w2 ``(e, D, F)`` of each, and the scales of both where they are quantised.
        first_expert: Number of the first of these e.
        mail: Words, tokens, weights, answer and counts of the mailbox.
        wide: ``(max_tokens * K, 2F)`` float32: gate and up of a request, rows of tokens by expert.
        progress: ``(N * 32,)`` int32: how far each process is, in a line of its own (``Worker``).
    """

    file: int
    parent: int
    num_cores: int
    num_experts: int
    first_expert: int
    layers: Sequence[Sequence[Place]]
    mail: Sequence[Place]
    wide: Place
    progress: Place

    def to_json(self) -> str:
        """What ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        """The plan again."""
        fields: dict[str, Any] = json.loads(text)
        fields["layers"] = [tuple(Place(**place) for place in layer) for layer in fields["layers"]]
        fields["mail"] = [Place(**place) for place in fields["mail"]]
        fields |= {name: Place(**fields[name]) for name in ("wide", "progress")}
        return cls(**fields)


class Worker:
    """Answers requests, one after the other, with the other processes.

    Its word of ``progress`` is 2 n once its part of gate and up of request n is there, and 2 n + 1 once its answer is.

    Args:
        plan: Of the processes.
        member: Which of them this is; 0, the first one, tells the parent.
        first: Number of the first one's process.
    """

    def __init__(self, plan: WorkerPlan, member: int, first: int) -> None:
        self.plan, self.member = plan, member
        memory = mmap.mmap(plan.file, os.fstat(plan.file).st_size, flags=mmap.MAP_SHARED)
        numbers, self.tokens, self.weights, self.answer = (place.view(memory) for place in plan.mail[:4])
        self.numbers, self.wide = numbers[EXPERTS.value :], plan.wide.view(memory)
        self.words, self.counts = (place.words(memory) for place in (plan.mail[0], plan.mail[4]))
        self._progress = plan.progress.words(memory)
        self._fence, self._parent = threading.Lock(), first if member else plan.parent
        self._rows, self._columns = (
            share_of(part.shape[1], member, plan.num_cores) for part in (self.wide, self.answer)
        )
        self._codes = CodeProducts(1)
        self.layers = [self._by_expert(*(part.view(memory) for part in parts)) for parts in plan.layers]

    def serve(self) -> None:
        """Until the parent says so, or is gone."""
        words, served, busy_ns = self.words, self.words[REQUEST.value], time.monotonic_ns()
        self._tell(2 * served + 1)
        if not self.member:
            self._wait_for_all(2 * served + 1)
            words[READY.value] = 1
        while not words[STOP.value]:
            wanted = words[REQUEST.value]
            if wanted != served:
                self._order()
                self.compute(wanted)
                if not self.member:
                    self._wait_for_all(2 * wanted + 1)
                    words[ANSWERED.value] = wanted
                served, busy_ns = wanted, time.monotonic_ns()
            elif time.monotonic_ns() - busy_ns > PATIENCE_NS:
                self._end_if_alone()
                time.sleep(PAUSE_S)

    def compute(self, number: int) -> None:
        """This process's part of the request that the mailbox holds."""
        started, words = time.monotonic_ns(), self.words
        layer, num_experts, num_tokens, top_k = (
            words[place.value] for place in (OF_LAYER, NUM_EXPERTS, NUM_TOKENS, TOP_K)
        )
        first, held, wanted = self.plan.num_experts, self.layers[layer], self.numbers[:num_experts]
        ids = self.numbers[first : first + num_tokens * top_k].view(num_tokens, top_k)
        weights = self.weights[: num_tokens * top_k].view(num_tokens, top_k)
        weights = weights.where(ids == wanted[:, None, None], 0.0).sum(2)
        experts = [held[expert - self.plan.first_expert] for expert in wanted.tolist()]
        rows = rows_of(self.tokens[:num_tokens], weights)
        counts = [len(each) for each in rows]
        products = [
            product(each, w1, scales[:1], self._rows, self._codes)
            for each, (w1, _, *scales) in zip(rows, experts, strict=True)
        ]
        wide = self.wide[: sum(counts)]
        wide[:, self._rows] = torch.cat(products)
        self._tell(2 * number)
        self._wait_for_all(2 * number)
        gate, up = wide.chunk(2, dim=1)
        hidden = (silu(gate) * up).to(self.tokens.dtype).split(counts)
        products = [
            product(each, w2, scales[1:], self._columns, self._codes)
            for each, (_, w2, *scales) in zip(hidden, experts, strict=True)
        ]
        weighted_sum(torch.cat(products).float(), weights, self.answer[:num_tokens, self._columns])
        if not self.member:
            self.counts[0] += num_experts
            self.counts[1] += time.monotonic_ns() - started
        self._tell(2 * number + 1)

    def _by_expert(self, w1: Tensor, w2: Tensor, *scales: Tensor) -> list[tuple[Tensor, ...]]:
        """w1 and w2, this process's rows of them where they are not codes, and the scales of each expert."""
        own = w1[:, self._rows], w2[:, self._columns]
        for part in chain.from_iterable(own):
            touch(part)
        parts = (w1, w2, *scales) if scales else own
        return list(zip(*(part.unbind() for part in parts), strict=True))

    def _tell(self, progress: int) -> None:
        self._order()
        self._progress[LINE_WORDS * self.member] = progress

    def _wait_for_all(self, progress: int) -> None:
        """Until all processes are as far as this one, or in front of it by half a request."""
        polls = 0
        while not set(self._progress[::LINE_WORDS].tolist()) <= {progress, progress | 1}:
            polls += 1
            if polls % POLLS == 0:
                self._end_if_alone()
                os.sched_yield()
        self._order()

    def _end_if_alone(self) -> None:
        """End where the parent is gone, or another of these processes."""
        if os.getppid() != self._parent:
            sys.exit()
        if self.member or self.plan.num_cores == 1:
            return
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended and not self.words[STOP.value]:
            sys.exit(f"one of {self.plan.num_cores} processes ended with status {os.waitstatus_to_exitcode(status)}")

    def _order(self) -> None:
        """Keep what is read or written before in front of what comes behind, on any processor."""
        for _ in range(2):
            with self._fence:
                pass


def share_of(size: int, member: int, num_members: int) -> slice:
    """One of N even parts of columns, by whole lines of memory.

    Example: of 48 columns 2 processes have ``[0, 16)`` and ``[16, 48)``, and of 4 the first has none.
    """
    lines = -(-size // LINE_COLUMNS)
    first, end = (min(lines * each // num_members * LINE_COLUMNS, size) for each in (member, member + 1))
    return slice(first, end)


def touch(part: Tensor) -> None:
    """Let this process map the pages of ``(R, C)``; else the first read of an expert takes twenty times as long."""
    part.flatten().view(torch.uint8)[:: mmap.PAGESIZE].sum()


def rows_of(tokens: Tensor, weights: Tensor) -> list[Tensor]:
    """The tokens ``(R, D)`` of each expert, of ``(T, D)`` and ``(n, T)`` weights, 0 where a token did not choose it."""
    return [tokens] * len(weights) if len(tokens) == 1 else [tokens[weight.nonzero()[:, 0]] for weight in weights]


def weighted_sum(outputs: Tensor, weights: Tensor, answer: Tensor) -> None:
    """Write the sum of some experts' outputs, each times its weight.

    Example: outputs ``[[32], [8]]``, of one token, and weights ``[[0.5], [0.25]]``: 18.

    Args:
        outputs: ``(R, C)`` float32, the rows of each expert behind those of the one before.
        weights: ``(n, T)`` float32, of the n experts; 0 where a token has no row.
        answer: ``(T, C)`` float32.
    """
    if len(answer) == 1:  # a fourth of the time, but where there are more tokens, a NaN would get into all of them
        torch.mm(weights.T, outputs, out=answer)
    else:
        expert, token = weights.nonzero(as_tuple=True)
        answer.zero_().index_add_(0, token, outputs * weights[expert, token, None])


def product(tokens: Tensor, weight: Tensor, scales: Sequence[Tensor], rows: slice, codes: CodeProducts) -> Tensor:
    """``tokens @ weight.T`` in the type of both; of codes with scales, of the ``rows`` of weight, in float32."""
    return codes(tokens, weight, scales[0], rows) if scales else linear(tokens, weight)


def main() -> None:
    """Serve by the plan on standard input, a process a core."""
    plan = WorkerPlan.from_json(sys.stdin.read())
    torch.set_num_threads(1)
    gc.disable()  # nothing here makes cycles, and a collection would stop a step of the GPU
    first = os.getpid()
    member = next((each for each in range(1, plan.num_cores) if not os.fork()), 0)
    with torch.inference_mode():
        Worker(plan, member, first).serve()


if __name__ == "__main__":
    main()
