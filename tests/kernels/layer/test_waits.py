"""Launches in Triton whose other ranks never come, or whose own rank has failed, in one process."""

from __future__ import annotations

from dataclasses import replace

from emulated_cases import TWO
from emulated_faults import LAUNCHES, SENDING, check_alone, check_failed
from ranks import run_ranks

CASE = replace(TWO, num_tokens=(150, 5), hidden_size=256, ffn_size=128, num_panels=1)


def wait_alone(rank: int, world_size: int) -> None:
    for name in LAUNCHES:
        check_alone(name, CASE, "triton", deadline_ns=2_000_000)


def test_a_rank_that_never_comes_is_named() -> None:
    run_ranks(wait_alone, 1, interpret=True)


def fail(rank: int, world_size: int) -> None:
    case = replace(TWO, ep=3, num_tokens=(60, 40, 50), num_experts=6, top_k=4, routing="uniform")
    for name in SENDING:
        check_failed(name, case, "triton")


def test_a_rank_that_failed_sends_nothing() -> None:
    run_ranks(fail, 1, interpret=True)
