"""Scalars for TensorBoard and Weights & Biases, traces of torch's profiler, and the rates that a run reports."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from training_cases import TRAIN, Rank, make_job, train_on_rank

from comet.config import MoEConfig
from comet.jobs import config as config_module
from comet.models.config import ModelConfig
from comet.training.report import EVENT_FILES, HISTORY_FILE, flops_per_token, speed_of
from comet.training.trainer import train


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def test_tensorboard_has_the_scalars_of_the_run_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = make_job(tmp_path, steps=12, checkpoint_every=11, eval_every=10, async_save=True)
    train(job, Rank())
    train(replace(job, resume=str(tmp_path / "out")), Rank())
    found = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    found.Reload()
    lines = lines_of(tmp_path / "out")
    heldout = {line["step"]: line["heldout"] for line in lines if "heldout" in line}
    assert {event.step: event.value for event in found.Scalars("heldout/loss")} == pytest.approx(heldout)
    windows = [line for line in lines if "losses" in line]
    means = {line["step"]: sum(line["losses"]) / len(line["losses"]) for line in windows}
    assert {event.step: event.value for event in found.Scalars("train/loss")} == pytest.approx(means)
    rates = {line["step"]: line["learning_rate"] for line in windows}
    assert {event.step: event.value for event in found.Scalars("train/learning_rate")} == pytest.approx(rates)
    assert {"train/grad_norm", "train/expert_imbalance", "train/tokens_per_second"} <= set(found.Tags()["scalars"])
    train(replace(job, overwrite=True), Rank())
    assert len(list((tmp_path / "out").glob(EVENT_FILES))) == 1, "those of the run before are gone"


def test_a_run_without_tensorboard_writes_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(make_job(tmp_path), Rank())["steps"] == 6
    assert not (tmp_path / "out" / "tensorboard").exists()


def test_weights_and_biases_gets_scalars_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in notes the calls."""
    started, logged, ended = [], [], []

    def init(**settings: object) -> SimpleNamespace:
        started.append(settings)
        return SimpleNamespace(log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: ended.append(1))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(config_module, "find_spec", lambda name: name)
    train(make_job(tmp_path, wandb="experts"), Rank())
    (settings,) = started
    assert (settings["project"], settings["name"], settings["dir"]) == ("experts", "out", str(tmp_path / "out"))
    assert settings["config"]["train"]["steps"] == 6
    assert [step for step, _ in logged] == [6, 6]
    assert logged[0][1]["train/loss"] > 0
    assert ended == [1]


def test_weights_and_biases_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^wandb='x' must be the name .* installed, or None: pip install wandb$"):
        replace(TRAIN, wandb="x")


def test_each_rank_writes_a_trace_of_some_steps(tmp_path: Path) -> None:
    run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, profile=2))
    traces = sorted((tmp_path / "out" / "profile").iterdir())
    assert [trace.name.partition(".")[0] for trace in traces] == ["rank0", "rank1"]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
        assert len(steps) == 2
    with pytest.raises(ValueError, match=r"profile=6 must be .*below steps=6"):
        replace(TRAIN, profile=6)


def test_rates_count_ranks_and_know_no_peak_of_a_cpu(tmp_path: Path) -> None:
    moe = MoEConfig(hidden_size=128, ffn_size=128, num_experts=8, top_k=2)
    model = ModelConfig(
        name="x", context=128, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=4, dense_layers=0, moe=moe
    )
    assert flops_per_token(model) == 6 * (300160 + 393216) + 12 * 4 * 128 * 128 == 4946688
    speed = speed_of(model, 2e6, 2, "NVIDIA H200", torch.bfloat16)
    assert speed.model_flops_utilization == pytest.approx(4946688e6 / 989e12)
    assert str(speed) == "2,000,000 tokens/s (1,000,000 a rank, MFU 0.5%)"
    assert speed_of(model, 2e6, 2, "NVIDIA H200", torch.float32).model_flops_utilization is None
    (result, _) = run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2))
    assert result["tokens_per_second_per_rank"] == result["tokens_per_second"] / 2 > 0
    assert result["model_flops_utilization"] is None
