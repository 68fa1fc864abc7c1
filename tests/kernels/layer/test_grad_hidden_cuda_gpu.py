"""Gradients of hidden in CUDA C++: bit for bit those of dispatch and GEMM in Triton, of ranks emulated on one GPU."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from emulated_cases import LAYER0, draw_layer0
from emulated_events import check_layer0_events, recorded
from emulated_ranks import EmulatedCase, plans_of
from grad_hidden_launches import check, grad_hidden_in, launch, of_experts, run_grad_hidden
from layer0_launches import make_buffers

from comet.kernels.runtime.recorder import Recorder

pytestmark = pytest.mark.gpu


def compare(case: EmulatedCase) -> None:
    found, twin = run_grad_hidden(case, "cuda"), run_grad_hidden(case, "triton")
    check(case, twin, "Triton")
    check(case, found, "CUDA")
    for rank, (mine, other) in enumerate(zip(found, twin, strict=True)):
        assert torch.equal(mine.hidden, other.hidden), f"gradient of hidden, rank {rank} of {case}"


@pytest.mark.parametrize("case", LAYER0, ids=lambda case: case.name)
def test_equal_their_twin(case: EmulatedCase) -> None:
    compare(case)


@pytest.mark.parametrize("apart", [{0}, {1, 3}])
def test_ranks_may_differ_in_their_launches(apart: set[int]) -> None:
    case = EmulatedCase("mixed", 4, 1, (500, 90, 0, 710), 16, 4, 512, 256)
    check(case, run_grad_hidden(case, "cuda", apart=apart), f"{apart} in Triton")


def test_random_cases() -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(12):
        compare(draw_layer0(draw, seed + number))


def test_events() -> None:
    case = EmulatedCase("events", 2, 1, (700, 300), 8, 2, 256, 208, routing="first_half")
    plans, buffers = plans_of(case), make_buffers(case)
    recorders = [Recorder.allocate(torch.device(case.device), 256) for _ in plans]
    with grad_hidden_in("cuda"):
        found = recorded(case, buffers, partial(launch, case, plans), recorders)
    check(case, [of_experts(plan, result) for plan, result in zip(plans, found, strict=True)], "recorded")
    for plan, recorder in zip(plans, recorders, strict=True):
        check_layer0_events(plan, recorder)
