"""The decode benchmark: its steps, arithmetic and rivals, what it refuses to time, ranks, and whole runs on CPUs."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_cases import ALONE, CPU, TINY, run_on_rank
from ranks import in_ranks, run_ranks
from tiers import slow

from comet.config import MoEConfig, ParallelConfig
from comet.decode import warp_decode_torch
from comet.errors import CommTimeoutError, StepFailedError
from comet.layout import ExpertLayout
from comet.tuner.timing import Timing

import suites.decode
from baselines.decode import find_library
from lib.decode import OWN, PREFIX, WEIGHTS, Team, make_set, make_steps, open_team
from lib.ranks import Ranks
from lib.suite import Point
from suites.decode import (
    OVER_RANKS,
    CheckedSteps,
    Run,
    figures,
    host_waits,
    own_runs,
    share_of,
    timed_form,
)

SMALL = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)
TWELVE = replace(SMALL, num_experts=12)


def alone(config: MoEConfig) -> ExpertLayout:
    return ExpertLayout.create(config, ParallelConfig(), 0)


# ---- steps, paths, arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "per_expert"), [
    ("bf16", 4 * 3 * 64 * 32), ("mxfp8", 3 * 64 * 32 * 33 // 32),
    ("fp8", 3 * 64 * 32 + 2 * 4), ("mxfp4", 3 * 64 * 32 * 17 // 32),
])  # fmt: skip
def test_steps_count_each_expert_once_with_its_scales(kind: str, per_expert: int) -> None:
    """Other paths and the float64 oracle get the quantised numbers."""
    config = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=32)
    weights = make_set(config, alone(config), CPU, torch.float32, 0, kind)
    (step,) = make_steps(config, alone(config), [weights], 5, "hot")
    assert step.touched_bytes == len(step.ids.unique()) * per_expert
    arguments = (step.tokens, step.ids, step.routing_weights)
    wanted = warp_decode_torch(*arguments, step.weights)
    assert torch.equal(warp_decode_torch(*arguments, step.set.plain), wanted)
    assert (wanted - step.exact()).abs().max() < 1e-5


def row_of(tokens: int, **times: float) -> dict[str, Any]:
    keys = {"model": "tiny", "weights": "bf16", "ep": 1, "tp": 1, "tokens": tokens, "mbytes": 1.0}
    return keys | {f"{name}_us": time for name, time in times.items()} | {"times_us": times}


class Given(Run):
    """The suite with rows that were measured before."""

    rows: tuple[dict[str, Any], ...] = ()

    @classmethod
    def name(cls) -> str:
        return "decode"

    def facts(self, ranks: Ranks) -> dict[str, Any]:
        return {"device": "cpu"}

    def points(self, ranks: Ranks, facts: dict[str, Any]) -> Iterator[Point]:
        for row in self.rows:
            yield Point({name: row[name] for name in ("model", "weights", "tokens")}, partial(dict, row))


def test_report_survives_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = row_of(1, comet=10.0, torch=20.0) | {"no_graph": {"torch": "slow"}, "failures": {}}
    bad = row_of(2) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    late = row_of(4, comet=30.0, fused=20.0) | {"failures": {"point": "RuntimeError: out of memory, really"}}
    rows = [good, bad, late]
    monkeypatch.setattr(Given, "rows", rows)
    Given(out=tmp_path).run(ALONE)
    *lines, line = capsys.readouterr().out.splitlines()
    kept = json.loads(line)
    assert kept == json.loads((tmp_path / "bench_decode.json").read_text())
    assert (kept["facts"]["device"], len(kept["rows"])) == ("cpu", 3)
    assert len({len(line) for line in lines[:4]}) == 1  # aligned
    assert lines[4] == "no_graph: torch: slow (at tiny bf16 1)"
    assert lines[5].endswith("out of memory, really (at tiny bf16 2; tiny bf16 4)")


def test_without_transformers_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = [*TINY, "--tokens", "2", "--variants", "comet,transformers", "--out", str(tmp_path)]
    Run.parse(words).run(ALONE)
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if "transformers" in line]
    assert line.startswith("no columns of transformers: ModuleNotFoundError: ")
    report = json.loads(output.out.splitlines()[-1])
    assert report["facts"]["transformers"] is None
    assert list(report["rows"][0]["times_us"]) == ["comet"]
    assert not any(name.startswith("transformers_") and value is not None for name, value in report["rows"][0].items())


# ---- what is timed, and what is not ----------------------------------------------------------------------------------


def test_what_waits_is_launched_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own detector finds the wait, and its mode is restored; no capture is tried."""
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


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every implementation of transformers is timed or fails for a reason. Warp decode does not take 65 tokens."""
    library = find_library()
    words = ["--weights", ",".join(WEIGHTS), "--tokens", "3,65", "--out", str(tmp_path)]
    Run.parse([*TINY, *words]).run(ALONE)
    output = capsys.readouterr()
    rows = json.loads(output.out.splitlines()[-1])["rows"]
    assert [(row["weights"], row["tokens"]) for row in rows] == [(kind, count) for kind in WEIGHTS for count in (3, 65)]
    theirs = {f"{PREFIX}{name}" for name in library.names} if library is not None else set()
    for row in rows:
        ours = {"torch", "triton0", "triton1", "triton2", "fused"} | ({"comet"} if row["tokens"] == 3 else set())
        assert set(row["failures"]) <= theirs, row["failures"]
        assert ours | theirs == {*row["times_us"], *row["failures"]}
        assert all(error < 1e-5 and cosine > 0.999996 for error, cosine in row["accuracy"].values())
        assert (row["x_transformers"] is None) == (not theirs or row["tokens"] == 65)
        assert (row["best_us"] is None) == (row["of_roofline"] is None) == (row["tokens"] == 65)
    assert output.err.count(": done in ") == 8


# ---- over ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep", "tp", "kind"), [slow(2, 1, "bf16"), slow(1, 2, "mxfp8")])
def test_run_over_ranks(tmp_path: Path, ep: int, tp: int, kind: str) -> None:
    """One rank has no token of one, and one rank has fewer tokens of five."""
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


def test_warp_decode_needs_room_for_equal_shares() -> None:
    """Three ranks need 22 slots each for 64 tokens, 66 in all, and 21 each for 63."""
    layout = layout_of(0, 3)
    team = Team(config=TWELVE, layout=layout, ranks=ALONE)
    weights = make_set(TWELVE, layout, CPU, torch.float32, 0, "bf16")
    most, fits = (make_steps(TWELVE, layout, [weights], count, "uniform") for count in (64, 63))
    assert own_runs(team, most, OWN) == {}
    assert list(own_runs(team, fits, OWN)) == ["own_nccl"]  # the others need a group
    assert own_runs(team, fits, ("own",)) == {}


@pytest.mark.slow
@in_ranks(2)
def test_what_is_wrong_on_any_rank_is_not_timed(rank: int, world_size: int) -> None:
    """``comet`` differs in the last bit only, but ranks that sample from it may part."""
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
        "fused": exact.float() * float("nan"),
    }  # fmt: skip
    checked, right = CheckedSteps(team), CheckedSteps(team)
    for name, output in outputs.items():
        checked.check(name, lambda index, output=output: output, exact, 1)
    checked.check("torch", lambda index: exact.item() if rank else exact.float(), exact, 1)
    right.check("own", lambda index: exact[mine].float(), exact, 1)
    assert [*checked.variants, *right.variants] == ["local", "own"]
    failures = checked.failures
    assert failures.pop("comet") == "ranks have different bits"
    assert failures.pop("torch").startswith("rank 1: RuntimeError: a Tensor with ")
    assert failures["fused"].startswith("error inf relative")
    assert list(failures) == ["local_nccl", "own_nccl", "own", "own_fused", "fused"]
    assert all("relative to float64 is above 0.0001" in reason for reason in failures.values())


@in_ranks(2)
def test_a_deadline_of_own_tokens_is_reported(rank: int, world_size: int) -> None:
    """The team finds the fault that a step leaves when it meets its deadline."""
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    with open_team(TWELVE, ParallelConfig(ep=2), max_tokens=4, wants_fused=False, ranks=ranks) as team:
        decode = team.decode(2, replicated=False)
        assert team.decode(2, replicated=False) is decode
        assert team.decode(1, replicated=False) is not decode
        team.check()
        dist.barrier()
        decode.fault[:3] = torch.tensor([1, 0, 1 - rank])
        with pytest.raises((CommTimeoutError, StepFailedError)) as raised:  # its own failure, or that of the other rank
            team.check()
    late = [f"rank {each} waited 30.0 s for rank {1 - each}" for each in range(2)]
    assert any(words in str(raised.value) for words in late)


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
    over_ranks = figures(timings_of(comet=0.4, local=0.38, own=0.42, own_nccl=0.6), {}, 4, 2e8, 4.0)
    assert (over_ranks["added_us"], over_ranks["own_added_us"]) == pytest.approx((5, 10))
    assert (over_ranks["own_us"], over_ranks["own_nccl_us"]) == pytest.approx((105, 150))
