"""The plan's kernels compiled for a GPU, which plays all ranks, against the torch twin."""

from __future__ import annotations

import pytest
from plan_cases import assert_same_plan, plan_all_ranks, random_case, twin_plan

pytestmark = pytest.mark.gpu
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
