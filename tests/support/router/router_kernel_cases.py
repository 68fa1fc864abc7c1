"""Checks of the router's kernels, shared by the interpreter and the GPU tests."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from router_cases import make_config
from torch import Tensor
from torch.testing import assert_close

from comet.config import MoEConfig
from comet.kernels.router.logits import router_logits
from comet.kernels.router.select import SelectRule
from comet.kernels.router.select import select as select_ids
from comet.router.kernels import measure, select
from comet.router.losses import RouterStats, measure_routing
from comet.router.router import score_logits, select_experts, weigh_experts

ROUNDING = 2.0**-24
TINY = torch.finfo(torch.float32).tiny

# T, E, D: tails along every axis, one expert, more tokens than a block.
SIZES = [(1, 8, 64), (17, 16, 48), (70, 60, 112), (33, 1, 16), (5, 130, 64)]

# T and a router: every rule, widths that are no powers of two, groups of one expert and of padded width, no tokens.
SELECTS = [
    (1, {"num_experts": 8, "top_k": 2}),
    (0, {"num_experts": 8, "top_k": 2}),
    (13, {"num_experts": 60, "top_k": 4, "renormalize": False}),
    (9, {"num_experts": 1, "top_k": 1}),
    (30, {"num_experts": 130, "top_k": 8, "score": "sigmoid", "routed_scale": 2.5}),
    (5, {"num_experts": 40, "top_k": 32, "balance": "bias"}),
    (70, {"num_experts": 60, "top_k": 4, "num_groups": 4, "top_groups": 2}),
    (11, {"num_experts": 8, "top_k": 3, "num_groups": 8, "top_groups": 3, "score": "sigmoid"}),
    (12, {"num_experts": 33, "top_k": 11, "num_groups": 3, "top_groups": 1, "balance": "bias"}),
    (12, {"num_experts": 12, "top_k": 2, "num_groups": 4, "top_groups": 4}),
    (
        7,
        {"num_experts": 256, "top_k": 8, "num_groups": 8, "top_groups": 4, "score": "sigmoid", "balance": "bias"}
        | {"routed_scale": 2.5},
    ),
    (3, {"num_experts": 512, "top_k": 32, "renormalize": False, "score": "sigmoid"}),
    (2, {"num_experts": 600, "top_k": 5}),
    (4300, {"num_experts": 8, "top_k": 2}),
]

# T, E, K: one block and several, with tails.
MEASURES = [(0, 4, 2), (1, 1, 1), (64, 8, 2), (65, 60, 4), (200, 130, 8), (4200, 8, 2)]


def check_logits(num_tokens: int, num_experts: int, hidden_size: int, dtype: torch.dtype, device: str) -> None:
    """At most twice as far from float64 as float32 products are; weights of very different sizes."""
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16().to(device)
    scale = 2.0 ** torch.randint(-20, 3, (num_experts, 1), generator=generator)
    weight = (torch.randn(num_experts, hidden_size, generator=generator) * scale).to(dtype).to(device)
    exact = tokens.double() @ weight.double().T
    unit = tokens.double().abs() @ weight.double().abs().T * 2.0**-24  # one rounding of the largest partial sum
    limit = 2 * ((tokens.float() @ weight.float().T - exact).abs() / unit).max() + math.log2(hidden_size)
    error = ((router_logits(tokens, weight) - exact).abs() / unit).max()
    where = f"T={num_tokens} E={num_experts} D={hidden_size} {dtype}"
    assert error <= limit, f"{where}: {error:.1f} units of float32, limit {limit:.1f}"


def draw_scores(num_tokens: int, num_experts: int, seed: int) -> torch.Tensor:
    """Few different values, so that there are ties; infinities of both signs, both zeros, subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, 1e-40, -1e-40, 3.4e38])
    ties = values[torch.randint(0, len(values), (num_tokens, num_experts), generator=generator)]
    numbers = torch.randn(num_tokens, num_experts, generator=generator)
    return torch.where(torch.rand(num_tokens, 1, generator=generator) < 0.5, ties, numbers)


def check_top_k(num_tokens: int, num_experts: int, top_k: int, device: str) -> None:
    """Check ids against a stable sort; with NaN, check that ids exist and that none comes twice."""
    scores = draw_scores(num_tokens, num_experts, seed=num_tokens + num_experts).to(device)
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    rule = SelectRule(top_k=top_k)
    ids = select_ids(scores, None, rule)[0]
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), wanted), f"T={num_tokens} E={num_experts} K={top_k}"
    scores[::2] = math.nan
    scores[1::3, 0] = -math.nan
    ids = select_ids(scores, None, rule)[0].long()
    assert ((ids >= 0) & (ids < num_experts)).all()
    assert all(row.unique().numel() == top_k for row in ids)
    assert (ids[::2] == torch.arange(top_k, device=device)).all()


