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
from comet.measure.timing import Timing

import suites.decode
from baselines.decode import (
    EXPERT_CONFIGS,
    expert_counts,
    find_library,
    make_experts,
    torch_experts,
    triton_experts,
)
from lib.decode.report import draw, figures, format_table, write_results
from lib.decode.steps import Step, Team, make_set, make_steps, open_team
from lib.shapes import make_routing
from suites.decode import Checked, check_variant, compare, host_waits, measure_point, parse, timed_form
from variants.decode import Settings, configs, step_runs

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


def test_counts_example() -> None:
    assert expert_counts(torch.tensor([[2, 0], [2, 1]]), 4).tolist() == [1, 1, 2, 0]


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


def test_touched_bytes_count_an_expert_once() -> None:
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=32, ffn_size=16)
    step = one_step(config, 30, "hot")
    ids, _ = make_routing("hot", num_tokens=30, num_experts=8, top_k=2, seed=0, device="cpu")
    assert step.touched_bytes == len(set(ids.flatten().tolist())) * 3 * 32 * 16 * 4


@pytest.mark.parametrize(("kind", "per_expert"), [
    ("mxfp8", 3 * 64 * 32 * 33 // 32), ("fp8", 3 * 64 * 32 + 2 * 4), ("mxfp4", 3 * 64 * 32 * 17 // 32)
])  # fmt: skip
def test_quantised_steps(kind: str, per_expert: int) -> None:
    """Bytes count the scales; the other paths and float64 get the quantised numbers."""
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=32)
    step = one_step(config, 5, "uniform", kind)
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


def test_figures_example() -> None:
    medians = {"comet": 0.4, "triton0": 1.2, "triton1": 0.8, "dependent=1": 0.3, "transformers_eager": 4.0}
    timings = {name: Timing(median, median, median, median) for name, median in medians.items()}
    row = figures(timings, {"comet": (0.1, 0.9), "triton1": (0.2, 0.8)}, 4, 2e8, 4.0)
    assert (row["comet_us"], row["triton_us"], row["transformers_eager_us"]) == pytest.approx((100, 200, 1000))
    assert (row["best"], row["best_us"]) == ("dependent=1", pytest.approx(75))
    assert (row["tbs"], row["of_roofline"]) == pytest.approx((2e8 / 75e6, 2e8 / 75e6 / 4))
    assert (row["x_triton"], row["x_transformers"]) == pytest.approx((200 / 75, 1000 / 75))
    assert (row["torch_us"], row["x_torch"], row["added_us"], row["fused_us"]) == (None, None, None, None)
    assert (row["comet_error"], row["triton_error"], row["triton_cosine"]) == (0.1, 0.2, 0.8)
    over_ranks = {name: Timing(median, median, median, median) for name, median in (("comet", 0.4), ("local", 0.38))}
    assert figures(over_ranks, {}, 4, 2e8, 4.0)["added_us"] == pytest.approx(5)
    assert figures(over_ranks, {}, 4, 2e8, 4.0)["best"] == "comet"


def row_of(tokens: int, **times: float) -> dict[str, Any]:
    keys = {"model": "tiny", "weights": "bf16", "ep": 1, "tp": 1, "tokens": tokens, "mbytes": 1.0}
    return keys | {f"{name}_us": time for name, time in times.items()} | {"times_us": times}


def test_compare_example() -> None:
    error, cosine = compare(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]], dtype=torch.float64))
    assert (error, cosine) == pytest.approx((0.1715, 0.9947), abs=1e-4)


def test_report_survives_what_failed(tmp_path: Path) -> None:
    good = row_of(1, comet=10.0, torch=20.0) | {"no_graph": {"torch": "slow"}, "failures": {}}
    bad = row_of(2) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    late = row_of(4, comet=30.0, fused=20.0) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    rows = [good, bad, late]
    line = write_results(tmp_path, rows, {"device": "cpu"})
    assert json.loads(line) == json.loads((tmp_path / "bench_decode.json").read_text())
    with (tmp_path / "bench_decode.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["fused_us"] for row in read] == ["", "", "20.0"]  # a column only the last row has
    assert (read[0]["no_graph"], read[1]["failures"]) == ("torch: slow", "point: RuntimeError: out of memory, really")
    lines = format_table(rows).splitlines()
    assert len({len(line) for line in lines[:4]}) == 1  # aligned
    assert lines[4] == "without a graph: torch: slow (at tiny, bf16, 1)"
    assert lines[5].endswith("out of memory, really (at tiny, bf16, 2; tiny, bf16, 4)")
    for name, drawn in (("all", rows), ("none", [bad])):
        draw(tmp_path / f"{name}.png", drawn, 4.0)
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


def test_an_implementation_that_cannot_load_is_tried_once() -> None:
    pytest.importorskip("transformers.integrations.moe")
    library = find_library()
    assert library is not None
    called = []

    def missing(*_: object) -> None:
        called.append(1)
        raise ModuleNotFoundError("no kernels\nat all")

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS["absent"] = missing
    try:
        run = library._run("absent", steps_of(SMALL, 1), [torch.zeros(1, 2, dtype=torch.int64)])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^ModuleNotFoundError: no kernels$"):
                run(0)
    finally:
        del ALL_EXPERTS_FUNCTIONS["absent"]
    assert called == [1]


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
    monkeypatch.setattr(suites.decode, "capture", lambda variant, rotate: captured.append(variant) or variant)

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
        settings = Settings(variants=("comet", "torch", "fused"), trials=({"fold": "0"},), rounds=1)
        assert list(step_runs(team, steps, settings)) == ["torch", "fused"]
        row = measure_point(team, [step.set for step in steps], 65, settings)
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
        row = measure_point(team, [steps_of(SMALL, 2)[0].set], 2, Settings(variants=("comet", "fused"), rounds=1))
    assert row["failures"] == {"group": "ValueError: no memory"}
    assert set(row["times_us"]) == {"comet"}
