"""Timelines: what the kernels record with real ranks, how it becomes spans of one clock, and what is written."""

import dataclasses
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bench_cases import report_of
from emulated_layer import check_layer0_events, check_layer1_events
from late import come_late, passed
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer
from ranks import in_ranks, run_ranks
from tile_orders import panels_of

from comet.config import MoEConfig, ParallelConfig
from comet.kernels.layer.triton import dispatch_gemm
from comet.kernels.runtime import recorder
from comet.kernels.runtime.recorder import recording
from comet.layer.fused import combine_symm, recv_symm
from comet.layer.group import make_expert_group
from comet.layer.plan import Plan
from comet.layer.routed_experts import SymmetricPath
from comet.layer.workspace import Workspace
from comet.trace.events import CONVERSION, KINDS, NETWORK, WAITS, WORKS, Clock, Event, Span, compare_clocks, find_spans
from comet.trace.timeline import RankRecord, Timeline, chrome_trace, record

CHUNK = 128
CASES = (
    LayerCase("ep2", 2, 1, (30, 130), num_experts=4, hidden_size=128),
    LayerCase("tp2", 1, 2, (31, 29), comm_blocks=2),
)


@dataclasses.dataclass(frozen=True)
class Found:
    """The records of one rank in one case, and those it should have."""

    records: list[RankRecord]
    lossy: list[RankRecord] | None
    plan: Plan
    num_cols: tuple[int, int]
    is_unchanged: bool


def record_cases(rank: int, world_size: int) -> list[Found]:
    return [record_case(rank, case) for case in CASES]


def record_case(rank: int, case: LayerCase) -> Found:
    """Forward and a dispatch alone, recorded, with rank 1 late; under TP with room for two events; then unrecorded."""
    moe = build_layer(case, rank, "fused")
    workspace = moe.group.workspace
    assert isinstance(moe.experts, SymmetricPath)
    backend = moe.experts.backend
    inputs = rank_inputs(case, rank)
    w1, w2 = moe.expert_weights()
    tile = backend.settings.tile
    num_cols = -(-(case.ffn_size // case.tp) // tile.block_f), -(-case.hidden_size // tile.block_n)
    num_panels = len(panels_of(num_cols[1], backend.settings.num_panels))
    with record(moe.group) as timeline:
        plan = backend.plan(inputs.top_k_ids, inputs.top_k_weights)
        dist.barrier()
        if rank == 1:
            come_after_dispatch(plan, workspace, case.name)
        else:
            tell_of_waits(case.name)
        hidden, _ = backend.dispatch_gemm(inputs.tokens, w1.flatten(1, 2), plan, save_pre_activation=False)
        y = backend.gemm_combine(hidden, w2, plan)
        written = workspace.recorder, int(workspace.epoch)
        check_layer0_events(plan, *written, num_cols=num_cols[0])
        check_layer1_events(plan, *written, num_cols=num_cols[1], num_panels=num_panels)
        backend.barrier(plan)
        backend.dispatch(inputs.tokens, plan.for_backward(plan.memory))
    routed = inputs.routed
    lossy, again = None, y
    with torch.no_grad():
        if case.tp > 1:
            with record(moe.group, capacity=2) as lossy:
                again = moe.routed_experts(*routed)
        off = moe.routed_experts(*routed)
    moe.group.close()
    return Found(
        records=timeline.records,
        lossy=lossy and lossy.records,
        plan=plan,
        num_cols=num_cols,
        is_unchanged=torch.equal(y, off) and torch.equal(again, off),
    )


def come_after_dispatch(plan: Plan, workspace: Workspace, name: str) -> None:
    """Return when rank 0 is done with its dispatch and has begun the tile after it, which waits for rank 1."""
    last = chunks(int(plan.recv_counts[0])) - 1
    while int(workspace.recv_flags.local[0, last]) < int(workspace.epoch):
        time.sleep(0.02)
    come_late(f"{name}: a tile of rank 1's rows", 60.0)


def tell_of_waits(name: str) -> None:
    """Let this rank say when it begins to wait for rows of another."""
    arrival = dispatch_gemm.zero_after_arrival

    def tell(flags: Any, mask: Any, *others: Any) -> Any:
        if mask.handle.data.any():
            passed(f"{name}: a tile of rank 1's rows")
        return arrival(flags, mask, *others)

    dispatch_gemm.zero_after_arrival = tell


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Found]]:
    """Case name -> what each rank found; one run for all tests."""
    ranks = run_ranks(record_cases, 2, interpret=True, timeout=300)
    return {case.name: [found[index] for found in ranks] for index, case in enumerate(CASES)}


