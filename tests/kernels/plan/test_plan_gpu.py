"""The plan's kernels compiled for a GPU, which plays all ranks, against the torch twin."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpus import captured
from plan_cases import assert_same_plan, plan_all_ranks, random_case, twin_plan, workspace

from comet.comm import LocalCommunicator
from comet.kernels.plan import metadata
from comet.layer import fused

pytestmark = pytest.mark.gpu
REPLAYS = 200
GARBAGE = 123456789
LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (4, 2), (3, 1), (1, 4)]


@pytest.mark.parametrize("seed", range(24))
def test_kernels_equal_twin(seed: int) -> None:
    case = random_case(seed, *LAYOUTS[seed % len(LAYOUTS)])
    print(f"seed {seed}")
    for epoch, plans in enumerate(plan_all_ranks(case, "cuda", epochs=3)):
        for rank, plan in enumerate(plans):
            assert_same_plan(plan, twin_plan(case, rank), f"seed {seed} epoch {epoch} rank {rank}")


@pytest.mark.parametrize(("num_experts", "top_k", "ep"), [(128, 8, 4), (256, 8, 1), (8, 2, 4), (60, 4, 4), (32, 32, 2)])
def test_shapes_of_the_models(num_experts: int, top_k: int, ep: int) -> None:
    case = random_case(7, ep, 1, num_experts=num_experts, top_k=top_k, max_tokens=8192)
    (plans,) = plan_all_ranks(case, "cuda", epochs=1)
    for rank, plan in enumerate(plans):
        assert_same_plan(plan, twin_plan(case, rank), f"rank {rank}")


def test_one_launch_waits_for_its_own_senders_at_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = metadata.cut

    def dirty(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = cut(*arguments)
        for tensor in tensors.values():
            tensor.fill_(GARBAGE)  # in the graph too, so before every replay's kernels
        return tensors

    monkeypatch.setattr(metadata, "cut", dirty)
    monkeypatch.setattr(fused, "cut", dirty)
    num_tokens, num_experts = 64 * 128, 128
    case = random_case(3, 1, 1, num_experts=num_experts, top_k=8, max_tokens=num_tokens)
    case = replace(case, expert_capacity=None, block_rows=128, max_routed_rows=num_tokens * 8 + num_experts * 128)
    ids, weights = torch.zeros(num_tokens, 8, dtype=torch.int32, device="cuda"), torch.rand(num_tokens, 8).cuda()
    pool = workspace(case, LocalCommunicator(torch.device("cuda")))
    case = replace(case, ids=[ids], weights=[weights])
    graph, plan = captured(lambda: case.plan(0, pool))
    for replay in range(REPLAYS):
        generator = torch.Generator().manual_seed(replay)
        new = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :8].int()
        ids.copy_(new)
        graph.replay()
        expected = twin_plan(replace(case, ids=[new], weights=[weights.cpu()]), 0)
        assert_same_plan(plan, expected, f"replay {replay}")
    pool.check()
