"""Gradients of layer 0's tokens in CUDA C++: bit for bit those of the Triton twin, of all ranks played on one GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gradient_launches import exact_gradients, gradients_alone, run_gradients
from layer1_launches import layer1_in
from played_ranks import EPOCH, Kind, PlayedCase

pytestmark = pytest.mark.gpu

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
    PlayedCase("less than a stage", 1, 1, (300,), 4, 1, 256, 16, num_panels=1),
    PlayedCase("float16, long", 2, 1, (400, 300), 16, 4, 512, 4096, dtype=torch.float16),
    PlayedCase("sixteen panels", 2, 1, (400, 300), 16, 4, 4096, 128, num_panels=16),
]


def check(case: PlayedCase) -> None:
    found, twin = run_gradients(case, "cuda"), run_gradients(case, "triton")
    rounding = 3 * torch.finfo(case.dtype).eps / 2  # of rows of y, partial sums and the result
    for rank, ((exact, size, weights), mine, other) in enumerate(zip(exact_gradients(case), found, twin, strict=True)):
        for name, one, two in zip(("tokens", "routing weights"), mine, other, strict=True):
            assert torch.equal(one, two), f"{name} of rank {rank} of {case}"
        excess = (mine[0].double() - exact).abs() - (1.1 * rounding * size + 1e-6)
        assert not (excess > 0).any(), f"rank {rank} of {case}: {excess.max()} past the limit"
        assert torch.allclose(mine[1].double(), weights, rtol=1e-5, atol=1e-5), f"rank {rank} of {case}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_their_twin(case: PlayedCase) -> None:
    check(case)


def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(8):
        world_size, top_k = draw.choice([(1, 8), (4, 4)])
        case = PlayedCase(
            f"{number} of seed {seed}",
            world_size,
            1,
            tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
            num_experts=world_size * draw.choice([8, 24, 40]),
            top_k=top_k,
            hidden_size=16 * draw.randrange(16, 100),
            ffn_size=16 * draw.randrange(1, 60),
            num_panels=1,
            routing=draw.choice(["uniform", "one", "masked"]),
            seed=seed + number,
        )
        check(replace(case, num_panels=draw.randrange(1, -(-case.hidden_size // 256) + 1)))


@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_a_rank_that_never_comes_is_named(kind: Kind) -> None:
    case = PlayedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128, num_panels=3)
    with layer1_in(kind):
        aborted, place, peer, _, expected, seen, *_ = gradients_alone(case, deadline_ns=20_000_000)
    assert (aborted, place, peer, expected, seen) == (1, 4, 1, EPOCH, EPOCH - 1)
