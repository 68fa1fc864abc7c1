"""Activations in CUDA C++ against Triton: SwiGLU bit for bit, every float32 as a gate; the others closely, and NaN."""

import pytest
import torch
import triton
import triton.language as tl

import comet.kernels.runtime.nvrtc as nvrtc
from comet.kernels.gemm.activation import activate
from comet.kernels.runtime.activation import SWIGLU, Activation

AT_ONCE = 2**28
THREADS = 256
SOURCE = """
#include "include/activation.cuh"

struct Config {
    using Activation = FUNCTOR;
    static constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
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


def kernel_of(name: str) -> nvrtc.CudaKernel:
    """``all_gates`` of an activation."""
    cubin = nvrtc.compile_cubin(SOURCE.replace("FUNCTOR", name.title().replace("_", "")), "all_gates")
    return nvrtc.load_kernel(cubin, "all_gates", num_threads=THREADS, cluster=1, shared_bytes=0)


@pytest.mark.gpu
def test_every_gate_has_the_bits_of_triton():
    wanted, results = (torch.empty(AT_ONCE, device="cuda") for _ in range(2))
    up = torch.tensor([-3.7], device="cuda")
    kernel = kernel_of("swiglu")
    for first in range(-(2**31), 2**31, AT_ONCE):
        gates = (torch.arange(AT_ONCE, dtype=torch.int32, device="cuda") + first).view(torch.float32)
        all_gates_kernel[(AT_ONCE // 1024,)](gates, up.item(), wanted, BLOCK=1024, ACTIVATION=SWIGLU)
        kernel.launch(AT_ONCE // THREADS, [gates, up, results])
        differs = (results.view(torch.int32) != wanted.view(torch.int32)) & ~(results.isnan() & wanted.isnan())
        assert not differs.any(), gates[differs][:5].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["geglu", "reglu", "clamped_swiglu"])
@pytest.mark.parametrize("up", [-3.7, 0.5, 9.0, -8.0])
def test_other_activations_are_those_of_triton(name, up):
    activation, kernel = Activation(name), kernel_of(name)
    gates = torch.linspace(-40, 40, 2**20, device="cuda")
    gates[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 7.0], device="cuda")
    wanted, found = torch.empty_like(gates), torch.empty_like(gates)
    all_gates_kernel[(len(gates) // 1024,)](gates, up, wanted, BLOCK=1024, ACTIVATION=activation)
    kernel.launch(len(gates) // THREADS, [gates, torch.tensor([up], device="cuda"), found])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)
    exact = activation.forward(gates.double(), torch.full_like(gates, up, dtype=torch.float64))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5, equal_nan=True)
