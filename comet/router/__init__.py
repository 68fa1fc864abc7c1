"""The router, which sends tokens to experts, its kernels and its losses."""
