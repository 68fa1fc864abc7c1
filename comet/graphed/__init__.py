"""Layers, training steps and decode steps as CUDA graphs."""
