"""SwiGLU in CUDA C++ against the Triton twin, bit for bit: every float32 as a gate."""

import pytest
import torch
import triton
import triton.language as tl

import comet.kernels.runtime.nvrtc as nvrtc
from comet.kernels.gemm.activation import activate
from comet.kernels.runtime.activation import SWIGLU

AT_ONCE = 2**28
THREADS = 256
SOURCE = """
#include "include/activation.cuh"

struct Config {
    using Activation = Swiglu;
};

extern "C" __global__ void all_gates(const float* gates, const float* up, float* results) {
    const unsigned int index = blockIdx.x * blockDim.x + threadIdx.x;
    results[index] = activate<Config>(gates[index], *up);
}
"""


@triton.jit
def all_gates_kernel(gates_ptr, up, results_ptr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gates = tl.load(gates_ptr + at)
    tl.store(results_ptr + at, activate(gates, tl.zeros_like(gates) + up, ACTIVATION))


@pytest.mark.gpu
def test_every_gate_has_the_bits_of_triton():
    wanted, results = (torch.empty(AT_ONCE, device="cuda") for _ in range(2))
    up = torch.tensor([-3.7], device="cuda")
    kernel = nvrtc.load_kernel(
        nvrtc.compile_cubin(SOURCE, "all_gates"), "all_gates", num_threads=THREADS, cluster=1, shared_bytes=0
    )
    for first in range(-(2**31), 2**31, AT_ONCE):
        gates = (torch.arange(AT_ONCE, dtype=torch.int32, device="cuda") + first).view(torch.float32)
        all_gates_kernel[(AT_ONCE // 1024,)](gates, up.item(), wanted, BLOCK=1024, ACTIVATION=SWIGLU)
        kernel.launch(AT_ONCE // THREADS, [gates, up, results])
        differs = (results.view(torch.int32) != wanted.view(torch.int32)) & ~(results.isnan() & wanted.isnan())
        assert not differs.any(), gates[differs][:5].tolist()
