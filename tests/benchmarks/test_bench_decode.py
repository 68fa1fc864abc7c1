"""The decode benchmark: its steps, arithmetic and rivals, what it refuses to time, ranks, and whole runs on CPUs."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_cases import ALONE, CPU, TINY, report_of, run_on_rank
from ranks import run_ranks

from comet.config import MoEConfig, ParallelConfig
from comet.decode import warp_decode_torch
from comet.errors import CommTimeoutError, StepFailedError
from comet.layout import ExpertLayout
from comet.measure.timing import Timing

import suites.decode
from baselines.decode import (
    EXPERT_CONFIGS,
    find_library,
    make_experts,
    torch_experts,
    triton_experts,
)
from lib.decode import OWN, Step, Team, draw, figures, format_table, make_set, make_steps, open_team
from lib.ranks import Ranks
from lib.report import report
from suites.decode import (
    OVER_RANKS,
    Checked,
    check_variant,
    compare,
    host_waits,
    measure_point,
    own_runs,
    parse,
    share_of,
    slots_of,
    step_runs,
    timed_form,
)

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
        arguments = parse("--variants comet,torch,fused --rounds 1".split())
        assert list(step_runs(team, steps, arguments)) == ["torch", "fused"]
        row = measure_point(team, [step.set for step in steps], 65, arguments)
    assert set(row["times_us"]) == {"torch", "fused"}
    assert row["accuracy"]["fused"][0] < 1e-5
    assert (row["comet_us"], row["best_us"], row["of_roofline"], row["failures"]) == (None, None, None, {})


TWELVE = replace(SMALL, num_experts=12)
SETS = 2

# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_on_a_cpu(tmp_path: Path) -> None:
    """All variants; of transformers every implementation is timed, or fails for a reason."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions
    except ImportError:
        functions = None
    words = ["--weights", "bf16,mxfp8,fp8,mxfp4", "--tokens", "1,3", "--out", str(tmp_path)]
    run, done = report_of("decode", *TINY, *words)
    points = [(row["weights"], row["tokens"]) for row in run["rows"]]
    assert points == [(kind, tokens) for kind in ("bf16", "mxfp8", "fp8", "mxfp4") for tokens in (1, 3)]
    library = {f"transformers_{name}" for name in ("eager", *functions)} if functions is not None else set()
    known = {"comet", "torch", "triton0", "triton1", "triton2", "fused"}
    for row in run["rows"]:
        assert all(name.startswith("transformers_") for name in row["failures"]), row["failures"]
        assert known == {name for name in row["times_us"] if not name.startswith("transformers_")}
        assert all(error < 1e-5 and cosine > 0.999996 for error, cosine in row["accuracy"].values())
        assert library == {name for name in {*row["times_us"], *row["failures"]} if name.startswith("transformers_")}
        assert (row["x_transformers"] is None) == (not library)
    with (tmp_path / "bench_decode.csv").open() as file:
        assert [line["tokens"] for line in csv.DictReader(file)] == 4 * ["1", "3"]
    assert (tmp_path / "bench_decode.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.count(": done in ") == 8


# ---- over ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "tp", "kind"), [(2, 1, "bf16"), (1, 2, "mxfp8")])
def test_run_over_ranks(tmp_path: Path, ep: int, tp: int, kind: str) -> None:
    words = ["--ep", str(ep), "--tp", str(tp), "--tokens", "1,5,70", "--weights", kind, "--out", str(tmp_path)]
    run_ranks(run_on_rank, 2, "decode", [*TINY, *words])
    report = json.loads((tmp_path / "bench_decode.json").read_text())
    rows = report["rows"]
    assert [(row["ep"], row["tp"], row["tokens"]) for row in rows] == [(ep, tp, count) for count in (1, 5, 70)]
    assert report["facts"]["sets"] == 8
    for row in rows:
        names = {*OVER_RANKS} if row["tokens"] <= 64 else {"fused", "own_fused"}
        assert (row["failures"], set(row["times_us"]), set(row["accuracy"])) == ({}, names, names)
        assert all(error < 1e-5 and cosine > 0.999996 for error, cosine in row["accuracy"].values())
    if tp == 2:
        assert rows[0]["mbytes"] == pytest.approx(2 * 3 * 128 * 64 * 33 / 32 / 1e6)  # two experts, half of each


def layout_of(rank: int, ep: int, tp: int = 1) -> ExpertLayout:
    return ExpertLayout(num_experts=12, top_k=2, ep=ep, tp=tp, rank=rank)


def rank_steps(layout: ExpertLayout, num_tokens: int, kind: str = "bf16") -> list[Step]:
    sets = [make_set(TWELVE, layout, CPU, torch.float32, seed, kind) for seed in range(SETS)]
    return make_steps(TWELVE, layout, sets, num_tokens, "uniform")


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_warp_decode_needs_room_for_equal_shares() -> None:
    """64 tokens of three ranks are 22 slots of each, which are 66; 63 are 21 of each."""
    layout = layout_of(0, 3)
    team = Team(config=TWELVE, layout=layout, ranks=ALONE)
    assert own_runs(team, rank_steps(layout, 64), OWN) == {}
    assert list(own_runs(team, rank_steps(layout, 63), OWN)) == ["own_nccl"]  # the others need a group
    assert own_runs(team, rank_steps(layout, 63), ("own",)) == {}


# ---- over ranks ------------------------------------------------------------------------------------------------------


def run_shares(rank: int, world_size: int, tp: int, counts: list[int], kind: str) -> list[str]:
    """Every variant's output of every step against this rank's tokens of the whole one; also the bits of ``comet``."""
    parallel = ParallelConfig(ep=world_size // tp, tp=tp)
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    timed = []
    with open_team(TWELVE, parallel, max_tokens=max(counts), wants_fused=False, ranks=ranks) as team:
        for count in counts:
            steps, mine = rank_steps(team.layout, count, kind), share_of(count, team.layout)
            assert torch.equal(steps[0].ids, steps[1].ids), "the same rank is the slowest in every step"
            exact = [team.total(step.exact()) for step in steps]
            runs = step_runs(
                team, steps, parse(["--ep", "2", "--tokens", str(max(counts)), "--variants", ",".join(("comet", *OWN))])
            )
            checked = Checked()
            for name, run in runs.items():
                for index in reversed(range(SETS)):
                    output = run(index)
                    wanted = exact[index][mine] if name in OWN else exact[index]
                    assert output.shape == wanted.shape, f"{name}, rank {rank}, {count} tokens"
                    assert torch.allclose(output.double(), wanted, atol=1e-5), f"{name}, rank {rank}, {count} tokens"
                    if name == "own":
                        assert torch.equal(output, runs["comet"](index)[mine]), f"rank {rank}, {count} tokens"
                check_variant(name, run, exact[0], SETS, team, checked)
            assert checked.failures == {}
            assert all(error < 1e-5 for error, _ in checked.accuracy.values())
            timed.append(" ".join(checked.variants))
        most = {(max(counts), True)} | {(slots_of(count, team.layout), False) for count in counts}
        assert set(team.decodes) == most
    return timed


@pytest.mark.parametrize(("world_size", "tp", "kind"), [(3, 1, "bf16"), (2, 2, "mxfp8")])
def test_each_rank_gets_the_output_of_its_tokens(world_size: int, tp: int, kind: str) -> None:
    """Equal shares, unequal ones, ranks without any; steps of one object in both orders."""
    found = run_ranks(run_shares, world_size, tp, [1, 3, 4, 12], kind)
    assert found == [["comet own own_nccl own_fused"] * 4] * world_size


def wrong_outputs(rank: int, world_size: int) -> tuple[list[str], dict[str, str]]:
    """Wrong on one rank alone; of ``comet`` only the last bit, but ranks that sample from it may part."""
    layout = layout_of(rank, world_size)
    team = Team(config=TWELVE, layout=layout, ranks=Ranks(rank, CPU, dist.group.WORLD))
    exact = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, others = share_of(4, layout), share_of(4, layout_of(1 - rank, world_size))
    one_token, one_bit = exact[mine].float(), exact.float()
    one_token[1] *= 1 + 0.01 * rank
    one_bit[0, 0] *= 1 + rank * 2**-22
    outputs = {
        "comet": one_bit, "local_nccl": exact.float() * (1 + rank), "own_nccl": exact[others].float(),
        "own": one_token, "own_fused": exact[mine].float() * (1 - rank), "local": exact.float() / 2,
    }  # fmt: skip
    checked = Checked()
    for name, output in outputs.items():
        check_variant(name, lambda index, output=output: output, exact, 1, team, checked)
    right = Checked()
    check_variant("own", lambda index: exact[mine].float(), exact, 1, team, right)
    return [*checked.variants, *right.variants], checked.failures


def test_what_is_wrong_on_one_rank_is_not_timed() -> None:
    first, second = run_ranks(wrong_outputs, 2)
    assert first == second
    timed, failures = first
    assert timed == ["local", "own"]
    assert failures.pop("comet") == "ranks have different bits"
    assert list(failures) == ["local_nccl", "own_nccl", "own", "own_fused"]
    assert all("relative to float64 is above 0.0001" in reason for reason in failures.values())


def late_rank(rank: int, world_size: int) -> str:
    """What a step's spin leaves behind when it meets its deadline is found by the team."""
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    with open_team(TWELVE, ParallelConfig(ep=2), max_tokens=4, wants_fused=False, ranks=ranks) as team:
        decode = team.decode(2, replicated=False)
        assert team.decode(2, replicated=False) is decode
        assert team.decode(1, replicated=False) is not decode
        team.check()
        dist.barrier()
        decode.fault[:3] = torch.tensor([1, 0, 1 - rank])
        with pytest.raises((CommTimeoutError, StepFailedError)) as raised:  # its own, or the one the other told it of
            team.check()
    return str(raised.value)


def test_a_deadline_of_own_tokens_is_reported() -> None:
    found = run_ranks(late_rank, 2)
    late = [f"rank {rank} waited 30.0 s for rank {1 - rank}" for rank in range(2)]
    assert all(late[0] in words or late[1] in words for words in found)


# ---- what it says ----------------------------------------------------------------------------------------------------


def timings_of(**medians: float) -> dict[str, Timing]:
    return {name: Timing(median, median, median, median) for name, median in medians.items()}


def test_figures_example() -> None:
    timings = timings_of(comet=0.4, triton0=1.2, triton1=0.8, transformers_eager=4.0)
    row = figures(timings, {"comet": (0.1, 0.9), "triton1": (0.2, 0.8)}, 4, 2e8, 4.0)
    assert (row["comet_us"], row["triton_us"], row["transformers_eager_us"]) == pytest.approx((100, 200, 1000))
    assert (row["best_us"], row["tbs"], row["of_roofline"]) == pytest.approx((100, 2, 0.5))
    assert (row["x_triton"], row["x_transformers"]) == pytest.approx((2, 10))
    assert (row["torch_us"], row["x_torch"], row["added_us"], row["fused_us"]) == (None, None, None, None)
    assert (row["comet_error"], row["triton_error"], row["triton_cosine"]) == (0.1, 0.2, 0.8)


def test_own_figures_example() -> None:
    timings = timings_of(comet=0.4, local=0.38, own=0.42, own_nccl=0.6, own_fused=0.3)
    row = figures(timings, {}, 4, 2e8, 4.0)
    assert (row["added_us"], row["own_added_us"]) == pytest.approx((5, 10))
    assert (row["own_us"], row["own_nccl_us"], row["own_fused_us"]) == pytest.approx((105, 150, 75))
    assert row["best_us"] == row["comet_us"]
    without = figures({"own": timings["own"]}, {}, 4, 2e8, 4.0)
    assert (without["own_us"], without["own_added_us"], without["best_us"]) == (pytest.approx(105), None, None)
