"""The training loop: schedule, gradients over EP, TP and DP, whole jobs with their files and messages, replayed steps.

On a CPU recorded operations stand in for CUDA graphs.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from generate_cases import all_experts, graphs_on_cpu
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor
from training_cases import (
    GPT_OSS,
    LINEAR,
    MODEL,
    MOE,
    TEXT,
    TRAIN,
    Rank,
    losses,
    make_job,
    make_model,
    make_text,
    wake,
)

from comet.jobs.config import TrainConfig
from comet.launch.config import compose
from comet.launch.failures import is_user_error, one_line
from comet.layer.backend import Backend
from comet.layer.expert_path import FunctionPath
from comet.layer.sharding import local
from comet.models.gpt import next_token_loss
from comet.training import trainer
from comet.training.data import sample_batch
from comet.training.optimizer import learning_rate, make_optimizer, sum_gradients
from comet.training.report import History, Window, printable
from comet.training.step import TrainStep
from comet.training.tokens import Vocabulary
from comet.training.trainer import heldout_loss, sample_text, train
from comet.utils.graphs import GraphMode

DENSE_FIRST = replace(LINEAR, dense_layers=1)


CLIPPED = replace(TRAIN, grad_clip=0.1)


def loss_curve(rank, world_size, ep, tp, steps, config):
    """Return the values that are alike on all ranks, and the first step's gradients of this rank's experts."""
    model, group = make_model(config, ep=ep, tp=tp)
    optimizer, taken = make_optimizer(wake(model), CLIPPED), []
    optimizer.register_step_post_hook(lambda *_: taken.append(gradients(model)))
    train_step = TrainStep(model, optimizer, group, TEXT, CLIPPED)
    metrics = [train_step(step) for step in range(steps)]
    dense = [parameter.tolist() for parameter in model.dense_parameters()]
    held_out = heldout_loss(model, group, TEXT[:400], num_batches=3, batch_size=2)
    sample = sample_text(model, group, list(b"a"), Vocabulary(), num_ids=40, seed=0)
    group.close()
    curve = [(metric.loss.item(), metric.grad_norm.item()) for metric in metrics]
    first_dense, first_experts = taken[0]
    alike = curve, model.num_parameters(), first_dense, metrics[-1].expert_load.tolist(), dense, held_out, sample
    return alike, first_experts


def gradients(model):
    """Return the gradients of dense parameters, and of this rank's experts."""
    parameters = model.dense_parameters(), model.expert_parameters()
    return [[local(parameter.grad).tolist() for parameter in each] for each in parameters]


@pytest.mark.parametrize(
    ("world_size", "ep", "tp", "config"),
    [(2, 1, 2, LINEAR), (2, 1, 1, LINEAR), (4, 2, 1, DENSE_FIRST), slow(4, 2, 2, GPT_OSS)],
)
def test_ranks_learn_what_one_process_with_all_batches_learns(world_size, ep, tp, config):
    """Layouts are TP, data-parallel ranks, EP in two data-parallel groups, and EP x TP."""
    ranks = range(world_size)
    outcomes = run_ranks(loss_curve, world_size, ep, tp, 4, config)
    curve, num_parameters, first_dense, *_ = alike = outcomes[0][0]
    assert all(found == alike for found, _ in outcomes)
    model, _ = make_model(config, max_tokens=512)
    assert num_parameters == model.num_parameters()
    optimizer = make_optimizer(wake(model), CLIPPED)
    for step, (loss, norm) in enumerate(curve):
        batch = torch.cat([sample_batch(TEXT, batch_size=4, context=32, seed=0, step=step, rank=r) for r in ranks])
        output = model(batch[:, :-1])
        expected = next_token_loss(output.logits, batch[:, 1:])
        (expected + output.router_loss).backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED.grad_clip)
        assert loss == pytest.approx(expected.item(), rel=1e-3)
        assert norm == pytest.approx(expected_norm.item(), rel=2e-3)
        if step == 0:
            assert norm > CLIPPED.grad_clip
            dense, experts = gradients(model)
            assert_near(first_dense, dense)
            for rank, (_, found) in enumerate(outcomes):
                assert_near(found, experts, ep, tp, place=rank % (ep * tp))
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(step, CLIPPED)
        optimizer.step()
        optimizer.zero_grad()


