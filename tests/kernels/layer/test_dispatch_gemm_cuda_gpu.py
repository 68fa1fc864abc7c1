"""Layer 0 in CUDA C++: bit for bit what its Triton twin computes, for all ranks of a group emulated on one GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from emulated_cases import LAYER0, draw_layer0
from emulated_events import check_layer0_events, recorded
from emulated_ranks import EmulatedCase, Kind, plans_of
from layer0_launches import (
    exact_layer0,
    experts_rows,
    launch,
    layer0_in,
    make_buffers,
    run_layer0,
)

from comet.kernels.runtime.recorder import Recorder


def check(case: EmulatedCase, *, save_pre: bool) -> None:
    found, twin = (run_layer0(case, kind, save_pre=save_pre) for kind in ("cuda", "triton"))
    for rank, (exact, mine, other) in enumerate(zip(exact_layer0(case), found, twin, strict=True)):
        exact.check(other, f"Triton, rank {rank} of {case}")
        exact.check(mine, f"CUDA, rank {rank} of {case}")
        assert torch.equal(mine.hidden, other.hidden), f"hidden of rank {rank} of {case}"
        if mine.pre is not None and other.pre is not None:
            assert torch.equal(mine.pre, other.pre), f"gate | up of rank {rank} of {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("save_pre", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", LAYER0, ids=lambda case: case.name)
def test_equals_its_twin(case: EmulatedCase, save_pre: bool) -> None:
    check(case, save_pre=save_pre)


@pytest.mark.gpu
@pytest.mark.parametrize("comm_blocks", [1, 4, 16, 1000])
@pytest.mark.parametrize("save_pre", [False, True], ids=["inference", "training"])
def test_blocks_that_push_first_change_no_bit(comm_blocks: int, save_pre: bool) -> None:
    """Also where all blocks do."""
    for case in (
        EmulatedCase("split", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256, comm_blocks=comm_blocks),
        EmulatedCase("split", 2, 1, (2500, 1800), 8, 2, 768, 1152, dtype=torch.float16, comm_blocks=comm_blocks),
        EmulatedCase("split alone", 1, 1, (700,), 8, 2, 512, 256, comm_blocks=comm_blocks),
    ):
        check(case, save_pre=save_pre)
        found, whole = (run_layer0(each, "cuda", save_pre=save_pre) for each in (case, replace(case, comm_blocks=0)))
        assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(found, whole, strict=True))


@pytest.mark.gpu
def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        check(draw_layer0(draw, seed + number, least_ffn=64), save_pre=draw.random() < 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_twice_gives_the_same_bits(kind: Kind) -> None:
    case = EmulatedCase("twice", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256)
    first, second = (run_layer0(case, kind, save_pre=False) for _ in range(2))
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(first, second, strict=True))


def check_events(case: EmulatedCase, kind: Kind) -> None:
    """Recording changes no bit, and what is recorded is what there was to do."""
    plans, buffers = plans_of(case), make_buffers(case)
    recorders = [Recorder.allocate(torch.device(case.device), 256) for _ in plans]

    with layer0_in(kind):
        found = recorded(case, buffers, partial(launch, case, plans), recorders)
    silent = run_layer0(case, kind, save_pre=False)
    for rank, plan in enumerate(plans):
        assert torch.equal(experts_rows(plan, found[rank]).hidden, silent[rank].hidden)
        check_layer0_events(plan, recorders[rank])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "triton"])
def test_events(kind: Kind) -> None:
    check_events(EmulatedCase("events", 2, 1, (700, 300), 8, 2, 256, 208, routing="first_half"), kind)


@pytest.mark.gpu
def test_events_of_a_split() -> None:
    check_events(EmulatedCase("events", 2, 1, (700, 300), 8, 2, 256, 208, routing="first_half", comm_blocks=4), "cuda")
