"""Grouped GEMMs, and the kernels that run before and after them."""
