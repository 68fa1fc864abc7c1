"""``train.graphs``: the same training with replayed steps; on a CPU recorded operations stand in for CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import all_experts
from torch import Tensor
from training_cases import MODEL, MOE, TRAIN, Rank, make_job, make_model, steps_on_cpu

from comet.launch.config import compose
from comet.training.evaluate import heldout_loss
from comet.training.history import History
from comet.training.loop import Trainer
from comet.training.optimizer import make_optimizer
from comet.training.run import train

TEXT = torch.randint(97, 123, (2000,), generator=torch.Generator().manual_seed(0)).byte()


def make_trainer(graphs: bool, **settings: Any) -> Trainer:
    model, group = make_model(replace(MODEL, moe=replace(MOE, balance="bias", bias_update_rate=0.25)))
    for layer in model.moe_layers():
        layer.experts = partial(all_experts, None)
    config = replace(TRAIN, graphs=graphs, **settings)
    return Trainer(model, make_optimizer(model, config), group, TEXT, config)


def train_and_judge(graphs: bool) -> tuple[Tensor, list[Tensor], list[Tensor], float]:
    """Losses and gradient norms of six steps, expert loads, the weights they lead to, and the held-out loss."""
    trainer = make_trainer(graphs)
    metrics = [trainer.step(step) for step in range(6)]
    judged = heldout_loss(trainer.model, trainer.group, TEXT, num_batches=3, batch_size=4)
    assert trainer.why_eager == ""
    losses = torch.tensor([(each.loss, each.grad_norm) for each in metrics])
    return losses, [each.expert_load for each in metrics], list(trainer.model.state_dict().values()), judged


def test_replayed_steps_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train_and_judge(graphs=False)
    captures = steps_on_cpu(monkeypatch)
    assert train_and_judge(graphs=False)[3] == wanted[3]
    assert captures.count == 0
    found = train_and_judge(graphs=True)
    assert (captures.count, captures.replays) == (1, 5)  # from the second step on, the metrics of each kept; no judging
    assert torch.equal(found[0], wanted[0])
    assert all(map(torch.equal, found[1], wanted[1]))
    assert all(map(torch.equal, found[2], wanted[2]))
    assert found[3] == wanted[3]


def test_what_cannot_be_captured_runs_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, _, weights, _ = train_and_judge(graphs=False)

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with this or that")

    monkeypatch.setattr("comet.training.passes.capture", refuse)
    monkeypatch.setattr("comet.training.passes.device_obstacle", lambda device: "")
    trainer = make_trainer(graphs=True)
    found = torch.tensor([(each.loss, each.grad_norm) for each in map(trainer.step, range(6))])
    assert trainer.why_eager == "the step cannot be captured: operation not permitted when stream is capturing"
    assert caplog.messages == [f"steps are launched kernel by kernel: {trainer.why_eager}"]
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, trainer.model.state_dict().values(), weights))


def test_a_job_on_a_cpu_trains_as_ever_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def losses(name: str, graphs: bool) -> tuple[list[float], str]:
        result = train(make_job(tmp_path, output_dir=str(tmp_path / name), graphs=graphs, steps=4), Rank())
        assert result["graphs"] is False
        history = History(None)
        history.start(tmp_path / name, 4)
        return [loss for window in history.windows for loss in window.losses], capsys.readouterr().err

    (found, said), (wanted, silent) = losses("graphs", True), losses("eager", False)
    assert found == wanted
    assert len(found) == 4
    assert said.count("train.graphs=True has no effect: the model is on the device 'cpu'") == 1
    assert "train.graphs" not in silent


def test_the_setting_is_true_or_false() -> None:
    assert compose(["train.graphs=true"])["train"]["graphs"] is True
    assert compose([])["train"]["graphs"] is False
    with pytest.raises(ValueError, match=r"train\.graphs=sometimes.*'sometimes'.*bool"):
        compose(["train.graphs=sometimes"])
