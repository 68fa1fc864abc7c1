"""Biases of experts that are beyond GPU memory: prompts that stream, stages, models over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_cases import draw_biases
from ranks import run_ranks
from training_cases import GPT_OSS, wake

from comet.config import ParallelConfig
from comet.decode.runners import LocalRunner
from comet.experts import CachedExperts, ExpertCache
from comet.experts.staged import Stage, StagedCache, StagedExperts
from comet.experts.store import HeldExperts
from comet.generation.engine import GPTEngine
from comet.kernels.runtime.activation import Activation
from comet.layer.group import make_expert_group
from comet.layout import ExpertLayout
from comet.models.gpt import GPT
from comet.reference.plain import plain_experts

E, K, D, F, DECODED = 12, 3, 32, 16, 16
CPU = torch.device("cpu")


@pytest.mark.parametrize("staged", [False, True], ids=["pinned", "staged"])
def test_steps_and_prompts_are_those_of_the_plain_path(staged: bool) -> None:
    made, activation = torch.Generator().manual_seed(5), Activation("clamped_swiglu", limit=0.5)
    w1, w2 = torch.randn(E, 2 * F, D, generator=made) / 4, torch.randn(E, D, F, generator=made) / 4
    biases, runner = draw_biases(E, F, D, w1.dtype), LocalRunner(K, DECODED, activation=activation)
    if staged:
        held = HeldExperts(w1, w2, False, b1=biases.b1, b2=biases.b2)
        cache = StagedCache(held, Stage(8, held.specs, CPU), 0, 5, CPU, activation=activation)
        path: Any = StagedExperts(cache, runner, K)
    else:
        path = CachedExperts(ExpertCache(w1, w2, 5, CPU, activation=activation, **biases._asdict()), runner, K)
    layout = ExpertLayout(num_experts=E, top_k=K, ep=1, tp=1, rank=0)
    for num_tokens in (1, 40, 2, DECODED + 1, 1):
        tokens = torch.randn(num_tokens, D, generator=made)
        ids = torch.stack([torch.randperm(E, generator=made)[:K] for _ in range(num_tokens)]).int()
        ids[0, 0] = -1
        inputs = tokens, ids, torch.rand(num_tokens, K, generator=made), w1, w2
        torch.testing.assert_close(path(*inputs, biases), plain_experts(*inputs, layout, None, activation, biases))


@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2}], ids=["EP2", "TP2"])
def test_comets_own_model_over_ranks(layout: dict[str, int]) -> None:
    run_ranks(continue_texts, 2, layout)


def continue_texts(rank: int, world_size: int, layout: dict[str, int]) -> None:
    """With half of the experts on the device, and with all."""
    group = make_expert_group(GPT_OSS.moe, ParallelConfig(**layout), max_tokens=64, dtype=torch.float32, device="cpu")
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(3))
    found = []
    for slots, device in ((2, CPU), (None, None)):
        engine = GPTEngine(wake(GPT(GPT_OSS, group, seed=1, expert_device=device)), group, expert_slots=slots)
        found.append([engine.prefill(ids, torch.tensor([20, 9]), 24), engine.decode(torch.tensor([1, 2]))])
    for mine, resident in zip(*found, strict=True):
        torch.testing.assert_close(mine, resident, rtol=1e-4, atol=1e-4)
    group.close()
