"""Layer 0 in CUDA C++: bit for bit what its Triton twin computes, for all ranks of a group played on one GPU."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from layer0_launches import (
    exact_layer0,
    experts_rows,
    launch,
    layer0_alone,
    layer0_in,
    make_buffers,
    run_layer0,
)
from played_events import check_layer0_events, recorded
from played_ranks import EPOCH, Kind, PlayedCase, plans_of

from comet.kernels.recorder import Recorder

CASES = [
    PlayedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    PlayedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512),
    PlayedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128),
    PlayedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128),
    PlayedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128),
    PlayedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    PlayedCase("half of the experts idle", 2, 1, (500, 200), 16, 2, 256, 128, routing="first_half"),
    PlayedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    PlayedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256),
    PlayedCase("four phases", 4, 1, (150, 900, 260, 1), 16, 4, 512, 192, num_phases=4),
    PlayedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192),
    PlayedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    PlayedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 384, 272),
    PlayedCase("less than a stage", 2, 1, (300, 80), 4, 1, 16, 256),
    PlayedCase("narrow", 1, 1, (300,), 4, 2, 80, 16),
    PlayedCase("more items than blocks", 2, 1, (2500, 1800), 8, 4, 128, 1040),
    PlayedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
    PlayedCase("copied", 2, 1, (400, 300), 16, 4, 512, 256, transport="copy"),
]


def check(case: PlayedCase, *, save_pre: bool) -> None:
    found, twin = (run_layer0(case, kind, save_pre=save_pre) for kind in ("cuda", "triton"))
    for rank, (exact, mine, other) in enumerate(zip(exact_layer0(case), found, twin, strict=True)):
        exact.check(other, f"Triton, rank {rank} of {case}")
        exact.check(mine, f"CUDA, rank {rank} of {case}")
        assert torch.equal(mine.hidden, other.hidden), f"hidden of rank {rank} of {case}"
        if mine.pre is not None and other.pre is not None:
            assert torch.equal(mine.pre, other.pre), f"gate | up of rank {rank} of {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("save_pre", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_twin(case: PlayedCase, save_pre: bool) -> None:
    check(case, save_pre=save_pre)


@pytest.mark.gpu
def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        # Few numbers of ranks and widths of a tile, for each is a compilation.
        world_size = draw.choice([1, 4])
        experts = draw.choice([8, 24, 40])
        case = PlayedCase(
            f"{number} of seed {seed}",
            world_size,
            1,
            tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
            num_experts=world_size * experts,
            top_k=draw.randrange(1, 9),
            hidden_size=16 * draw.randrange(4, 100),
            ffn_size=16 * draw.randrange(4, 50),
            num_phases=draw.randrange(2, 5),
            routing=draw.choice(["uniform", "one", "masked", "first_half"]),
            seed=seed + number,
        )
        check(case, save_pre=draw.random() < 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_twice_gives_the_same_bits(kind: Kind) -> None:
    case = PlayedCase("twice", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256)
    first, second = (run_layer0(case, kind, save_pre=False) for _ in range(2))
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(first, second, strict=True))


def check_events(case: PlayedCase, kind: Kind) -> None:
    """Recording changes no bit, and what is recorded is what there was to do."""
    plans, buffers = plans_of(case), make_buffers(case)
    recorders = [Recorder.allocate(torch.device(case.device), 256) for _ in plans]

    with layer0_in(kind):
        found = recorded(case, buffers, partial(launch, case, plans, buffers), recorders)
    silent = run_layer0(case, kind, save_pre=False)
    for rank, plan in enumerate(plans):
        assert torch.equal(experts_rows(plan, found[rank]).hidden, silent[rank].hidden)
        check_layer0_events(plan, recorders[rank])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_events(kind: Kind) -> None:
    check_events(PlayedCase("events", 2, 1, (700, 300), 8, 2, 256, 208, routing="first_half"), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_a_rank_that_never_comes_is_named(kind: Kind) -> None:
    case = PlayedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128)
    with layer0_in(kind) as spy:
        for _ in range(10):  # all spins of all blocks give up at nearly the same time
            aborted, place, peer, _, expected, seen, *_ = layer0_alone(case, deadline_ns=20_000_000)
            assert (aborted, place, peer, expected, seen) == (1, 2, 1, EPOCH, EPOCH - 1)
    assert spy.call_count == (10 if kind == "cuda" else 0)
