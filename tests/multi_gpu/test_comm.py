"""The conformance suite between GPUs of one host, for every GPU backend."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from comm_conformance import CHECKS, run_suite
from ranks import run_ranks

NVSHMEM_MISSING = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed: pip install 'comet-moe[nvshmem]'"
)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["symm_mem", pytest.param("nvshmem", marks=NVSHMEM_MISSING)])
@pytest.mark.parametrize("process_group", ["gloo", "cpu:gloo,cuda:nccl"])
def test_conformance(monkeypatch: pytest.MonkeyPatch, backend: str, process_group: str) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    world_size = min(torch.cuda.device_count(), 4)
    names = [check.__name__ for check in CHECKS]
    assert run_ranks(run_suite, world_size, backend, True, backend=process_group) == [names] * world_size
