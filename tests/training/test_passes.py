"""Steps of several passes, and blocks whose activations are computed again: both learn what one plain pass learns."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from generate_cases import all_experts, graphs_on_cpu
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from training_cases import LINEAR, TEXT, TRAIN, Rank, losses, make_job, make_model, wake

from comet.jobs.config import TrainConfig, TrainJob
from comet.layer.expert_path import FunctionPath
from comet.layer.sharding import local
from comet.training import step as step_module
from comet.training.optimizer import make_optimizer, shard_dense
from comet.training.step import TrainStep
from comet.training.trainer import train

ONE_PASS = replace(TRAIN, grad_clip=0.1, cuda_graph="off")
TWO_PASSES = replace(ONE_PASS, batch_size=2, gradient_accumulation_steps=2)
SHARDED = replace(ONE_PASS, fsdp=True)
SHARDED_ALL = replace(TWO_PASSES, fsdp=True, gradient_checkpointing=True)
RECOMPUTED = replace(ONE_PASS, gradient_checkpointing=True)


def learn(
    config: TrainConfig, ep: int, tp: int, *, without_ranks: bool = False
) -> tuple[list[list[float]], list[list[float]], int]:
    """Return losses and norms of three steps, the weights of this rank after them, and the sums over ranks of a step.

    ``without_ranks``: The experts are plain tensors, as a recorded pass on a CPU needs them.
    """
    model, group = make_model(LINEAR, ep=ep, tp=tp)
    model.recomputes = config.gradient_checkpointing
    wake(model)
    if config.fsdp:
        shard_dense(model, group)
    if without_ranks:
        for layer in model.moe_layers():
            layer.experts = FunctionPath(partial(all_experts, None))
    train_step = TrainStep(model, make_optimizer(model, config), group, TEXT, config)
    reduce, calls = step_module.sum_gradients, []

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return reduce(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "sum_gradients", counted)
        metrics = [train_step(step) for step in range(3)]
    tokens = metrics[-1].expert_load.sum() / len(model.moe_layers()) / LINEAR.moe.top_k
    assert tokens == train_step.tokens_per_step
    curve = [[each.loss.item(), each.grad_norm.item()] for each in metrics]
    experts = set(model.expert_parameters())
    weights = [
        (local(each) if each in experts or not isinstance(each, DTensor) else each.full_tensor()).flatten().tolist()
        for each in model.parameters()
    ]
    group.close()
    return curve, weights, len(calls)


def compare(rank: int, world_size: int, ep: int, tp: int) -> None:
    plain = learn(ONE_PASS, ep, tp)
    assert learn(RECOMPUTED, ep, tp) == plain
    for config in (TWO_PASSES, SHARDED, SHARDED_ALL):
        curve, weights, sums = learn(config, ep, tp)
        assert sums == plain[2] == 3
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(plain[0]), rtol=1e-5, atol=1e-6)
        for found, wanted in zip(weights, plain[1], strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (1, 1)])
def test_two_half_batches_and_blocks_computed_again_learn_what_one_batch_learns(ep: int, tp: int) -> None:
    run_ranks(compare, 2, ep, tp)


def test_replayed_passes_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = learn(TWO_PASSES, 1, 1, without_ranks=True)
    captures = graphs_on_cpu(monkeypatch)
    assert learn(replace(TWO_PASSES, cuda_graph="on"), 1, 1, without_ranks=True) == wanted
    assert (captures.count, captures.replays) == (1, 5)


def test_a_run_of_several_passes_goes_on_bit_for_bit(tmp_path) -> None:
    settings = {"batch_size": 2, "gradient_accumulation_steps": 2, "checkpoint_every": 3}
    train(make_job(tmp_path, **settings, output_dir=str(tmp_path / "whole")), Rank())
    halfway = str(tmp_path / "whole" / "step-000003")
    train(make_job(tmp_path, **settings, gradient_checkpointing=True, resume=halfway), Rank())
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    other = make_job(tmp_path, **{**settings, "gradient_accumulation_steps": 1}, resume=halfway, overwrite=True)
    with pytest.raises(ValueError, match=r"train\.gradient_accumulation_steps=1 differs from 2"):
        train(other, Rank())


def shard_and_go_on(rank: int, world_size: int, whole: TrainJob, resumed: TrainJob) -> None:
    train(whole, Rank(rank, world_size))
    train(resumed, Rank(rank, world_size))


def test_a_sharded_run_repeats_its_bits_and_goes_on_in_another_layout_or_alone(tmp_path) -> None:
    settings = {"fsdp": True, "checkpoint_every": 3, "model": replace(LINEAR, num_heads=1)}
    whole = make_job(tmp_path, **settings, output_dir=str(tmp_path / "whole"))
    halfway = str(tmp_path / "whole" / "step-000003")
    resumed = make_job(tmp_path, **settings, resume=halfway)
    run_ranks(shard_and_go_on, 3, whole, resumed)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    alone = {"resume": halfway, "output_dir": str(tmp_path / "alone"), "batch_size": 12}
    train(make_job(tmp_path, **{**settings, **alone}, resume_changes=("train.batch_size",)), Rank())
    assert len(losses(tmp_path / "alone")) == 6


def test_matrices_gathered_in_bfloat16_give_the_losses_of_float32_masters_cast_by_autocast(tmp_path) -> None:
    job = make_job(tmp_path, dtype="bfloat16", model=LINEAR, output_dir=str(tmp_path / "plain"))
    sharded = make_job(tmp_path, dtype="bfloat16", model=LINEAR, fsdp=True)
    run_ranks(shard_and_go_on, 2, job, sharded)
    assert losses(tmp_path / "out")[0] == losses(tmp_path / "plain")[0], "the first step has the same weights"
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "plain"), rel=2**-8)


def test_sharded_steps_are_not_captured() -> None:
    run_ranks(refuse_graph, 2)


def refuse_graph(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        graphs_on_cpu(patch)
        with pytest.raises(ValueError, match=r"cuda_graph='on' must be 'auto' or 'off' here: train\.fsdp gathers"):
            learn(replace(SHARDED, cuda_graph="on"), 1, 1)
