"""Which paths there are, and what they need."""

from __future__ import annotations

import pytest
import torch

from comet import MoE, MoEConfig, ParallelConfig, make_expert_group
from comet.group import ExpertGroup


def alone(config: MoEConfig) -> ExpertGroup:
    return make_expert_group(config, ParallelConfig(), max_tokens=64, dtype=torch.float32, device="cpu")


def test_unknown_path_and_capacity_where_it_cannot_work() -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, capacity_factor=1.0)
    with pytest.raises(ValueError, match="path='fast' must be 'auto' or one of"):
        MoE(config, alone(config), path="fast")
    with pytest.raises(ValueError, match=r"capacity_factor=1\.0 needs path 'fused' or 'twin'; 'plain' is dropless"):
        MoE(config, alone(config), path="plain")
