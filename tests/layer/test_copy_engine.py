"""Copies of rows and flags: where they land, in which order, on whose stream, and what a layer does around them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import emulated_group
from plan_cases import plan_all_ranks, random_case, workspace

import comet.layer.copy_engine
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.layer.copy_engine import start_copies
from comet.layer.group import make_expert_group
from comet.layer.paths import SymmetricPath
from comet.layer.plan import Plan
from comet.layer.workspace import Workspace
from comet.layout import CHUNK_ROWS
from comet.moe import MoE
from comet.utils.streams import SideStream


def copied(num_tokens: list[int], width: int = 16) -> tuple[list[Workspace], list[Plan], list[torch.Tensor]]:
    """Pools, plans and rows of three ranks that have copied in epoch 7 with landing zones full of -1."""
    drawn = random_case(3, 3, 1, max_tokens=384)
    shape = dict(num_experts=drawn.num_experts, max_routed_rows=drawn.block_rows * 1000, transport="copy")
    ids = [torch.zeros(num, drawn.top_k, dtype=torch.int32) for num in num_tokens]
    case = replace(drawn, ids=ids, weights=[torch.ones(one.shape) for one in ids], **shape)
    plans = plan_all_ranks(case, "cpu", epochs=1, use_kernels=False)[0]
    pools = [workspace(case, comm) for comm in emulated_group(3, "cpu")]
    rows = [torch.arange(num * width).view(num, width) + 10_000.0 * rank for rank, num in enumerate(num_tokens)]
    for pool in pools:
        pool.recv_rows.local.fill_(-1)
        pool.epoch.fill_(7)
    for pool, plan, x in zip(pools, plans, rows, strict=True):
        start_copies(x, plan, pool, SideStream(None))()
    return pools, plans, rows


@pytest.mark.parametrize("width", [16, 4])
def test_rows_land_under_the_number_of_their_token_with_a_flag_for_each_chunk(width: int) -> None:
    pools, _, rows = copied([300, 0, 128], width)
    for rank, pool in enumerate(pools):
        landing = pool.recv_rows.with_columns(width).local.view(3, 384, width)
        for source, x in enumerate(rows):
            num = 0 if source == rank else len(x)
            assert torch.equal(landing[source, :num], x[:num]), f"rows of {source} at {rank}"
            assert (landing[source, num:] == -1).all(), f"past the rows of {source} at {rank}"
            chunks = -(-num // CHUNK_ROWS)
            assert pool.recv_flags.local[source].tolist() == [7] * chunks + [0] * (3 - chunks)


def test_each_rank_gets_its_flags_behind_its_rows_down_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, plans, _ = copied([0, 0, 0])
    order: list[tuple[int, list[bool]]] = []

    def note(flags: torch.Tensor, rank: int, epochs: torch.Tensor) -> None:
        target = [pool.recv_flags.local.data_ptr() for pool in pools].index(flags.data_ptr())
        order.append((target, [bool((pool.recv_rows.local[768:868] == 1).all()) for pool in pools]))

    monkeypatch.setattr(comet.layer.copy_engine, "_raise_flags", note)
    start_copies(torch.ones(100, 16), plans[2], pools[2], SideStream(None))()
    assert order == [(1, [False, True, False]), (0, [True, True, False])], "rank 2 serves rank 1, then rank 0"


class Recorder(SideStream):
    """A stream that notes when it gets work and when it is joined."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(None)
        self.events = events

    def start(self, work: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
        self.events.append("start")
        join = super().start(work, *inputs)
        return lambda: (self.events.append("join"), join())[1]


class Forgetful(SideStream):
    """A stream that keeps nothing of what it is handed, as one of a GPU does not."""

    def __init__(self) -> None:
        super().__init__(None)
        self.inputs: list[weakref.ref[torch.Tensor]] = []

    def start(self, work: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
        self.inputs = [weakref.ref(each) for each in inputs]
        return lambda: None


def test_what_is_being_copied_stays_until_the_copies_are_joined() -> None:
    pools, plans, _ = copied([0, 0, 0])
    stream = Forgetful()
    join = start_copies(torch.ones(100, 16), plans[2], pools[2], stream)
    gc.collect()
    assert [each() is not None for each in stream.inputs] == [True, True], "the allocator has rows or epochs back"
    join()
    del join
    assert [each() for each in stream.inputs] == [None, None]


@pytest.mark.parametrize(("transport", "blocks"), [("copy", 0), ("push", 5)])
def test_copies_start_before_layer0_which_has_no_comm_block_and_are_joined_behind_it(
    monkeypatch: pytest.MonkeyPatch, transport: Any, blocks: int
) -> None:
    fused = pytest.importorskip("comet.layer.fused")
    config = MoEConfig(hidden_size=16, ffn_size=16, num_experts=2, top_k=1)
    group = make_expert_group(config, ParallelConfig(), max_tokens=40, dtype=torch.float32, device="cpu")
    events: list[str] = []
    overlap = OverlapConfig(comm_blocks=5, num_phases=1, transport=transport)
    moe = MoE(config, replace(group, plan_stream=Recorder(events)), path="twin", overlap=overlap)
    path = moe.experts
    assert isinstance(path, SymmetricPath)
    plan = path.plan(torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1))
    events.clear()
    monkeypatch.setattr(fused, "dispatch_gemm", lambda *args: events.append(f"{args[-1].comm_blocks} blocks"))
    fused.layer0(torch.zeros(40, 16), moe.w1.flatten(1, 2), plan, path.workspace, path.settings, save_pre=False)
    assert events == (["start", "0 blocks", "join"] if transport == "copy" else ["5 blocks"])
    assert path.settings.comm_blocks == 5, "layer 1 keeps its own"
    assert plan.arrival_row_ids is plan.routed_row_ids or transport == "copy"
