"""State that ranks hold alike stays alike: reduced gradients, seeds, scaled losses, clipping, moving averages."""

import math

import pytest
import torch
import torch.distributed as dist
from pages import program, text_of
from ranks import in_ranks, logged
from refusals import dry_run
from tiers import slow
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from training_cases import make_group

import comet
from comet import MoE, MoEConfig
from comet.layer.sharding import local

CONFIG = MoEConfig(
    hidden_size=16, ffn_size=48, num_experts=8, top_k=2, shared_ffn_size=16, balance="none", z_loss_coef=0
)
TOKENS = 24
LAYOUTS = [(2, 2, 1), (2, 1, 1), (2, 1, 2), slow(4, 2, 1)]


class Model(nn.Module):
    def __init__(self, ep: int = 1, tp: int = 1, config: MoEConfig = CONFIG, **given: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.group = make_group(config, ep=ep, tp=tp, max_tokens=4 * TOKENS)
        self.layer = MoE(config, self.group, **given)
        self.out = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0]).square().sum()


def draw(rank: int, step: int) -> Tensor:
    """Other numbers of tokens on each rank, and none on rank 1 in one step."""
    count = 0 if (rank, step) == (1, 2) else TOKENS - 3 * rank
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.detach() for name, each in model.named_parameters()}
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}


def assert_alike(model: nn.Module) -> None:
    """All that a rank of another part of the experts holds, too, is bit for bit what rank 0 holds."""
    for name, tensor in whole(model).items():
        of_first = tensor.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(tensor, of_first), name


@pytest.mark.parametrize(("world_size", "ep", "tp"), LAYOUTS)
@in_ranks("world_size")
def test_reduced_gradients_are_those_of_one_rank_with_all_tokens(rank: int, world_size: int, ep: int, tp: int) -> None:
    torch.set_num_threads(1)
    model, one = Model(ep, tp), Model()
    one.load_state_dict(whole(model))
    # Not AdamW: it makes steps of one size of gradients that are rounding alone.
    optimizers = [SGD(each.parameters(), lr=1e-3, momentum=0.9, foreach=False) for each in (model, one)]
    for step in range(4):
        model(draw(rank, step)).backward()
        comet.reduce_gradients(model, model.group)
        (sum(one(draw(each, step)) for each in range(world_size)) / world_size).backward()
        assert model.unused.weight.grad is None, "weight decay is not for what no rank used"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model)
        for (name, found), wanted in zip(whole(model).items(), whole(one).values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=f"step {step}, {name}".__add__)


@in_ranks(2)
def test_the_loop_of_the_page_keeps_ranks_alike(rank: int, world_size: int) -> None:
    code = program("docs/howto/own-loop.md").replace("dist.init_process_group()", "pass")
    scope: dict[str, object] = {}
    exec(code, scope)
    layer = scope["layer"]
    assert isinstance(layer, MoE)
    assert_alike(layer)
    torch.manual_seed(0)
    first = MoE(layer.config, layer.group)
    assert not torch.equal(first.router.weight, layer.router.weight)
    x = torch.randn(4, 10, 64, requires_grad=True)
    mask, output = torch.rand(4, 10) < 0.7, torch.zeros_like(x)
    assert "output[mask], stats = layer(x[mask])" in text_of("docs/howto/own-loop.md")
    output[mask], _ = layer(x[mask])
    wanted, _ = layer(x)
    torch.testing.assert_close(output[mask], wanted[mask])
    assert (output[~mask] == 0).all()
    output.sum().backward()
    assert (x.grad[~mask] == 0).all()


