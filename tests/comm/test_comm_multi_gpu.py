"""The conformance suite between GPUs of one host, for every GPU backend."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from comm_conformance import run_suite
from gpus import SHARING, num_gpus
from ranks import run_ranks

from comet.comm import collective, make_communicator, nodes
from comet.comm.collective import StoreBoard
from comet.comm.handshake import Host

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


def two_hosts(rank: int, world_size: int) -> str:
    """Ranks that say that they are on hosts of their own: one node where the driver makes fabric handles."""
    host, group = Host(f"host-{rank}", f"boot-{rank}"), dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    with pytest.MonkeyPatch.context() as patch:
        for module in (nodes, collective):
            patch.setattr(module, "this_host", lambda: host)
        found = nodes.nodes_of(group, None, torch.device("cuda", torch.cuda.current_device()))
        told = "; ".join(map(str, found))
        with make_communicator("auto", group, "cuda", timeout_s=20.0) as comm:
            assert bool(comm.memory_obstacle) == (len(found) > 1)
            assert isinstance(comm.board, StoreBoard)
            if not comm.memory_obstacle:
                pool = comm.alloc(1024)
                pool.peers[1 - rank][:4] = rank + 1
                comm.barrier()
                torch.cuda.synchronize()
                assert pool.local[:4].tolist() == [2 - rank] * 4
    return told


@pytest.mark.multi_gpu(n=2, own=True)
def test_hosts_are_one_node_where_their_gpus_map_each_others_memory() -> None:
    found = run_ranks(two_hosts, 2, backend="cpu:gloo,cuda:nccl")
    assert found[0] == found[1]
    assert found[0] in ("ranks 0 to 1 on host-0, host-1", "rank 0 on host-0; rank 1 on host-1"), found
    print(found[0])
