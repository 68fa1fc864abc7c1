"""The fused layer and its plan in torch, step by step as the kernels do them."""
