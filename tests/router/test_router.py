"""Which experts the router chooses, how it weighs them, losses and balance: examples, rules by hand, hostile inputs."""

import dataclasses
import math

import pytest
import torch
from router_cases import VARIANTS, D, identity_router, make_config, make_router, stats_of, tokens_of_logits

from comet.config import MoEConfig
from comet.router.losses import count_routed_rows, load_balancing_loss, normalize, router_z_loss
from comet.router.router import Router, check_finite, compute_logits, select_experts


def route_by_hand(
    logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor
) -> tuple[list[list[int]], list[list[float]]]:
    """The routing rule once more, in Python numbers, token by token."""
    size = config.num_experts // config.num_groups
    all_ids, all_weights = [], []
    for row in logits.double().tolist():
        if config.score == "softmax":
            exps = [math.exp(value - max(row)) for value in row]
            scores = [value / sum(exps) for value in exps]
        else:
            scores = [1 / (1 + math.exp(-value)) for value in row]
        chosen_by = [score + offset for score, offset in zip(scores, bias.tolist(), strict=True)]
        groups = [chosen_by[group * size : (group + 1) * size] for group in range(config.num_groups)]
        group_scores = [sum(sorted(group)[-2:]) for group in groups]
        best_groups = sorted(range(config.num_groups), key=lambda g: (-group_scores[g], g))[: config.top_groups]
        allowed = [expert for expert in range(config.num_experts) if expert // size in best_groups]
        ids = sorted(allowed, key=lambda e: (-chosen_by[e], e))[: config.top_k]
        total = sum(scores[e] for e in ids) if config.renormalize else 1.0
        all_ids.append(ids)
        all_weights.append([scores[e] / total * config.routed_scale for e in ids])
    return all_ids, all_weights


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_routing_equals_rule_in_python_numbers(changes: dict, seed: int) -> None:
    print(f"seed {seed}, {changes}")
    router = make_router(seed, **changes).double()
    tokens = 2 * torch.randn(33, D, dtype=torch.float64)
    bias = torch.zeros(router.config.num_experts, dtype=torch.float64)
    if router.selection_bias is not None:
        router.selection_bias.normal_(std=0.3)
        bias = router.selection_bias.double()
    routing = router(tokens)
    ids, weights = route_by_hand(tokens @ router.weight.T, router.config, bias)
    assert routing.top_k_ids.dtype == torch.int32
    assert routing.top_k_ids.tolist() == ids
    torch.testing.assert_close(routing.top_k_weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)


def test_ties_go_to_the_lowest_expert() -> None:
    config = make_config(num_experts=128, top_k=5)
    assert (select_experts(torch.ones(300, 128), config) == torch.arange(5)).all()
    groups = dataclasses.replace(config, num_groups=8, top_groups=2, top_k=20)
    assert (select_experts(torch.zeros(300, 128), groups) == torch.arange(20)).all()
    scores = torch.tensor([[0.0, -0.0, 0.5, 0.5, 0.5]])
    assert select_experts(scores, make_config(num_experts=5, top_k=4)).tolist() == [[2, 3, 4, 0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_logits_tie_and_saturated_scores_do_not(score: str) -> None:
    config = make_config(num_experts=131, top_k=3, score=score)
    router = Router(config)
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            router.weight.copy_(torch.randint(-3, 4, (131, D)))
            router.weight[[5, 64, 130]] = router.weight[64] + 8
        tokens = torch.randint(1, 3, (9, D)).float()  # small integers: the three logits are equal on every machine
        ids = router(tokens).top_k_ids
        assert (ids == torch.tensor([5, 64, 130])).all(), f"seed {seed}"
    steep = identity_router(num_experts=4, score=score)
    assert steep(tokens_of_logits(torch.tensor([[30.0, 40.0, 300.0, 50.0]]))).top_k_ids.tolist() == [[2, 3]]
    assert steep(tokens_of_logits(torch.tensor([[300.0, -300.0, -400.0, -200.0]]))).top_k_ids.tolist() == [[0, 3]]


def test_negative_selection_scores_never_open_a_closed_group() -> None:
    scores = torch.full((1, 8), -2.0)
    scores[0, 5] = -0.5
    config = make_config(num_groups=4, top_groups=1)
    assert select_experts(scores, config).tolist() == [[5, 4]]


def test_selection_ignores_memory_layout() -> None:
    scores = torch.rand(8, 40).T
    config = make_config(num_groups=4, top_groups=2)
    assert torch.equal(select_experts(scores, config), select_experts(scores.contiguous(), config))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_tokens(changes: dict, dtype: torch.dtype) -> None:
    router = make_router(dtype=dtype, **changes)
    routing = router(torch.empty(0, D, dtype=dtype, requires_grad=True))
    assert routing.top_k_ids.shape == routing.top_k_weights.shape == (0, router.config.top_k)
    stats = stats_of(router, routing)
    assert stats.loss.item() == 0
    assert stats.expert_load.tolist() == [0] * router.config.num_experts
    (stats.loss + routing.top_k_weights.sum()).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_low_precision_inputs_are_routed_in_float32(dtype: torch.dtype, score: str) -> None:
    router = make_router(1, dtype=dtype, score=score)
    tokens = torch.randn(64, D).to(dtype)
    routing = router(tokens)
    exact = make_router(1, score=score)
    exact.load_state_dict({"weight": router.weight.detach().float()})
    expected = exact(tokens.float())
    loss = stats_of(router, routing).loss
    assert routing.top_k_weights.dtype == loss.dtype == torch.float32
    assert torch.equal(routing.top_k_ids, expected.top_k_ids)
    assert torch.equal(routing.top_k_weights, expected.top_k_weights)
    assert torch.equal(loss, stats_of(exact, expected).loss)


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_logits_are_refused_with_their_place(value: float, shown: str) -> None:
    logits = torch.zeros(5, 8)
    logits[3, 6] = logits[4, 0] = value
    message = rf"router logits\[3, 6\]={shown} must be finite \(2 of 40 are not\): look for NaN or Inf in tokens"
    with pytest.raises(ValueError, match=message):
        check_finite(logits)


def test_non_finite_tokens_and_weights_are_refused() -> None:
    router = make_router()
    tokens = torch.randn(4, D)
    tokens[2, 3] = math.nan
    with pytest.raises(ValueError, match=r"router logits\[2, 0\]=nan must be finite \(8 of 32 are not\)"):
        router(tokens)
    with torch.no_grad():
        router.weight[5] = math.inf
    with pytest.raises(ValueError, match=r"router logits\[0, 5\]=(nan|-?inf) must be finite"):
        router(torch.randn(4, D))


def test_large_finite_logits_give_finite_weights_and_gradients() -> None:
    for score in ("softmax", "sigmoid"):
        router = identity_router(num_experts=4, score=score)
        tokens = tokens_of_logits(torch.tensor([[1e4, -1e4, 1e4, 0.0], [-1e4, -1e4, -1e4, -1e4]])).requires_grad_()
        routing = router(tokens)
        assert routing.top_k_ids.tolist() == [[0, 2], [0, 1]]
        assert routing.top_k_weights[0].tolist() == [0.5, 0.5]
        assert routing.top_k_weights.isfinite().all()
        (routing.top_k_weights.square().sum() + stats_of(router, routing).loss).backward()
        assert tokens.grad.isfinite().all()
        assert router.weight.grad.isfinite().all()


def test_input_errors() -> None:
    router = make_router()
    with pytest.raises(ValueError, match=r"tokens of shape \(4, 8\) must be \(T, D\) with D = hidden_size=16"):
        router(torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 4, 16\) must be \(T, D\)"):
        router(torch.randn(2, 4, D))
    with pytest.raises(ValueError, match=r"tokens of dtype torch.int64 must be floating"):
        router(torch.zeros(4, D, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"balance='aux' must be 'bias' to update the selection bias"):
        router.update_bias(torch.zeros(8))
    with pytest.raises(ValueError, match=r"expert_load_global of shape \(7,\) must be \(E,\) = \(8,\)"):
        make_router(balance="bias").update_bias(torch.zeros(7))
    router = make_router(balance="bias")
    router.load_state_dict({name: each.bfloat16() for name, each in router.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"selection_bias of dtype torch.bfloat16 must be torch.float32"):
        router.update_bias(torch.zeros(8))


def test_selection_bias_survives_dtype_changes_bit_for_bit() -> None:
    router = make_router(balance="bias")
    router.selection_bias.uniform_()
    before = router.selection_bias.clone()
    wrapped = torch.nn.Sequential(router).to(torch.bfloat16).half().double()
    assert router.weight.dtype == torch.float64
    assert torch.equal(wrapped.state_dict()["0.selection_bias"], before)
    assert wrapped.state_dict()["0.selection_bias"].dtype == torch.float32


def test_router_built_on_meta_can_be_materialised() -> None:
    router = Router(make_config(balance="bias"), device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    router.reset_parameters()
    assert router.selection_bias.tolist() == [0.0] * 8
    assert router(torch.randn(3, D)).top_k_ids.shape == (3, 2)


def test_state_has_a_bias_only_when_balanced_by_bias() -> None:
    assert set(make_router().state_dict()) == {"weight"}
    assert set(make_router(balance="bias").state_dict()) == {"weight", "selection_bias"}


def test_compute_logits_keeps_float64_and_lifts_the_rest() -> None:
    for dtype, expected in [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]:
        assert compute_logits(torch.ones(2, D, dtype=dtype), torch.ones(3, D, dtype=dtype)).dtype == expected


def test_worked_examples_of_losses_and_loads() -> None:
    scores = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    assert load_balancing_loss(scores, torch.tensor([2.0, 0.0])).item() == 1.5
    assert router_z_loss(torch.zeros(1, 2, dtype=torch.float64)).item() == pytest.approx(0.480453013918)
    assert count_routed_rows(torch.tensor([[2, 0], [2, -1]]), 4).tolist() == [1, 0, 2, 0]
    assert normalize(torch.tensor([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[0.25, 0.75], [0.0, 0.0]]


def test_worked_example_of_update_bias() -> None:
    router = make_router(num_experts=3, balance="bias", bias_update_rate=0.5)
    router.update_bias(torch.tensor([6, 1, 2]))
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.5]


def test_losses_are_zero_when_unused() -> None:
    tokens = torch.randn(9, D)
    for changes in ({"balance": "bias"}, {"balance": "none"}, {"aux_loss_coef": 0.0}):
        router = make_router(**changes)
        assert stats_of(router, router(tokens)).aux_loss.item() == 0
    router = make_router(aux_loss_coef=0.0, z_loss_coef=0.0)
    assert stats_of(router, router(tokens)).loss.item() == 0
    router = make_router()
    stats = stats_of(router, router(tokens))
    assert stats.loss.item() == pytest.approx((stats.aux_loss + stats.z_loss).item())
    assert stats.loss.requires_grad
    assert not stats.expert_load.requires_grad


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_of_forward_equal_independent_formulas(seed: int, score: str) -> None:
    print(f"seed {seed}")
    router = make_router(seed, score=score, aux_loss_coef=0.5, z_loss_coef=0.25, top_k=3)
    tokens = 2 * torch.randn(50, D)
    stats = stats_of(router, router(tokens))
    logits = (tokens @ router.weight.detach().T).double()
    exps = logits.exp()
    probs = exps / exps.sum(1, keepdim=True) if score == "softmax" else 1 / (1 + 1 / exps)
    shares = (probs / probs.sum(1, keepdim=True)).mean(0)
    load = torch.zeros(8, dtype=torch.float64)
    for row in logits.tolist():
        for expert in sorted(range(8), key=lambda e, row=row: -row[e])[:3]:
            load[expert] += 1
    assert stats.expert_load.tolist() == load.tolist()
    assert stats.expert_load.sum().item() == 50 * 3
    assert stats.aux_loss.item() == pytest.approx(0.5 * 8 * ((load / 150) @ shares).item(), rel=1e-5)
    assert stats.z_loss.item() == pytest.approx(0.25 * exps.sum(1).log().square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_gradients_of_forward_by_finite_differences(changes: dict) -> None:
    router = make_router(3, **changes).double()
    tokens = torch.randn(7, D, dtype=torch.float64, requires_grad=True)

    def outputs(tokens: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = torch.func.functional_call(router, {"weight": weight}, (tokens,))
        return routing.top_k_weights, stats_of(router, routing).loss

    assert torch.autograd.gradcheck(outputs, (tokens, router.weight), fast_mode=True)
