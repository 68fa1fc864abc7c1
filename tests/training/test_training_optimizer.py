"""Gradients of all ranks and the steps taken with them: learning rate, decay, norm and clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from training_cases import GPT_OSS, LAYOUTS, LINEAR, MODEL, MOE, TEXT, TRAIN, make_model, wake

from comet.jobs.config import TrainConfig
from comet.launch.config import compose
from comet.layer.sharding import local
from comet.models.gpt import next_token_loss
from comet.training.data import sample_batch
from comet.training.optimizer import global_norm, learning_rate, make_optimizer, sum_gradients
from comet.training.step import TrainStep


def test_learning_rate_example_of_the_docstring():
    config = TrainConfig(steps=5, batch_size=1, lr=1.0, min_lr_ratio=0.5, warmup_steps=2)
    assert [learning_rate(step, config) for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])


def test_warm_up_that_nobody_asked_for():
    steps = [TrainConfig(steps=count, batch_size=1, warmup_steps=None).num_warmup_steps for count in (1, 5, 200, 800)]
    assert steps == [0, 0, 20, 60]
    config = TrainConfig(steps=20, batch_size=1, lr=1.0, warmup_steps=None)
    assert [learning_rate(step, config) for step in range(3)] == [0.5, 1.0, 1.0]
    assert compose(["train.steps=10"])["train"]["warmup_steps"] is None


def test_learning_rate_of_one_step_and_beyond_the_end():
    config = TrainConfig(steps=1, batch_size=1, lr=2.0)
    assert learning_rate(0, config) == 2.0
    assert learning_rate(50, replace(config, steps=10)) == pytest.approx(0.2)


def test_only_matrices_decay():
    model, _ = make_model(GPT_OSS)
    groups = make_optimizer(model, TRAIN).param_groups
    biases = {id(bias) for layer in model.moe_layers() for bias in (layer.b1, layer.b2)}
    for group in groups:
        matrices = {parameter.dim() > 1 and id(parameter) not in biases for parameter in group["params"]}
        assert matrices == {group["weight_decay"] == TRAIN.weight_decay}
    assert {group["weight_decay"] for group in groups} == {TRAIN.weight_decay, 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def local_norm(rank, world_size, ep, tp, max_norm, num_batches, config):
    """The norm before clipping, and the dense and expert gradients of the step; one rank takes all batches."""
    model, group = make_model(config, ep=ep, tp=tp, max_tokens=512)
    wake(model)
    batches = [sample_batch(TEXT, batch_size=4, context=32, seed=0, step=0, rank=r) for r in range(num_batches)]
    batch = batches[rank] if world_size > 1 else torch.cat(batches)
    output = model(batch[:, :-1])
    (next_token_loss(output.logits, batch[:, 1:]) + output.router_loss).backward()
    sum_gradients(model, group)
    norm = global_norm(model, group)
    optimizer = make_optimizer(model, TRAIN)
    optimizer.clip(norm, max_norm, num_summed=world_size)
    optimizer.step()  # which leaves the gradients as it took them
    dense = [parameter.grad.tolist() for parameter in model.dense_parameters()]
    experts = [local(parameter.grad).tolist() for parameter in model.expert_parameters()]
    group.close()
    return norm.item(), dense, experts


@pytest.mark.parametrize(
    ("ep", "tp", "config"), [*((*layout, LINEAR) for layout in [*LAYOUTS, (2, 2)]), (2, 2, GPT_OSS)]
)
def test_clipped_gradients_are_those_of_one_process(ep, tp, config):
    max_norm, world_size = 0.1, max(2, ep * tp)
    norm, dense, experts = local_norm(0, 1, 1, 1, max_norm, world_size, config)
    assert norm > max_norm
    ranks = run_ranks(local_norm, world_size, ep, tp, max_norm, world_size, config)
    assert all(found[:2] == ranks[0][:2] for found in ranks)
    for rank, (rank_norm, rank_dense, rank_experts) in enumerate(ranks):
        assert rank_norm == pytest.approx(norm, rel=1e-5)
        for found, expected in zip(rank_dense, dense, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-6)
        place = rank % (ep * tp)
        for found, whole in zip(rank_experts, experts, strict=True):
            expected = torch.tensor(whole).chunk(ep, dim=0)[place // tp]
            if expected.dim() > 2:
                expected = expected.chunk(tp, dim=2)[place % tp]
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-6)


def test_small_gradients_are_not_scaled_and_silent_parameters_get_zeros():
    model, group = make_model(replace(MODEL, moe=replace(MOE, num_experts=4, top_k=1)))
    batch = TEXT[None, :2].long()  # one token per expert at most: most experts see none
    next_token_loss(model(batch[:, :1]).logits, batch[:, 1:]).backward()
    sum_gradients(model, group)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm, optimizer = global_norm(model, group), make_optimizer(model, TRAIN)
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
    norm = global_norm(model, group)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-5)


def clipped_norms(rank, world_size, grad_clip):
    """Norms before clipping, and those of the gradients that AdamW took; data-parallel ranks hold all parameters."""
    model, group = make_model()
    config, taken = replace(TRAIN, grad_clip=grad_clip), []
    optimizer = make_optimizer(model, config)

    def note(*_):
        squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        taken.append(torch.stack(squares).sum().sqrt().item())

    optimizer.register_step_post_hook(note)
    train_step = TrainStep(model, optimizer, group, TEXT, config)
    found = [train_step(step).grad_norm.item() for step in range(3)]
    group.close()
    assert optimizer.grad_scale is None
    return found, taken


def test_a_step_takes_clipped_means():
    """Which AdamW shows in no loss: it takes gradients of any size alike."""
    for norms, taken in run_ranks(clipped_norms, 2, 1e-3):
        assert min(norms) > 1e-2
        assert taken == pytest.approx([1e-3] * 3, rel=1e-3)
    for norms, taken in run_ranks(clipped_norms, 2, 1e3):
        assert taken == pytest.approx(norms, rel=1e-5)
