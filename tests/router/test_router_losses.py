"""Losses, gradients and balance of the router: worked examples, independent formulas, and streams it must even out."""

from __future__ import annotations

import pytest
import torch
from router_cases import VARIANTS, D, identity_router, make_router, stats_of, tokens_of_logits

from comet.router.losses import count_routed_rows, load_balancing_loss, normalize, router_z_loss


def imbalance(expert_load: torch.Tensor) -> float:
    return (expert_load.max() / expert_load.mean()).item()


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

    assert torch.autograd.gradcheck(outputs, (tokens, router.weight))


def test_bias_balances_a_skewed_stream() -> None:
    router = identity_router(num_experts=16, top_k=2, balance="bias", score="sigmoid", bias_update_rate=2e-3)
    generator = torch.Generator().manual_seed(7)
    skew = torch.linspace(2.0, -2.0, 16)
    loads = []
    for _ in range(500):
        routing = router(torch.randn(1024, D, generator=generator) + skew)
        loads.append(stats_of(router, routing).expert_load)
        router.update_bias(loads[-1])
    # An even expectation of 128 rows still has a deviation of 11 in one step, so the largest of 16 is about 1.2.
    assert imbalance(loads[0]) > 2.5
    assert max(imbalance(load) for load in loads[-20:]) < 1.4
    assert imbalance(torch.stack(loads[-50:]).sum(0)) < 1.05
    assert router.weight.grad is None
    assert not router.selection_bias.requires_grad


def test_aux_loss_balances_a_skewed_router() -> None:
    router = identity_router(num_experts=8, top_k=2, aux_loss_coef=1.0, z_loss_coef=0.0)
    generator = torch.Generator().manual_seed(7)
    skew = tokens_of_logits(torch.linspace(1.0, -1.0, 8)[None])
    skew[0, 8] = 1.0  # a constant feature, so that the router can learn an offset per expert
    optimizer = torch.optim.Adam(router.parameters(), lr=2e-2)
    imbalances = []
    for _ in range(150):
        stats = stats_of(router, router(torch.randn(512, D, generator=generator) + skew))
        imbalances.append(imbalance(stats.expert_load))
        optimizer.zero_grad()
        stats.loss.backward()
        optimizer.step()
    assert imbalances[0] > 1.6
    assert max(imbalances[-10:]) < 1.35
