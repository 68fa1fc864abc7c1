"""The layers in block FP8 in CUDA C++: bit for bit what they are in Triton, ranks of a group emulated on one GPU.

Layer 1 reads what layer 0 has found in the same implementation, so its rows of no expert are NaN in CUDA C++.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import layer1_launches
import pytest
import torch
from emulated_events import check_layer0_events, check_layer1_events, recorded
from emulated_ranks import EmulatedCase, Kind, plans_of
from fp8_cases import float32_products, tensor_core_products
from fp8_launches import (
    check_outputs,
    launch_layer0,
    launch_layer1,
    make_buffers,
    rows_of_experts,
    run_fp8_layer0,
    run_fp8_layer1,
    settings_of,
)
from layer0_launches import layer0_in
from layer1_launches import layer1_in
from layer_cases import EDGE_ROWS
from torch import Tensor

from comet.kernels.runtime.recorder import Recorder
from comet.quantization.formats import FP8_BLOCK

pytestmark = pytest.mark.gpu

CAPACITY = 256
TWO = EmulatedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512, num_panels=1)
CASES = [
    replace(TWO, name="one rank", ep=1, num_tokens=(700,), num_panels=2),
    TWO,
    replace(TWO, name="unequal", num_tokens=(900, 5), top_k=4, hidden_size=768, ffn_size=128, num_panels=3),
    replace(TWO, name="none on rank 1", num_tokens=(300, 0), top_k=4, hidden_size=128, ffn_size=128),
    replace(TWO, name="nobody has tokens", num_tokens=(0, 0)),
    replace(TWO, name="one expert takes all", num_tokens=(600, 500), hidden_size=640, routing="one", num_panels=2),
    replace(TWO, name="half of the experts idle", num_experts=16, routing="first_half", ffn_size=384),
    replace(TWO, name="masked", num_tokens=(300, 450), num_experts=64, top_k=8, hidden_size=640, routing="masked"),
    replace(TWO, name="4 blocks push first", num_tokens=(900, 5), comm_blocks=4),
    replace(TWO, name="float16", top_k=4, hidden_size=896, dtype=torch.float16, num_panels=4),
    replace(TWO, name="float32", num_tokens=(300, 80), hidden_size=256, ffn_size=128, dtype=torch.float32),
    replace(TWO, name="31 blocks in 16 panels", num_tokens=(400, 300), hidden_size=3968, num_panels=16),
    replace(TWO, name="more items than blocks", num_tokens=(2500, 1800), top_k=4, hidden_size=128, ffn_size=1152),
    EmulatedCase("four ranks", 4, 1, (150, 900, 260, 1), 16, 4, 512, 384, num_panels=2),
    EmulatedCase("eight ranks", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1152, 128, num_panels=4),
    EmulatedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 128),
]


def edges(top_k: int) -> EmulatedCase:
    """Experts with rows around the heights of pieces, on one rank or on two."""
    world_size = 1 + top_k % 2
    tokens = -(-sum(EDGE_ROWS) * world_size // top_k) + 40  # some slots are masked
    num_tokens = (tokens,) if world_size == 1 else (tokens - tokens // 4, tokens // 4)
    return EmulatedCase(
        f"edges, K = {top_k}",
        world_size,
        1,
        num_tokens,
        num_experts=len(EDGE_ROWS) * world_size,
        top_k=top_k,
        hidden_size=(640, 128, 384, 1408)[top_k % 4],
        ffn_size=(128, 384)[top_k // 4 % 2],
        routing="edges",
        dtype=torch.float16 if top_k in (2, 5) else torch.bfloat16,
        num_panels=1 + top_k % 3,
        seed=top_k,
    )


def check(case: EmulatedCase) -> list[Tensor]:
    """Both layers have the same bits in either; returns the outputs."""
    found, twin = (run_fp8_layer0(case, kind) for kind in ("cuda", "triton"))
    for plan, mine, other in zip(plans_of(case), found, twin, strict=True):
        names = "elements", "scales"
        for name, a, b in zip(names, rows_of_experts(plan, mine), rows_of_experts(plan, other), strict=True):
            wrong = (a != b).nonzero()
            assert not len(wrong), f"{name} {len(wrong)} times, first at {wrong[0].tolist()}: {plan.layout} of {case}"
    outputs, others = run_fp8_layer1(case, found, "cuda"), run_fp8_layer1(case, twin, "triton")
    mixed = run_fp8_layer1(case, found, "triton")  # as layers with few tokens run
    for rank, of_rank in enumerate(zip(outputs, others, mixed, strict=True)):
        for other in of_rank[1:]:
            wrong = (of_rank[0] != other).nonzero()
            assert not len(wrong), f"output {len(wrong)} times, first at {wrong[0].tolist()}: rank {rank} of {case}"
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_twin(case: EmulatedCase) -> None:
    check(case)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_experts_with_rows_around_the_heights_of_pieces(top_k: int) -> None:
    case = edges(top_k)
    products = tensor_core_products(case.device) if case.device == "cuda" else 0.0
    terms = max(case.hidden_size, case.ffn_size)
    check_outputs(case, check(case), products + float32_products(terms))


def random_case(draw: random.Random, number: int, seed: int) -> EmulatedCase:
    """Few numbers of ranks, experts per token and types, for each is a compilation; any widths, tokens and routing."""
    world_size, top_k, dtype = draw.choice([(1, 8, torch.bfloat16), (4, 4, torch.bfloat16), (2, 3, torch.float16)])
    blocks = draw.randrange(1, 14)
    return EmulatedCase(
        f"{number} of seed {seed}",
        world_size,
        1,
        tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
        num_experts=world_size * draw.choice([8, 24, 40]),
        top_k=top_k,
        hidden_size=FP8_BLOCK * blocks,
        ffn_size=FP8_BLOCK * draw.randrange(1, 6),
        num_panels=draw.randrange(1, -(-blocks // 2) + 1),
        routing=draw.choice(["uniform", "one", "masked", "first_half"]),
        dtype=dtype,
        seed=seed + number,
    )


def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(15):
        check(random_case(draw, number, seed))


def test_twice_gives_the_same_bits() -> None:
    case = replace(TWO, name="twice", num_tokens=(500, 333), hidden_size=640, routing="masked", num_panels=2)
    first, second = (run_fp8_layer0(case, "cuda") for _ in range(2))
    for plan, mine, other in zip(plans_of(case), first, second, strict=True):
        assert all(map(torch.equal, rows_of_experts(plan, mine), rows_of_experts(plan, other)))
    outputs = (run_fp8_layer1(case, first, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_events(kind: Kind) -> None:
    """Recording changes no bit, and what is recorded is what there was to do."""
    case = replace(TWO, name="events", num_tokens=(700, 300), hidden_size=1152, routing="first_half", num_panels=3)
    case = replace(case, ffn_size=384)
    plans = plans_of(case)
    recorders = [Recorder.allocate(torch.device(case.device), CAPACITY) for _ in plans]
    silent = run_fp8_layer0(case, kind)
    with layer0_in(kind):
        found = recorded(case, make_buffers(case), partial(launch_layer0, case, plans), recorders)
    for plan, mine, other, recorder in zip(plans, found, silent, recorders, strict=True):
        assert all(map(torch.equal, rows_of_experts(plan, mine), rows_of_experts(plan, other)))
        check_layer0_events(plan, recorder, num_cols=case.ffn_size // FP8_BLOCK)
    with layer1_in(kind):
        launch = partial(launch_layer1, case, plans, found)
        outputs = recorded(case, layer1_launches.make_buffers(case), launch, recorders)
    for plan, out, other, recorder in zip(plans, outputs, run_fp8_layer1(case, silent, kind), recorders, strict=True):
        assert torch.equal(out, other)
        settings = settings_of(case, plan)
        num_cols = -(-case.hidden_size // settings.tile.block_n)
        check_layer1_events(plan, recorder, num_cols=num_cols, num_panels=settings.layer1.num_panels)
