"""The processes that compute missing experts on the host's cores: they poll a mailbox, and never touch a GPU.

The first one reads a ``WorkerPlan`` as JSON from its input, maps the store's file, which it was given open, and forks
the others, a process a core. They serve each request (``comet.kernels.expert_host``) together until they are told to
end or the parent is gone. Of every expert each has some rows: of w1, which make its part of the hidden units, and, once
all parts are there, of w2, which make its part of the answer. So what one reads is its own, from memory that no other
core has to fetch, and they wait for each other twice in a request: threads of one process, which meet in every
product, read half as fast.
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
POLLS = 200  # of other processes' progress, between looks for those that are gone
LINE_WORDS, LINE_COLUMNS = 32, 32  # so that no two processes write to one line of memory


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
    """What the processes are to know.

    Args:
        file: Number of the open file.
        parent: Process that they end with.
        num_cores: N, processes that compute.
        num_experts: E, of all ranks.
        layers: w1 ``(e, 2F, D)`` and w2 ``(e, D, F)`` of each, and the scales of both where they are quantised.
        first_expert: Number of the first of these e.
        mail: Words, tokens, weights, answer and counts of the mailbox.
        hidden: ``(m, T, F)`` hidden units of the experts of a request, in the tokens' type.
        progress: ``(N * 32,)`` int32: how far each process is, in a line of its own (``Worker``).
    """

    file: int
    parent: int
    num_cores: int
    num_experts: int
    first_expert: int
    layers: Sequence[Sequence[Place]]
    mail: Sequence[Place]
    hidden: Place
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
        fields |= {name: Place(**fields[name]) for name in ("hidden", "progress")}
        return cls(**fields)


class Worker:
    """Answers requests, one after the other, with the other processes.

    Its word of ``progress`` is 2 n once its hidden units of request n are there, and 2 n + 1 once its answer is.

    Args:
        plan: Of the processes.
        member: Which of them this is; 0, the first one, tells the parent.
        first: Number of the first one's process.
    """

    def __init__(self, plan: WorkerPlan, member: int, first: int) -> None:
        self.plan, self.member = plan, member
        memory = mmap.mmap(plan.file, os.fstat(plan.file).st_size, flags=mmap.MAP_SHARED)
        self.layers = [[part.view(memory) for part in parts] for parts in plan.layers]
        self._codes = CodeProducts(1)
        _, self.tokens, self.weights, self.answer, self.counts = (place.view(memory) for place in plan.mail)
        self.hidden = plan.hidden.view(memory)
        self.words, self._progress = (words_of(memory, place) for place in (plan.mail[0], plan.progress))
        self._fence, self._parent = threading.Lock(), first if member else plan.parent
        self._units = share_of(self.hidden.shape[2], member, plan.num_cores)
        self._columns = share_of(self.answer.shape[1], member, plan.num_cores)
        for w1, w2, *_ in self.layers:
            for rows in self._rows_of(w1):
                touch(w1[:, rows])
            touch(w2[:, self._columns])

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
        experts = torch.tensor(words[EXPERTS.value : EXPERTS.value + num_experts].tolist())
        first = EXPERTS.value + self.plan.num_experts
        ids = torch.tensor(words[first : first + num_tokens * top_k].tolist()).view(num_tokens, top_k)
        weights = self.weights[: num_tokens * top_k].view(num_tokens, top_k)
        shares = weights.where(ids == experts[:, None, None], 0.0).sum(2, keepdim=True)  # (m, T, 1)
        rows: list[Any] = [slice(None) if num_tokens == 1 else share[:, 0].nonzero()[:, 0] for share in shares]
        numbers = (experts - self.plan.first_expert).tolist()
        for place, (number_held, chose) in enumerate(zip(numbers, rows, strict=True)):
            parts, tokens = [part[number_held] for part in self.layers[layer]], self.tokens[:num_tokens][chose]
            hidden = hidden_units(tokens, *parts[::2], rows=self._rows_of(parts[0]), codes=self._codes)
            self.hidden[place, : len(tokens), self._units] = hidden
        self._tell(2 * number)
        self._wait_for_all(2 * number)
        answer = self.answer[:num_tokens, self._columns].zero_()
        for place, (number_held, chose) in enumerate(zip(numbers, rows, strict=True)):
            parts, share = [part[number_held] for part in self.layers[layer]], shares[place][chose]
            hidden = self.hidden[place, : len(share)]
            answer[chose] += share * product(hidden, parts[1], parts[3:], self._columns, self._codes)
        if not self.member:
            self.counts += torch.tensor([num_experts, time.monotonic_ns() - started])
        self._tell(2 * number + 1)

    def _rows_of(self, w1: Tensor) -> tuple[slice, slice]:
        """Rows of gate and of up that make this process's hidden units."""
        units, half = self._units, w1.shape[-2] // 2
        return units, slice(half + units.start, half + units.stop)

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


def words_of(memory: mmap.mmap, place: Place) -> memoryview:
    """The int32 words of a place."""
    return memoryview(memory)[place.offset : place.offset + 4 * torch.Size(place.shape).numel()].cast("i")


def share_of(size: int, member: int, num_members: int) -> slice:
    """One of N even parts of columns, by whole lines of memory.

    Example: of 96 columns 2 processes have ``[0, 32)`` and ``[32, 96)``, and of 4 the first has none.
    """
    lines = -(-size // LINE_COLUMNS)
    first, end = (min(lines * each // num_members * LINE_COLUMNS, size) for each in (member, member + 1))
    return slice(first, end)


def touch(part: Tensor) -> None:
    """Let this process map the pages of ``(e, R, C)``; else the first read of an expert takes twenty times as long."""
    for rows in part:
        rows.flatten().view(torch.uint8)[:: mmap.PAGESIZE].sum()


def hidden_units(tokens: Tensor, w1: Tensor, *scales: Tensor, rows: tuple[slice, slice], codes: CodeProducts) -> Tensor:
    """``(T, U)``: silu(gate) times up, of the U rows of each.

    Example (T = 1; were D = F = 1 legal): token ``[[1]]`` and w1 ``[[32], [2]]``, rows 0 and 1: silu(32) is 32 in
    float32, so ``[[64]]``.

    Args:
        tokens: ``(T, D)``.
        w1: ``(2F, D)``, gate rows first.
        scales: Of w1, where it holds codes.
        rows: Of gate, and of up.
        codes: Multiplies with these.
    """
    gate, up = (product(tokens, w1, scales, of_one, codes) for of_one in rows)
    return (silu(gate) * up).to(tokens.dtype)


def product(tokens: Tensor, weight: Tensor, scales: Sequence[Tensor], rows: slice, codes: CodeProducts) -> Tensor:
    """``tokens @ weight[rows].T`` in float32, of a weight in the tokens' type, or of codes that have scales."""
    return codes(tokens, weight, *scales, rows) if scales else linear(tokens, weight[rows]).float()


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
