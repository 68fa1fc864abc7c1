"""The ``tune`` task: a point in words, regrets, what is kept, and the command on two CPU ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import JobConfig
from comet.launch.cli import main
from comet.launch.config import compose, make_job
from comet.layer.paths import ExpertPath, make_path
from comet.measure import tune
from comet.measure.tune import Tuned, regret_text, regrets
from comet.tuner.problem import Problem
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

MODELS = {
    "few": MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, expert_bias=True),
    "many": MoEConfig(hidden_size=64, ffn_size=32, num_experts=8, top_k=1),
}


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "layers_of", lambda names, job: {name: MODELS[name] for name in names})


def job_of(folder: Path, *overrides: str) -> JobConfig:
    return make_job(compose(["model=tiny", f"tune.profiles={folder}", "tune.rounds=1", *overrides]), 1)


def tuned(num_tokens: int, times: dict[OverlapConfig | None, float | None]) -> Tuned:
    problem = Problem(MODELS["many"], ParallelConfig(ep=2), num_tokens, torch.bfloat16)
    return Tuned(problem, tuple(Measured(setting=setting, ms=ms, failure="" if ms else "died")
                                for setting, ms in times.items()))  # fmt: skip


def store_of(folder: Path, *points: Tuned) -> ProfileStore:
    store = ProfileStore.load(folder / "p.json", "cpu")
    for point in points:
        key = ProfileKey.create(point.problem, "cpu")
        store.put(ProfileEntry(key=key, measured=point.measured, commit="abc", date="2026-11-20"))
    return store


ONE, SPLIT = OverlapConfig(num_panels=1), OverlapConfig(comm_blocks=8, num_panels=1)  # the layer is one column block


def test_a_point_in_words_and_in_json() -> None:
    point = tuned(40, {None: 9.0, SPLIT: None, ONE: 1.5})
    title, head, *rows = point.text().splitlines()
    assert title == "ep=2, tp=1, num_experts=8, top_k=1, hidden_size=64, ffn_size=32, tokens=40, dtype=bfloat16"
    assert head.split() == ["candidate", "ms"]
    assert [row.split("  ")[0] for row in rows] == ["1 panel", "plain", "8 comm blocks, 1 panel"]
    assert [row.split()[-1] for row in rows] == ["kept", "9.000", "died"]
    facts = json.loads(json.dumps(point.facts()))
    assert facts["chosen"] == facts["candidates"][0]["setting"] == {"comm_blocks": 0, "num_panels": 1}
    assert [item["measured_ms"] for item in facts["candidates"]] == [1.5, 9.0, None]
    assert [item["failure"] for item in facts["candidates"]] == ["", "", "died"]


def test_regret_of_the_default_and_of_the_nearest_entry(tmp_path: Path) -> None:
    small, large = tuned(4096, {ONE: 1.0, SPLIT: 1.25, None: 4.0}), tuned(8192, {ONE: 2.2, SPLIT: 2.0, None: 8.0})
    alone = tuned(64, {SPLIT: 1.0, None: 4.0})
    found = regrets([small, large, alone], store_of(tmp_path, small, large, alone))
    assert found == {
        "default": {"mean": pytest.approx(1.05), "worst": pytest.approx(1.1), "points": 2},
        "nearest": {"mean": pytest.approx(1.175), "worst": 1.25, "points": 2},
    }
    assert regret_text(found).splitlines() == [
        "regret: time of the choice over the best measured",
        "default  mean 1.050, worst 1.100, 2 points",
        "nearest  mean 1.175, worst 1.250, 2 points",
    ]
    none = regrets([alone], store_of(tmp_path / "alone", alone))
    assert [values["points"] for values in none.values()] == [0, 0]
    assert regret_text(none).splitlines() == ["regret: time of the choice over the best measured"]


@pytest.mark.slow
def test_the_command_on_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["tune", "tune.rounds=2", f"tune.profiles={tmp_path}", "tune.tokens=[48,8]", "parallel.ep=2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["regrets"].keys() == {"default", "nearest"}
    assert found["regrets"]["default"]["points"] == 2
    assert sum(line.startswith("candidate ") for line in lines) == 2
    assert sum(line.startswith("tiny, ") and line.endswith(" s") for line in lines) == 2, "seconds of each point"
    assert 0 < sum(point["seconds"] for point in found["points"]) <= found["seconds"] + 0.02, "each is rounded"
    path = tmp_path / "cpu_x2.json"
    assert found["profile"] == str(path)
    entries = ProfileStore.load(path, "cpu").entries
    assert {key.tokens: entry.winner.ms for key, entry in entries.items()} == {
        tokens: point["candidates"][0]["measured_ms"] for tokens, point in zip((64, 8), found["points"], strict=True)
    }
    assert {entry.kernels for entry in entries.values()} == {"triton"}  # there is no CUDA C++ on a CPU


def test_several_models_in_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16,4]")
    facts = tune.tune_job(config, Rank())
    assert [point["model"] for point in facts["points"]] == ["few", "few", "many", "many"]
    entries = ProfileStore.load(tmp_path / "cpu_x1.json", "cpu").entries
    assert {(key.hidden_size, key.tokens) for key in entries} == {(32, 16), (32, 4), (64, 16), (64, 4)}
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == facts


def test_a_run_says_what_it_compiles_and_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    tune.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[16,4]"), Rank())
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
    facts = tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16]"), Rank())
    failed, ran = facts["points"]
    reason = f"none of {failed['failure'].split()[2]} settings ran, the first: RuntimeError: no resources"
    assert failed == {"model": "few", "tokens": 16, "failure": reason}
    assert ran["model"] == "many"
    assert f"few, 16 tokens: {reason}" in capfd.readouterr().out
    with pytest.raises(NothingMeasuredError, match=r"^tune: none of 1 points ran, the first: none of \d+ settings ran"):
        tune.tune_job(job_of(tmp_path, "tune.models=[few]", "tune.tokens=[16]"), Rank())


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_layer, done = tune.measure_layer, []

    def stops_at_the_third(problem: Problem, *others, **named) -> tuple[Measured, ...]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(problem)
        return measure_layer(problem, *others, **named)

    monkeypatch.setattr(tune, "measure_layer", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[16,4]"), Rank())
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

    monkeypatch.setattr(tune, "measure_layer", fake)
    candidates = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda *call: [*candidates(*call), odd])
    tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[300]"), Rank())
    assert pools == [(300, 300, 32), (300, 300, 64)]
    monkeypatch.setattr(tune, "candidates", candidates)
    tune.tune_job(job_of(tmp_path, "tune.models=[few,many]", "tune.tokens=[100]"), Rank())
    assert all(settings.count(odd) == 1 for settings in tried)
