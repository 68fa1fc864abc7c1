"""Parts that all kernels share: arguments, signals, recording, compiling and launching CUDA C++."""
