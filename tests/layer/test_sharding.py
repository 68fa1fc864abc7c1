"""torch's own tools on layers of several ranks: each is right, compared with a layer of one rank, or refuses."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from activation_cases import draw_biases
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from training_cases import make_group

from comet import MoE, MoEConfig, clip_grad_norm_, exclude_experts
from comet.layer.sharding import local

CONFIG = MoEConfig(hidden_size=16, ffn_size=48, num_experts=8, top_k=2, shared_ffn_size=16, balance="none")
TOKENS = 24


def make_layer(ep: int = 1, tp: int = 1, seed: int = 0) -> MoE:
    return MoE(CONFIG, make_group(CONFIG, ep=ep, tp=tp, max_tokens=4 * TOKENS), seed=seed)


class Model(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer
        self.out = nn.Linear(CONFIG.hidden_size, CONFIG.hidden_size)
        with torch.no_grad():
            for parameter in self.out.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


def draw(rank: int, call: int = 0) -> Tensor:
    return torch.randn(TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(10 * call + rank))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(each) for name, each in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(each.grad) for name, each in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def stepped(ep: int, tp: int, seed: int = 0) -> tuple[MoE, AdamW]:
    """A layer after one step, whose gradients are half the weights."""
    layer = make_layer(ep, tp, seed)
    optimizer = AdamW(layer.parameters(), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return layer, optimizer


def states(layer: MoE, optimizer: AdamW) -> dict[str, object]:
    model, moments = get_state_dict(layer, optimizer)
    return {"model": model, "optimizer": moments}


def save(rank: int, world_size: int, folder: str, ep: int, tp: int) -> None:
    layer, optimizer = stepped(ep, tp)
    dcp.save(states(layer, optimizer), checkpoint_id=folder)
    dcp.save(layer.state_dict(), checkpoint_id=f"{folder}/plain")
    layer.group.close()


def load(rank: int, world_size: int, folder: str, ep: int, tp: int) -> None:
    """Weights and moments on this layout, bit for bit; and weights alone, by ``state_dict()``."""
    wanted, wanted_moments = stepped(ep, tp)
    layer, optimizer = stepped(ep, tp, seed=9)
    found = states(layer, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(layer, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for mine, theirs in zip(layer.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs))
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(local(optimizer.state[mine][moment]), local(wanted_moments.state[theirs][moment]))
    other = make_layer(ep, tp, seed=9)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    for mine, theirs in zip(other.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs))


@pytest.mark.parametrize(("saved", "loaded"), [((2, 1), [(1, 2), (1, 1)]), slow((2, 2), [(4, 1)]), ((1, 1), [(2, 2)])])
def test_checkpoints_of_torch_load_on_any_layout(
    tmp_path: Path, saved: tuple[int, int], loaded: list[tuple[int, int]]
) -> None:
    run_ranks(save, saved[0] * saved[1], str(tmp_path), *saved)
    for ep, tp in loaded:
        run_ranks(load, ep * tp, str(tmp_path), ep, tp)


@in_ranks(4)
def test_states_of_whole_layers(rank: int, world_size: int) -> None:
    """The state of a layer on one rank loads into shards, and back."""
    alone, layer, other = make_layer(seed=3), make_layer(2, 2, seed=3), make_layer(2, 2, seed=9)
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(layer, options=full)
    assert_same(state, alone.state_dict(), 0.0)
    set_model_state_dict(other, state, options=full)
    assert_same(weights(other), weights(alone), 0.0)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        other.load_state_dict(alone.state_dict())


@in_ranks(2)
def test_a_part_that_another_rank_saved_is_refused(rank: int, world_size: int) -> None:
    """This happens when rank 0 alone writes a file and all ranks read it."""
    saved, layer, model = io.BytesIO(), make_layer(2), Model(make_layer(2, seed=9))
    torch.save(Model(layer).state_dict(), saved)
    files: list[bytes] = [b""] * world_size
    dist.all_gather_object(files, saved.getvalue())
    states = [torch.load(io.BytesIO(each), weights_only=True) for each in files]
    words = rf"layer\.w1 .* at \({1 - rank},\) of \('ep',\), must be this rank's, at \({rank},\): save on every rank"
    for assign in (False, True):
        with pytest.raises(ValueError, match=words):
            model.load_state_dict(states[1 - rank], assign=assign)
    model.load_state_dict(states[rank])
    assert_same(weights(model.layer), weights(layer), 0.0)


def wrap_ddp(model: Model) -> nn.Module:
    exclude_experts(model)
    return DistributedDataParallel(model)


def wrap_fsdp(model: Model) -> nn.Module:
    fully_shard(model.out)
    return fully_shard(model, ignored_params=exclude_experts(model))


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp])
@pytest.mark.parametrize(("world_size", "ep", "tp"), [(2, 2, 1), slow(4, 1, 2)])
@in_ranks("world_size")
def test_wrapped_models_train_as_one_rank(
    rank: int, world_size: int, ep: int, tp: int, wrap: Callable[[Model], nn.Module]
) -> None:
    """Gradients, norm, clipping and weights equal those of one rank with all tokens."""
    one, model = Model(make_layer()), wrap(Model(make_layer(ep, tp)))
    exclude_experts(model)  # changes nothing
    experts = [each for name, each in model.named_parameters() if name.endswith(("layer.w1", "layer.w2"))]
    dense = [each for each in model.parameters() if all(each is not expert for expert in experts)]
    optimizers = AdamW([{"params": dense}, {"params": experts}], foreach=True), AdamW(one.parameters(), foreach=False)
    for call in range(3):
        for part in range(2):  # gradients accumulate
            model(draw(rank, 2 * call + part)).square().mean().backward()
            for source in range(world_size):
                (one(draw(source, 2 * call + part)).square().mean() / world_size).backward()
        assert_same(gradients(model), gradients(one))
        norm, wanted = clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted)
        assert wanted > 0.5
        assert_same(gradients(model), gradients(one))
        norms = [torch.zeros_like(norm) for _ in range(world_size)]
        dist.all_gather(norms, norm)
        assert len({each.item() for each in norms}) == 1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), weights(one), 1e-4)


@in_ranks(2)
def test_a_layer_itself_may_be_wrapped(rank: int, world_size: int) -> None:
    """Parameters that the user excludes from the wrapper stay this rank's."""
    layer = make_layer(2)
    layer(draw(rank))[0].sum().backward()
    sums = gradients(layer)
    own = {"shared.w2": sums["shared.w2"]}
    for name in ("router.weight", "shared.w1"):
        dist.all_reduce(sums[name])
    layer.zero_grad()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, list(own))
    for _ in range(2):
        exclude_experts(layer)
    wrapped = DistributedDataParallel(layer)
    wrapped(draw(rank))[0].sum().backward()
    assert_same(gradients(layer), {name: grad / world_size for name, grad in sums.items()} | own)