def draw_logits(num_tokens: int, num_experts: int, seed: int) -> torch.Tensor:
    """Rows of everyday logits, of ties, and of logits so far apart that scores underflow or saturate."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(num_tokens, num_experts, generator=generator)
    kind = torch.randint(0, 4, (num_tokens, 1), generator=generator)
    return torch.where(kind == 0, numbers.round(), numbers * torch.tensor([0.0, 1.0, 3.0, 60.0])[kind])


def compared_scores(logits: Tensor, scores: Tensor, bias: Tensor | None, config: MoEConfig) -> Tensor:
    if bias is not None:
        return scores + bias
    return scores if config.top_groups < config.num_groups else logits


def plain(logits: Tensor, ids: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    scores = score_logits(logits, config.score)
    return weigh_experts(scores, ids.long(), config), scores


def assert_as_exact(found: Sequence[Tensor], units: Tensor | float, where: str) -> None:
    """``found``: the kernel's values, float32's and float64's; the first are off by twice the second and some units."""
    actual, float32, exact = found
    if actual.numel() == 0:
        return
    error, usual = (((value - exact).abs() / units).max().item() for value in (actual, float32))
    assert error <= 2 * usual + 6, f"{where}: {error:.1f} roundings of float32, plain torch {usual:.1f}"


def check_select(num_tokens: int, changes: dict, seed: int, device: str) -> None:
    """Ids exactly those of plain torch for the kernel's scores; scores, weights and gradients as exact as torch's."""
    config, where = make_config(**changes), f"T={num_tokens} seed {seed} {changes}"
    generator = torch.Generator().manual_seed(seed)
    logits = draw_logits(num_tokens, config.num_experts, seed).to(device).requires_grad_()
    bias = torch.randint(-2, 3, (config.num_experts,), generator=generator).to(device) * 0.25
    bias = bias if config.balance == "bias" else None
    ids, *outputs = select(logits, bias, config)
    assert ids.dtype == torch.int32
    assert not ids.requires_grad
    compared = compared_scores(logits.detach(), outputs[1].detach(), bias, config)
    assert torch.equal(ids.long(), select_experts(compared, config)), where
    ways = (outputs, plain(logits, ids, config), plain(logits.double(), ids, config))
    for name, *found in zip(("weights", "scores"), *ways, strict=True):
        assert_as_exact(found, found[2].abs() * ROUNDING + TINY, f"{where}, {name}")
    grads = [torch.randn(value.shape, generator=generator).to(device) for value in outputs]
    for kept in ((0, 1), (0,), (1,)):
        found = []
        for way in ways:
            taken, upstream = [way[i] for i in kept], [grads[i].to(way[i].dtype) for i in kept]
            found += torch.autograd.grad(taken, logits, upstream, retain_graph=True)
        largest = sum(grads[i].abs().amax(1, keepdim=True) for i in kept) if num_tokens else 0.0
        assert_as_exact(found, largest * config.routed_scale * ROUNDING, f"{where}, gradient through {kept}")
    for first, second in zip((ids, *outputs), select(logits, bias, config), strict=True):
        assert torch.equal(first, second), where


def check_extremes(device: str) -> None:
    """NaN, infinities, saturated scores, and sums that underflow: values and gradients of plain torch in float32."""
    rows = [
        [math.nan, 0.0, 1.0, 2.0, 3.0, -1.0],
        [math.inf, 0.0, 1.0, 2.0, 3.0, -1.0],
        [-math.inf, 0.0, 1.0, 2.0, 3.0, -1.0],
        [-math.inf] * 6,
        [-200.0] * 6,
        [-88.2] * 6,  # sigmoids are subnormal numbers
        [200.0, -200.0, 88.5, -88.5, 0.0, -0.0],
        [3e38, -3e38, 0.0, 1.0, -1.0, 2.0],
    ]
    for changes in ({"score": "softmax"}, {"score": "sigmoid"}, {"score": "sigmoid", "renormalize": False}):
        for groups in ({}, {"num_groups": 3, "top_groups": 2}):
            config = make_config(num_experts=6, top_k=2, routed_scale=2.0, **changes, **groups)
            logits = torch.tensor(rows, device=device, requires_grad=True)
            ids, weights, scores = select(logits, None, config)
            compared = compared_scores(logits, scores, None, config)
            assert torch.equal(ids.long(), select_experts(compared.detach(), config)), f"{changes} {groups}"
            wanted = plain(logits, ids, config)
            assert_close((weights, scores), wanted, equal_nan=True)
            grads = [torch.arange(1.0, 1 + value.numel()).view_as(value).to(device) / 64 for value in wanted]
            (actual,), (expected,) = (torch.autograd.grad(way, logits, grads) for way in ((weights, scores), wanted))
            finite = logits.isfinite().all(1)
            assert_close(actual[finite], expected[finite])


