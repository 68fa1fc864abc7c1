"""Whoever plays the ranks of layer 0 gets them right, with the Triton twin, which the GPU tests compare with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_cases import SMALL_LAYER0, TWO
from layer0_launches import Exact, Hidden, exact_layer0, run_layer0
from ranks import run_ranks


def play(rank: int, world_size: int) -> None:
    for case in SMALL_LAYER0:
        for save_pre in (False, True):
            found = run_layer0(case, "triton", save_pre=save_pre)
            for emulated, (exact, result) in enumerate(zip(exact_layer0(case), found, strict=True)):
                assert (result.pre is not None) == save_pre
                exact.check(result, f"rank {emulated} of {case}")


def test_ranks_played_in_one_process() -> None:
    run_ranks(play, 1, interpret=True, timeout=240)


def test_limits_admit_roundings_and_no_more() -> None:
    [exact] = exact_layer0(replace(TWO, ep=1, num_tokens=(70,), dtype=torch.bfloat16))
    gate, up = exact.pre.bfloat16().double().chunk(2, dim=1)
    rounded = Hidden((torch.nn.functional.silu(gate) * up).bfloat16(), exact.pre.bfloat16())
    exact.check(rounded, "rounded")
    off = Exact(exact.hidden * (1 + 2**-6), exact.hidden_limit, exact.pre, exact.pre_limit)
    with pytest.raises(AssertionError, match=r"off: hidden is wrong \d+ times, first at \[\d+, \d+\]"):
        off.check(rounded, "off")
    off = Exact(exact.hidden, exact.hidden_limit, exact.pre.roll(1, 0), exact.pre_limit)
    with pytest.raises(AssertionError, match="off: pre is wrong"):
        off.check(rounded, "off")