def assert_near(found, wanted, ep=1, tp=1, place=0):
    """Gradients are those of the whole, or of the shard of experts at that place."""
    for mine, whole in zip(found, wanted, strict=True):
        expected = torch.tensor(whole).chunk(ep, dim=0)[place // tp]
        if tp > 1 and expected.dim() > 2:
            expected = expected.chunk(tp, dim=2)[place % tp]
        torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-3, atol=1e-6)


def test_selection_bias_moves_with_the_load_of_all_ranks():
    model, group = make_model(replace(MODEL, moe=replace(MOE, balance="bias", bias_update_rate=0.25)))
    load = TrainStep(model, make_optimizer(model, TRAIN), group, TEXT, TRAIN)(0).expert_load
    for layer, layer_load in zip(model.moe_layers(), load, strict=True):
        assert torch.equal(layer.router.selection_bias, 0.25 * torch.sign(layer_load.mean() - layer_load))


def test_heldout_loss_is_the_mean_of_the_windows_whatever_the_batches():
    model, group = make_model()
    wake(model)
    text = TEXT[: 32 * 6 + 1]
    windows = torch.stack([text[first : first + 33] for first in range(0, 32 * 6, 32)]).long()
    expected = next_token_loss(model(windows[:, :-1]).logits, windows[:, 1:]).item()
    for num_batches, batch_size in ((6, 1), (3, 2), (2, 4), (1, 6)):
        found = heldout_loss(model, group, text, num_batches=num_batches, batch_size=batch_size)
        assert found == pytest.approx(expected, rel=1e-5)


