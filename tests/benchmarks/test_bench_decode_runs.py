"""Whole runs of the decode benchmark on CPUs: alone, over ranks, interrupted; and what ranks must agree on."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_cases import ALONE, CPU, TINY, report_of, run_on_rank
from ranks import run_ranks

from comet.config import MoEConfig
from comet.layout import ExpertLayout
from comet.reference.layer import reference_experts

import suites.decode
from lib.decode.steps import Team, make_set, make_steps
from lib.ranks import Ranks
from suites.decode import Checked, check_variant, measure_point, parse
from variants.decode import OVER_RANKS, Settings

SMALL = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)

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
    assert [entry["measured"] for entry in run["crossover"]] == 4 * [[1, 3]]
    with (tmp_path / "bench_decode.csv").open() as file:
        assert [line["tokens"] for line in csv.DictReader(file)] == 4 * ["1", "3"]
    assert (tmp_path / "bench_decode.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.count("done after") == 8


def test_an_interrupted_run_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(team: Team, sets: list[Any], num_tokens: int, settings: Settings) -> dict[str, Any]:
        if num_tokens == 2:
            raise RuntimeError("out of memory")  # a point that fails is a row
        if num_tokens == 3:
            raise KeyboardInterrupt
        return measure_point(team, sets, num_tokens, settings)

    monkeypatch.setattr(suites.decode, "measure_point", interrupted)
    words = [*TINY, "--tokens", "1,2,3", "--variants", "comet", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        suites.decode.run(parse(words), ALONE)
    for text in ((tmp_path / "bench_decode.json").read_text(), capsys.readouterr().out.splitlines()[-1]):
        rows = json.loads(text)["rows"]
        assert [row["tokens"] for row in rows] == [1, 2]
        assert rows[1]["failures"] == {"point": "RuntimeError: out of memory"}
    assert (tmp_path / "bench_decode.png").exists()


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


def check_rows(folder: Path, ep: int, tp: int, tokens: list[int]) -> list[dict[str, Any]]:
    report = json.loads((folder / "bench_decode.json").read_text())
    rows: list[dict[str, Any]] = report["rows"]
    assert [(row["ep"], row["tp"], row["tokens"]) for row in rows] == [(ep, tp, count) for count in tokens]
    assert report["facts"]["sets"] == 4 * ep * tp
    for row in rows:
        assert row["failures"] == {}
        names = {*OVER_RANKS} if row["tokens"] <= 64 else {"fused", "own_fused"}
        assert set(row["times_us"]) == set(row["accuracy"]) == names
        assert all(error < 1e-5 and cosine > 0.999996 for error, cosine in row["accuracy"].values())
        if "comet" in names:
            assert row["added_us"] == pytest.approx(row["comet_us"] - row["local_us"])
            assert row["own_added_us"] == pytest.approx(row["own_us"] - row["local_us"])
    (crossover,) = report["crossover"]
    assert crossover["measured"] == [count for count in tokens if count <= 64]
    assert (folder / "bench_decode.png").exists()
    return rows


@pytest.mark.slow
def test_tensor_parallel_and_quantised(tmp_path: Path) -> None:
    words = [*TINY, "--tp", "2", "--tokens", "1,5,70", "--weights", "mxfp8", "--out", str(tmp_path)]
    run_ranks(run_on_rank, 2, "decode", words)
    rows = check_rows(tmp_path, 1, 2, [1, 5, 70])
    assert rows[0]["mbytes"] == pytest.approx(2 * 3 * 128 * 64 * 33 / 32 / 1e6)  # two experts, half of each


def wrong_on_one_rank(rank: int, world_size: int) -> dict[str, str]:
    """Only the last bit of rank 1 differs: the sum is right, but ranks that sample from it may part."""
    layout = ExpertLayout(num_experts=8, top_k=2, ep=2, tp=1, rank=rank)
    team = Team(config=SMALL, layout=layout, ranks=Ranks(rank, CPU, dist.group.WORLD))
    exact, checked = torch.ones(2, 64, dtype=torch.float64), Checked()
    output = exact.float()
    output[0, 0] += rank * 2**-23
    check_variant("comet", lambda index: output, exact, 1, team, checked)
    check_variant("local", lambda index: exact.float() / 2, exact, 1, team, checked)
    check_variant("local_nccl", lambda index: exact.float() * (1 + rank), exact, 1, team, checked)
    assert list(checked.variants) == ["local"]
    return checked.failures


def test_ranks_that_disagree_are_not_timed() -> None:
    wanted = {"comet": "ranks have different bits", "local_nccl": "error 1 relative to float64 is above 0.0001"}
    assert run_ranks(wrong_on_one_rank, 2) == [wanted, wanted]


@pytest.mark.slow
def test_torchrun_end_to_end(tmp_path: Path) -> None:
    words = [*TINY, "--ep", "2", "--tokens", "1,3,128", "--out", str(tmp_path)]
    _, done = report_of("decode", *words, torchrun=True)
    check_rows(tmp_path, 2, 1, [1, 3, 128])
    assert done.stdout.splitlines()[-1] == (tmp_path / "bench_decode.json").read_text().strip()  # rank 0 alone
