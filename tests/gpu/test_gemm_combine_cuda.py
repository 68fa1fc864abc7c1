"""Layer 1 in CUDA C++: bit for bit what its Triton twin computes, for all ranks of a group played on one GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from layer1_launches import exact_layer1, layer1_alone, layer1_in, run_layer1, sent_after_a_fault
from played_ranks import EPOCH, Kind, PlayedCase

CASES = [
    PlayedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    PlayedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512, num_panels=1),
    PlayedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128, num_panels=3),
    PlayedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, num_panels=1),
    PlayedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128, num_panels=1),
    PlayedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    PlayedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    PlayedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256, num_panels=6),
    PlayedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192, num_panels=4),
    PlayedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    PlayedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 1280, 272, num_panels=3),
    PlayedCase("tall pieces on one rank only", 2, 1, (1024, 300), 16, 2, 512, 128),
    PlayedCase("less than a stage", 1, 1, (300,), 4, 1, 256, 16, num_panels=1),
    PlayedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
    PlayedCase("sixteen panels", 2, 1, (400, 300), 16, 4, 4096, 128, num_panels=16),
]


def check(case: PlayedCase) -> None:
    found, twin = run_layer1(case, "cuda"), run_layer1(case, "triton")
    # Outputs of experts, partial sums and the result are rounded once each.
    rounding = 3 * torch.finfo(case.dtype).eps / 2
    for rank, ((exact, size), mine, other) in enumerate(zip(exact_layer1(case), found, twin, strict=True)):
        assert torch.equal(mine, other), f"rank {rank} of {case}"
        excess = ((mine.double() - exact).abs() - (1.1 * rounding * size + 1e-6)).max() if mine.numel() else 0
        assert excess <= 0, f"rank {rank} of {case}: {excess} past the limit"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_twin(case: PlayedCase) -> None:
    check(case)


@pytest.mark.gpu
def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        # Few shapes, for each number of experts per token and of ranks is a compilation.
        world_size, top_k = draw.choice([(1, 8), (4, 4)])
        case = PlayedCase(
            f"{number} of seed {seed}",
            world_size,
            1,
            tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
            num_experts=world_size * draw.choice([8, 24, 40]),
            top_k=top_k,
            hidden_size=16 * draw.randrange(16, 100),
            ffn_size=16 * draw.randrange(1, 30),
            num_panels=1,
            routing=draw.choice(["uniform", "one", "masked"]),
            seed=seed + number,
        )
        blocks = -(-case.hidden_size // 256)
        check(replace(case, num_panels=draw.randrange(1, blocks + 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_a_rank_that_never_comes_is_named(kind: Kind) -> None:
    case = PlayedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128, num_panels=3)
    with layer1_in(kind) as spy:
        for _ in range(10):  # all spins of all blocks give up at nearly the same time
            aborted, place, peer, _, expected, seen, *_ = layer1_alone(case, deadline_ns=20_000_000)
            assert (aborted, place, peer, expected, seen) == (1, 4, 1, EPOCH, EPOCH - 1)
    assert spy.call_count == (10 if kind == "cuda" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_a_rank_that_failed_sends_nothing(kind: Kind) -> None:
    case = PlayedCase("failed", 4, 1, (900, 200, 0, 300), 8, 4, 768, 128, num_panels=3)
    with layer1_in(kind) as spy:
        assert sent_after_a_fault(case) == [(0, 0)] * 3
    assert spy.call_count == (1 if kind == "cuda" else 0)
