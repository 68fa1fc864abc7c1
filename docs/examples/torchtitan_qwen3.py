"""A configuration of torchtitan that trains its small Qwen3-MoE with Comet's experts.

PYTHONPATH=docs/examples torchrun --nproc-per-node 2 -m torchtitan.train \
    --module torchtitan_qwen3 --config qwen3_with_comet
"""

from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer


def qwen3_with_comet() -> Trainer.Config:
    """Return torchtitan's own configuration with EP over two ranks, and Comet by one line."""
    config = qwen3_moe_debug()
    config.parallelism.expert_parallel_degree = 2
    config.training.disable_cuda_graphs = True
    config.override.imports = ["comet.integrations.torchtitan.experts"]
    return config
