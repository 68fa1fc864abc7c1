"""What all kernels share: arguments, signals, recording, and how CUDA C++ is compiled and launched."""
