"""Experts beyond GPU memory: all of them in host memory, some of them in slots on the GPU."""
