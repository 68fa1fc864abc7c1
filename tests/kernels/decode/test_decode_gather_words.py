"""The words in which ranks gather tokens: every order of late ranks, tokens that are half there, and early starts."""

from __future__ import annotations

import random
import re

import torch
import triton
import triton.language as tl
from ranks import in_ranks

from comet.kernels.aot.decode import aot_cases
from comet.kernels.decode.gather import ABSENT, push_token, take_token
from comet.kernels.decode.step import Batch
from comet.kernels.decode.words import push_words, sum_words
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.faults import Place


@triton.jit
def send_kernel(tokens_ptr, ids_ptr, weights_ptr, addresses, epoch, rank, T, W: tl.constexpr):
    own = Batch(tokens_ptr, ids_ptr, weights_ptr)
    push_token(own, addresses, 0, 0, epoch, rank, 1, T, 16, 100, 20, W, 2, 16)


@triton.jit
def receive_kernel(tokens_ptr, ids_ptr, weights_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, W: tl.constexpr):
    batch = Batch(tokens_ptr, ids_ptr, weights_ptr)
    for token in range(W):
        take_token(batch, addresses, token, 0, epoch, fault_ptr, timeout_ns, rank, 1, 16, 20, W, 2, 16, True)


@triton.jit
def push_kernel(values_ptr, present_ptr, addresses, epoch, rank, W: tl.constexpr):
    tokens, cols = tl.arange(0, 4), tl.arange(0, 16)
    mask = tl.load(present_ptr + tokens, mask=tokens < W, other=0) > 0
    values = tl.load(values_ptr + tokens[:, None] * 16 + cols[None, :], mask=mask[:, None])
    push_words(values, tokens, cols, mask[:, None] & (cols < 16)[None, :], addresses, epoch, rank, 1, 16, W, True)


@triton.jit
def sum_kernel(out_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, max_tokens, W: tl.constexpr):
    sum_words(0, out_ptr, addresses, epoch, fault_ptr, timeout_ns, rank, max_tokens, 16, W, 16, True)


class EmulatedRank:
    """One of three ranks in one process: a step is send, receive, push and, with a token, sum; T is 0 or 1."""

    def __init__(self, rank: int, tokens: list[torch.Tensor], sums: list[torch.Tensor], present: torch.Tensor) -> None:
        self.rank, self.done, self.present = rank, 0, present
        self.tokens, self.sums = (torch.tensor([words.data_ptr() for words in buffers]) for buffers in (tokens, sums))
        self.fault = torch.zeros(8, dtype=torch.int64)
        ranks, steps = present.shape[1], present.shape[0]
        generator = torch.Generator().manual_seed(rank)
        self.values = torch.randn(steps, ranks, 16, generator=generator)

    def phase(self) -> int:
        return self.done % 4

    def step(self) -> int:
        return self.done // 4

    def run(self, ranks: list[EmulatedRank], who: str) -> None:
        step, phase, count = self.step(), self.phase(), len(ranks)
        who = f"{who}, rank {self.rank}, step {step}"
        present = self.present[step]
        if phase == 0:
            token = torch.full((16,), 1000 * step + self.rank, dtype=torch.int32)
            ids, weights = torch.tensor([step, -1], dtype=torch.int32), torch.full((2,), 0.5 + self.rank)
            send_kernel[(1,)](token, ids, weights, self.tokens, step + 1, self.rank, int(present[self.rank]), W=count)
        elif phase == 1:
            tokens, ids = torch.zeros(count, 16, dtype=torch.int32), torch.zeros(count, 2, dtype=torch.int32)
            weights = torch.zeros(count, 2)
            receive_kernel[(1,)](tokens, ids, weights, self.tokens, step + 1, self.fault, 10**9, self.rank, W=count)
            for other in range(count):
                wanted = [step, -1] if present[other] else [ABSENT.value] * 2
                assert ids[other].tolist() == wanted, f"{who}: ids {ids.tolist()}"
                if present[other]:
                    assert (tokens[other] == 1000 * step + other).all(), f"{who}: tokens of another step"
                    assert (weights[other] == 0.5 + other).all(), f"{who}: weights of another step"
        elif phase == 2:
            push_kernel[(1,)](self.values[step], present.int(), self.sums, step + 1, self.rank, W=count)
        elif present[self.rank]:
            out = torch.empty(1, 16)
            sum_kernel[(1,)](out, self.sums, step + 1, self.fault, 10**9, self.rank, 1, W=count)
            wanted = sum(other.values[step, self.rank] for other in ranks)
            assert torch.equal(out[0], wanted), f"{who}: sums of another step"
        assert not self.fault.any(), who
        self.done += 1

    def may_run(self, ranks: list[EmulatedRank]) -> bool:
        """A kernel that waits for words may run once all ranks have sent them."""
        waits = self.phase() == 1 or (self.phase() == 3 and bool(self.present[self.step(), self.rank]))
        return all(other.done >= self.done for other in ranks) if waits else True


