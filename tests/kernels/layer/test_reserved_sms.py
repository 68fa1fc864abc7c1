"""All launches of layer 1 and of its backward pass leave reserved SMs alone, whatever they are written in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_arguments import make_symm, make_table

from comet.kernels.layer import gemm_combine as gemm_combine_cuda
from comet.kernels.layer.triton import gemm_combine as module
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import CombineLists, GradBuffer, Scaled, num_sms
from comet.kernels.runtime.cuda_source import TensorMap
from comet.layer.fused import launch_gemm_combine

SPARE = 31
ALL = 132
BF16 = torch.bfloat16


class FakeKernel:
    """Of CUDA C++: it keeps how many blocks it was launched with."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def launch(self, num_blocks: int, arguments: list[Any]) -> None:
        self.blocks.append(num_blocks)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=ALL))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm_combine_cuda, "tensor_map", lambda tensor, box: TensorMap())
    yield
    num_sms.cache_clear()


def scaled(*shape: int) -> Scaled:
    return Scaled(elements=torch.zeros(*shape, dtype=torch.float8_e4m3fn), scales=torch.zeros(1))


def run(config: GemmCombineConfig, *, fp8: bool = False, backward: bool = False) -> None:
    numbers = torch.zeros(128, 2, dtype=torch.int32)
    weights = None if backward else torch.zeros(128, 2)
    a, b = (scaled(128, 128), scaled(2, 128, 128)) if fp8 else (torch.zeros(128, 128), torch.zeros(2, 128, 128))
    y, out = torch.zeros(128, 128, dtype=BF16), torch.zeros(128, 128, dtype=BF16)
    grads = GradBuffer(row_grads=out, received=out, received_pointers=out, out=out) if backward else None
    returns = CombineLists(row_slots=numbers, row_weights=weights, send_rows=numbers, recv_counts=numbers, grads=grads)
    launch_gemm_combine(a, b, y, out, make_symm(), returns, make_table(), config)


@pytest.mark.parametrize(("cluster", "blocks"), [(1, ALL - SPARE), (2, 92)])
def test_in_cuda(monkeypatch: pytest.MonkeyPatch, cluster: int, blocks: int) -> None:
    kernel, fp8 = FakeKernel(), cluster == 1
    monkeypatch.setattr(gemm_combine_cuda, "can_run", lambda *_: True)
    monkeypatch.setattr(gemm_combine_cuda, "_kernels", lambda *_: defaultdict(lambda: kernel))
    run(GemmCombineConfig(), fp8=fp8)
    run(GemmCombineConfig(reserved_sms=SPARE), fp8=fp8)
    assert kernel.blocks == [ALL, blocks]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_in_triton(monkeypatch: pytest.MonkeyPatch, fp8: bool, backward: bool) -> None:
    found: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            found.extend(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(module, "gemm_combine_kernel", Kernel())
    run(GemmCombineConfig(block_n=128, block_k=128, reserved_sms=SPARE), fp8=fp8, backward=backward)
    assert found == [ALL - SPARE]
