"""From tokens to experts: the router, its kernels, its losses."""