@in_ranks(1, interpret=True)
def test_no_rank_overwrites_what_another_still_reads(rank: int, world_size: int) -> None:
    """Try every legal order of the kernels of three ranks."""
    seed, count, steps = 11, 3, 12
    sleeper = random.Random(seed)
    present = torch.rand(steps, count, generator=torch.Generator().manual_seed(seed)) < 0.6
    tokens = [torch.zeros(2, count, 1, 20, dtype=torch.int64) for _ in range(count)]
    sums = [torch.zeros(2, count, 1, 16, dtype=torch.int64) for _ in range(count)]
    ranks = [EmulatedRank(rank, tokens, sums, present) for rank in range(count)]
    lead = 0
    while waiting := [player for player in ranks if player.step() < steps]:
        player = sleeper.choice(waiting)
        # One rank runs as far ahead as it may, then another, so that every lead that is possible occurs.
        while player.step() < steps and player.may_run(ranks) and sleeper.random() < 0.9:
            player.run(ranks, f"seed {seed}")
            lead = max(lead, player.done - min(other.done for other in ranks))
    assert lead >= 4, f"no rank was a step ahead of another, only {lead} kernels"


# ---- words that are late ---------------------------------------------------------------------------------------------


@in_ranks(1, interpret=True)
def test_half_a_token_is_not_taken(rank: int, world_size: int) -> None:
    """Rank 1's token lacks one word, an id, a weight or a column: rank 0 takes nothing and names the late rank."""
    token, weights = torch.arange(16, dtype=torch.int32), torch.ones(2)
    for column in (-4, -3, -2, -1, 0, 15):
        words, fault = torch.zeros(2, 2, 1, 20, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
        addresses = torch.full((2,), words.data_ptr())  # both ranks' words of rank 0
        for sender in range(2):
            send_kernel[(1,)](token, torch.tensor([5, 6]), weights, addresses, 3, sender, 1, W=2)
        words[1, 1, 0, column] -= 2 << 32
        ids, tokens = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
        receive_kernel[(1,)](tokens, ids, torch.zeros(2, 2), addresses, 3, fault, 10**7, 0, W=2)
        assert fault.tolist()[:6] == [1, Place.GATHER, 1, 1, 3, 1], f"column {column}: {fault.tolist()}"
        assert ids.tolist() == [[5, 6], [ABSENT.value] * 2], f"column {column}: ids {ids.tolist()}"
        assert torch.equal(tokens, torch.stack((token, token * 0))), f"column {column}: half a token was taken"


# ---- dependent launches ----------------------------------------------------------------------------------------------


@in_ranks(1)
def test_no_kernel_reads_what_is_not_gathered_yet(rank: int, world_size: int) -> None:
    """Check in compiled kernels of a gathered step when each waits for the last one and lets the next one start."""
    starts: dict[str, list[str]] = {}
    for case in aot_cases():
        if case.name.endswith(", 4 tokens, matrix, 4 ranks, gathered"):
            code = triton.compile(case.source, target=HOPPER.target, options=case.options).asm["ptx"]
            found = re.findall(r"griddepcontrol\.(\w+)|\b(ld|st)\.(?:volatile\.)?global", code)
            starts[case.kernel] = [wait or access for wait, access in found]
    assert starts["gather_kernel"][0] == "launch_dependents"
    assert starts["gate_up_kernel"][:2] == ["wait", "launch_dependents"], "down reads ids before it waits"
    assert "launch_dependents" not in starts["down_kernel"]
