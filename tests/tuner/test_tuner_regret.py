"""What a choice costs over the best measured one, over all points of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.measure.explain import Explained, regret_text, regrets
from comet.tuner.choice import Resolved
from comet.tuner.model import predict
from comet.tuner.problem import H200, Problem
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
DEFAULT, SIX = OverlapConfig(), OverlapConfig(num_panels=6)


def problem_of(num_tokens: int) -> Problem:
    return Problem.create(QWEN3, ParallelConfig(ep=4), num_tokens, torch.bfloat16)


def tuned(num_tokens: int, favourite: OverlapConfig | None, times: dict[OverlapConfig | None, float]) -> Explained:
    """A point at which the model likes ``favourite`` best."""
    problem = problem_of(num_tokens)
    predictions = [
        replace(predict(problem, setting, H200), ms=1.0 if setting == favourite else 2.0) for setting in times
    ]
    measured = tuple(Measured(setting=setting, ms=ms) for setting, ms in times.items())
    key = ProfileKey.create(problem, H200.name)
    entry = ProfileEntry(key=key, measured=measured, commit="abc", date="2026-11-20")
    resolved = Resolved(setting=entry.winner.setting, source="profile")
    return Explained(problem=problem, machine=H200, predictions=predictions, resolved=resolved, entry=entry)


def store_of(tmp_path: Path, *points: Explained) -> ProfileStore:
    store = ProfileStore.load(tmp_path / "p.json", H200.name)
    for point in points:
        store.put(point.entry)
    return store


def test_each_way_to_choose_over_all_points(tmp_path: Path) -> None:
    small = tuned(4096, SIX, {DEFAULT: 1.0, SIX: 1.25, None: 4.0})
    large = tuned(8192, SIX, {DEFAULT: 2.2, SIX: 2.0, None: 8.0})
    found = regrets([small, large], store_of(tmp_path, small, large))
    assert found == {
        "default": {"mean": pytest.approx(1.05), "worst": pytest.approx(1.1), "points": 2},
        "model": {"mean": pytest.approx(1.125), "worst": 1.25, "points": 2},
        "nearest": {"mean": pytest.approx(1.175), "worst": 1.25, "points": 2},
    }
    assert regret_text(found).splitlines() == [
        "regret: time of the choice over the best measured",
        "default  mean 1.050, worst 1.100, 2 points",
        "model    mean 1.125, worst 1.250, 2 points",
        "nearest  mean 1.175, worst 1.250, 2 points",
    ]


def test_what_was_not_measured_does_not_count(tmp_path: Path) -> None:
    eight = OverlapConfig(num_panels=8)
    point, far = tuned(8192, SIX, {SIX: 1.0, None: 4.0}), tuned(512, SIX, {SIX: 1.0})
    other = tuned(4096, eight, {eight: 1.0})
    found = regrets([point], store_of(tmp_path, point, other))
    assert {name: values["points"] for name, values in found.items()} == {"default": 0, "model": 1, "nearest": 0}
    assert found["default"]["mean"] is found["default"]["worst"] is None
    assert "default" not in regret_text(found)
    assert regrets([far], store_of(tmp_path / "far", far))["nearest"]["points"] == 0, "its own is left out"
