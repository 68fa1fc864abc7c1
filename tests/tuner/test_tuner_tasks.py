"""The tasks ``tune`` and ``explain`` as users run them, on two CPU ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig
from comet.launch.cli import main
from comet.launch.config import compose, make_job
from comet.layer.paths import ExpertPath, make_path
from comet.measure import job
from comet.tuner.problem import H200, Problem
from comet.tuner.profile import Measured, ProfileStore

MODELS = {
    "few": MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2),
    "many": MoEConfig(hidden_size=64, ffn_size=32, num_experts=8, top_k=1),
}


def job_of(folder: Path, *overrides: str) -> JobConfig:
    return make_job(compose(["model=tiny", f"tune.profiles={folder}", "tune.rounds=1", *overrides]), 1)


def explain(capfd: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    capfd.readouterr()
    assert main(["explain", *words]) == 0
    points: list[dict] = json.loads(capfd.readouterr().out.splitlines()[-1])["points"]
    return points


def test_tune_then_explain(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = (f"tune.profiles={tmp_path}", "tune.tokens=[48,8]", "parallel.ep=2")
    assert [point["source"] for point in explain(capfd, *settings)] == ["default", "default"]

    assert main(["tune", "tune.rounds=2", *settings]) == 0
    lines = capfd.readouterr().out.splitlines()
    tuned = json.loads(lines[-1])
    assert tuned["regrets"].keys() == {"default", "model", "nearest"}
    assert all(1 <= values["mean"] <= values["worst"] for values in tuned["regrets"].values())
    assert tuned["regrets"]["default"]["points"] == tuned["regrets"]["model"]["points"] == 2
    assert sum(line.startswith("candidate ") for line in lines) == 2
    assert sum(line.startswith("tiny, ") and line.endswith(" s") for line in lines) == 2, "seconds of each point"
    assert 0 < sum(point["seconds"] for point in tuned["points"]) <= tuned["seconds"] + 0.02, "each is rounded"
    for point in tuned["points"]:
        times = [candidate["measured_ms"] for candidate in point["candidates"]]
        assert point["source"] == "profile"
        assert times == sorted(times), "every candidate ran, the fastest first"
        assert point["candidates"][0]["setting"] == point["chosen"]
    path = tmp_path / "cpu_x2.json"
    assert tuned["profile"] == str(path)
    entries = ProfileStore.load(path, "cpu").entries
    assert {key.tokens for key in entries} == {64, 8}
    assert {entry.kernels for entry in entries.values()} == {"triton"}  # there is no CUDA C++ on a CPU
    assert not ProfileStore.load(path, H200.name).entries

    after = explain(capfd, *settings[:1], "tune.tokens=[48,9,100000]", "parallel.ep=2")
    assert [point["source"] for point in after] == ["profile", "profile", "default"]
    assert [point["profile"] for point in after] == [str(path), str(path), None]
    assert [point["chosen"] for point in after[:2]] == [point["chosen"] for point in tuned["points"]]


def test_an_h200_is_explained_without_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = f"tune.profiles={tmp_path}", "model=qwen3_30b_a3b", "tune.tokens=[2048]", "parallel.ep=2"
    assert main(["explain", *settings]) == 0
    assert capfd.readouterr().err.splitlines() == [
        "comet: no GPU here; tune.machine=h200 tells the times of an H200 in bfloat16"
    ]
    assert main(["explain", *settings, "tune.machine=h200"]) == 0
    out, err = capfd.readouterr()
    assert "dtype=bfloat16" in out
    assert "in CUDA C++ <- chosen" in out
    assert err == ""
    facts = json.loads(out.splitlines()[-1])
    assert facts.keys() == {"task", "points"}
    point = facts["points"][0]
    assert point["source"] == "profile", "measured on two H200, and shipped"
    assert Path(point["profile"]).parts[-3:] == ("configs", "profiles", "nvidia_h200_x2.json")
    assert Path(point["profile"]).is_file()
    assert f", in {point['profile']}\n" in out
    assert point["regret"] == 1.0
    chosen = [candidate for candidate in point["candidates"] if candidate["setting"] == point["chosen"]]
    assert chosen[0]["measured_ms"] == min(c["measured_ms"] for c in point["candidates"] if c["measured_ms"])


def test_times_in_triton_do_not_stand_beside_cuda(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What ships for four H200 was measured in Triton, and at 2048 tokens at least."""
    settings = f"tune.profiles={tmp_path}", "model=qwen3_30b_a3b", "parallel.ep=4", "tune.machine=h200"
    for point in explain(capfd, *settings, "tune.tokens=[2048,512]"):
        names = [candidate["name"] for candidate in point["candidates"]]
        assert len(set(names)) == len(names)
        assert point["source"] in ("profile", "nearest")
        assert not any(item["measured_ms"] for item in point["candidates"])


