"""One step of a layer with an activation and biases, on ranks and in one process."""

from __future__ import annotations

from typing import Any

import torch
from activation_cases import ACTIVATIONS, draw_biases
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.kernels.runtime.activation import Activation
from comet.layer.group import make_expert_group
from comet.layer.sharding import local
from comet.layout import Biases, ExpertLayout
from comet.moe import MoE
from comet.reference.layer import reference_experts, shard_biases, shard_experts

SIZES = dict(hidden_size=32, num_experts=4, top_k=2, balance="none")
NAMES = ("output", "x", "routing weights", "w1", "w2", "b1", "b2")


def make_config(index: int, ffn_size: int, *, expert_bias: bool = True) -> MoEConfig:
    activation: Activation = ACTIVATIONS[index]
    return MoEConfig(**SIZES, ffn_size=ffn_size, activation=activation, expert_bias=expert_bias)


def draw(config: MoEConfig, dtype: torch.dtype, rank: int | None = None) -> tuple[Tensor, ...]:
    """Tokens, ids and routing weights of a rank; or of ``None`` w1, w2, b1 and b2 of all experts."""
    made = torch.Generator().manual_seed(77 if rank is None else rank)
    if rank is None:
        experts, hidden_size, ffn_size = config.num_experts, config.hidden_size, config.ffn_size
        w1 = torch.randn(experts, 2 * ffn_size, hidden_size, generator=made) / hidden_size**0.5
        w2 = torch.randn(experts, hidden_size, ffn_size, generator=made) / ffn_size**0.5
        return w1.to(dtype), w2.to(dtype), *draw_biases(experts, ffn_size, hidden_size, dtype)
    num_tokens = 11 + 9 * rank
    tokens = torch.randn(num_tokens, config.hidden_size, generator=made).to(dtype)
    ids = torch.rand(num_tokens, config.num_experts, generator=made).topk(config.top_k).indices.int()
    ids[torch.rand(ids.shape, generator=made) < 0.2] = -1
    return tokens, ids, torch.rand(ids.shape, generator=made)


def run_layer(
    rank: int, world_size: int, path: str, ep: int, tp: int, cases: list[tuple[int, int]], device: str = "cpu"
) -> list[list[Tensor]]:
    """``NAMES`` of this rank for the loss sum(y * y) / 2, of each (activation, F); biases where F is even in 32s."""
    return [run_case(rank, path, ParallelConfig(ep=ep, tp=tp), index, ffn_size, device) for index, ffn_size in cases]


def run_case(
    rank: int, path: str, parallel: ParallelConfig, index: int, ffn_size: int, device: str, **options: Any
) -> list[Tensor]:
    config = make_config(index, ffn_size)
    dtype = options.get("dtype", torch.float32)
    group = make_expert_group(config, parallel, max_tokens=64, dtype=dtype, device=torch.device(device))
    layer = MoE(config, group, path=path, param_dtype=dtype)
    w1, w2, b1, b2 = draw(config, dtype)
    layout = group.layout(config)
    mine = shard_biases(Biases(b1, b2), layout)
    assert mine is not None
    experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    parts = (*shard_experts(w1, w2, layout), mine.b1, b2[experts])
    with torch.no_grad():
        for parameter, part in zip(layer.expert_parameters(), parts, strict=True):
            local(parameter).copy_(part.view_as(local(parameter)))
    tokens, ids, weights = (each.to(device) for each in draw(config, dtype, rank))
    tokens.requires_grad_(), weights.requires_grad_()
    output = layer.routed_experts(tokens, ids, weights)
    output.float().square().sum().div(2).backward()
    group.workspace.check()
    grads = [tokens.grad, weights.grad, *(local(parameter.grad) for parameter in layer.expert_parameters())]
    found = [output.detach(), *grads]
    flat = [each.flatten(1, 2) if place in (3, 5) else each for place, each in enumerate(found)]
    group.close()
    return [each.cpu() for each in flat]


def expected(index: int, ffn_size: int, ep: int, tp: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """The same of every rank, from one process, computed in ``dtype``."""
    config = make_config(index, ffn_size)
    w1, w2, b1, b2 = (leaf.to(dtype).requires_grad_() for leaf in draw(config, torch.float32))
    by_rank = []
    for rank in range(ep * tp):
        tokens, ids, weights = draw(config, torch.float32, rank)
        tokens, weights = tokens.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        output = reference_experts(
            tokens, ids, weights, w1, w2, ep=ep, tp=tp, activation=config.activation, biases=Biases(b1, b2)
        )
        output.square().sum().div(2).backward()
        by_rank.append([output.detach(), tokens.grad, weights.grad])
    results = []
    for rank in range(ep * tp):
        layout = ExpertLayout.create(config, ParallelConfig(ep=ep, tp=tp), rank)
        mine = shard_biases(Biases(b1.grad, b2.grad), layout)
        assert mine is not None
        experts = slice(layout.first_expert, layout.first_expert + layout.experts_local)
        results.append([*by_rank[rank], *shard_experts(w1.grad, w2.grad, layout), mine.b1, b2.grad[experts]])
    return results
