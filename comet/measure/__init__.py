"""Times of layers on this machine: candidates, sweeps, and what explains them."""
