"""The layer replayed from graphs, in training steps and for inference; recorded operations stand in for CUDA graphs."""

import logging
from typing import Any

import pytest
import torch
from generate_cases import Captures, all_experts
from graphed_cases import (
    LaterExperts,
    Steps,
    draw,
    gradients,
    leaf,
    make_layer,
    pass_through,
    record_on_cpu,
)
from layer_cases import LayerCase, full_weights, rank_inputs, shard
from ranks import in_ranks
from stream_cases import assert_same
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from comet import GraphedMoE, MoE, make_expert_group
from comet.config import OverlapConfig
from comet.graphed.moe import Output
from comet.layer.expert_path import FunctionPath
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import expert_parameter
from comet.layout import RoutedTokens
from comet.router.losses import RouterStats


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return record_on_cpu(monkeypatch)


def make_steps(path: str = "dense", **settings: Any) -> Steps:
    return Steps(GraphedMoE(make_layer(path, **settings)), make_layer(path, **settings), assert_same)


@pytest.mark.parametrize("path", ["dense", "later"])
def test_steps_with_changing_weights_routing_and_numbers_of_tokens(captures: Captures, path: str) -> None:
    steps = make_steps(path)
    for seed, num_tokens in enumerate((5, 7, 5, 5, 7, 0, 5, 0, 0, 7)):
        steps.step([draw(num_tokens, seed)], f"step {seed}")
    assert (captures.count, captures.replays, steps.graphed.graph_fallback_reason) == (6, 14, "")


@pytest.mark.parametrize("path", ["dense", "later"])
def test_parts_of_the_loss_may_change_from_step_to_step(captures: Captures, path: str) -> None:
    steps = make_steps(path)
    for seed, losses in enumerate(("output", "both", "output", "output", "both")):
        steps.step([draw(9, seed)], f"step {seed}", losses=losses)
    assert captures.replays == 8


@pytest.mark.parametrize("path", ["dense", "later"])
@in_ranks(1)
def test_steps_with_sharded_weights(rank: int, world_size: int, path: str) -> None:
    """Graphs get the local parts, whose gradients come back as ``DTensor``s."""
    with pytest.MonkeyPatch.context() as patch:
        captures, steps = record_on_cpu(patch), make_steps(path)
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "ep"))
        for layer in (steps.layer, steps.eager):
            layer.w1, layer.w2 = (expert_parameter(part, mesh) for part in layer.expert_weights())
        steps.layer.w1.register_hook(lambda grad: kinds.append(type(grad)))
        kinds: list[type] = []
        steps.__post_init__()
        for seed in range(4):
            steps.step([draw(6, seed)], f"step {seed}")
        assert captures.replays == 6
        assert set(kinds) == {DTensor}


