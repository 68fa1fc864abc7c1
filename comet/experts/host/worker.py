"""The process that computes missing experts on the host's cores: it polls a mailbox, and never touches a GPU.

It reads a ``WorkerPlan`` from its input, maps the store's file, which it was given open, and serves requests
(``comet.kernels.experts.host``) until it is told to end or its parent is gone.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from comet.comm.signals import fence
from comet.experts.host.codes import CodeProducts
from comet.kernels.experts.mailbox import (
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
from comet.kernels.runtime.activation import SWIGLU, Activation

PATIENCE_NS = 20_000_000  # of polling without a pause, behind the last request
PAUSE_S = 100e-6


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the file."""

    offset: int  # in bytes
    shape: Sequence[int]  # of the tensor
    dtype: torch.dtype

    def view(self, memory: mmap.mmap) -> Tensor:
        """The tensor in a mapping of the whole file."""
        count = torch.Size(self.shape).numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(*self.shape)

    def words(self, memory: mmap.mmap) -> memoryview:
        """Integers, of 4 or 8 bytes, which Python reads and writes sooner than torch does."""
        size = self.dtype.itemsize
        end = self.offset + size * torch.Size(self.shape).numel()
        return memoryview(memory)[self.offset : end].cast("q" if size == 8 else "i")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What the process is to know."""

    file: int  # number of the open file
    parent: int  # process that it ends with
    num_cores: int  # threads that compute
    num_experts: int  # E, of all ranks
    first_expert: int  # number of the first of these e
    layers: Sequence[Mapping[str, Place]]  # of each HeldExperts.stored_parts
    mail: Sequence[Place]  # words, tokens, weights, answer and counts of the mailbox
    activation: Activation = SWIGLU  # of the experts


class Worker:
    """Answers requests, one after the other."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        # All pages are mapped now: a first read of an expert would take twenty times as long, in page faults.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(plan.file, os.fstat(plan.file).st_size, flags=flags)
        stored = ({name: part.view(memory).unbind() for name, part in parts.items()} for parts in plan.layers)
        self.layers = [  # the parts of each expert by name
            [dict(zip(parts, expert, strict=True)) for expert in zip(*parts.values(), strict=True)] for parts in stored
        ]
        self._codes = CodeProducts(plan.num_cores)
        numbers, self.tokens, self.weights, self.answer = (place.view(memory) for place in plan.mail[:4])
        self.numbers = numbers[EXPERTS.value :]
        self.words, self.counts = (place.words(memory) for place in (plan.mail[0], plan.mail[4]))

    def serve(self) -> None:
        """Until the parent says so, or is gone."""
        words, served, busy_ns = self.words, self.words[REQUEST.value], time.monotonic_ns()
        words[READY.value] = 1
        while not words[STOP.value]:
            wanted = words[REQUEST.value]
            if wanted != served:
                fence()
                self.compute()
                fence()
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
        first, held = self.plan.num_experts, self.layers[layer]
        wanted = self.numbers[:num_experts]
        ids = self.numbers[first : first + num_tokens * top_k].view(num_tokens, top_k)
        weights = self.weights[: num_tokens * top_k].view(num_tokens, top_k)
        weights = weights.where(ids == wanted[:, None, None], 0.0).sum(2)
        experts = [held[expert - self.plan.first_expert] for expert in wanted.tolist()]
        answer, tokens = self.answer[:num_tokens], self.tokens[:num_tokens]
        sum_experts(answer, tokens, weights, experts, self._codes, self.plan.activation)
        self.counts[0] += num_experts
        self.counts[1] += time.monotonic_ns() - started


def sum_experts(
    answer: Tensor,
    tokens: Tensor,
    weights: Tensor,
    experts: Sequence[Mapping[str, Tensor]],
    codes: CodeProducts,
    activation: Activation = SWIGLU,
) -> None:
    """Write the sum of some experts' outputs, each times its weight.

    An expert of its own takes the two products and nothing else; the rest is done for all of them at once.

    Example (T = 1; were D = F = 1 legal): token ``[[1]]``, weights ``[[0.5]]``, an expert of w1 ``[[32], [2]]`` and w2
    ``[[0.5]]``: silu(32) is 32 in float32, so hidden is 64, the output 32, and the answer 16.

    Args:
        weights: ``(n, T)`` float32; 0 where a token did not choose the expert.
        experts: Of each of these n, w1 ``(2F, D)``, gate rows first, w2 ``(D, F)``, ``w1_scales`` and ``w2_scales``
            where they are codes, and biases b1 ``(2F,)`` and b2 ``(D,)`` where there are some.
    """
    single = len(tokens) == 1
    rows = [tokens] * len(experts) if single else [tokens[weight.nonzero()[:, 0]] for weight in weights]
    gate, up = products(rows, experts, "1", codes).chunk(2, dim=1)
    hidden = activation.forward(gate, up).to(tokens.dtype).split([len(each) for each in rows])
    outputs = products(hidden, experts, "2", codes)
    if single:  # a fourth of the time, but where there are more tokens, a NaN would get into all of them
        torch.mm(weights.T, outputs, out=answer)
    else:
        expert, token = weights.nonzero(as_tuple=True)
        answer.zero_().index_add_(0, token, outputs * weights[expert, token, None])


def products(
    rows: Sequence[Tensor], experts: Sequence[Mapping[str, Tensor]], which: str, codes: CodeProducts
) -> Tensor:
    """``(R, C)`` float32: rows of each expert times its w1 or w2 (``which``), and with its bias if it has one.

    A weight in the tokens' type multiplies in that, codes that have scales in float32.
    """
    weight, scales, bias = f"w{which}", f"w{which}_scales", f"b{which}"
    found = torch.cat(
        [
            codes(each, expert[weight], expert[scales]) if scales in expert else linear(each, expert[weight])
            for each, expert in zip(rows, experts, strict=True)
        ]
    ).float()
    if bias not in experts[0]:
        return found
    biases = torch.stack([expert[bias] for expert in experts]).float()
    return found + biases.repeat_interleave(torch.tensor([len(each) for each in rows]), dim=0)


def main() -> None:
    """Serve by the plan on standard input."""
    plan: WorkerPlan = pickle.load(sys.stdin.buffer)  # from the process that started this one
    torch.set_num_threads(plan.num_cores)
    gc.disable()  # nothing here makes cycles, and a collection would stop a step of the GPU
    with torch.inference_mode():
        Worker(plan).serve()


if __name__ == "__main__":
    main()
