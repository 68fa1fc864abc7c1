"""Whole runs of the decode benchmark on CPUs, what ranks must agree on, and tokens of the ranks' own."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_cases import ALONE, CPU, TINY, report_of, run_on_rank
from ranks import run_ranks

from comet.config import MoEConfig, ParallelConfig
from comet.errors import CommTimeoutError, StepFailedError
from comet.layout import ExpertLayout
from comet.measure.timing import Timing
from comet.reference.layer import reference_experts

import suites.decode
from lib.decode.report import OWN, figures
from lib.decode.steps import Step, Team, make_set, make_steps, open_team
from lib.ranks import Ranks
from suites.decode import Checked, check_variant, parse
from variants.decode import OVER_RANKS, own_runs, share_of, slots_of, step_runs

SMALL = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)
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
    words = ["--weights", "bf16,mxfp8,fp8,mxfp4", "--tokens", "1,3", "--try", "dependent=1", "--out", str(tmp_path)]
    run, done = report_of("decode", *TINY, *words)
    points = [(row["weights"], row["tokens"]) for row in run["rows"]]
    assert points == [(kind, tokens) for kind in ("bf16", "mxfp8", "fp8", "mxfp4") for tokens in (1, 3)]
    library = {f"transformers_{name}" for name in ("eager", *functions)} if functions is not None else set()
    known = {"comet", "dependent=1", "torch", "triton0", "triton1", "triton2", "fused"}
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


def test_an_interrupted_run_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(team: Team, sets: list[Any], num_tokens: int, arguments: Namespace) -> dict[str, Any]:
        if num_tokens == 1:
            raise RuntimeError("out of memory")  # a point that fails is a row
        raise KeyboardInterrupt

    monkeypatch.setattr(suites.decode, "measure_point", interrupted)
    words = [*TINY, "--tokens", "1,2", "--variants", "comet", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        suites.decode.run(parse(words), ALONE)
    for text in ((tmp_path / "bench_decode.json").read_text(), capsys.readouterr().out.splitlines()[-1]):
        (row,) = json.loads(text)["rows"]
        assert (row["tokens"], row["failures"]) == (1, {"point": "RuntimeError: out of memory"})


# ---- over ranks ------------------------------------------------------------------------------------------------------


def sharded_step(rank: int, world_size: int, ep: int, tp: int) -> tuple[float, list[int], int]:
    """Deviation of the exact output from the reference with all weights, the ids of all steps, and touched bytes."""
    layout = ExpertLayout(num_experts=8, top_k=2, ep=ep, tp=tp, rank=rank)
    sets = [make_set(SMALL, layout, CPU, torch.float32, seed, "bf16") for seed in range(2)]
    steps = make_steps(SMALL, layout, sets, 6, "uniform")
    team = Team(config=SMALL, layout=layout, ranks=Ranks(rank, CPU, dist.group.WORLD))
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, (sets[0].weights.w1, sets[0].weights.w2))
    w1, w2 = torch.zeros(8, 128, 64), torch.zeros(8, 64, 64)
    for owner, (own_w1, own_w2) in enumerate(parts):
        experts = slice(owner // tp * 8 // ep, (owner // tp + 1) * 8 // ep)
        columns = slice(owner % tp * 64 // tp, (owner % tp + 1) * 64 // tp)
        w2[experts, :, columns] = own_w2
        for half, rows in enumerate(own_w1.chunk(2, dim=1)):
            w1[experts, 64 * half : 64 * (half + 1)][:, columns] = rows
    step = steps[0]
    routed = (step.tokens.double(), step.ids, step.routing_weights.double())
    wanted = reference_experts(*routed, w1.double(), w2.double())
    error = (team.total(step.exact()) - wanted).abs().max().item()
    return error, [id for step in steps for id in step.ids.flatten().tolist()], step.touched_bytes


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_hold_one_model_and_equal_tokens(ep: int, tp: int) -> None:
    found = run_ranks(sharded_step, ep * tp, ep, tp)
    for error, ids, _ in found:
        assert error < 1e-12
        assert ids == found[0][1]
        assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]  # the same rank is the slowest in every step
    experts = len(set(found[0][1]))
    assert sum(num_bytes for _, _, num_bytes in found) == experts * 3 * 64 * 64 * 4


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


def steps_of(layout: ExpertLayout, num_tokens: int, kind: str = "bf16") -> list[Step]:
    sets = [make_set(TWELVE, layout, CPU, torch.float32, seed, kind) for seed in range(SETS)]
    return make_steps(TWELVE, layout, sets, num_tokens, "uniform")


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_share_examples() -> None:
    tokens = list(range(5))
    shares = [tokens[share_of(5, layout_of(rank, 4))] for rank in range(4)]
    assert shares == [[0, 1], [2, 3], [4], []]
    assert slots_of(5, layout_of(0, 4)) == 2
    for count in range(1, 20):
        brought = [range(count)[share_of(count, layout_of(rank, 3))] for rank in range(3)]
        assert [token for share in brought for token in share] == list(range(count))
        assert max(map(len, brought)) == slots_of(count, layout_of(0, 3))


def test_warp_decode_needs_room_for_equal_shares() -> None:
    """64 tokens of three ranks are 22 slots of each, which are 66; 63 are 21 of each."""
    layout = layout_of(0, 3)
    team = Team(config=TWELVE, layout=layout, ranks=ALONE)
    assert own_runs(team, steps_of(layout, 64), OWN) == {}
    assert list(own_runs(team, steps_of(layout, 63), OWN)) == ["own_nccl"]  # the others need a group
    assert own_runs(team, steps_of(layout, 63), ("own",)) == {}


# ---- over ranks ------------------------------------------------------------------------------------------------------


def run_shares(rank: int, world_size: int, tp: int, counts: list[int], kind: str) -> list[str]:
    """Every variant's output of every step against this rank's tokens of the whole one; also the bits of ``comet``."""
    parallel = ParallelConfig(ep=world_size // tp, tp=tp)
    ranks = Ranks(rank, CPU, dist.group.WORLD)
    timed = []
    with open_team(TWELVE, parallel, max_tokens=max(counts), wants_fused=False, ranks=ranks) as team:
        for count in counts:
            steps, mine = steps_of(team.layout, count, kind), share_of(count, team.layout)
            exact = [team.total(step.exact()) for step in steps]
            runs = step_runs(team, steps, parse(["--ep", "2", "--variants", ",".join(("comet", *OWN))]))
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
        assert sorted(team.shared.own) == sorted({slots_of(count, team.layout) for count in counts})
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
        decode = team.own_decode(2)
        assert team.own_decode(2) is decode
        assert team.own_decode(1) is not decode
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
    timings = timings_of(comet=0.4, triton0=1.2, triton1=0.8, dependent=0.3, transformers_eager=4.0)
    row = figures(timings, {"comet": (0.1, 0.9), "triton1": (0.2, 0.8)}, 4, 2e8, 4.0)
    assert (row["comet_us"], row["triton_us"], row["transformers_eager_us"]) == pytest.approx((100, 200, 1000))
    assert (row["best"], row["best_us"]) == ("dependent", pytest.approx(75))
    assert (row["tbs"], row["of_roofline"]) == pytest.approx((2e8 / 75e6, 2e8 / 75e6 / 4))
    assert (row["x_triton"], row["x_transformers"]) == pytest.approx((200 / 75, 1000 / 75))
    assert (row["torch_us"], row["x_torch"], row["added_us"], row["fused_us"]) == (None, None, None, None)
    assert (row["comet_error"], row["triton_error"], row["triton_cosine"]) == (0.1, 0.2, 0.8)


def test_own_figures_example() -> None:
    timings = timings_of(comet=0.4, local=0.38, own=0.42, own_nccl=0.6, own_fused=0.3)
    row = figures(timings, {}, 4, 2e8, 4.0)
    assert (row["added_us"], row["own_added_us"]) == pytest.approx((5, 10))
    assert (row["own_us"], row["own_nccl_us"], row["own_fused_us"]) == pytest.approx((105, 150, 75))
    assert row["best"] == "comet"  # another task is no trial of its blocks
    without = figures({"own": timings["own"]}, {}, 4, 2e8, 4.0)
    assert (without["own_us"], without["own_added_us"], without["best"]) == (pytest.approx(105), None, None)