def test_the_backward_pass_of_the_statistics_has_run_before_it_is_captured(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, ran = GraphedMoE(make_layer()), []

    class Noted(torch.autograd.Function):  # a kernel in the statistics' backward pass, which notes when it is launched
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append(captures.count)
            return grad

    plain = graphed.layer.router.measure

    def measure(*inputs: Tensor, **options: Any) -> RouterStats:
        stats = plain(*inputs, **options)
        return stats._replace(z_loss=Noted.apply(stats.z_loss))

    monkeypatch.setattr(graphed.layer.router, "measure", measure)
    for seed in range(2):
        pass_through(graphed, draw(6, seed), losses="output")
    assert ran == [0, 2], "once before the captures, then in that of the backward pass"


def test_statistics_alone_are_differentiated_only_as_the_layer_stands(captures: Captures) -> None:
    steps = make_steps()
    for seed in range(3):  # the output was never differentiated, so the kernels of that are not known yet
        steps.step([draw(9, seed)], f"step {seed}", losses="stats")
    assert captures.count == 0
    steps.step([draw(9, 3)], "step 3")
    with pytest.raises(RuntimeError, match=r"must start from its output, not only from the router's statistics"):
        pass_through(steps.graphed, draw(9, 4), losses="stats")
    steps.layer.zero_grad()
    steps.step([draw(9, 5)], "step 5")


@pytest.mark.parametrize("path", ["dense", "later"])
def test_nothing_that_was_handed_out_is_overwritten(captures: Captures, path: str) -> None:
    layer = make_layer(path)
    graphed, kept = GraphedMoE(layer), []
    for seed in range(5):
        layer.zero_grad()
        found = pass_through(graphed, draw(6, seed)) | gradients(layer)
        x, names = leaf(6, seed + 50), ["tokens", *dict(layer.named_parameters())]
        output = graphed(x)[0].square().sum()
        found |= dict(zip(names, torch.autograd.grad(output, [x, *layer.parameters()]), strict=True))
        kept.append((found, {name: value.clone() for name, value in found.items()}))
    for call, (found, wanted) in enumerate(kept):
        assert_same(found, wanted, f"call {call}")


def test_a_call_before_the_backward_pass_of_the_one_before(
    captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    layer, eager = make_layer(), make_layer()
    graphed = GraphedMoE(layer)
    with caplog.at_level(logging.WARNING):
        for seed in range(5):
            for run, each in ((graphed, layer), (eager, eager)):
                each.zero_grad()
                first, _ = run(leaf(6, seed))
                second, stats = run(first)  # the same layer twice
                (second.square().sum() + first.sum() + stats.loss).backward()
            assert_same(gradients(layer), gradients(eager), f"step {seed}")
    assert captures.replays == 2 * 4
    assert [record.message for record in caplog.records] == [
        "a call with 6 tokens is launched kernel by kernel: the backward pass of the one before is still to come"
    ]


def test_a_call_without_backward_pass_is_forgotten_with_its_output(captures: Captures) -> None:
    graphed = GraphedMoE(make_layer())
    for seed in range(2):
        pass_through(graphed, draw(6, seed))
    kept = graphed(leaf(6, 2))
    before = captures.replays
    graphed(leaf(6, 3))
    assert captures.replays == before
    del kept
    pass_through(graphed, draw(6, 4))
    assert captures.replays == before + 2


def test_other_numbers_of_tokens_and_calls_without_gradients_may_come_in_between(captures: Captures) -> None:
    layer, eager = make_layer("later"), make_layer("later")
    graphed = GraphedMoE(layer)
    for seed in range(5):
        found = []
        for run, each in ((graphed, layer), (eager, eager)):
            each.zero_grad()
            one, two = run(draw(6, seed))[0], run(draw(4, seed))[0]
            with torch.no_grad():
                three = run(draw(6, seed + 1))[0]
            one.square().sum().backward()
            two.square().sum().backward()
            found.append({"one": one, "two": two, "three": three} | gradients(each))
        assert_same(found[0], found[1], f"step {seed}")
    assert captures.count == 2 + 2 + 1


def test_a_second_backward_pass_is_refused(captures: Captures) -> None:
    graphed = GraphedMoE(make_layer())
    pass_through(graphed, draw(6, 0))
    output, _ = graphed(leaf(6, 1))
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"has one backward pass; where a second one is needed"):
        output.sum().backward()
    later, _ = graphed(leaf(6, 2))
    with pytest.raises(RuntimeError, match=r"has one backward pass"):
        output.sum().backward()
    later.sum().backward()


def test_a_weight_that_changed_before_the_backward_pass_is_refused(captures: Captures) -> None:
    layer = make_layer()
    graphed = GraphedMoE(layer)
    pass_through(graphed, draw(6, 0))
    output, _ = graphed(leaf(6, 1))
    with torch.no_grad():
        layer.w2.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        output.sum().backward()


def test_gradients_that_nobody_wants_are_not_made(captures: Captures) -> None:
    layer, eager = make_layer("later"), make_layer("later")
    graphed = GraphedMoE(layer)
    for frozen in (["w1"], ["w1", "router.weight"], []):
        for seed in range(3):
            for run, each in ((graphed, layer), (eager, eager)):
                each.zero_grad()
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(name not in frozen)
                run(draw(6, seed))[0].square().sum().backward()
            assert gradients(layer).keys() == {name for name, _ in layer.named_parameters()} - set(frozen)
            assert_same(gradients(layer), gradients(eager), f"{frozen}, call {seed}")
    assert captures.count == 6
    assert isinstance(layer.experts, LaterExperts)
    assert layer.experts.made == ["w2"] * 4 + ["w1", "w2"] * 2
    layer.requires_grad_(False)
    assert not graphed(draw(6, 0))[0].requires_grad


def test_hooks_of_parameters_run(captures: Captures) -> None:
    layer, seen = make_layer("later"), []
    graphed = GraphedMoE(layer)
    layer.w1.register_post_accumulate_grad_hook(lambda weight: seen.append(weight is layer.w1))
    layer.router.weight.register_hook(lambda grad: seen.append(grad.shape == layer.router.weight.shape))
    for seed in range(3):
        pass_through(graphed, draw(6, seed))
        assert seen == [True] * 2 * (seed + 1)
    assert captures.replays == 4


def test_graphs_with_and_without_gradients_count_apart(captures: Captures) -> None:
    graphed = GraphedMoE(make_layer(), max_graphs=1)
    for seed in range(2):
        pass_through(graphed, draw(6, seed))
        pass_through(graphed, draw(5, seed))
        with torch.no_grad():
            graphed(draw(6, seed))
            graphed(draw(5, seed))
    assert captures.count == 2 + 1


def test_nothing_is_replayed_after_the_group_was_closed(captures: Captures) -> None:
    layer = make_layer()
    graphed = GraphedMoE(layer)
    pass_through(graphed, draw(6, 0))
    output, _ = graphed(leaf(6, 1))
    layer.group.close()
    with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        output.sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        graphed(draw(6, 2))


def test_a_layer_that_asks_the_device_in_its_backward_pass(
    captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    def asks(grad: Tensor) -> Tensor:
        return grad * (2 if float(grad.sum()) > 1e9 else 1)

    def experts(*inputs: Any) -> Tensor:
        output = all_experts(None, *inputs)
        output.register_hook(asks)
        return output

    steps = make_steps()
    steps.layer.experts = FunctionPath(experts)
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            steps.step([draw(6, seed)], f"step {seed}")
    assert "not permitted" in steps.graphed.graph_fallback_reason
    assert len(caplog.records) == 1


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_weights_made_later_are_those_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    """The twin computes its weight gradients later, piece by piece; padded weights leave nothing for later."""
    if padded:
        monkeypatch.setattr(
            "comet.layer.routed_experts.pad_width", lambda w1, w2, biases=None: (w1 * 1, w2 * 1, biases)
        )
    case = LayerCase("one rank", 1, 1, (60,), hidden_size=64, ffn_size=48)
    group = make_expert_group(case.config, case.parallel, max_tokens=64, dtype=torch.float32, device="cpu")
    path = SymmetricPath(case.config, group, OverlapConfig(num_panels=1), use_kernels=False)
    inputs, (w1, w2) = rank_inputs(case, 0), (each.requires_grad_() for each in shard(case, 0, *full_weights(case)))

    def grads() -> tuple[Tensor | None, ...]:
        output = path(inputs.routed, w1.flatten(1, 2), w2)
        return torch.autograd.grad(output.square().sum(), (w1, w2), allow_unused=True)

    wanted = grads()
    with path.defer_wgrad() as deferred:
        found = grads()
    made = [make() for make in deferred]
    with pytest.raises(RuntimeError, match="a capture that failed"), path.defer_wgrad():
        raise RuntimeError("a capture that failed")
    assert len(made) == (0 if padded else 2)
    assert all((one is not None) == padded for one in found)
    for actual in (found if padded else made, grads()):  # the last: it ends with the context
        for one, other in zip(actual, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one.view_as(other), other)


def test_both_passes_join_streams_before_they_are_replayed(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, joined = make_steps(), []
    for seed in range(3):
        steps.step([draw(5, seed)], f"step {seed}")
    order = steps.layer.group.comm.stream_order
    monkeypatch.setattr(order, "join", lambda: joined.append(captures.replays))
    steps.step([draw(5, 3)], "step 3")
    assert joined == [4, 5]


def test_calls_under_hooks_of_saved_tensors_are_launched(captures: Captures, caplog: pytest.LogCaptureFixture) -> None:
    graphed = GraphedMoE(make_layer())
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                pass_through(graphed, draw(6, seed))
        assert (captures.count, len(caplog.records)) == (0, 1)
        assert "hooks" in caplog.text
    pass_through(graphed, draw(6, 3))
    pass_through(graphed, draw(6, 4))
    assert (captures.replays, graphed.graph_fallback_reason) == (2, "")


def test_checkpointed_layers(captures: Captures) -> None:
    layer, eager = make_layer(), make_layer()
    graphed = GraphedMoE(layer)
    for call, use_reentrant in enumerate((True, True, True, False, True, False, False, True)):
        for run, each in ((graphed, layer), (eager, eager)):
            each.zero_grad()
            again = checkpoint(lambda x, run=run: run(x)[0], leaf(6, call), use_reentrant=use_reentrant)
            again.square().sum().backward()
        assert_same(gradients(layer), gradients(eager), f"{use_reentrant}, call {call}")
    assert (captures.count, captures.replays) == (3, 4 + 2 * 4)


def test_autocast_has_graphs_of_its_own(captures: Captures) -> None:
    layer = make_layer()
    graphed, wanted = GraphedMoE(layer), []
    layer.experts = FunctionPath(lambda routed, *_: routed.tokens * routed.top_k_weights.sum(1, keepdim=True))
    for seed in range(6):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=seed % 2 == 1):
            output, _ = graphed(draw(6, 0))
        output.float().square().sum().backward()
        wanted.append({"output": output.detach()} | gradients(layer))
    for seed in range(2, 6):
        assert_same(wanted[seed], wanted[seed % 2], f"call {seed}")
    assert not torch.equal(wanted[0]["shared.w1"], wanted[1]["shared.w1"])
    assert captures.count == 4


def test_casts_that_autocast_keeps_are_in_the_graph(captures: Captures) -> None:
    layer = make_layer()
    layer.experts = FunctionPath(lambda routed, *_: routed.tokens * routed.top_k_weights.sum(1, keepdim=True))
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            graphed(draw(6, 0))  # casts the weights
            graphed(draw(6, 1))
        for parameter in layer.parameters():
            parameter.mul_(3)
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = graphed(draw(6, 2)), layer(draw(6, 2))
    assert torch.equal(found[0], wanted[0])
    assert captures.replays == 2


# ---- without gradients ----------------------------------------------------------------------------------------------


@pytest.fixture
def layer() -> MoE:
    return make_layer()


def assert_same_outputs(found: Output, wanted: Output) -> None:
    assert all(map(torch.equal, (found[0], *found[1]), (wanted[0], *wanted[1])))


def test_every_call_is_the_layer_whatever_the_numbers_of_tokens(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    kept = []
    with torch.no_grad():
        for seed, num_tokens in enumerate((5, 7, 5, 5, 7, 7, 0, 5, 0, 0, 64, 5)):
            x = draw(num_tokens, seed)
            found, wanted = graphed(x), layer(x)
            assert_same_outputs(found, wanted)
            kept.append((found, wanted))
    assert (captures.count, graphed.graph_fallback_reason) == (3, "")  # 64 came once
    assert captures.replays == 4 + 2 + 2 - 1 + 1
    for found, wanted in kept:  # no later call has overwritten them
        assert_same_outputs(found, wanted)


def test_a_layer_captured_in_inference_mode_serves_outside_of_it(layer: MoE, captures: Captures) -> None:
    former, records = layer.experts, []
    layer.experts = FunctionPath(lambda *inputs: records.append(torch.is_grad_enabled()) or former(*inputs))
    graphed = GraphedMoE(layer)
    for seed, mode in enumerate([torch.inference_mode] * 3 + [torch.no_grad, torch.inference_mode]):
        with mode():
            found, wanted = graphed(draw(6, seed)), layer(draw(6, seed))
        assert_same_outputs(found, wanted)
        assert found[0].is_inference() == wanted[0].is_inference()
    assert (captures.count, captures.replays, any(records)) == (1, 4, False)


def test_leading_dimensions_are_kept_and_parameters_may_change_in_place(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    x = draw(12, 1).view(3, 4, -1)
    with torch.no_grad():
        for _ in range(3):
            assert graphed(x)[0].shape == x.shape
            for parameter in layer.parameters():
                parameter.mul_(1.5)
            assert_same_outputs(graphed(x), layer(x))


def test_more_numbers_of_tokens_than_graphs(layer: MoE, captures: Captures, caplog: pytest.LogCaptureFixture) -> None:
    graphed = GraphedMoE(layer, max_graphs=2)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for seed, num_tokens in enumerate((1, 2, 3, 1, 2, 3, 4, 3, 1)):
            x = draw(num_tokens, seed)
            assert_same_outputs(graphed(x), layer(x))
    assert captures.count == 2
    assert [record.message for record in caplog.records] == ["no graph for 3 tokens: max_graphs=2 others came first"]


def test_a_layer_that_asks_the_device_runs_as_it_stands(
    layer: MoE, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    experts = layer.experts

    def asks(routed: RoutedTokens, *weights: Tensor) -> Tensor:
        return experts(routed, *weights) * (1 if int(len(routed.tokens) + routed.top_k_ids.max()) else 0)

    layer.experts = FunctionPath(asks)
    graphed = GraphedMoE(layer)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for seed in range(4):
            x = draw(6, seed)
            assert_same_outputs(graphed(x), layer(x))
    assert "cannot be captured" in graphed.graph_fallback_reason
    assert "not permitted" in graphed.graph_fallback_reason
    assert len(caplog.records) == 1


def test_without_a_gpu_it_is_the_layer(layer: MoE) -> None:
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        for seed in range(3):
            x = draw(4, seed)
            assert_same_outputs(graphed(x), layer(x))
    assert "cpu" in graphed.graph_fallback_reason


def test_other_tokens_are_refused(layer: MoE, captures: Captures) -> None:
    graphed = GraphedMoE(layer)
    with torch.no_grad():
        for _ in range(2):
            graphed(draw(3, 0))
        with pytest.raises(ValueError, match=r"hidden_size=16 of the input must be the layer's 32"):
            graphed(draw(3, 0).view(6, 16))
        with pytest.raises(ValueError, match=r"dtype=torch.float64 of the input"):
            graphed(draw(3, 0).double())
    with pytest.raises(ValueError, match=r"max_graphs=0 must be at least 1"):
        GraphedMoE(layer, max_graphs=0)
