"""The fused layer with every activation and with biases on a GPU, forward and backward, in all types."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES
from activation_layers import NAMES as TENSORS
from activation_layers import expected, run_case
from kinds import layer0_in, layer1_in

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("index", range(len(ACTIVATIONS)), ids=NAMES)
def test_output_and_gradients_in_cuda(index: int, dtype: torch.dtype) -> None:
    """Both layers and the gradients of tokens in CUDA C++, which layers of this size would leave to Triton."""
    with layer0_in("cuda") as layer0, layer1_in("cuda") as layer1:
        found = run_case(0, "fused", ParallelConfig(), index, 48, "cuda", dtype=dtype)
    assert (layer0.call_count, layer1.call_count) == (1, 2)
    for name, got, want in zip(TENSORS, found, expected(index, 48, 1, 1)[0], strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 4 * torch.finfo(dtype).eps, f"{dtype}, {name}: {error}"
