"""Training of small MoE language models, end to end: data, loop, checkpoints and reports."""