@in_ranks(2)
def test_reduced_gradients_leave_means_alone(rank: int, world_size: int) -> None:
    plain, excluded = Model(2), Model(2)
    comet.exclude_experts(excluded)
    for model in (plain, excluded):
        model(draw(rank, 0)).backward()
        comet.reduce_gradients(model, model.group)
    for mine, other in zip(plain.parameters(), excluded.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(local(mine.grad), local(other.grad))


@in_ranks(2)
def test_gradients_that_would_be_reduced_wrongly_are_refused_by_name(rank: int, world_size: int) -> None:
    sparse = nn.ModuleList([nn.Embedding(5, 16, sparse=True)])
    group = make_group(CONFIG, ep=2, max_tokens=TOKENS)
    sparse[0](torch.tensor([rank])).sum().backward()
    with pytest.raises(ValueError, match=r"^layout=torch.sparse_coo of the gradient of 0.weight must be torch.strided"):
        comet.reduce_gradients(sparse, group)
    alone = MoE(CONFIG, make_group(CONFIG, max_tokens=TOKENS), seed=0)
    both = nn.ModuleList([MoE(CONFIG, group, seed=1), alone])
    with pytest.raises(ValueError, match=r"^ep x tp=2 of the group must be the 1 of layer 1:"):
        comet.reduce_gradients(both, group)
    comet.reduce_gradients(nn.ModuleList([both[0], MoE(CONFIG, make_group(CONFIG, ep=2), seed=0)]), group)


@in_ranks(2)
def test_one_scaler_and_one_optimizer_over_experts_of_several_ranks(rank: int, world_size: int) -> None:
    """A scale that is a power of two changes no bit of a step; infinity on one rank skips the step on all."""
    model, plain = Model(2), Model(2)
    scaler = comet.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, other = (AdamW(each.parameters(), lr=0.01, foreach=False) for each in (model, plain))
    for step in range(2):
        scaler.scale(model(draw(rank, step))).backward()
        comet.reduce_gradients(model, model.group)
        scaler.unscale_(optimizer)
        plain(draw(rank, step)).backward()
        comet.reduce_gradients(plain, plain.group)
        norms = [comet.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        assert torch.equal(*norms)
        scaler.step(optimizer)
        scaler.update()
        other.step()
        for each in (optimizer, other):
            each.zero_grad()
    assert scaler.get_scale() == 2.0**11
    assert all(map(torch.equal, whole(model).values(), whole(plain).values()))
    model(draw(rank, 0)).backward()
    stock = torch.amp.GradScaler("cpu")
    stock.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        stock.unscale_(optimizer)
    for name in ("w1", "w2"):
        assert_skipped(model, scaler, optimizer, rank, name)


@in_ranks(2)
def test_a_scaler_skips_on_a_rank_that_no_gradient_reached(rank: int, world_size: int) -> None:
    linear = nn.Linear(2, 2)
    optimizer, scaler = SGD(linear.parameters()), comet.GradScaler("cpu", init_scale=8.0)
    before = linear.weight.clone()
    loss = linear(torch.full((1, 2), math.inf)).sum() if rank == 0 else torch.ones((), requires_grad=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(linear.weight, before)


def assert_skipped(model: Model, scaler: comet.GradScaler, optimizer: AdamW, rank: int, name: str) -> None:
    before, scale = whole(model), scaler.get_scale()
    before = {key: each.clone() for key, each in before.items()}
    optimizer.zero_grad()
    scaler.scale(model(draw(rank, 0))).backward()
    if rank == 1:
        local(getattr(model.layer, name).grad)[0, 0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale / 2, name
    assert all(torch.equal(before[key], each) for key, each in whole(model).items()), name


@in_ranks(2)
def test_clipping_takes_what_torchs_takes(rank: int, world_size: int) -> None:
    model, one = Model(2), Model()
    one.load_state_dict(whole(model))
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        for foreach in (None, False):
            for each in (model, one):
                each.zero_grad()
            model(draw(rank, 0)).backward()
            comet.reduce_gradients(model, model.group)
            (sum(one(draw(source, 0)) for source in range(2)) / 2).backward()
            found = comet.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
            wanted = nn.utils.clip_grad_norm_(one.parameters(), 0.1, norm_type, foreach=foreach)
            torch.testing.assert_close(found, wanted)
            grad = model.layer.w1.grad.full_tensor()
            torch.testing.assert_close(grad, one.layer.w1.grad, rtol=1e-4, atol=1e-6)
    if rank == 1:
        local(model.layer.w2.grad)[0, 0, 0] = math.nan
    kept = model.out.weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
        comet.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    assert torch.equal(model.out.weight.grad, kept)


@in_ranks(2)
def test_moving_averages_of_experts_of_several_ranks(rank: int, world_size: int) -> None:
    model = Model(2)
    averaged, refused = (
        AveragedModel(model, **given)
        for given in ({"avg_fn": get_ema_avg_fn(0.75)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.75)})
    )
    first = {name: each.clone() for name, each in whole(model).items()}
    for each in (averaged, refused):
        each.update_parameters(model)  # the first time copies
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    averaged.update_parameters(model)
    for name, found in whole(averaged.module).items():
        torch.testing.assert_close(found, 1.5 * first[name])
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        refused.update_parameters(model)


@in_ranks(2)
def test_layers_without_a_seed_follow_torchs_and_are_alike_on_all_ranks(rank: int, world_size: int) -> None:
    for ep in (1, 2):
        group, found = make_group(CONFIG, ep=ep, max_tokens=TOKENS), {}
        for seed in (1, 2, 1):
            torch.manual_seed(seed + 10 * rank)  # rank 0's counts
            layers = [MoE(CONFIG, group) for _ in range(2)]
            assert_alike(nn.ModuleList(layers))
            weights = [whole(layer) for layer in layers]
            assert not torch.equal(weights[0]["w1"], weights[1]["w1"])
            assert not torch.equal(weights[0]["router.weight"], weights[1]["router.weight"])
            again = found.setdefault(seed, weights)
            assert all(map(torch.equal, again[1].values(), weights[1].values()))
        assert not torch.equal(found[1][0]["w2"], found[2][0]["w2"])
        assert all(
            map(torch.equal, whole(MoE(CONFIG, group, seed=3)).values(), whole(MoE(CONFIG, group, seed=3)).values())
        )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_without_a_gradient_from_the_task_is_warned_of(score: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = logged("comet.schedule.choice")
    for top_k, renormalize, is_warned in ((2, True, False), (1, False, False), (1, True, True)):
        config = MoEConfig(
            hidden_size=16, ffn_size=16, num_experts=4, top_k=top_k, score=score, renormalize=renormalize,
            balance="none", z_loss_coef=0,
        )  # fmt: skip
        layer = MoE(config, make_group(config, max_tokens=TOKENS), seed=0)
        with torch.no_grad():
            layer(draw(0, 0))
        assert not said
        for _ in range(2):
            layer(draw(0, 0))[0].square().sum().backward()
        assert bool(layer.router.weight.grad.abs().max() < 1e-4) == is_warned
        assert len(said) == is_warned, said
    assert "top_k=1 with renormalize=true" in said[0]
    assert score in said[0]
    words = [f"model.moe.score={score}", "model=tiny", "model.moe.top_k=1"]
    warned, *_ = (line for line in dry_run(capsys, "train", *words)[0].splitlines() if "warning" in line)
    assert "set renormalize=false" in warned
    assert "warning" not in dry_run(capsys, "train", *words, "model.moe.renormalize=false")[0]
