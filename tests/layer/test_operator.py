"""Layers as one operator of a compiled model: no graph break, the numbers of the layer as it stands, nothing kept."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import LayerCase
from layer_ranks import build_layer, open_group
from ranks import in_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from comet.config import MoEConfig
from comet.layer.sharding import local
from comet.moe import MoE

CASE = LayerCase("operator", 1, 1, (9,), backward=True)
PATHS = ("twin", "plain", "reference")
Run = Callable[..., tuple[Tensor, Tensor]]
compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two layers between products that autograd differentiates."""

    def __init__(self, *layers: MoE) -> None:
        super().__init__()
        size = layers[0].config.hidden_size
        self.before, self.layers = nn.Linear(size, size), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, loss = self.before(x).sigmoid(), x.new_zeros(())
        for layer in self.layers:
            x, stats = layer(x.tanh())
            loss = loss + stats.loss
            x = x.relu()
        return x, loss


def block(path: str, count: int = 2, **changes: Any) -> Block:
    torch.manual_seed(3)
    config = MoEConfig(
        hidden_size=32, ffn_size=32, num_experts=4, top_k=2, shared_ffn_size=16, aux_loss_coef=0.1, z_loss_coef=0.1,
        **changes,
    )  # fmt: skip
    group = open_group(CASE)
    return Block(*(MoE(config, group, path=path) for _ in range(count)))


