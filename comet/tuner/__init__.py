"""Sweeps: times of layers with several settings on this machine, and the profile that keeps the fastest."""
