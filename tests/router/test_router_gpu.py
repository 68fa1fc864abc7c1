"""Router on a GPU: the CPU's routing, no wait for the GPU, capture in a graph, and the deferred check of the logits."""

import math
import subprocess
import sys

import pytest
import torch
from gpus import no_wait
from router_cases import stats_of
from router_kernel_cases import (
    MEASURES,
    SELECTS,
    SIZES,
    check_extremes,
    check_logits,
    check_masked_experts,
    check_measure,
    check_measure_extremes,
    check_select,
    check_top_k,
)

from comet.config import MoEConfig, ParallelConfig
from comet.layer.group import make_expert_group
from comet.moe import MoE
from comet.router.losses import measure_routing
from comet.router.router import Router, score_logits, weigh_experts

pytestmark = pytest.mark.gpu

D = 32
VARIANTS = [
    {},
    {"score": "sigmoid", "renormalize": False},
    {"score": "sigmoid", "balance": "bias", "num_groups": 4, "top_groups": 2},
]

NAN_TOKEN = """
import torch
from comet.config import MoEConfig
from comet.router.router import Router
router = Router(MoEConfig(hidden_size=16, ffn_size=16, num_experts=4, top_k=2), device="cuda")
tokens = torch.randn(5, 16, device="cuda")
tokens[3, 1] = float("nan")
routing = router(tokens)
router.measure(routing.logits, routing.scores, routing.top_k_ids)
print("measure returned", flush=True)
torch.cuda.synchronize()
print("not reached", flush=True)
"""


def make_case(changes: dict, num_tokens: int) -> tuple[Router, torch.Tensor]:
    """Float64, so that the two devices' rounding never decides between experts."""
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=D, ffn_size=16, num_experts=16, top_k=4, **changes)
    return Router(config, dtype=torch.float64), torch.randn(num_tokens, D, dtype=torch.float64)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 500])
def test_gpu_routes_like_the_cpu_without_waiting(changes: dict, num_tokens: int) -> None:
    router, tokens = make_case(changes, num_tokens)
    expected = router(tokens)
    expected_stats = stats_of(router, expected)
    router, tokens = router.cuda(), tokens.cuda()
    with no_wait():
        routing = router(tokens)
        stats = stats_of(router, routing)
        stats.loss.backward()
    assert torch.equal(routing.top_k_ids.cpu(), expected.top_k_ids)
    assert torch.equal(stats.expert_load.cpu(), expected_stats.expert_load)
    torch.testing.assert_close(routing.top_k_weights.cpu(), expected.top_k_weights)
    torch.testing.assert_close(stats.loss.cpu(), expected_stats.loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [*SIZES, (100, 8, 4096), (8192, 128, 2048), (3000, 256, 7168)], ids=str)
def test_logits_are_those_of_float32(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_logits(*sizes, dtype, "cuda")


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (256, 8), (512, 32)])
def test_best_ids_are_those_of_a_stable_sort(num_experts: int, top_k: int) -> None:
    for num_tokens in (0, 1, 777):
        check_top_k(num_tokens, num_experts, top_k, "cuda")


WIDE = {"num_experts": 256, "top_k": 8, "num_groups": 8, "top_groups": 4, "score": "sigmoid", "balance": "bias"}
MANY = [(8192, {"num_experts": 128, "top_k": 8}), (9000, WIDE), (5000, {"num_experts": 512, "top_k": 32})]


@pytest.mark.parametrize(("num_tokens", "changes"), [*SELECTS, *MANY], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_selection_and_its_gradient_are_those_of_plain_torch(num_tokens: int, changes: dict, seed: int) -> None:
    check_select(num_tokens, changes, seed, "cuda")


@pytest.mark.parametrize("sizes", [*MEASURES, (8192, 128, 8), (9001, 256, 8), (3000, 512, 32)], ids=str)
def test_statistics_and_their_gradients_are_those_of_plain_torch(sizes: tuple[int, int, int]) -> None:
    check_measure(*sizes, "cuda")


def test_scores_that_are_not_finite_or_underflow() -> None:
    check_extremes("cuda")
    check_masked_experts("cuda")
    check_measure_extremes("cuda")


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 500])
def test_kernels_measure_like_plain_torch_without_waiting(changes: dict, num_tokens: int) -> None:
    """Compare the router as a layer calls it, in float32, with the functions that specify it."""
    router, tokens = make_case(changes, num_tokens)
    router, tokens = router.float().cuda(), tokens.bfloat16().cuda().requires_grad_()
    tokens.grad, router.weight.grad = torch.zeros_like(tokens), torch.zeros_like(router.weight)
    with no_wait():
        routing = router(tokens)
        largest = torch.zeros((), device="cuda")
        stats = router.measure(routing.logits, routing.scores, routing.top_k_ids, largest_logit=largest)
        (stats.loss + routing.top_k_weights.square().sum()).backward()
    logits = routing.logits.detach().requires_grad_()
    scores = score_logits(logits, router.config.score)
    weights = weigh_experts(scores, routing.top_k_ids.long(), router.config)
    wanted = measure_routing(logits, scores, routing.top_k_ids, router.config)
    (grad,) = torch.autograd.grad(wanted.loss + weights.square().sum(), logits)
    torch.testing.assert_close(routing.top_k_weights, weights)
    torch.testing.assert_close(tuple(stats), tuple(wanted))
    torch.testing.assert_close(tokens.grad, (grad @ router.weight).bfloat16())
    torch.testing.assert_close(router.weight.grad, grad.T @ tokens.float(), rtol=1e-4, atol=1e-4)
    assert largest == (logits.abs().max() if num_tokens else 0)


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "(inf|nan)"), (-math.inf, "(inf|nan)")])
def test_a_layer_notes_non_finite_logits_for_the_next_check(value: float, shown: str) -> None:
    moe = MoEConfig(hidden_size=64, ffn_size=64, num_experts=4, top_k=2)
    group = make_expert_group(moe, ParallelConfig(), max_tokens=128, dtype=torch.bfloat16, device="cuda")
    layer = MoE(moe, group, param_dtype=torch.bfloat16)
    tokens = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    layer(tokens[:0])
    layer(tokens)
    group.workspace.check()
    tokens[77, 3] = value
    with no_wait():
        layer(tokens)
    layer(tokens[:10])  # a later call does not make it unseen
    with pytest.raises(ValueError, match=rf"router logits on rank 0, {shown} among them, must be finite: look for NaN"):
        group.workspace.check()
    group.close()


def test_non_finite_logits_of_a_router_alone_end_the_process_at_its_next_synchronisation() -> None:
    # In a process of its own: a failed device assertion leaves the CUDA context unusable.
    child = subprocess.run(
        [sys.executable, "-P", "-c", NAN_TOKEN], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode != 0
    assert "not reached" not in child.stdout
    assert "router logits must be finite: look for NaN or Inf in tokens or router weight" in child.stderr
