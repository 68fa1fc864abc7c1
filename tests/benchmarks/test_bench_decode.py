"""The decode benchmark: its steps, its arithmetic, its rivals, and what it refuses to time."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import ALONE, CPU, TINY

from comet.config import MoEConfig, ParallelConfig
from comet.decode import warp_decode_torch
from comet.layout import ExpertLayout

import suites.decode
from baselines.decode import (
    EXPERT_CONFIGS,
    find_library,
    make_experts,
    torch_experts,
    triton_experts,
)
from lib.decode.report import draw, format_table
from lib.decode.steps import Step, Team, make_set, make_steps, open_team
from lib.report import report
from suites.decode import Checked, check_variant, compare, host_waits, measure_point, parse, timed_form
from variants.decode import configs, step_runs

SMALL = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)


def alone(config: MoEConfig) -> ExpertLayout:
    return ExpertLayout.create(config, ParallelConfig(), 0)


def steps_of(
    config: MoEConfig, num_tokens: int, routing: str = "uniform", kind: str = "bf16", sets: int = 1
) -> list[Step]:
    layout = alone(config)
    weights = [make_set(config, layout, CPU, torch.float32, seed, kind) for seed in range(sets)]
    return make_steps(config, layout, weights, num_tokens, routing)


def one_step(config: MoEConfig, num_tokens: int, routing: str, kind: str = "bf16") -> Step:
    return steps_of(config, num_tokens, routing, kind)[0]


# ---- steps, paths, arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["uniform", "hot"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_expert_centric_paths_agree_with_warp_decode(routing: str, num_tokens: int) -> None:
    config = MoEConfig(num_experts=5, top_k=2, hidden_size=32, ffn_size=48)
    step = one_step(config, num_tokens, routing)
    arguments = (step.tokens, step.ids, step.routing_weights)
    wanted = warp_decode_torch(*arguments, step.weights)
    weights = (step.set.plain.w1, step.set.plain.w2)
    for output in (torch_experts(*arguments, *weights), triton_experts(*arguments, *weights, EXPERT_CONFIGS[0])):
        assert (output - wanted).abs().max() < 1e-5
    assert (wanted - step.exact()).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "per_expert"), [
    ("bf16", 4 * 3 * 64 * 32), ("mxfp8", 3 * 64 * 32 * 33 // 32),
    ("fp8", 3 * 64 * 32 + 2 * 4), ("mxfp4", 3 * 64 * 32 * 17 // 32),
])  # fmt: skip
def test_steps_count_each_expert_once_with_its_scales(kind: str, per_expert: int) -> None:
    """The other paths and float64 get the quantised numbers."""
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=32)
    step = one_step(config, 5, "hot", kind)
    assert step.touched_bytes == len(step.ids.unique()) * per_expert
    arguments = (step.tokens, step.ids, step.routing_weights)
    wanted = warp_decode_torch(*arguments, step.weights)
    assert torch.equal(warp_decode_torch(*arguments, step.set.plain), wanted)
    assert (wanted - step.exact()).abs().max() < 1e-5


def test_steps_differ_on_one_gpu() -> None:
    """Other tokens, other routing, other weights: nothing stays in a cache."""
    first, second = steps_of(SMALL, 5, sets=2)
    assert not torch.equal(first.ids, second.ids)
    assert not torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.weights.w1, second.weights.w1)


def row_of(tokens: int, **times: float) -> dict[str, Any]:
    keys = {"model": "tiny", "weights": "bf16", "ep": 1, "tp": 1, "tokens": tokens, "mbytes": 1.0}
    return keys | {f"{name}_us": time for name, time in times.items()} | {"times_us": times}


def test_report_survives_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = row_of(1, comet=10.0, torch=20.0) | {"no_graph": {"torch": "slow"}, "failures": {}}
    bad = row_of(2) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    late = row_of(4, comet=30.0, fused=20.0) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    rows = [good, bad, late]

    def found(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"rows": len(rows)}

    report("bench_decode", iter(rows), ALONE, tmp_path, keys=("tokens",), found=found, table=format_table)
    *lines, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == json.loads((tmp_path / "bench_decode.json").read_text()) == {"rows": 3}
    with (tmp_path / "bench_decode.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["fused_us"] for row in read] == ["", "", "20.0"]  # a column only the last row has
    assert (read[0]["no_graph"], read[1]["failures"]) == ("torch: slow", "point: RuntimeError: out of memory, really")
    assert len({len(line) for line in lines[:4]}) == 1  # aligned
    assert lines[4] == "without a graph: torch: slow (at tiny, bf16, 1)"
    assert lines[5].endswith("out of memory, really (at tiny, bf16, 2; tiny, bf16, 4)")
    for name, drawn in (("all", rows), ("none", [bad])):
        draw(4.0, tmp_path / f"{name}.png", drawn)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# ---- transformers ----------------------------------------------------------------------------------------------------


def test_transformers_computes_the_same_with_its_own_code() -> None:
    pytest.importorskip("transformers.integrations.moe")
    library = find_library()
    assert library is not None
    assert library.names[0] == "eager"
    assert {"batched_mm", "grouped_mm"} <= set(library.names)
    steps = steps_of(SMALL, 9, sets=2)
    runs = library.runs(steps)
    for name in ("eager", "batched_mm", "grouped_mm"):
        for index, step in enumerate(steps):
            error, _ = compare(runs[f"transformers_{name}"](index), step.exact())
            assert error < 1e-5, name
    experts: Any = make_experts("eager", steps[0])
    assert type(experts).__module__.startswith("transformers.")
    assert experts.gate_up_proj.data_ptr() == steps[0].weights.w1.data_ptr()  # no copy


def test_without_transformers_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = [*TINY, "--tokens", "2", "--variants", "comet,transformers", "--out", str(tmp_path)]
    suites.decode.run(parse(words), ALONE)
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if "transformers" in line]
    assert line.startswith("no columns of transformers: ModuleNotFoundError: ")
    report = json.loads(output.out.splitlines()[-1])
    assert report["facts"]["transformers"] is None
    assert list(report["rows"][0]["times_us"]) == ["comet"]
    header = (tmp_path / "bench_decode.csv").read_text().splitlines()[0]
    assert "transformers_" not in header


# ---- what is timed, and what is not ----------------------------------------------------------------------------------


def test_what_waits_is_launched_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out by torch's own detector, whose mode is put back; a graph is never tried."""
    modes, captured, launched = ["warn"], [], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(suites.decode, "capture", lambda variant: captured.append(variant) or variant)

    def waits(index: int) -> torch.Tensor:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        launched.append(index)
        return torch.zeros(1)

    def breaks(index: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    cuda = torch.device("cuda")
    variant, reason = timed_form(waits, 3, cuda, may_wait=True)
    assert (reason, captured, modes) == ("makes the host wait for the device", [], ["warn", "error", "warn"])
    variant(0)
    assert launched == [0, 1, 2]
    assert timed_form(lambda index: torch.zeros(1), 3, cuda, may_wait=True)[1] == ""
    assert timed_form(waits, 3, cuda, may_wait=False)[1] == ""
    assert len(captured) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        host_waits(breaks)
    assert modes[-1] == "warn"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda exact: exact.float() * 1.001, "error 0.001 relative to float64 is above 0.0001"),
        (lambda exact: exact.float() * float("nan"), "error nan relative to float64 is above 0.0001"),
        (lambda exact: exact.item(), "RuntimeError: a Tensor with "),
    ],
)
def test_what_is_wrong_is_not_timed(wrong: Any, reason: str) -> None:
    team = Team(config=SMALL, layout=alone(SMALL), ranks=ALONE)
    exact, checked = torch.randn(3, 64, dtype=torch.float64), Checked()
    check_variant("wrong", lambda index: wrong(exact), exact, 1, team, checked)
    check_variant("right", lambda index: exact.float(), exact, 1, team, checked)
    assert list(checked.variants) == ["right"]
    assert checked.failures["wrong"].startswith(reason)