@in_ranks(2)
def test_experts_stay_means_whatever_becomes_of_their_parameters(rank: int, world_size: int) -> None:
    """Parameters are frozen while excluded, copied, replaced, and cast."""
    one, model, replaced = Model(make_layer()), Model(make_layer(2)), Model(make_layer(2, seed=9))
    model.layer.requires_grad_(False)
    for each in (model, replaced):
        exclude_experts(each)
    model.layer.requires_grad_(True)
    replaced.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    for source in range(world_size):
        (one(draw(source)).square().mean() / world_size).backward()
    for changed in (model, copy.deepcopy(model), replaced, copy.deepcopy(model).double().float()):
        wrapped = DistributedDataParallel(changed)
        wrapped(draw(rank)).square().mean().backward()
        assert_same(gradients(changed), gradients(one))


@in_ranks(2)
def test_what_would_mix_experts_is_refused(rank: int, world_size: int) -> None:
    """DDP, FSDP and others would average or overwrite experts, or see one rank's only; they raise on every rank."""
    layer = make_layer(2)
    assert layer.group.mesh is not None
    names = [name for name, parameter in layer.named_parameters() if isinstance(parameter, DTensor)]
    assert names == ["w1", "w2"]
    with pytest.raises(RuntimeError, match="DTensor"):
        DistributedDataParallel(Model(copy.deepcopy(layer)))
    unsynchronised = DistributedDataParallel(Model(copy.deepcopy(layer)), init_sync=False)
    loss = unsynchronised(draw(rank)).sum()
    with pytest.raises(RuntimeError, match="DTensor"):
        loss.backward()
    for mesh in (None, layer.group.mesh["ep"], dist.device_mesh.init_device_mesh("cpu", (world_size,))):
        with pytest.raises(Exception, match=r"Invariant encountered|overlapping meshes|root"):
            fully_shard(Model(make_layer(2)), mesh=mesh)
    model = Model(layer)
    model(draw(rank)).sum().backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for options in ({"foreach": True}, {"fused": True}):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            AdamW(model.parameters(), weight_decay=0.0, **options).step()
    assert_same(weights(model), before, 0.0)


