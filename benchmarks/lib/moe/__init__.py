"""A MoE layer with its inputs, and what its times say."""