def test_more_tokens_than_warp_decode_takes() -> None:
    steps = steps_of(SMALL, 65)
    with open_team(SMALL, ParallelConfig(), max_tokens=65, wants_fused=True, ranks=ALONE) as team:
        arguments = parse("--variants comet,torch,fused --try fold=0 --rounds 1".split())
        assert list(step_runs(team, steps, arguments)) == ["torch", "fused"]
        row = measure_point(team, [step.set for step in steps], 65, arguments)
    assert set(row["times_us"]) == {"torch", "fused"}
    assert row["accuracy"]["fused"][0] < 1e-5
    assert (row["comet_us"], row["best"], row["of_roofline"], row["failures"]) == (None, None, None, {})


def test_trials_change_the_fields_they_name() -> None:
    selected, tiles = configs(SMALL, 64, torch.bfloat16, [{"tile": "16", "down.rows": "32"}]).values()
    assert tiles == replace(selected, tile=16, down=replace(selected.down, rows=32))
    selected, ahead = configs(SMALL, 1, torch.bfloat16, [{"ahead": "2", "dependent": "0"}]).values()
    assert ahead == replace(selected, ahead=2, dependent=False)


def test_a_group_that_cannot_be_built_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr("lib.decode.steps.make_expert_group", fail)
    with open_team(SMALL, ParallelConfig(), max_tokens=2, wants_fused=True, ranks=ALONE) as team:
        row = measure_point(team, [steps_of(SMALL, 2)[0].set], 2, parse("--variants comet,fused --rounds 1".split()))
    assert row["failures"] == {"group": "ValueError: no memory"}
    assert set(row["times_us"]) == {"comet"}
