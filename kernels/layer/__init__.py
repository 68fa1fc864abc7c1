"""Layer 0, layer 1 and their gradients in CUDA C++, for Hopper."""
