"""The conformance suite between GPUs of one host, for every GPU backend."""

import importlib.util

import pytest
import torch.distributed as dist
from comm_conformance import run_suite
from gpus import SHARING, num_gpus
from ranks import run_ranks

from comet.comm import make_communicator

NVSHMEM_MISSING = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed: pip install 'comet-moe[nvshmem]'"
)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "backend", ["symm_mem", pytest.param("nvshmem", marks=[NVSHMEM_MISSING, pytest.mark.multi_gpu(own=True)])]
)
@pytest.mark.parametrize(
    "process_group", ["gloo", pytest.param("cpu:gloo,cuda:nccl", marks=pytest.mark.multi_gpu(own=True))]
)
def test_conformance(monkeypatch: pytest.MonkeyPatch, backend: str, process_group: str) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    world_size = min(4, num_gpus(own="nccl" in process_group or backend == "nvshmem"))
    run_ranks(run_suite, world_size, backend, True, backend=process_group)


def share_one(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="needs one GPU per rank") as caught:
        make_communicator("symm_mem", dist.group.WORLD, "cuda:0", timeout_s=5.0)
    return str(caught.value)


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARING, raising=False)
    said = "device=cuda:0: backend='symm_mem' needs one GPU per rank, but ranks 0 and 1 share one GPU ("
    assert all(each.startswith(said) for each in run_ranks(share_one, 2, backend="cpu:gloo,cuda:gloo"))
