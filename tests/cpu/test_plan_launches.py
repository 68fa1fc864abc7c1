"""How many launches a plan takes, and that its halves, by kernels, wait only in the second."""

from __future__ import annotations

import pytest
import torch
from plan_cases import Case, assert_same_plan, random_case, twin_plan, workspace
from ranks import run_ranks

from comet.comm import LocalCommunicator
from comet.plan import begin_plan, make_plan


def launches(rank: int, world_size: int, case: Case, halves: bool) -> tuple[list[str], int]:
    """Names of the parts of the exchange that were launched, and how many before the plan's second half."""
    from comet import plan_kernels

    parts: list[str] = []
    exchange = plan_kernels.exchange

    def noted(*arguments: object, part: str) -> None:
        parts.append(part)
        exchange(*arguments, part=part)

    plan_kernels.exchange = noted
    pool = workspace(case, LocalCommunicator(torch.device("cpu")))
    first = len(parts)
    if halves:
        finish = begin_plan(case.ids[0], case.weights[0], case.layout(0), pool, use_kernels=True, **case.arguments)
        first = len(parts)
        plan = finish()
    else:
        plan = make_plan(case.ids[0], case.weights[0], case.layout(0), pool, use_kernels=True, **case.arguments)
    assert_same_plan(plan, twin_plan(case, 0), f"halves={halves}")
    return parts, first


@pytest.mark.parametrize(("halves", "expected"), [(False, (["all"], 0)), (True, (["send", "count"], 1))])
def test_the_exchange_is_one_launch_unless_the_plan_is_made_in_halves(
    halves: bool, expected: tuple[list[str], int]
) -> None:
    case = random_case(4, 1, 1, max_tokens=256)
    assert run_ranks(launches, 1, case, halves, interpret=True) == [expected]
