"""The fused layer with every activation and with biases on a GPU, forward and backward, in bfloat16 and float32."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES
from activation_layers import NAMES as TENSORS
from activation_layers import expected, run_case

from comet.config import ParallelConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["fused", "plain"])
@pytest.mark.parametrize("index", range(len(ACTIVATIONS)), ids=NAMES)
def test_output_and_gradients(index: int, path: str) -> None:
    wanted = expected(index, 48, 1, 1)[0]
    for dtype, close in ((torch.float32, 2e-4), (torch.bfloat16, 5e-2)):
        found = run_case(0, path, ParallelConfig(), index, 48, "cuda", dtype=dtype)
        for name, got, want in zip(TENSORS, found, wanted, strict=True):
            error = (got.double() - want).norm() / want.norm()
            assert error < close, f"{path}, {dtype}, {name}: {error}"