@pytest.fixture(params=[case.name for case in CASES])
def found(request: pytest.FixtureRequest, recorded: dict[str, list[Found]]) -> list[Found]:
    return recorded[request.param]


def of_kind(timeline: Timeline, work: str, rank: int, *, alone: bool = False) -> list[Event]:
    """Events of one work on one rank, of the forward pass or of the dispatch ``alone`` after it."""
    first = min(event.epoch for event in timeline.events)
    return [e for e in timeline.events if (e.work, e.rank) == (work, rank) and (e.epoch > first) == alone]


def numbers_of(timeline: Timeline, work: str, rank: int, *, alone: bool = False) -> set[tuple[int, ...]]:
    """The numbers of the events that ``of_kind`` finds."""
    return {event.numbers for event in of_kind(timeline, work, rank, alone=alone)}


def chunks(count: int) -> int:
    return -(-count // CHUNK)


def test_every_rank_has_the_same_complete_timeline_and_outputs_do_not_change(found: list[Found]) -> None:
    timelines = [Timeline(one.records) for one in found]
    assert timelines[0].events == timelines[1].events
    assert {event.work for event in timelines[0].events} == {kind.work for kind in KINDS} - {*NETWORK.values()}
    assert [one.is_unchanged for one in found] == [True, True]
    assert timelines[0].summary()["lost_events"] == 0


def test_every_item_is_recorded_once(found: list[Found]) -> None:
    """Which items of a forward pass there are is checked while it is recorded."""
    timeline = Timeline(found[0].records)
    items = Counter((e.rank, e.epoch, e.work, e.numbers) for e in timeline.events if e.work != CONVERSION)
    assert set(items.values()) == {1}
    for rank, one in enumerate(found):
        plan, phases = one.plan, one.plan.tiles[:, 3].tolist()
        assert all(phases[tile] == phase for tile, _, phase in numbers_of(timeline, "layer 0 GEMM", rank))
        for work, counts in {"dispatch": plan.send_counts, "receive": plan.recv_counts}.items():
            rows = counts.tolist()
            rows[rank] = plan.max_tokens
            moved = {(peer, chunk, 0) for peer, count in enumerate(rows) for chunk in range(chunks(count))}
            assert numbers_of(timeline, work, rank, alone=True) == moved


def test_a_block_does_one_thing_after_the_other(found: list[Found]) -> None:
    timeline = Timeline(found[0].records)
    lanes: dict[tuple[int, int], list[Event]] = {}
    for event in timeline.events:
        assert event.begin <= event.ready <= event.end
        assert event.sm == 0
        lanes.setdefault((event.rank, event.block), []).append(event)
    assert len(lanes) > 2
    for lane in lanes.values():
        assert all(before.end <= after.begin for before, after in pairwise(lane))
    spans: dict[tuple[int, int], list[Span]] = {}
    for span in timeline.spans:
        spans.setdefault((span.event.rank, span.event.block), []).append(span)
    for lane in spans.values():
        assert all(before.end <= after.begin for before, after in pairwise(lane))
    assert {span.name for span in timeline.spans} == {*WORKS, *WAITS}


def test_a_wait_ends_after_what_it_waited_for_began(found: list[Found]) -> None:
    """The clocks of two processes of one host are the same, so the times as recorded compare exactly."""
    timeline = Timeline(found[0].records)
    shown = [clock.offset_ns for clock in timeline.clocks]
    sent, returned = {}, {}
    for rank in range(2):
        for event in of_kind(timeline, "dispatch", rank):
            sent[rank, *event.numbers[:2]] = event.begin + shown[rank]
        for event in of_kind(timeline, "reduce and send", rank):
            returned[rank, *event.numbers] = event.begin + shown[rank]
    for rank, one in enumerate(found):
        plan = one.plan
        for event in of_kind(timeline, "layer 0 GEMM", rank):
            _, first, valid, _ = plan.tiles[event.numbers[0]].tolist()
            for row in plan.routed_row_ids[first : first + valid].tolist():
                source, index = divmod(row, plan.max_tokens)
                assert source == rank or event.ready + shown[rank] > sent[source, rank, index // CHUNK]
        for event in of_kind(timeline, "final sum", rank):
            token, count, panel = event.numbers
            for row in plan.send_rows[token : min(token + count, plan.num_tokens)].tolist():
                for source, index in enumerate(row):
                    assert index < 0 or event.ready + shown[rank] > returned[source, rank, index // CHUNK, panel]
        done: Counter[int] = Counter()
        for event in of_kind(timeline, "layer 1 GEMM", rank):
            done[event.numbers[2]] = max(done[event.numbers[2]], event.end)
        assert all(e.ready >= done[e.numbers[2]] for e in of_kind(timeline, "reduce and send", rank))
    late = min(begin for (source, *_), begin in sent.items() if source == 1) - shown[0]
    waits = [e for e in of_kind(timeline, "layer 0 GEMM", 0) if e.begin < late < e.ready]
    # With several columns the first tile after the dispatch may be one of local rows, which keeps rank 0 busy.
    assert waits or found[0].num_cols[0] > 1, "rank 0 waits for rank 1, which begins its dispatch late"


def test_clocks_of_one_host_agree_within_the_error(found: list[Found]) -> None:
    """Both processes read the same clock, so the true offset is 0."""
    clocks = Timeline(found[0].records).clocks
    assert clocks[0] == Clock(0, 0)
    assert abs(clocks[1].offset_ns) <= clocks[1].error_ns


def test_a_full_buffer_counts_what_is_lost(recorded: dict[str, list[Found]]) -> None:
    found = recorded["tp2"][0]
    whole, lossy = Timeline(found.records), Timeline(found.lossy)
    first = min(event.epoch for event in whole.events)
    wanted = Counter((e.rank, e.work) for e in whole.events if e.epoch == first)
    kept = Counter(event.rank for event in lossy.events)
    for rank in range(2):
        total = sum(count for (owner, _), count in wanted.items() if owner == rank)
        assert lossy.records[rank].lost == total - kept[rank] > 0
    assert max(Counter((event.rank, event.block) for event in lossy.events).values()) == 2
    assert lossy.summary()["lost_events"] == sum(record.lost for record in lossy.records)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chrome_trace(recorded: dict[str, list[Found]], case: LayerCase) -> None:
    timeline = Timeline(recorded[case.name][0].records)
    trace = json.loads(json.dumps(chrome_trace(timeline.events, timeline.spans, timeline.summary())))
    entries = trace["traceEvents"]
    assert all({"ph", "name", "pid", "tid", "args"} <= entry.keys() for entry in entries)
    timed = [entry for entry in entries if entry["ph"] != "M"]
    assert entries[: len(entries) - len(timed)] == [entry for entry in entries if entry["ph"] == "M"]
    assert {entry["ph"] for entry in timed} == {"X", "i"}
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))
    assert timed[0]["ts"] >= 0
    assert all(entry["dur"] >= 0 for entry in timed if entry["ph"] == "X")
    assert {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"} == {"rank 0", "rank 1"}
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert {(entry["pid"], entry["tid"]) for entry in timed} <= named
    assert {entry["name"] for entry in timed if entry["ph"] == "i"} == {"joins the GEMM", "joins reduce and send"}
    tile = next(entry for entry in timed if entry["name"] == "layer 0 GEMM")
    assert tile["args"].keys() == {"tile", "column", "phase", "sm", "epoch"}


def test_files_and_summary(recorded: dict[str, list[Found]], tmp_path: Path) -> None:
    timeline = Timeline(recorded["ep2"][0].records)
    summary = timeline.write(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "summary.json").read_text()) == summary
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (summary["ranks"], summary["launches"], summary["events"]) == (2, 3, len(timeline.events))
    for rank in summary["per_rank"]:
        shares = [ms / rank["block_ms"] for ms in (rank["work_ms"] | rank["wait_ms"]).values()]
        assert sum(shares) + rank["idle_share"] == pytest.approx(1)
        assert set(rank["work_ms"]) == set(WORKS)
        assert 0 < rank["wait_share"] < 1


def test_off_means_no_buffer_and_nothing_recorded_is_an_error(tmp_path: Path) -> None:
    assert recording(None, 132) is None
    empty = RankRecord(torch.zeros(0, 10, dtype=torch.int64), 0, torch.zeros(1, 2, dtype=torch.int64))
    timeline = Timeline([empty])
    assert timeline.summary()["wait_share"] == 0
    with pytest.raises(ValueError, match="events=0 must be at least 1: only the 'fused' path records"):
        timeline.write(tmp_path)


NODES = LayerCase("two nodes of one rank", 2, 1, (9, 5), node_size=1, backend="cpu_shm", max_tokens=10)


def record_nodes(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A forward and a backward pass over two nodes."""
    moe = build_layer(NODES, rank, "fused")
    inputs = rank_inputs(NODES, rank)
    tokens = inputs.tokens.requires_grad_()
    with record(moe.group) as timeline:
        moe.routed_experts(tokens, *inputs.routed[1:]).backward(inputs.grad_output)
    summary = timeline.write(folder / str(rank))
    found = [event for event in timeline.events if event.rank == rank and event.block in NETWORK]
    lanes = {name: [event for event in found if event.work == name] for name in NETWORK.values()}
    assert [event.numbers[:2] for event in lanes["wait for nodes"]] == [(0, 0), (-1, 0)] * 2, "guests, then sums"
    assert [event.numbers[0] for event in lanes["send to nodes"]] == [0, 1] * 2
    assert all(event.begin <= event.end for event in found)
    for sent, waited in zip(lanes["send to nodes"][::2], lanes["wait for nodes"][::2], strict=True):
        assert sent.end <= waited.end, "own tokens leave before guests are waited for"
    assert all(launch.blocks <= recorder.INTERPRETER_BLOCKS for launch in timeline.launches)
    moe.group.close()
    return summary


def test_the_network_has_lanes_of_its_own(tmp_path: Path) -> None:
    summaries = run_ranks(record_nodes, 2, tmp_path, interpret=True)
    assert summaries[0] == summaries[1]
    assert [rank["network_ms"].keys() for rank in summaries[0]["per_rank"]] == [set(NETWORK.values())] * 2
    written = json.loads((tmp_path / "0" / "timeline.json").read_text())["traceEvents"]
    names = {(entry["pid"], entry["args"]["name"]) for entry in written if entry["name"] == "thread_name"}
    assert {(rank, name) for rank in range(2) for name in NETWORK.values()} <= names
    assert {entry["tid"] for entry in written if entry["name"] in NETWORK.values()} == NETWORK.keys()


@pytest.mark.parametrize("capacity", [0, -1, 1_000_001])
def test_capacity_has_bounds(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity} must be at least 1 and at most 1000000"):
        record(None, capacity=capacity).__enter__()  # type: ignore[arg-type]


@in_ranks(1)
def test_a_cpu_records_under_the_interpreter_only(rank: int, world_size: int) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=32)
    group = make_expert_group(moe, ParallelConfig(ep=1), max_tokens=8, dtype=torch.float32, device="cpu")
    rule = "device=cpu must be used with TRITON_INTERPRET=1: only kernels record"
    with pytest.raises(ValueError, match=rule), record(group):
        pass


@pytest.mark.slow
def test_benchmark_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    words = ["--device", "cpu", "--model", "tiny", "--ep", "2", "--tokens", "20", "--out", str(tmp_path / "out")]
    result, _ = report_of("timeline", *words, "--overlap", "comm_blocks=2,num_panels=2", torchrun=True)
    assert result["output_unchanged"] is True
    assert (result["ranks"], result["launches"], result["lost_events"]) == (2, 2, 0)
    for file in result["files"]:
        assert Path(file).stat().st_size > 0


def test_a_graph_captured_inside_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would write to the recorder's memory after the end."""
    moe = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=32)
    group = make_expert_group(moe, ParallelConfig(ep=1), max_tokens=8, dtype=torch.float32, device="cpu")
    group.workspace.recorder = recorder.Recorder.allocate(torch.device("cpu"), 8)
    assert recv_symm(group.workspace).recorder is group.workspace.recorder
    monkeypatch.setattr("comet.layer.fused.is_capturing", lambda device: True)
    with pytest.raises(ValueError, match="a CUDA graph of a layer must not be captured while it is recorded"):
        combine_symm(group.workspace)


def work(begin: int, ready: int, end: int, kind: int = 2) -> Event:
    return Event(0, 0, 7, 1, kind, (0, 0, 1), begin, ready, end)


def test_spans_of_the_worked_example() -> None:
    events = [work(0, 0, 50_000), work(30_000, 40_000, 90_000)]
    spans = [(span.name, span.begin, span.end) for span in find_spans(events)]
    assert spans == [
        ("layer 0 GEMM", 0, 30_000),
        ("wait for rows", 30_000, 40_000),
        ("layer 0 GEMM", 40_000, 50_000),
        ("layer 0 GEMM", 50_000, 90_000),
    ]


def test_spans_of_odd_cases() -> None:
    assert find_spans([]) == []
    short = [(s.name, s.begin, s.end) for s in find_spans([work(0, 900, 5_000)])]
    assert short == [("layer 0 GEMM", 0, 5_000)], "one look is no wait"
    assert find_spans([work(10, 10, 10, kind=6)]) == [], "a conversion has no length"
    covered = [work(0, 0, 9_000), work(0, 9_000, 9_500), work(9_500, 12_000, 12_000)]
    assert [s.name for s in find_spans(covered)] == ["wait for rows", "layer 0 GEMM", "wait for rows"]


@pytest.mark.parametrize("seed", range(5))
def test_random_spans_never_overlap_and_keep_all_time(seed: int) -> None:
    """Waits of the next one or two items fall into the present one, as in a pipelined loop."""
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    ends = np.cumsum(draw.integers(5_000, 20_000, 40)).tolist()
    events, reached = [], 0
    for end, before in zip(ends, [0, 0, *ends[:-2]], strict=True):
        begin = max(reached, before + int(draw.integers(0, 3_000)))
        ready = min(begin + int(draw.choice([0, 500, 4_000])), end)
        events.append(work(begin, ready, end))
        reached = ready
    spans = find_spans(events)
    assert all(before.end <= after.begin for before, after in pairwise(spans))
    assert sum(span.end - span.begin for span in spans) == ends[-1] - spans[0].begin
    waits = [event.ready - event.begin for event in events if event.ready - event.begin > 1000]
    assert [span.end - span.begin for span in spans if span.name == "wait for rows"] == waits


def test_clocks_of_the_worked_example() -> None:
    stamps = [torch.tensor([[100, 110]]), torch.tensor([[1103, 1109]])]
    assert compare_clocks(stamps) == [Clock(0, 0), Clock(1001, 8)]
    # A second barrier in which rank 1 came last leaves less.
    stamps = [torch.tensor([[100, 110], [200, 240]]), torch.tensor([[1103, 1109], [1238, 1241]])]
    assert compare_clocks(stamps)[1] == Clock((998 + 1009) // 2, 5)
    # Clocks that drift apart leave nothing: the error is half of what is missing.
    stamps = [torch.tensor([[100, 110], [200, 210]]), torch.tensor([[1100, 1110], [1300, 1310]])]
    assert compare_clocks(stamps)[1] == Clock((1090 + 1010) // 2, 40)
