"""Whoever plays the ranks of the layers in block FP8 gets them right: in Triton, which the GPU tests compare with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import layer1_launches
import pytest
import torch
from emulated_events import check_layer0_events, check_layer1_events, recorded
from emulated_ranks import EmulatedCase, plans_of
from fp8_cases import float32_products
from fp8_launches import (
    check_outputs,
    launch_layer0,
    launch_layer1,
    make_buffers,
    run_fp8_layer0,
    run_fp8_layer1,
)
from layer_cases import EDGE_ROWS, edge_ids
from ranks import run_ranks

from comet.kernels.runtime.recorder import Recorder

TWO = EmulatedCase("two", 2, 1, (150, 5), 4, 2, 256, 128, "masked", torch.float32, block_rows=16, device="cpu")
EDGES = replace(
    TWO, name="edges", ep=1, num_tokens=(230,), num_experts=9, top_k=4, hidden_size=128, routing="edges", block_rows=128
)
CASES = [
    replace(TWO, name="one rank", ep=1, num_tokens=(70,), num_panels=1),
    TWO,
    replace(TWO, name="tall tiles", block_rows=128, hidden_size=384, dtype=torch.float16),
    replace(TWO, name="none on rank 0", num_tokens=(0, 30), ffn_size=384),
    replace(TWO, name="nobody has tokens", num_tokens=(0, 0)),
    replace(TWO, name="one expert", num_tokens=(20, 40), routing="one"),
    replace(TWO, name="three ranks", ep=3, num_tokens=(17, 33, 1), num_experts=6, hidden_size=640),
    EDGES,
]


def play(rank: int, world_size: int) -> None:
    for case in CASES:
        outputs = run_fp8_layer1(case, run_fp8_layer0(case, "triton"), "triton")
        check_outputs(case, outputs, float32_products(max(case.hidden_size, case.ffn_size)))


@pytest.mark.slow
def test_ranks_played_in_one_process() -> None:
    run_ranks(play, 1, interpret=True, timeout=400)


def record(rank: int, world_size: int) -> None:
    case = replace(TWO, name="events", hidden_size=384, ffn_size=256, num_panels=3)
    plans = plans_of(case)
    recorders = [Recorder.allocate(torch.device("cpu"), 256) for _ in plans]
    hidden = recorded(case, make_buffers(case), partial(launch_layer0, case, plans), recorders)
    for plan, recorder in zip(plans, recorders, strict=True):
        check_layer0_events(plan, recorder, num_cols=2)
        with pytest.raises(AssertionError):
            check_layer0_events(plan, recorder, num_cols=3)
    buffers = layer1_launches.make_buffers(case)
    recorded(case, buffers, partial(launch_layer1, case, plans, hidden), recorders)
    for plan, recorder in zip(plans, recorders, strict=True):
        check_layer1_events(plan, recorder, num_cols=6, num_panels=3)
        with pytest.raises(AssertionError):
            check_layer1_events(plan, recorder, num_cols=6, num_panels=2)


def test_every_item_is_recorded() -> None:
    run_ranks(record, 1, interpret=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_tokens", "top_k"), [((300, 150, 0), 2), ((877,), 1), ((0, 0, 130), 7)])
def test_experts_have_as_many_rows_as_the_case_asks_for(num_tokens: tuple[int, ...], top_k: int, seed: int) -> None:
    case = replace(EDGES, ep=len(num_tokens), num_tokens=num_tokens, top_k=top_k, seed=seed)
    ids = edge_ids(case)
    assert [tuple(of_rank.shape) for of_rank in ids] == [(tokens, top_k) for tokens in num_tokens]
    of_all = torch.cat(ids).flatten()
    assert of_all[of_all >= 0].bincount().tolist() == list(EDGE_ROWS)
    assert int((of_all < 0).sum()) == sum(num_tokens) * top_k - 877
    counts = torch.cat([plan.segment_counts for plan in plans_of(case)])
    assert counts.tolist() == list(EDGE_ROWS)


def test_too_few_tokens_for_these_rows_are_refused() -> None:
    with pytest.raises(AssertionError, match="876 slots are too few for 877 rows"):
        edge_ids(replace(EDGES, num_tokens=(876,), top_k=1))