@in_ranks(4)
def test_torch_clips_and_steps_experts_of_several_ranks(rank: int, world_size: int) -> None:
    """Norm, clipping and every AdamW on expert weights equal those of one rank or of plain tensors."""
    layer, one = make_layer(2, 2), make_layer()
    layer(draw(rank))[0].square().sum().backward()
    for source in range(world_size):
        one(draw(source))[0].square().sum().backward()
    experts = layer.expert_parameters()
    norm, wanted = nn.utils.clip_grad_norm_(experts, 0.5), nn.utils.clip_grad_norm_(one.expert_parameters(), 0.5)
    torch.testing.assert_close(whole(norm), wanted)
    for mine, theirs in zip(experts, one.expert_parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        plain = [nn.Parameter(local(each).detach().clone()) for each in experts]
        for mine, theirs in zip(plain, experts, strict=True):
            mine.grad = local(theirs.grad).clone()
        for parameters in (plain, experts):
            optimizer = AdamW(parameters, lr=0.1, **options)
            for _ in range(2):
                optimizer.step()
        for mine, theirs in zip(plain, experts, strict=True):
            assert torch.equal(mine, local(theirs)), options


@in_ranks(4)
def test_fully_shard_over_the_groups(rank: int, world_size: int) -> None:
    """``fully_shard`` over the MoE groups: experts are gathered for a call, their gradients means over the groups."""
    one, layer = make_layer(), make_layer(2)
    assert layer.group.mesh is not None
    fully_shard(layer, mesh=layer.group.mesh["data"])
    assert local(layer.w1).shape[0] == CONFIG.num_experts // 4
    y, _ = layer(draw(rank))
    y.square().sum().backward()
    for source in range(world_size):
        wanted, _ = one(draw(source))
        (wanted.square().sum() / 2).backward()
        if source == rank:
            torch.testing.assert_close(y, wanted)
    for mine, theirs in zip(layer.expert_parameters(), one.expert_parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-4, atol=1e-5)
    layer.reshard()
    with pytest.raises(ValueError, match=r"w1 of shape \(2, 96, 16\) must be \(e, 2F, D\) = \(4, 96, 16\)"):
        layer.routed_experts(draw(rank), torch.zeros(TOKENS, 2, dtype=torch.int32), torch.ones(TOKENS, 2))


def copy_layers(rank: int, world_size: int) -> None:
    layer = make_layer(2)
    copied = copy.deepcopy(Model(layer)).layer
    assert copied.group is layer.group
    assert_same(weights(copied), weights(layer), 0.0)
    with torch.no_grad():
        outputs = [each(draw(rank))[0] for each in (layer, copied)]
        assert torch.equal(*outputs)
        copied.expert_weights()[0].zero_()
        assert torch.equal(layer(draw(rank))[0], outputs[0])
        assert not torch.equal(copied(draw(rank))[0], outputs[0])
    with pytest.raises(TypeError, match=r"ExpertGroup cannot be pickled, nor can a layer .* save its state_dict\(\)"):
        pickle.dumps(layer)
    half = layer.to(torch.bfloat16)
    assert half.w1.dtype == local(half.w1).dtype == torch.bfloat16
    assert isinstance(half.w1, DTensor)


def test_copies_of_layers() -> None:
    run_ranks(copy_layers, 2)
    alone = make_layer()
    x = draw(0)
    assert torch.equal(copy.deepcopy(alone)(x)[0], alone(x)[0])
    with pytest.raises(TypeError, match="ExpertGroup cannot be pickled"):
        pickle.dumps(alone)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
@in_ranks("ep tp")
def test_biases_are_sharded_as_the_weights_are(rank: int, world_size: int, ep: int, tp: int) -> None:
    """Biases and their gradients as all ranks hold them together, and the norm of both gradients.

    TP ranks sum b2's gradient in other orders, of different tokens each: it is alike all the same, so that b2 stays so.
    """
    config = replace(CONFIG, expert_bias=True)
    layer = MoE(config, make_group(config, ep=ep, tp=tp, max_tokens=4 * TOKENS), path="twin")
    wanted = draw_biases(config.num_experts, config.ffn_size, config.hidden_size, torch.float32)
    for name, value in {"b1": wanted.b1.view(-1, 2, config.ffn_size), "b2": wanted.b2}.items():
        mine = getattr(layer, name)
        layer.load_state_dict({name: distribute_tensor(value, mine.device_mesh, mine.placements)}, strict=False)
    layer(draw(rank))[0].square().sum().backward()
    biases = [layer.b1, layer.b2]
    assert torch.equal(whole(layer.b1).flatten(1), wanted.b1)
    assert torch.equal(whole(layer.b2), wanted.b2)
    grads = torch.cat([whole(each.grad).flatten() for each in biases])
    found = [torch.empty_like(grads) for _ in range(world_size)]
    dist.all_gather(found, grads)
    assert all(torch.equal(each, grads) for each in found)
    said = "a bias that TP ranks hold alike counts once: ".__add__
    torch.testing.assert_close(clip_grad_norm_(biases, 1e9), grads.norm(), msg=said)


@pytest.mark.parametrize("path", ["twin", "plain"])
@in_ranks(2)
def test_weights_written_between_forward_and_backward_pass(rank: int, world_size: int, path: str) -> None:
    """Writes are refused if gradients would mix both weights; weights that were cast for the products stay right."""
    group = make_group(CONFIG, ep=2, max_tokens=4 * TOKENS)
    for dtype in (torch.float32, torch.float64):
        layer, found = MoE(CONFIG, group, path=path, param_dtype=dtype), []
        layer.shared = None
        for factor in (1, 2):
            output = layer(draw(rank))[0]
            with torch.no_grad():
                layer.w2.mul_(factor)
            if dtype == torch.float32:
                with pytest.raises(
                    RuntimeError, match=r"expert weights of shape .* were modified by an inplace operation"
                ):
                    output.sum().backward()
            else:
                found += torch.autograd.grad(output.sum(), (layer.w1, layer.w2))
        for first, second in zip(found[:2], found[2:], strict=True):
            assert torch.equal(local(first), local(second))


@in_ranks(2)
def test_one_group_after_another(rank: int, world_size: int) -> None:
    """torch remembers operations by the ranks of their mesh: a second group's must not run on the first one's."""
    norms = []
    for _ in range(2):
        layer = make_layer(2)
        layer(draw(rank))[0].sum().backward()
        norms.append(clip_grad_norm_(layer.parameters(), 1.0))
        layer.group.close()
    assert torch.equal(*norms)


@in_ranks(2)
def test_a_group_outlives_another_one_of_the_same_ranks(rank: int, world_size: int) -> None:
    first, (second, optimizer) = make_layer(2), stepped(2, 1, seed=1)
    wanted = weights(second)
    second.load_state_dict(first.state_dict())
    assert_same(weights(second), weights(first), 0.0)
    first.group.close()
    assert weights(second).keys() == wanted.keys()
    optimizer.zero_grad()
    second(draw(rank))[0].sum().backward()
    norm = clip_grad_norm_([second.w1], 1e9)
    torch.testing.assert_close(norm, whole(second.w1.grad).norm())
    optimizer.step()
    assert weights(copy.deepcopy(second)).keys() == wanted.keys()
    second.group.close()


def test_clipping_takes_one_tensor_as_torch_does() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.full((2, 2), 3.0)
    assert clip_grad_norm_(weight, 1.0) == 6
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 0.5))