def test_job_writes_its_files_and_prints_the_result_last(tmp_path, capsys):
    result = train(make_job(tmp_path, eval_every=3, checkpoint_every=3), Rank())
    captured = capsys.readouterr()
    line = json.loads(captured.out.splitlines()[-1])
    assert line == json.loads((tmp_path / "out" / "result.json").read_text()) == result
    wanted = {"task", "world_size", "ep", "tp", "device", "steps", "heldout_nats_per_byte", "tokens_per_second"}
    assert wanted | {"peak_memory_bytes", "output_dir", "checkpoint"} <= line.keys()
    assert (line["task"], line["device"], line["steps"], line["world_size"]) == ("train", "cpu", 6, 1)
    assert line["moe_path"] == "twin", "what auto takes"
    assert line["dropped_rows"] == 0
    assert 0 < line["heldout_nats_per_byte"] < 5.5
    assert line["tokens_per_second"] > 0
    assert 10**8 < line["peak_memory_bytes"] < 4 * 2**30
    assert Path(line["checkpoint"]).name == "step-000006"
    for name in ("loss.png", "expert_load.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "sample.txt").read_bytes()) == 32 + TRAIN.sample_bytes
    assert "step 3: held-out loss" in captured.err
    assert "busiest expert" in captured.err
    assert "tokens/s" in captured.err


def test_the_rate_of_a_run_leaves_out_its_first_window(tmp_path):
    result = train(make_job(tmp_path, steps=11, checkpoint_every=10, sample_bytes=0), Rank())
    first, second = (json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[:2])
    assert (first["step"], second["step"]) == (10, 11)
    assert result["tokens_per_second"] == second["tokens_per_second"]
    tokens = make_job(tmp_path).train.batch_size * MODEL.context
    seconds = tokens * (10 / first["tokens_per_second"] + 1 / second["tokens_per_second"])
    assert result["train_seconds"] == pytest.approx(seconds)


@in_ranks(2)
def test_ranks_with_different_text_refuse_to_start(rank, world_size, tmp_path):
    job = make_job(tmp_path, ep=2)
    if rank == 1:
        other = tmp_path / "other"
        other.mkdir()
        make_text(other).write_bytes(b"something else " * 500)
        job = replace(job, data=replace(job.data, path=str(other / "text.txt")))
    with pytest.raises(ValueError, match=r"must be the same on all ranks, but differs between rank 0 and \[1\]"):
        train(job, Rank(rank, world_size))


def diverge(folder, monkeypatch, where, **changes):
    """A job whose router weight becomes NaN in step 2 (``where="step"``), or after the last one."""
    step = trainer.TrainStep.__call__

    def spoiled(self, number, **rest):
        if number == 1 and where == "step":
            with torch.no_grad():
                self.model.moe_layers()[0].router.weight[0, 0] = float("nan")
        return step(self, number, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainStep, "__call__", spoiled)
        if where == "held-out text":
            patch.setattr(trainer, "heldout_loss", lambda *_, **__: float("nan"))
        return train(make_job(folder, **changes), Rank())


def test_divergence_names_step_and_setting(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"diverged at step 2 .*: train\.lr=1e\+30 must be lower or train\.warmup_steps"
    ):
        train(make_job(tmp_path, lr=1e30, weight_decay=0.0, checkpoint_every=1), Rank())
    with pytest.raises(ValueError, match=r"diverged at step 2 \(router logits\[.*train\.lr=0\.01 must be lower"):
        diverge(tmp_path, monkeypatch, "step", overwrite=True)
    with pytest.raises(ValueError, match=r"diverged at step 3 \(held-out loss=nan\): train\.lr=0\.01 must be lower"):
        diverge(tmp_path, monkeypatch, "held-out text", eval_every=3, overwrite=True)


def test_resume_of_another_model_stops_before_anything_is_written(tmp_path):
    train(make_job(tmp_path), Rank())
    other = replace(MODEL, num_layers=3)
    job = make_job(tmp_path, model=other, resume=str(tmp_path / "out"), output_dir=str(tmp_path / "new"))
    with pytest.raises(ValueError, match="num_layers=2 there but 3 here"):
        train(job, Rank())
    assert not (tmp_path / "new").exists()


def test_history_of_a_killed_job_is_read_up_to_the_unfinished_line(tmp_path):
    history = History(tmp_path)
    history.add_heldout(1, 5.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "held')
    again = History(tmp_path, tmp_path, 9)
    assert again.heldout == [(1, 5.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_of_with_the_file_that_did_not_fit(tmp_path):
    history = History(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device") as caught:
        history.add_heldout(1, 5.0)
    assert is_user_error(caught.value)
    assert one_line(caught.value) == f"No space left on device: '{tmp_path}/metrics.jsonl'"
    job = make_job(tmp_path)
    train(job, Rank())
    (tmp_path / "out" / "loss.png").unlink()
    (tmp_path / "out" / "loss.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device") as caught:
        train(replace(job, resume="auto"), Rank())
    assert one_line(caught.value) == f"No space left on device: '{tmp_path}/out'"


def test_terminal_is_safe_from_the_sample():
    assert printable(b"a\x1b\n\xc3") == "a\\x1b\n\\xc3"


TIGHT = replace(MODEL, moe=replace(MODEL.moe, capacity_factor=0.5))


@pytest.mark.parametrize(("world_size", "ep", "tp"), [(2, 2, 1), (2, 1, 2), (2, 1, 1)])
def test_the_job_reports_what_the_plans_dropped(tmp_path, world_size: int, ep: int, tp: int) -> None:
    ranks = run_ranks(dropped_by_job_and_plans, world_size, tmp_path, ep, tp)
    planned = sum(dropped for _, dropped in ranks) / tp
    assert [reported for reported, _ in ranks] == [planned] * world_size
    assert planned > 0


def dropped_by_job_and_plans(rank: int, world_size: int, folder, ep: int, tp: int) -> tuple[float, int]:
    """Return the rows dropped as the job reports them, and as this rank's plans of training steps count them."""
    dropped, make_plan = [], Backend.plan

    def plan(backend, ids, weights, *, trains=False):
        made = make_plan(backend, ids, weights, trains=trains)
        dropped.append(int(made.status[1]) if trains else 0)
        return made

    Backend.plan = plan
    result = train(make_job(folder, model=TIGHT, ep=ep, tp=tp, moe_path="twin", steps=3), Rank(rank, world_size))
    return result["dropped_rows"], sum(dropped)


def test_window_examples() -> None:
    window = Window(
        step=1, losses=[1.0], grad_norms=[1.0], learning_rate=1.0, expert_load=[[6, 2], [4, 4]], tokens_per_second=1.0
    )
    assert (window.imbalance, window.dropped_share) == (1.25, 0)
    assert replace(window, expert_load=[]).imbalance == 1.0
    assert replace(window, dropped_rows=2).dropped_share == 0.125


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"steps": 5, "min_lr_ratio": 0.5, "warmup_steps": 2}, {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 4: 0.5}),
        ({"steps": 20, "warmup_steps": None}, {0: 0.5, 1: 1.0, 2: 1.0}),
        ({"steps": 1}, {0: 1.0}),
        ({"steps": 10}, {50: 0.1}),
    ],
)
def test_learning_rates(settings, rates):
    config = TrainConfig(**{"batch_size": 1, "lr": 1.0, "warmup_steps": 0, **settings})
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(rates)


def test_warm_up_that_nobody_asked_for():
    steps = [TrainConfig(steps=count, batch_size=1, warmup_steps=None).num_warmup_steps for count in (1, 5, 200, 800)]
    assert steps == [0, 0, 20, 60]
    assert compose(["train.steps=10"])["train"]["warmup_steps"] is None


def test_only_matrices_decay():
    model, _ = make_model(GPT_OSS)
    groups = make_optimizer(model, TRAIN).param_groups
    biases = {id(bias) for layer in model.moe_layers() for bias in (layer.b1, layer.b2)}
    for group in groups:
        matrices = {parameter.dim() > 1 and id(parameter) not in biases for parameter in group["params"]}
        assert matrices == {group["weight_decay"] == TRAIN.weight_decay}
    assert {group["weight_decay"] for group in groups} == {TRAIN.weight_decay, 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_small_gradients_are_not_scaled_and_silent_parameters_get_zeros():
    model, group = make_model(replace(MODEL, moe=replace(MOE, num_experts=4, top_k=1)))
    batch = TEXT[None, :2].long()  # one token per expert at most: most experts see none
    next_token_loss(model(batch[:, :1]).logits, batch[:, 1:]).backward()
    norm, optimizer = sum_gradients(model, group), make_optimizer(model, TRAIN)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.clip(norm, 1e6, num_summed=1)
    optimizer.step()
    total = torch.stack([gradient.double().square().sum() for gradient in before]).sum().sqrt()
    assert norm.item() == pytest.approx(total.item(), rel=1e-5)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))


def test_the_norm_of_bfloat16_gradients_is_that_of_float32():
    model, group = make_model()
    model = model.to(torch.bfloat16)
    for seed, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.grad = drawn.to(torch.bfloat16)
    exact = sum(parameter.grad.double().square().sum() for parameter in model.parameters()) ** 0.5
    norm = sum_gradients(model, group)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-5)


def make_trainer(cuda_graph: GraphMode) -> TrainStep:
    model, group = make_model(replace(MODEL, moe=replace(MOE, balance="bias", bias_update_rate=0.25)))
    for layer in model.moe_layers():
        layer.experts = FunctionPath(partial(all_experts, None))
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
