"""Expert biases in CUDA C++, as far as it goes without a GPU: they are handed on, and change what is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launch_arguments import make_symm, make_table
from torch import Tensor

from comet.kernels.layer import dispatch_gemm as layer0
from comet.kernels.layer import gemm_combine as layer1
from comet.kernels.layer.triton.dispatch import DispatchLists
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import CombineLists
from comet.layer.fused import launch_dispatch_gemm, launch_gemm_combine

NUMBERS = torch.zeros(4, dtype=torch.int32)
X, BIASES = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(2, 64)


@pytest.mark.parametrize("biases", [None, BIASES])
def test_launches_hand_them_on(monkeypatch: pytest.MonkeyPatch, biases: Tensor | None) -> None:
    given: list[object] = []
    for module in (layer0, layer1):
        monkeypatch.setattr(module, "can_run", lambda *_: True)
    monkeypatch.setattr(layer0, "dispatch_gemm_cuda", lambda *_, b1, **__: given.append(b1))
    monkeypatch.setattr(layer1, "gemm_combine_cuda", lambda *_, bias: given.append(bias))
    sends = DispatchLists(token_ids=NUMBERS, counts=NUMBERS, recv_counts=NUMBERS, pushed=NUMBERS)
    returns = CombineLists(row_slots=NUMBERS[None], row_weights=X, send_rows=NUMBERS, recv_counts=NUMBERS)
    launch_dispatch_gemm(X, X[None], X, None, make_symm(), sends, make_table(), DispatchGemmConfig(), biases)
    launch_gemm_combine(X, X[None], X, X, make_symm(), returns, make_table(), GemmCombineConfig(), biases)
    assert all(found is biases for found in given)
    assert len(given) == 2


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "Bf16"), (torch.float16, "Fp16"), (torch.float32, "Fp32")]
)
def test_a_kernel_is_compiled_for_their_type(weights: torch.dtype, dtype: torch.dtype, name: str) -> None:
    types = dict(weights=weights, output=torch.bfloat16, world_size=2)
    for variant in (layer0.Variant(**types), layer1.Variant(**types, top_k=2)):
        plain, biased = variant.source(8), replace(variant, bias=dtype).source(8)
        assert plain.entry.count("biases") == 0
        assert biased.entry.count("biases") == 1
        assert plain.constants["HAS_BIAS"] is False
        assert biased.constants == dict(plain.constants, HAS_BIAS=True)
        assert biased.types["Bias"] == name
