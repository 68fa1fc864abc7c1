"""The process that computes missing experts on the host's cores: it polls a mailbox, and never touches a GPU.

It reads a ``WorkerPlan`` from its input, maps the store's file, which it was given open, and serves requests
(``comet.kernels.experts.host``) until its parent ends it or is gone.

Codes of quantised experts become float32 numbers, some rows at a time. torch converts eight-bit codes one by one, at
0.3 GB/s a core. But the bits of an e4m3 or e2m1 code, shifted to where float16 has its own, are the same number times a
power of two, subnormal ones included, so a shift, a mask and torch's conversion of float16, all of whole vectors, do
it. The products are those of the codes' exact numbers in float32, as a decode step's are.
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
from comet.config import require
from comet.kernels.experts.mailbox import (
    ANSWERED,
    EXPERTS,
    NUM_EXPERTS,
    NUM_TOKENS,
    OF_LAYER,
    READY,
    REQUEST,
    SERVED,
    STOP,
    TOP_K,
)
from comet.kernels.experts.tables import ExpertParts
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.quantization.formats import CODES, FLOAT32_FRACTION_BITS, FP8_BLOCK

PATIENCE_NS = 20_000_000  # After each request the process polls so long without a pause.
PAUSE_S = 100e-6


NUMBERS_PER_CORE = 2**20  # that are converted at once: 4 MB, which a core's cache holds or nearly does
# Of e4m3 and e2m1: how far up the code's bits go, those of them that stay, and the number's multiple of what they say.
E4M3_BITS, E2M1_BITS = (7, 0xBF80 - 2**16, 2.0**8), (5, 0x8E00 - 2**16, 2.0**14)
E4M3_NAN = 0x7F


class CodeProducts:
    """Multiplies with matrices of codes, in memory that each product uses again."""

    def __init__(self, num_cores: int) -> None:
        self._halves = torch.empty(num_cores * NUMBERS_PER_CORE, dtype=torch.int16)
        self._numbers = torch.empty(num_cores * NUMBERS_PER_CORE)

    def __call__(self, tokens: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
        """``(T, N)`` float32: ``tokens (T, K)`` times a matrix of codes, transposed.

        Args:
            elements: ``(N, K)`` float8_e4m3fn, or ``(N, K / 2)`` uint8 of MXFP4.
            scales: ``(N, K / 32)`` uint8 or ``(ceil(N / 128), ceil(K / 128))`` float32, none of them NaN.
        """
        per_byte, (num_rows, num_bytes) = 2 if elements.dtype == CODES else 1, elements.shape
        multiple = (E2M1_BITS if per_byte == 2 else E4M3_BITS)[2]
        # The low halves of all bytes come first, then the high ones.
        inputs = tokens.float().unflatten(1, (num_bytes, per_byte)).transpose(1, 2).flatten(1)
        output = inputs.new_empty(len(tokens), num_rows)
        most = len(self._numbers) // inputs.shape[1]
        require(most > 0, f"contraction={inputs.shape[1]} must be at most {len(self._numbers)} for the host's cores")
        for first in range(0, num_rows, most):
            rows = slice(first, min(first + most, num_rows))
            numbers = self.numbers(elements[rows], scales_of(scales, rows), per_byte)
            output[:, rows] = linear(inputs, numbers.flatten(1))
        return output.mul_(multiple)

    def numbers(self, elements: Tensor, scales: Tensor, per_byte: int) -> Tensor:
        """``(R, per_byte, C)`` float32, of memory of this: numbers of codes ``(R, C)`` over the multiple of their type.

        Example: the MXFP4 byte 0xF1 is 0.5, its low half, and -6, its high one; with the scale 2 they are 1 and -12.
        """
        shape = len(elements), per_byte, elements.shape[1]
        count = torch.Size(shape).numel()
        halves, numbers = self._halves[:count].view(shape), self._numbers[:count].view(shape)
        codes = elements.view(torch.int8)  # the sign of which goes on into the upper bits
        shift, mask, _ = E2M1_BITS if per_byte == 2 else E4M3_BITS
        halves[:, -1] = codes
        if per_byte == 2:
            halves[:, 0] = codes << 4
        numbers.copy_(halves.bitwise_left_shift_(shift).bitwise_and_(mask).view(torch.float16))
        width = FP8_BLOCK if scales.dtype == torch.float32 else shape[2] // scales.shape[1]
        whole, scales = shape[2] // width, numbers_of(scales)[:, None, :, None]
        numbers[..., : whole * width].unflatten(2, (whole, width)).mul_(scales[:, :, :whole])
        if shape[2] % width:
            numbers[..., whole * width :].mul_(scales[:, :, whole])
        return numbers


def scales_of(scales: Tensor, rows: slice) -> Tensor:
    """Return the scales of some rows of a matrix, one row each; in block FP8 128 rows of the matrix share one."""
    if scales.dtype == torch.float32:
        return scales[torch.arange(rows.start, rows.stop) // FP8_BLOCK]
    return scales[rows]


def numbers_of(scales: Tensor) -> Tensor:
    """Scales as float32; of e8m0 2^-127, next to which every number vanishes, is 0."""
    if scales.dtype == torch.float32:
        return scales
    return (scales.int() << FLOAT32_FRACTION_BITS).view(torch.float32)


def refuse_nan(layers: Sequence[ExpertParts]) -> None:
    """Raise ``ValueError`` if experts in block FP8, which others may have quantised, have a NaN, which is not kept."""
    for number, layer in enumerate(layers):
        if layer.w1_scales is not None and layer.w1_scales.dtype == torch.float32:
            for name, stored in (("w1", layer.w1), ("w2", layer.w2)):
                for expert, codes in enumerate(stored.view(torch.uint8)):
                    require(
                        not bool((codes & E4M3_NAN == E4M3_NAN).any()),
                        f"{name} of expert {expert} of layer {number} has a NaN, and the host's cores compute numbers "
                        "only: set host_cores=off",
                    )


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor in the file."""

    offset: int  # in bytes
    shape: Sequence[int]  # of the tensor
    dtype: torch.dtype

    def view(self, memory: mmap.mmap) -> Tensor:
        count = torch.Size(self.shape).numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(*self.shape)

    def words(self, memory: mmap.mmap) -> memoryview:
        """Integers, of 4 or 8 bytes, which Python reads and writes sooner than torch does."""
        size = self.dtype.itemsize
        end = self.offset + size * torch.Size(self.shape).numel()
        return memoryview(memory)[self.offset : end].cast("q" if size == 8 else "i")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything that the process has to know."""

    file: int  # number of the open file
    parent: int  # process that it ends with
    num_cores: int  # threads that compute
    num_experts: int  # E, of all ranks
    first_expert: int  # number of the first of these e
    layers: Sequence[Mapping[str, FilePart]]  # of each HeldExperts.stored_parts
    mail: Sequence[FilePart]  # words, tokens, weights, answer and counts of the mailbox
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
        words, served, busy_ns = self.words, self.words[SERVED.value], time.monotonic_ns()
        words[READY.value] = 1
        while not words[STOP.value]:
            wanted = words[REQUEST.value]
            if wanted != served:
                fence()
                self.compute()
                fence()
                words[SERVED.value] = words[ANSWERED.value] = served = wanted
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
