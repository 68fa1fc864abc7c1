"""NVSHMEM's remote path on one host: kernels put rows and signals through the proxy thread and the test transport."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import ON_GPUS
from ranks import run_ranks
from remote_link import build_plugin, compile_and_link, start

from comet.kernels.runtime.nvrtc import CudaKernel

NVSHMEM_MISSING = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed: pip install 'comet-moe[nvshmem]'"
)
THREADS = 256
# Each rank sends in turn: it writes a pattern of the round, puts it, and the other rank compares what it received.
SOURCE = """
__device__ unsigned long now_ns() {
    unsigned long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__device__ unsigned long signal_at(const unsigned long* signal) {
    unsigned long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(signal) : "memory");
    return value;
}

__device__ void put(unsigned int* target, unsigned int* source, int words, unsigned long* signal, unsigned long value,
                    int peer) {
    nvshmemi_transfer_put_signal<nvshmemi_threadgroup_block>(
        target, source, 4ul * words, signal, value, NVSHMEMI_AMO_SIGNAL_SET, peer, true);
}

__device__ bool wait(const unsigned long* signal, unsigned long value, int* late) {
    if (threadIdx.x == 0) {
        const unsigned long end = now_ns() + 5000000000ul;
        while (signal_at(signal) < value && *late == 0) {
            if (now_ns() > end) atomicExch(late, 1);
        }
    }
    __syncthreads();
    return *reinterpret_cast<volatile int*>(late) == 0;
}

extern "C" __global__ void ping_pong(unsigned int* received, unsigned int* sent, unsigned long* signal, int* wrong,
                                     int* late, int words, int rank, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        if (round % 2 == rank) {
            for (int at = threadIdx.x; at < words; at += blockDim.x) sent[at] = 1000003u * round + at;
            __threadfence_system();
            __syncthreads();
            put(received, sent, words, signal, round + 1, 1 - rank);
        } else {
            if (!wait(signal, round + 1, late)) return;
            for (int at = threadIdx.x; at < words; at += blockDim.x)
                if (__ldcv(received + at) != 1000003u * round + at) atomicAdd(wrong, 1);
        }
        __syncthreads();
    }
}

// Rank 0 sends chunks, each with a value of the signal, and rank 1 answers the last one.
extern "C" __global__ void stream(unsigned int* received, unsigned int* sent, unsigned long* signal, int* wrong,
                                  int* late, int words, int rank, int chunks) {
    if (rank == 0) {
        for (int chunk = 0; chunk < chunks; ++chunk)
            put(received + (long)chunk * words, sent + (long)chunk * words, words, signal, chunk + 1, 1);
        if (!wait(signal, 1, late)) return;
    } else {
        if (!wait(signal, chunks, late)) return;
        put(received, sent, 2, signal, 1, 0);
    }
}
"""


def load(name: str) -> CudaKernel:
    """A kernel whose module knows NVSHMEM's state on this device."""
    driver, bindings = importlib.import_module("cuda.bindings.driver"), importlib.import_module("nvshmem.bindings")
    status, module = driver.cuModuleLoadData(compile_and_link(SOURCE, "remote"))
    assert int(status) == 0, status
    bindings.cumodule_init(int(module))
    status, function = driver.cuModuleGetFunction(module, name.encode())
    assert int(status) == 0, status
    return CudaKernel(function, THREADS, 1, 0)


def run(kernel: CudaKernel, tensors: list[torch.Tensor], words: int, rank: int, count: int) -> float:
    """Milliseconds of one launch on all ranks at once; checks that nothing was wrong or late."""
    signal, wrong, late = tensors[2:]
    for each in (signal, wrong, late):
        each.zero_()
    start_event, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start_event.record()
    kernel.launch(1, [*tensors, words, rank, count])
    end.record()
    torch.cuda.synchronize()
    assert late.item() == 0, "a signal did not come within 5 s"
    assert wrong.item() == 0, f"{wrong.item()} words arrived wrong"
    return start_event.elapsed_time(end)


def puts_arrive(rank: int, world_size: int, library: str, gbs: float, latency_us: float) -> dict[str, Any]:
    plugin = start(Path(library), rank, world_size, gbs=gbs, latency_us=latency_us)
    core: Any = importlib.import_module("nvshmem.core")
    words, chunks, rounds = 2**18, 64, 200
    symmetric = [core.tensor((words * chunks,), dtype=torch.int32) for _ in range(2)]
    signal = core.tensor((1,), dtype=torch.int64)
    tensors = [*symmetric, signal, *(torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))]
    ping_pong, stream = load("ping_pong"), load("stream")
    found: dict[str, Any] = {"gbs": gbs, "latency_us": latency_us}
    for size in (1, 37, 1024, words):
        run(ping_pong, tensors, size, rank, 10)
        before = plugin.comet_test_link_bytes()
        found[f"us_of_{4 * size}_bytes"] = 1000 * run(ping_pong, tensors, size, rank, rounds) / rounds
        assert plugin.comet_test_link_bytes() - before == rounds // 2 * (4 * size + 8)
    run(stream, tensors, words, rank, chunks)
    found["GB/s"] = 4 * words * chunks / 1e6 / min(run(stream, tensors, words, rank, chunks) for _ in range(3))
    return found


@NVSHMEM_MISSING
@pytest.mark.multi_gpu(n=2, own=True)
@pytest.mark.parametrize(("gbs", "latency_us"), [(0, 0), (50, 5)])
def test_kernels_put_rows_and_signals_to_a_peer_that_is_not_mapped(tmp_path: Path, gbs: float, latency_us: float):
    library = build_plugin(tmp_path)
    found = run_ranks(puts_arrive, 2, str(library), gbs, latency_us, backend=ON_GPUS)
    print(json.dumps(found[0]))
    if gbs:
        assert found[0]["GB/s"] < gbs
        assert found[0]["us_of_4_bytes"] > latency_us
