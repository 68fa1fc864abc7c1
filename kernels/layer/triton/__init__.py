"""The same in Triton: the twins of CUDA C++, and what other types and GPUs run."""
