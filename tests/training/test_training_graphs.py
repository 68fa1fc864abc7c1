"""``train.cuda_graph``: the same training, replayed; on a CPU recorded operations stand in for CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from generate_cases import all_experts, graphs_on_cpu
from torch import Tensor
from training_cases import MODEL, MOE, TEXT, TRAIN, Rank, losses, make_job, make_model

from comet.training.optimizer import make_optimizer
from comet.training.step import TrainStep
from comet.training.trainer import heldout_loss, train
from comet.utils.graphs import GraphMode


def make_trainer(cuda_graph: GraphMode) -> TrainStep:
    model, group = make_model(replace(MODEL, moe=replace(MOE, balance="bias", bias_update_rate=0.25)))
    for layer in model.moe_layers():
        layer.experts = partial(all_experts, None)
    config = replace(TRAIN, cuda_graph=cuda_graph)
    return TrainStep(model, make_optimizer(model, config), group, TEXT, config)


def train_and_judge(cuda_graph: GraphMode) -> tuple[Tensor, list[Tensor], list[Tensor], float]:
    """Losses and gradient norms of six steps, expert loads, the weights they lead to, and the held-out loss."""
    train_step = make_trainer(cuda_graph)
    metrics = [train_step(step) for step in range(6)]
    judged = heldout_loss(train_step.model, train_step.group, TEXT, num_batches=3, batch_size=4)
    assert train_step.graph_fallback_reason == ("cuda_graph='off'" if cuda_graph == "off" else "")
    losses = torch.tensor([(each.loss, each.grad_norm) for each in metrics])
    return losses, [each.expert_load for each in metrics], list(train_step.model.state_dict().values()), judged


def test_replayed_steps_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train_and_judge("off")
    captures = graphs_on_cpu(monkeypatch)
    assert train_and_judge("off")[3] == wanted[3]
    assert captures.count == 0
    for number, mode in enumerate(("auto", "on"), start=1):
        found = train_and_judge(mode)
        # From the second step on; the held-out loss is of another shape and never replayed.
        assert (captures.count, captures.replays) == (number, 5 * number)
        assert torch.equal(found[0], wanted[0])
        assert all(map(torch.equal, found[1], wanted[1]))
        assert all(map(torch.equal, found[2], wanted[2]))
        assert found[3] == wanted[3]


def test_a_graph_that_does_not_fit_the_memory_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("the capture failed before")

    monkeypatch.setattr("comet.utils.graphs.capture", run_out)
    monkeypatch.setattr("comet.utils.graphs.device_obstacle", lambda device: "")
    train_step = make_trainer("auto")
    train_step(0)
    with pytest.raises(RuntimeError) as caught:
        train_step(1)
    (note,) = caught.value.__notes__
    assert note == "a CUDA graph of training steps does not fit the memory; cuda_graph='off' needs less"


def test_collectives_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    model, group = make_model(path="plain")
    train_step = TrainStep(model, make_optimizer(model, TRAIN), group, TEXT, TRAIN)
    for step in range(3):
        train_step(step)
    assert captures.count == 0
    assert train_step.graph_fallback_reason == "the collectives of its MoE layers wait for counts on the host"


def test_a_job_on_a_cpu_is_not_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for mode in ("auto", "off"):
        result = train(make_job(tmp_path, output_dir=str(tmp_path / mode), cuda_graph=mode, steps=4), Rank())
        assert result["cuda_graph"] is False
        found[mode] = losses(tmp_path / mode)
    assert len(found["auto"]) == 4
    assert found["auto"] == found["off"]
    assert "CUDA graph" not in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="cuda_graph='on' must be 'auto' or 'off' here: the model is on the device 'cpu'"
    ):
        train(make_job(tmp_path, cuda_graph="on", steps=4), Rank())


def test_a_replay_joins_streams_and_is_refused_once_the_group_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = graphs_on_cpu(monkeypatch)
    train_step = make_trainer("on")
    for step in range(2):
        train_step(step)
    joined = []
    monkeypatch.setattr(train_step.group.comm.stream_order, "join", lambda: joined.append(captures.replays))
    train_step(2)
    assert joined == [1]
    train_step.group.close()
    with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        train_step(3)
    assert captures.replays == 2
