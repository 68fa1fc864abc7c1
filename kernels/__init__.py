"""Kernels in Triton and CUDA C++, and what launches them; imports torch and triton, and ``cuda.bindings`` on use."""