def found(run: Run, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and gradients of tokens and parameters that want one."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y, loss = run(x)
    (y.square().sum() + loss).backward()
    grads = [each.grad for each in (x, *model.parameters())]
    return [y.detach(), loss.detach(), *(local(each) for each in grads if each is not None)]


def assert_same(run: Run, model: nn.Module, x: Tensor) -> None:
    wanted, given = found(model, model, x), found(run, model, x)
    assert len(given) == len(wanted)
    assert all(map(torch.equal, given, wanted))


def records(model: Block) -> int:
    return sum(len(layer.operand.records) for layer in model.layers)


@pytest.mark.parametrize("path", ["twin", *(pytest.param(path, marks=pytest.mark.slow) for path in PATHS[1:])])
def test_a_compiled_model_has_no_break_and_the_same_bits(path: str) -> None:
    model, x = block(path), torch.randn(9, 32)
    assert torch._dynamo.explain(model)(x).graph_break_count == 0
    run = compiled(model)
    for tokens in (x, x, x[:5], x[:7], x[:0]):
        assert_same(run, model, tokens)
        assert records(model) == 0
    with torch.no_grad():
        assert torch.equal(run(x)[0], model(x)[0])
    with torch.inference_mode():
        assert torch.equal(run(x)[0], model(x)[0])
    assert records(model) == 0


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    model, x = block("twin", 1, expert_bias=True), torch.randn(9, 32)
    wanted = found(model, model, x)
    for each, given in zip(wanted, found(torch.compile(model, fullgraph=True), model, x), strict=True):
        torch.testing.assert_close(given, each, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_have_no_gradient() -> None:
    model, x = block("twin"), torch.randn(9, 32)
    for layer in model.layers:
        layer.w1.requires_grad_(False)
        layer.router.requires_grad_(False)
    assert_same(compiled(model), model, x)
    model.requires_grad_(False)
    assert_same(compiled(model), model, x)
    assert records(model) == 0


def test_hooks_of_parameters_change_a_gradient_once() -> None:
    model, x, calls = block("twin", 1), torch.randn(9, 32), []
    for each in model.parameters():
        each.register_hook(lambda grad: calls.append(0) or 3 * grad)
    run = compiled(model)
    for _ in range(2):
        assert_same(run, model, x)
    assert len(calls) == 4 * len(list(model.parameters()))


def test_a_layer_may_take_the_same_tokens_twice() -> None:
    model = block("twin", 1)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x, layer = model.before(x), model.layers[0]
        (first, stats), (second, others) = layer(x), layer(x)
        return first.sin() + 2 * second, stats.loss + others.loss

    x = torch.randn(9, 32)
    wanted = found(run, model, x)
    assert all(map(torch.equal, found(compiled(run), model, x), wanted))
    assert records(model) == 0


@pytest.mark.parametrize("path", PATHS)
def test_no_result_is_kept_by_what_autograd_recorded(path: str) -> None:
    model, x = block(path, 1, expert_bias=True).layers[0], torch.randn(9, 32, requires_grad=True)
    grad, grads = torch.randn(9, 32), []
    for overwrite in (False, True):
        y, stats = model(x)
        loss = stats.loss
        if overwrite:
            y.data.fill_(torch.nan)
        grads.append(torch.autograd.grad([y, loss], [x, *model.parameters()], [grad, torch.ones(())]))
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_compute_the_layer_again(inside: bool) -> None:
    model, x = block("twin"), torch.randn(9, 32)
    if inside:
        run: Run = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
        assert_same(run, model, x)
    else:
        whole = compiled(model)
        for reentrant in (False, True):
            assert_same(lambda x, of=reentrant: checkpoint(whole, x, use_reentrant=of), model, x)
    assert records(model) == 0


def test_a_selective_checkpoint_may_save_the_layer() -> None:
    model, x, calls = block("twin"), torch.randn(9, 32), []
    for layer in model.layers:
        layer.run = lambda x, run=layer.run: calls.append(0) or run(x)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operator is torch.ops.comet.layer.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    run = compiled(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    found(run, model, x)
    assert len(calls) == 2
    calls.clear()
    found(compiled(lambda x: checkpoint(model, x, use_reentrant=False)), model, x)
    assert len(calls) == 4


def test_a_graph_that_is_kept_runs_backward_twice() -> None:
    model, x = block("twin"), torch.randn(9, 32)
    y, loss = compiled(model)(x)
    total = y.square().sum() + loss
    first = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    assert records(model) == 2
    second = torch.autograd.grad(total, list(model.parameters()))
    assert all(map(torch.equal, first, second))


def test_autocast_around_the_call_counts() -> None:
    group = open_group(replace(CASE, dtype=torch.bfloat16))
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
    model, x = MoE(config, group, path="plain"), torch.randn(9, 32)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y, stats = model(x)
        return y, stats.loss

    wanted = found(run, model, x)
    assert all(map(torch.equal, found(compiled(run), model, x), wanted))


def test_a_copy_is_an_operand_of_its_own() -> None:
    model = block("twin", 1)
    copied = copy.deepcopy(model)
    layer = copied.layers[0]
    assert layer.operand.layer is layer
    with torch.no_grad():
        layer.w2.mul_(2)
    assert_same(compiled(copied), copied, torch.randn(9, 32))


def test_weights_in_the_place_of_its_own_are_refused() -> None:
    model, x = block("twin", 1).layers[0], torch.randn(9, 32)
    others = {name: each.detach().clone() for name, each in model.named_parameters()}
    run = compiled(lambda held, x: torch.func.functional_call(model, held, (x,))[0])
    with pytest.raises(ValueError, match="weights of a compiled layer must be its own"):
        run(others, x)


def test_loads_of_experts_have_no_gradient() -> None:
    layer, x = block("twin", 1).layers[0], torch.randn(9, 32)
    assert not layer(x)[1].expert_load.requires_grad
    stats = compiled(layer)(x)[1]
    assert not stats.expert_load.requires_grad
    assert stats.aux_loss.requires_grad


def test_code_without_its_model_is_refused() -> None:
    model, x = block("plain", 1), torch.randn(9, 32)
    exported = torch.export.export(model, (x,)).module()
    del model
    gc.collect()
    with pytest.raises(ValueError, match="model of compiled or exported code must still exist"):
        exported(x)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_calls_the_layer(strict: bool) -> None:
    model, x = block("plain", 1), torch.randn(9, 32)
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.ops.comet.layer.default in [node.target for node in exported.graph.nodes]
    assert all(map(torch.equal, exported.module()(x), model(x)))


def test_what_the_layer_refuses_it_refuses_compiled() -> None:
    model = block("twin", 1)
    with pytest.raises(ValueError, match=r"^num_tokens=129"):
        compiled(model)(torch.randn(129, 32))


@in_ranks(2)
def test_ranks_compile_alike(rank: int, world_size: int) -> None:
    case = LayerCase("operator", 2, 1, (9, 4), expert_bias=True)
    model = Block(build_layer(case, rank, "twin"))
    assert isinstance(model.layers[0].w1, DTensor)
    x, whole = torch.randn(case.num_tokens[rank], 32), compiled(model)
    for _ in range(2):
        assert_same(whole, model, x)
    assert isinstance(model.layers[0].w1.grad, DTensor)
    assert records(model) == 0