def test_tune_measures_where_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be 'this': tune measures where it runs"):
        job.tune_job(job_of(tmp_path, "tune.machine=h200"), Rank(), lambda _: MODELS)


def test_several_models_in_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16,4]")
    asked: list[Sequence[str]] = []
    facts = job.tune_job(config, Rank(), lambda names: asked.append(names) or MODELS)
    assert asked == [("few", "many")]
    assert [point["model"] for point in facts["points"]] == ["few", "few", "many", "many"]
    entries = ProfileStore.load(tmp_path / "cpu_x1.json", "cpu").entries
    assert {(key.hidden_size, key.tokens) for key in entries} == {(32, 16), (32, 4), (64, 16), (64, 4)}
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == facts


def test_a_run_says_what_it_compiles_and_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    job.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[16,4]"), Rank(), lambda _: {"few": MODELS["few"]})
    err = capfd.readouterr().err
    for done, tokens in ((0, 16), (1, 4)):
        point = rf"comet: {done} of 2 points measured, [\d:]+ so far, [\d:?]+ left; few, {tokens} tokens"
        assert re.search(rf"^{point}$", err, re.MULTILINE)
        assert re.search(rf"^{point}, compiling candidate 2 of \d+$", err, re.MULTILINE)
        assert re.search(rf"^{point}, timing \d+ candidates, round 2$", err, re.MULTILINE)


def test_a_point_of_which_nothing_runs_is_told_and_a_run_of_such_points_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_wide(name: str, moe: MoEConfig, *others) -> ExpertPath:
        if moe.hidden_size == 32:
            raise RuntimeError("no resources")
        return make_path(name, moe, *others)

    monkeypatch.setattr("comet.measure.layers.make_path", only_wide)
    facts = job.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16]"), Rank(), lambda _: MODELS)
    failed, ran = facts["points"]
    reason = f"none of {failed['failure'].split()[2]} settings ran, the first: RuntimeError: no resources"
    assert failed == {"model": "few", "tokens": 16, "failure": reason}
    assert ran["source"] == "profile"
    assert f"few, 16 tokens: {reason}" in capfd.readouterr().out
    with pytest.raises(NothingMeasuredError, match=r"^tune: none of 1 points ran, the first: none of \d+ settings ran"):
        job.tune_job(job_of(tmp_path, "tune.tokens=[16]"), Rank(), lambda _: {"few": MODELS["few"]})


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_layer, done = job.measure_layer, []

    def stops_at_the_third(problem: Problem, *others, **named) -> tuple[Measured, ...]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(problem)
        return measure_layer(problem, *others, **named)

    monkeypatch.setattr(job, "measure_layer", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        job.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16,4]"), Rank(), lambda _: MODELS)
    entries = ProfileStore.load(tmp_path / "cpu_x1.json", "cpu").entries
    assert {(key.hidden_size, key.tokens) for key in entries} == {(32, 16), (32, 4)}


def test_each_point_has_a_pool_of_its_size_and_the_stored_setting_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the pool decides between kernels; settings that are not proposed come from the nearest entry."""
    pools, tried, odd = [], [], OverlapConfig(comm_blocks=5, num_panels=1)

    def fake(problem: Problem, settings: Sequence[OverlapConfig | None], group, **named) -> tuple[Measured, ...]:
        pools.append((problem.num_tokens, group.workspace.shape.max_tokens, group.workspace.shape.hidden_size))
        tried.append(settings)
        return tuple(Measured(setting=setting, ms=1.0 if setting == odd else 2.0) for setting in settings)

    monkeypatch.setattr(job, "measure_layer", fake)
    propose = job.propose
    monkeypatch.setattr(job, "propose", lambda *call: [*propose(*call), job.predict(call[0], odd, call[1])])
    job.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[300]"), Rank(), lambda _: MODELS)
    assert pools == [(300, 300, 32), (300, 300, 64)]
    monkeypatch.setattr(job, "propose", propose)
    job.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[100]"), Rank(), lambda _: MODELS)
    assert all(settings.count(odd) == 1 for settings in tried)
