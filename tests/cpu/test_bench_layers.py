"""The per-layer benchmark: its figures, its grid, launches that fail or hang, and one run end to end on CPUs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_layers import default_grid, measure_point, parse
from late import stopped
from layer_launches import checked_launches
from layer_points import Split, open_point
from layer_report import COLUMNS, format_table, make_rows, overlap_figures, summary
from overlap import parse_overlap
from points import Ranks, Settings, open_layer
from ranks import run_ranks
from report import append_csv

from comet import twin
from comet.comm import Communicator
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.group import make_expert_group
from comet.tuner.timing import Timing

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Two panels of 256 columns; two ranks have two phases whatever is asked for.
MODEL = MoEConfig(num_experts=4, top_k=2, hidden_size=128, ffn_size=32)
TRIES = [
    OverlapConfig(),
    OverlapConfig(comm_blocks=8),
    OverlapConfig(num_panels=1),
    OverlapConfig(num_phases=4),
    OverlapConfig(comm_blocks=0, transport="copy"),
]
DEFAULT, FEW_BLOCKS, ONE_PANEL = Split(16, 2, 2), Split(8, 2, 2), Split(16, 1, 2)
COPIED = DEFAULT._replace(transport="copy")
PIECES = {"plan", "dispatch", "gemm0", "gemm1", "combine"}


def timings(**medians: float) -> dict[str, Timing]:
    names = {"layer0": DEFAULT.launches()[0], "layer1": DEFAULT.launches()[1]}
    return {names.get(name, name): Timing(value, value, value) for name, value in medians.items()}


def test_overlap_figures_example() -> None:
    assert overlap_figures(5.0, 4.0, 2.0) == (0.8, 0.5)
    assert overlap_figures(5.0, 1.0, 4.0) == (0.8, 0.0)
    assert overlap_figures(8.0, 4.0, 2.0) == (0.5, -1.0)
    assert overlap_figures(5.0, None, 2.0) == (None, None)


def test_launches_are_named_by_what_they_depend_on() -> None:
    assert str(Split(16, 4, 2)) == "comm_blocks=16,num_panels=4,num_phases=2,beside=1,transport=push"
    assert DEFAULT.launches()[0] == ONE_PANEL.launches()[0]
    in_turn = DEFAULT._replace(beside=0)  # in Triton, whatever the default runs in
    assert len({split.launches()[0] for split in (DEFAULT, FEW_BLOCKS, Split(16, 2, 4), in_turn)}) == 4
    assert len({split.launches()[1] for split in (DEFAULT, FEW_BLOCKS, ONE_PANEL, Split(16, 2, 4))}) == 4
    assert COPIED.launches()[0] == COPIED._replace(comm_blocks=8).launches()[0] != DEFAULT.launches()[0]
    assert COPIED.launches()[1] == DEFAULT.launches()[1]
    assert len({split.plan for split in (DEFAULT, FEW_BLOCKS, COPIED, COPIED._replace(num_phases=4))}) == 3


def test_default_grid_changes_one_setting_at_a_time() -> None:
    grid = default_grid()
    default = OverlapConfig()
    assert grid[0] == default
    assert len(set(grid)) == len(grid) == 9
    for overlap in grid[1:]:
        assert sum(getattr(overlap, name) != getattr(default, name) for name in Split._fields) == 1


def test_tries_come_after_the_default() -> None:
    arguments, settings = parse(["--ep", "4", "--try", "comm_blocks=8", "--try", "num_panels=2,num_phases=3"])
    assert arguments.tries == [OverlapConfig(), OverlapConfig(comm_blocks=8), OverlapConfig(num_panels=2, num_phases=3)]
    assert settings.max_tokens == 8192
    assert parse([])[0].tries == default_grid()
    assert parse_overlap("transport=copy,comm_blocks=0", "try") == OverlapConfig(transport="copy", comm_blocks=0)


@pytest.mark.parametrize(
    "text",
    [
        "comm_blocks",
        "comm_blocks=",
        "comm_blocks=-1",
        "block_rows=64",
        "",
        "num_panels=2,",
        "transport=",
        "transport=1",
    ],
)
def test_a_try_must_name_a_setting_and_a_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"try='.*' must be comm_blocks=N, num_panels=N, num_phases=N, beside=0 or tr"):
        parse_overlap(text, "try")


def test_a_try_obeys_the_rules_of_the_settings() -> None:
    with pytest.raises(ValueError, match=r"comm_blocks=0 must be at least 1"):
        parse_overlap("comm_blocks=0", "try")
    with pytest.raises(ValueError, match=r"transport='fly' must be 'push' or 'copy'"):
        parse_overlap("transport=fly", "try")


def test_rows_share_the_pieces_and_mark_the_best() -> None:
    measured = timings(layer0=5, gemm0=4, dispatch=2, layer1=4, gemm1=3, combine=2, plan=0.16)
    measured[FEW_BLOCKS.launches()[0]] = Timing(4, 4, 4)
    measured[FEW_BLOCKS.launches()[1]] = Timing(4.5, 4.5, 4.5)
    rows = make_rows([DEFAULT, FEW_BLOCKS, ONE_PANEL], measured, {str(ONE_PANEL): "RuntimeError: no", "plan": "odd"})
    assert [row["layer0_ms"] for row in rows] == [5, 4, 5]
    assert [row["layer1_ms"] for row in rows] == [4, 4.5, None]
    assert [row["plan_ms"] for row in rows] == [0.02] * 3
    assert [row["gemm0_ms"] for row in rows] == [4, 4, 4]
    assert [row["efficiency0"] for row in rows] == [0.8, 1.0, 0.8]
    assert [row["hidden1"] for row in rows] == [0.5, 0.25, None]
    assert [row["best"] for row in rows] == ["", "*", ""]
    assert [row["failures"] for row in rows] == ["plan: odd"] * 2 + [f"{ONE_PANEL}: RuntimeError: no; plan: odd"]


def test_reports_survive_missing_figures(tmp_path: Path) -> None:
    rows = make_rows([DEFAULT], timings(layer0=5.0), {})
    rows += make_rows([DEFAULT], timings(layer0=5, gemm0=4, dispatch=2, layer1=4, gemm1=3, combine=2), {})
    rows += [{"model": "tiny", "failures": "point: no"}]
    table = format_table(rows).splitlines()
    assert len({len(line) for line in table}) == 1
    assert "point: no" in table[3]
    assert "plan_ms" not in table[0]
    for _ in range(2):
        append_csv(tmp_path / "rows.csv", rows, COLUMNS)
    with (tmp_path / "rows.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == 6
    assert tuple(read[0]) == COLUMNS
    found = summary(rows, {"device": "cpu"})
    assert found["geometric_mean"] == {"efficiency0": pytest.approx(0.8), "efficiency1": pytest.approx(0.75)}
    assert len(found["best"]) == 1
    assert summary(rows[:1], {})["geometric_mean"] == {"efficiency0": None, "efficiency1": None}


def measure(rank: int, world_size: int, routing: str, trouble: str) -> dict[str, Any]:
    """What one rank finds; ``trouble`` says which launch goes wrong, and how."""
    parallel = ParallelConfig(ep=world_size)
    ranks = Ranks(rank, CPU, dist.group.WORLD if world_size > 1 else None)
    group = make_expert_group(MODEL, parallel, max_tokens=200, dtype=torch.float32, device=CPU)
    with open_layer(MODEL, Settings(parallel=parallel, max_tokens=200, variants=()), ranks) as layer:
        point = open_point(layer, group, 200, routing, TRIES, ranks)
        if trouble:
            make_trouble(point.paths, trouble, rank, group.comm)
        failures: dict[str, str] = {}
        launches = checked_launches(point, ranks, failures)
        first = dict(failures)
        rows = measure_point(point, ranks, rounds=1)
    group.close()
    return {"launches": set(launches), "failures": first, "rows": rows}


def make_trouble(paths: dict[Split, Any], trouble: str, rank: int, comm: Communicator) -> None:
    """Replace the functions of one split."""

    def layer0(*args: Any, **keywords: Any) -> Any:
        if trouble == "raises":
            raise RuntimeError(f"rank {rank} gave up")
        with stopped(rank, comm) if trouble == "stops" else nullcontext():
            hidden, pre = twin.layer0(*args, **keywords)
        return (hidden + 1e-3 if trouble == "differs" and rank == 1 else hidden), pre

    def silent(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError(f"rank {rank} sends nothing")

    broken = {"first raises": {"layer0": silent}, "no dispatch": {"dispatch": silent}}.get(trouble, {"layer0": layer0})
    split = DEFAULT if trouble in ("first raises", "no dispatch") else FEW_BLOCKS
    paths[split].ops = SimpleNamespace(**(vars(twin) | broken))


@pytest.mark.parametrize("routing", ["uniform", "hot"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_launch_runs_and_agrees(world_size: int, routing: str) -> None:
    for found in run_ranks(measure, world_size, routing, ""):
        assert found["failures"] == {}
        assert found["launches"] >= PIECES
        assert len(found["rows"]) == 4  # phases beyond the ranks are no other split
        for row in found["rows"]:
            assert row["failures"] == ""
            assert all(row[name] > 0 for name in COLUMNS if name.endswith("_ms"))
        assert [row["best"] for row in found["rows"]].count("*") == 1


@pytest.mark.parametrize(
    ("trouble", "name", "reasons"),
    [
        ("raises", str(FEW_BLOCKS), ("RuntimeError: rank 0 gave up", "RuntimeError: rank 1 gave up")),
        (
            "stops",
            str(FEW_BLOCKS),
            ("CommTimeoutError: rank 0 waited 1.0 s for rank 1", "RuntimeError: rank 1 gave up"),
        ),
        ("differs", str(FEW_BLOCKS), (f"differs from {DEFAULT}", f"differs from {DEFAULT}")),
        ("first raises", str(DEFAULT), ("RuntimeError: rank 0 sends", "RuntimeError: rank 1 sends")),
        ("no dispatch", "dispatch", ("RuntimeError: rank 0 sends", "RuntimeError: rank 1 sends")),
    ],
)
def test_a_failure_is_named_and_the_others_go_on(trouble: str, name: str, reasons: tuple[str, str]) -> None:
    found = run_ranks(measure, 2, "uniform", trouble)
    for rank, reason in enumerate(reasons):
        failures, rows = found[rank]["failures"], found[rank]["rows"]
        assert list(failures) == [name]
        assert failures[name].startswith(reason)
        assert found[rank]["launches"] >= PIECES - {name}
        timed = [row["layer1_ms"] is not None for row in rows]
        assert timed == [str(Split(*(row[field] for field in Split._fields))) != name for row in rows]


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "benchmarks" / "bench_layers.py"), "--device", "cpu", "--models", "tiny", "--ep", "2"]
    options = ["--tokens", "32,16", "--routing", "zipf", "--rounds", "2", "--try", "comm_blocks=8"]
    done = subprocess.run(
        [*command, *script, *options, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(row["model"], row["tokens"]) for row in found["best"]] == [("tiny", 32), ("tiny", 16)]
    rows = json.loads((tmp_path / "bench_layers.json").read_text())["rows"]
    assert [(row["tokens"], row["comm_blocks"]) for row in rows] == [(32, 16), (32, 8), (16, 16), (16, 8)]
    assert all(row["failures"] == "" for row in rows)
    with (tmp_path / "bench_layers.csv").open() as file:
        assert [row["routing"] for row in csv.DictReader(file)] == ["zipf"] * 4
    assert len(done.stdout.splitlines()) == 6
