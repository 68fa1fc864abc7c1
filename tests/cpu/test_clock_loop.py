"""``--clocks`` of the benchmarks: each launch repeated alone, equally often on all ranks, and what the reports say."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_decode
import bench_layers
import clock_loop
import pytest
import torch
import torch.distributed as dist
from clock_cases import fake_watch
from clock_loop import Calls, clock_rows, over_ranks, repeat
from clocks import LIMITS, Clocks
from decode_points import repeat_alone
from decode_report import clock_figures
from decode_team import Team
from layer_points import Split, open_point
from points import Ranks, Settings, attempt, open_layer
from ranks import run_ranks
from report import append_csv, cell, table_of

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.group import make_expert_group
from comet.layout import ExpertLayout
from comet.tuner.timing import Timing

CPU = torch.device("cpu")
ALONE = Ranks(0, CPU, None)
MODEL = MoEConfig(num_experts=4, top_k=2, hidden_size=128, ffn_size=32)
SAMPLED = {"sm_mhz": 1410, "memory_mhz": 3201, "watts": 698.52, "celsius": 61, "limits": "software power cap"}
BRIEFLY = 0.3  # seconds that a launch is repeated here


def timing(milliseconds: float) -> Timing:
    return Timing(milliseconds, milliseconds, milliseconds)


# ---- how often -------------------------------------------------------------------------------------------------------


def test_calls_example() -> None:
    assert Calls.lasting(2.0, 1.0) == Calls(settling=150, counted=350, chunk=5)
    assert Calls.lasting(4000.0, 1.0) == Calls(1, 1, 1)
    assert Calls.lasting(0.01, 1.0) == Calls(30_000, 70_000, 1000)


@pytest.mark.parametrize("seed", range(5))
def test_two_chunks_wait_at_most_and_the_device_never_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    number, chunk = draw.randrange(1, 60), draw.randrange(1, 12)
    started: list[int] = []
    read: list[int] = []

    def start_call(variant: Callable[[int], None], index: int, opening: Callable[[], None], _: Any) -> Any:
        opening()
        variant(index)
        mine = len(started)
        started.append(mine)
        assert len(started) - len(read) <= 2 * chunk

        def read_ms() -> float:
            assert len(started) - mine > chunk or len(started) == number  # a whole chunk is behind it
            read.append(mine)
            return float(mine)

        return read_ms

    monkeypatch.setattr(clock_loop, "start_call", start_call)
    order: list[str] = []
    times = repeat(lambda index: order.append(f"call {index}"), number, chunk, lambda: order.append("opening"), CPU)
    assert times == started == read == list(range(number))
    assert order == ["opening", "call 0"] * number


def calls_on_rank(rank: int, world_size: int, folder: str) -> tuple[int, int, list[dict[str, Any]]]:
    """Launches that wait for the other rank, whose clock says another time; with unequal numbers one would hang."""
    made = [0, 0]
    token = torch.zeros(1)

    def variant(index: int) -> None:
        made[0] += 1
        dist.all_reduce(token)

    def opening() -> None:
        made[1] += 1

    ranks = Ranks(rank, CPU, dist.group.WORLD)
    rows = clock_rows(
        {"waits": variant},
        {"waits": timing(5.0 - 2 * rank)},
        command=fake_watch(make_folder(folder, rank), f"{1400 - rank}, 3201, {690.0 + rank}, 61, {hex(4 << rank)}"),
        opening=opening,
        guard=lambda action: attempt(action, ranks),
        ranks=ranks,
    )
    return made[0], made[1], rows


def make_folder(folder: str, rank: int) -> Path:
    path = Path(folder) / str(rank)
    path.mkdir()
    return path


def test_all_ranks_make_equally_many_calls(tmp_path: Path) -> None:
    found = run_ranks(calls_on_rank, 2, str(tmp_path))
    assert [made[:2] for made in found] == [(60 + 140,) * 2] * 2  # of 5 ms, the time of the slower rank
    for (row,) in (rows for _, _, rows in found):
        assert (row["launch"], row["failures"], row["limits"]) == ("waits", "", "software power cap, hardware slowdown")
        assert (row["sm_mhz"], row["memory_mhz"], row["watts"]) == (1399, 3201, 691)
    assert found[0][2][0]["repeated_ms"] == found[1][2][0]["repeated_ms"] > 0


def reduced(rank: int, world_size: int) -> tuple[float, Clocks]:
    mine = [
        (2.0, Clocks(1410, None, 690, 60, ("software power cap",))),
        (3.0, Clocks(1380, None, None, 50, ("idle", "other"))),
    ]
    return over_ranks(*mine[rank], Ranks(rank, CPU, dist.group.WORLD))


def test_the_worst_of_the_ranks_is_told() -> None:
    worst = (3.0, Clocks(1380, None, 690, 60, ("idle", "software power cap", "other")))
    assert run_ranks(reduced, 2) == [worst, worst]
    alone = Clocks(1410, 3201, 690, 60, LIMITS)
    assert over_ranks(2.0, alone, ALONE) == (2.0, alone)


# ---- what fails ------------------------------------------------------------------------------------------------------


def rows_of(variants: dict[str, Callable[[int], None]], command: tuple[str, ...]) -> list[dict[str, Any]]:
    with patch.object(clock_loop, "SECONDS", BRIEFLY):
        return clock_rows(
            variants,
            dict.fromkeys(variants, timing(5.0)),
            command=command,
            opening=lambda: None,
            guard=lambda action: attempt(action, ALONE),
            ranks=ALONE,
        )


def works(index: int) -> None:
    torch.zeros(2**18).sum()


def test_a_launch_that_fails_does_so_alone(tmp_path: Path) -> None:
    def fails(index: int) -> None:
        raise RuntimeError("no such kernel")

    first, second = rows_of({"fails": fails, "works": lambda index: clock_loop.time.sleep(0.005)}, fake_watch(tmp_path))
    assert first == {"launch": "fails", "ms": 5.0, "failures": "RuntimeError: no such kernel"}
    assert second.pop("repeated_ms") >= 5
    assert second == {"launch": "works", "ms": 5.0, "failures": ""} | SAMPLED
    table = table_of([first, second], ("launch", *clock_loop.FIGURES), cell).splitlines()
    assert table[0].split() == ["launch", "ms", "sm_mhz", "memory_mhz", "watts", "celsius", "limits", "failures"]
    assert table[1].split()[:3] == ["fails", "5", "-"]
    assert table[2].split()[:5] == ["works", "5", "1410", "3201", "699"]


def test_without_samples_nothing_is_repeated() -> None:
    (row,) = rows_of({"works": lambda _: pytest.fail("repeated")}, ("false",))
    assert row["launch"] == ""
    assert row["failures"].startswith("ValueError: start_s=60.0: false must print a sample in that time")


# ---- the option in the benchmarks ------------------------------------------------------------------------------------


def layers_on_rank(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    parallel = ParallelConfig(ep=world_size)
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    group = make_expert_group(MODEL, parallel, max_tokens=64, dtype=torch.float32, device=CPU, timeout_s=30.0)
    with (
        open_layer(MODEL, Settings(parallel=parallel, max_tokens=64, variants=()), ranks) as layer,
        patch.object(clock_loop, "SECONDS", BRIEFLY),
    ):
        tries = [OverlapConfig(), OverlapConfig(comm_blocks=8)]
        point = open_point(layer, group, 64, "uniform", tries, ranks)
        watch = fake_watch(make_folder(folder, rank))
        rows, _, clocks = bench_layers.measure_point(point, ranks, rounds=1, compare=False, watch=watch)
    group.close()
    return rows, clocks


def test_every_launch_of_a_layer_has_its_clocks(tmp_path: Path) -> None:
    launches = {"plan", "dispatch", "gemm0", "gemm1", "combine"}
    launches |= {name for blocks in (8, 16) for name in Split(blocks, 2, 2).launches()}
    assert len(launches) == 9
    for rows, clocks in run_ranks(layers_on_rank, 2, str(tmp_path)):
        assert [row["failures"] for row in rows] == ["", ""]
        assert {row["launch"] for row in clocks} == launches
        for row in clocks:
            assert row["repeated_ms"] > 0
            assert {name: row[name] for name in SAMPLED} == SAMPLED
            assert row["failures"] == ""
        assert {row["ms"] for row in clocks} >= {row["gemm0_ms"] for row in rows}


def test_the_layers_report_has_a_table_a_csv_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"model": "tiny", "tokens": 64, "ep": 1, "tp": 1, "routing": "uniform"}
    clocks = [keys | {"launch": "gemm0", "ms": 1.25, "repeated_ms": 1.5, "failures": ""} | SAMPLED]
    append_csv(tmp_path / "clocks.csv", clocks, bench_layers.CLOCK_COLUMNS)
    (read,) = csv.DictReader((tmp_path / "clocks.csv").open())
    assert (read["launch"], read["sm_mhz"], read["limits"]) == ("gemm0", "1410", "software power cap")
    bench_layers.report(bench_layers.Measured([keys], [], clocks), {}, tmp_path)
    *_, names, row, last = capsys.readouterr().out.splitlines()
    wanted = "model tokens launch ms repeated_ms sm_mhz memory_mhz watts celsius limits"
    assert names.split() == wanted.split()
    assert row.split() == "tiny 64 gemm0 1.25 1.5 1410 3201 699 61 software power cap".split()
    assert json.loads((tmp_path / "bench_layers.json").read_text())["clocks"] == clocks
    assert "clocks" not in json.loads(last)


def test_clock_figures_example() -> None:
    row = clock_figures({"launch": "comet", "ms": 0.4, "repeated_ms": 0.5, "watts": 400.0}, 4, 2e8, 4.0)
    us = {name: row.pop(name) for name in ("us", "repeated_us", "repeated_of_roof")}
    assert us == pytest.approx({"us": 100, "repeated_us": 125, "repeated_of_roof": 0.4})
    assert row == {"launch": "comet", "watts": 400.0}
    assert clock_figures({"launch": "", "failures": "no"}, 4, 2e8, 4.0) == {"launch": "", "failures": "no"}


@pytest.mark.slow
def test_decode_with_clocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(clock_loop, "SECONDS", BRIEFLY)
    monkeypatch.setattr(bench_decode, "watch_command", lambda device, speaks: fake_watch(tmp_path))
    words = ["--device", "cpu", "--models", "tiny", "--rounds", "2", "--tokens", "1,3", "--variants", "comet,torch"]
    bench_decode.run(bench_decode.parse([*words, "--clocks", "--out", str(tmp_path)]), ALONE)
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    for row in report["rows"]:
        assert row["failures"] == {}
        assert [each["launch"] for each in row["clocks"]] == list(row["times_us"]) == ["comet", "torch"]
        for each in row["clocks"]:
            assert {name: each[name] for name in SAMPLED} == SAMPLED
            assert each["us"] == pytest.approx(row["times_us"][each["launch"]])
            rate = row["mbytes"] / each["repeated_us"]
            assert each["repeated_of_roof"] == pytest.approx(rate / report["facts"]["read_roof_tbs"])
    with (tmp_path / "bench_decode_clocks.csv").open() as file:
        read = [(line["tokens"], line["launch"], line["sm_mhz"]) for line in csv.DictReader(file)]
    assert read == [(tokens, name, "1410.0") for tokens in "13" for name in ("comet", "torch")]
    assert "clocks" not in (tmp_path / "bench_decode.csv").read_text().splitlines()[0]
    names = "model weights ep tp tokens launch us repeated_us repeated_of_roof sm_mhz memory_mhz watts celsius limits"
    assert names.split() in [line.split() for line in lines]


def test_a_fault_of_the_ranks_is_found_with_the_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Team) -> None:
        raise RuntimeError("rank 0 waited for rank 1")

    monkeypatch.setattr(clock_loop, "SECONDS", BRIEFLY)
    monkeypatch.setattr(Team, "check", check)
    team = Team(config=MODEL, layout=ExpertLayout.create(MODEL, ParallelConfig(), 0), ranks=ALONE)
    (row,) = repeat_alone({"comet": works}, {"comet": timing(5.0)}, fake_watch(tmp_path), team)
    assert row["failures"] == "RuntimeError: rank 0 waited for rank 1"


@pytest.mark.parametrize("benchmark", [bench_layers, bench_decode])
def test_the_option_needs_a_gpu(benchmark: Any, tmp_path: Path) -> None:
    parsed = [benchmark.parse(options) for options in ([], ["--clocks"])]
    arguments = [found[0] if isinstance(found, tuple) else found for found in parsed]
    assert [found.clocks for found in arguments] == [False, True]
    arguments[1].out = tmp_path
    inputs = parsed[1] if isinstance(parsed[1], tuple) else (parsed[1],)
    with pytest.raises(ValueError, match="clocks=True needs an NVIDIA GPU: device=cpu is none"):
        benchmark.run(*inputs, ALONE)