def check_masked_experts(device: str) -> None:
    """A bias of minus infinity leaves fewer experts than K: ids still exist, each once, as in plain torch."""
    config = make_config(num_experts=15, top_k=10, num_groups=3, top_groups=2, score="sigmoid", balance="bias")
    bias = torch.full((15,), -math.inf)
    bias[[5, 6, 10, 11]] = 0.0
    logits = torch.randn(9, 15, generator=torch.Generator().manual_seed(1)).to(device)
    ids, _, scores = select(logits, bias.to(device), config)
    assert torch.equal(ids.long(), select_experts(scores + bias.to(device), config))


def check_measure(num_tokens: int, num_experts: int, top_k: int, device: str) -> None:
    """Loads exactly those of plain torch, losses and gradients as exact as torch's float32; equal bits every time."""
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = 3 * torch.randn(num_tokens, num_experts, generator=generator)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int().to(device)
    ids[::3, -1] = -1
    for use in ({}, {"score": "sigmoid"}, {"z_loss_coef": 0.0}, {"aux_loss_coef": 0.0}, {"balance": "none"}):
        config = replace(
            make_config(num_experts=num_experts, top_k=top_k), **{"aux_loss_coef": 0.5, "z_loss_coef": 0.25} | use
        )
        where = f"T={num_tokens} E={num_experts} K={top_k} {use}"
        inputs = [drawn.to(device), score_logits(drawn, config.score).to(device)]
        leaves = [
            [value.to(dtype, copy=True).requires_grad_() for value in inputs]
            for dtype in (torch.float32, torch.float64)
        ]
        largest = torch.full((), 2.0, device=device)
        stats = measure(*leaves[0], ids, config, largest)
        ways = (stats, *(measure_routing(*of, ids, config) for of in leaves))
        assert torch.equal(stats.expert_load, ways[1].expert_load), where
        assert torch.equal(largest, drawn.abs().max().clamp_min(2.0).to(device) if num_tokens else largest)
        for loss in ("aux_loss", "z_loss"):
            found = [getattr(way, loss) for way in ways]
            assert found[0].requires_grad == found[1].requires_grad, where
            assert_as_exact(found, found[2].abs() * ROUNDING + TINY, f"{where}, {loss}")
        if stats.loss.requires_grad:
            check_measure_gradients(ways, (leaves[0], *leaves), where)
        again = measure(*leaves[0], ids, config, largest)
        assert all(torch.equal(first, second) for first, second in zip(stats, again, strict=True)), where


def check_measure_gradients(ways: Sequence[RouterStats], leaves: Sequence[list[Tensor]], where: str) -> None:
    """The gradients of logits and scores through both losses at once, and which there are."""
    grads = [
        torch.autograd.grad(way.loss * 3, of, retain_graph=True, allow_unused=True)
        for way, of in zip(ways, leaves, strict=True)
    ]
    for name, *found in zip(("logits", "scores"), *grads, strict=True):
        assert (found[0] is None) == (found[1] is None), f"{where}, {name}"
        if found[0] is not None and found[0].numel():
            assert_as_exact(found, found[2].abs().max() * ROUNDING + TINY, f"{where}, gradient of {name}")


def check_measure_extremes(device: str) -> None:
    """Scores that are all zero; and what is remembered of the largest logit."""
    logits = torch.randn(70, 6, generator=torch.Generator().manual_seed(5)).to(device)
    ids = torch.zeros(70, 2, dtype=torch.int64, device=device)
    scores = torch.zeros_like(logits)
    scores[::2] = 1e-39
    config, largest = make_config(num_experts=6), torch.zeros((), device=device)
    found = []
    for way in (partial(measure, largest_logit=largest), measure_routing):
        leaf = scores.clone().requires_grad_()
        stats = way(logits, leaf, ids, config=config)
        found.append((stats.aux_loss, *torch.autograd.grad(stats.aux_loss, leaf)))
    assert_close(*found)
    for value, seen in ((-7.0, 7.0), (5.0, 7.0), (-math.inf, math.inf), (1.0, math.inf), (math.nan, math.nan)):
        for row in (0, 69):
            poisoned = logits.clone()
            poisoned[row, 5] = value
            measure(poisoned, scores, ids, config, largest)
            assert_close(largest.cpu(), torch.tensor(seen), rtol=0, atol=0, equal_nan=True)
    measure(logits, scores, ids, config, largest)
    assert largest.isnan()
