"""Models built on the MoE layer."""
