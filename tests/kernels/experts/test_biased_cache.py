"""A cache of experts with biases under Triton's interpreter: every form of a step, in one wave and in several."""

from __future__ import annotations

import pytest
import torch
from biased_caches import BiasedCase, compare_biased
from decode_cases import FOLD, MATRIX, VECTOR
from ranks import run_ranks

CASES = [
    BiasedCase("fold", T=1, K=3, E=9, num_slots=3, config=FOLD),
    BiasedCase("vector, two tokens", T=2, K=3, E=12, num_slots=6, config=VECTOR),
    BiasedCase("matrix, waves", T=5, K=2, E=16, num_slots=3, config=MATRIX),
    BiasedCase("matrix, by expert, mxfp4", T=8, K=2, E=9, num_slots=5, quantised="mxfp4"),
]


def compare(rank: int, world_size: int, case: BiasedCase) -> None:
    compare_biased(case, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_biases_of_all_experts_are_there_whatever_has_a_slot(case: BiasedCase) -> None:
    run_ranks(compare, 1, case, interpret=True)
