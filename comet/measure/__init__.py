"""Times of layers on this machine: one timing protocol, tuning, sweeps."""
