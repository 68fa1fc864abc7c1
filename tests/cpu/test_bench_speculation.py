"""The benchmark of speculation: a run on a CPU over a trained model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_speculation import main
from training_cases import MODEL, MOE, Rank, make_job

from comet.training.run import train

VARIANTS = ["cache", "conservative", "conservative cached", "adaptive", "adaptive cached"]


def test_a_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = replace(MODEL, context=96, num_layers=1, moe=replace(MOE, num_experts=8, top_k=3))
    job = make_job(tmp_path, model=model, steps=20, eval_batches=1, sample_bytes=0)
    train(job, Rank())
    capsys.readouterr()
    words = ["--budgets", "0.5", "--tokens", "8", "--rounds", "1", "--temperature", "0", "--device", "cpu"]
    main(["--source", str(tmp_path / "out"), "--data", job.data.path, "--out", str(tmp_path), *words])
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "bench_speculation.json").read_text() == line + "\n"
    rows = json.loads(line)["rows"]
    assert [row["variant"] for row in rows] == ["on_demand", *VARIANTS, "cache"]
    assert [row["budget"] for row in rows] == [0.5] * 6 + [1.0]
    on_demand, cache, conservative, *_, resident = rows
    assert on_demand["hits"] == 0
    assert resident["hits"] == resident["of_resident"] == 1
    assert on_demand["mb_per_token"] > cache["mb_per_token"] > resident["mb_per_token"] == 0
    for plain in (cache, conservative, rows[3]):
        assert plain["nll"] == pytest.approx(resident["nll"], rel=1e-5), "greedy texts are the same"
    for row in rows[1:-1]:
        assert ("acceptance" in row) == (row["variant"] != "cache")
