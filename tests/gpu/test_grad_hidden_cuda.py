"""Gradients of hidden in CUDA C++: bit for bit those of dispatch and GEMM in Triton, of ranks played on one GPU."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from grad_hidden_launches import (
    alone,
    check,
    grad_hidden_in,
    launch,
    of_experts,
    run_grad_hidden,
    sent_after_a_fault,
)
from layer0_launches import make_buffers
from played_events import check_layer0_events, recorded
from played_ranks import EPOCH, Kind, PlayedCase, plans_of

from comet.kernels.recorder import Recorder

pytestmark = pytest.mark.gpu

CASES = [
    PlayedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    PlayedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512),
    PlayedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128),
    PlayedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128),
    PlayedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128),
    PlayedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    PlayedCase("half of the experts idle", 2, 1, (500, 200), 16, 2, 256, 128, routing="first_half"),
    PlayedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    PlayedCase("half a block of columns outside", 2, 1, (300, 450), 8, 2, 256, 192),
    PlayedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256),
    PlayedCase("four phases", 4, 1, (150, 900, 260, 1), 16, 4, 512, 192, num_phases=4),
    PlayedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192),
    PlayedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    PlayedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 384, 272),
    PlayedCase("less than a stage", 2, 1, (300, 80), 4, 1, 16, 256),
    PlayedCase("narrow", 1, 1, (300,), 4, 2, 80, 16),
    PlayedCase("more items than blocks", 2, 1, (2500, 1800), 8, 4, 128, 1040),
    PlayedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
    PlayedCase("copied in the forward pass", 2, 1, (400, 300), 16, 4, 512, 256, transport="copy"),
]


def compare(case: PlayedCase) -> None:
    found, twin = run_grad_hidden(case, "cuda"), run_grad_hidden(case, "triton")
    check(case, twin, "Triton")
    check(case, found, "CUDA")
    for rank, (mine, other) in enumerate(zip(found, twin, strict=True)):
        assert torch.equal(mine.hidden, other.hidden), f"gradient of hidden, rank {rank} of {case}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_their_twin(case: PlayedCase) -> None:
    compare(case)


@pytest.mark.parametrize("apart", [{0}, {1, 3}])
def test_ranks_may_differ_in_their_launches(apart: set[int]) -> None:
    case = PlayedCase("mixed", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256)
    check(case, run_grad_hidden(case, "cuda", apart=apart), f"{apart} in Triton")


def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        # Few numbers of ranks, for each is a compilation.
        world_size = draw.choice([1, 4])
        case = PlayedCase(
            f"{number} of seed {seed}",
            world_size,
            1,
            tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
            num_experts=world_size * draw.choice([8, 24, 40]),
            top_k=draw.randrange(1, 9),
            hidden_size=16 * draw.randrange(4, 100),
            ffn_size=16 * draw.randrange(1, 60),
            num_phases=draw.randrange(2, 5),
            routing=draw.choice(["uniform", "one", "masked", "first_half"]),
            seed=seed + number,
        )
        compare(case)


def test_events() -> None:
    case = PlayedCase("events", 2, 1, (700, 300), 8, 2, 256, 208, routing="first_half")
    plans, buffers = plans_of(case), make_buffers(case)
    recorders = [Recorder.allocate(torch.device(case.device), 256) for _ in plans]
    with grad_hidden_in("cuda"):
        found = recorded(case, buffers, partial(launch, case, plans), recorders)
    check(case, [of_experts(plan, result) for plan, result in zip(plans, found, strict=True)], "recorded")
    for plan, recorder in zip(plans, recorders, strict=True):
        check_layer0_events(plan, recorder)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_a_rank_that_never_comes_is_named(kind: Kind) -> None:
    case = PlayedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128)
    with grad_hidden_in(kind) as spy:
        for _ in range(10):  # all spins of all blocks give up at nearly the same time
            aborted, place, peer, _, expected, seen, *_ = alone(case, deadline_ns=20_000_000)
            assert (aborted, place, peer, expected, seen) == (1, 2, 1, EPOCH, EPOCH - 1)
    assert spy.call_count == (10 if kind == "cuda" else 0)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_nothing_is_sent_once_a_wait_has_failed(kind: Kind) -> None:
    case = PlayedCase("after a fault", 3, 1, (300, 200, 100), 12, 4, 256, 128)
    with grad_hidden_in(kind):
        assert sent_after_a_fault(case) == [(0, 0), (0, 0)]
