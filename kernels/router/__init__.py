"""The router's kernels."""
