"""Triton kernels and their host wrappers; they import nothing but torch and triton."""
