"""A cache of experts with biases on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from biased_caches import BiasedCase, compare_biased

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quantised", [None, "mxfp8", "mxfp4"])
@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, 4), (2, 9), (5, 6), (16, 11)])
def test_steps_equal_those_of_resident_experts(num_tokens: int, num_slots: int, quantised: Any) -> None:
    case = BiasedCase("gpt-oss", T=num_tokens, K=4, E=32, num_slots=num_slots, quantised=quantised)
    compare_biased(case, torch.device("cuda"), torch.bfloat16)
