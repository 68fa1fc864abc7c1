"""What a point must do at least: floating-point operations, bytes over the links, and the figures derived from times.

Letters: T tokens per rank, K, D, F, E; W = EP x TP ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comet.config import MoEConfig
from comet.layout import ExpertLayout

BACKWARD_FLOPS = 2  # gradients of the rows and of the weights, each as much as the forward GEMMs
BACKWARD_BYTES = 1  # output gradients are dispatched, input gradients combined


def balanced_rows(num_tokens: int, layout: ExpertLayout) -> int:
    """Routed rows of one rank if all experts are alike; T=6, K=2, EP=2, TP=2 (W=4): 4 * 6 * 2 / 2 = 24."""
    return layout.world_size * num_tokens * layout.top_k // layout.ep


def layer_flops(config: MoEConfig, layout: ExpertLayout, num_tokens: int, *, backward: bool) -> int:
    """Floating-point operations of one rank's GEMMs; D=4, F=8, 3 rows, TP=1: 384 + 192 = 576, with backward 1728."""
    rows, width = balanced_rows(num_tokens, layout), config.ffn_size // layout.tp
    forward = (
        2 * rows * config.hidden_size * 2 * width  # gate and up
        + 2 * rows * width * config.hidden_size  # down
    )
    return forward * (1 + BACKWARD_FLOPS * backward)


def rows_to_ranks(top_k_ids: Tensor, layout: ExpertLayout) -> Tensor:
    """Tokens that reach each rank, each counted once per rank however many of its experts it goes to.

    Example: E=4, EP=2, TP=1, ids ``[[0, 1], [1, 3], [2, -1]]``: tokens 0 and 1 reach rank 0, tokens 1 and 2 rank 1:
    ``[2, 2]``.

    Args:
        top_k_ids: ``(T, K)`` int32, -1 masks.
        layout: The experts over the ranks.

    Returns:
        ``(W,)`` int64.
    """
    shards = torch.where(top_k_ids < 0, layout.ep, top_k_ids // layout.experts_local).long()
    reached = torch.zeros(top_k_ids.shape[0], layout.ep + 1, dtype=torch.int64, device=top_k_ids.device)
    reached.scatter_(1, shards, 1)
    return reached[:, : layout.ep].sum(0).repeat_interleave(layout.tp)


def link_bytes(
    top_k_ids: Tensor, layout: ExpertLayout, row_bytes: int, process_group: ProcessGroup | None, *, backward: bool
) -> int:
    """Bytes the busiest rank must send over its link, rank-deduplicated (as many arrive); collective."""
    mine = rows_to_ranks(top_k_ids, layout)
    rows = [torch.empty_like(mine) for _ in range(layout.world_size)]
    if layout.world_size > 1:
        dist.all_gather(rows, mine, group=process_group)
    else:
        rows = [mine]
    traffic = torch.stack(rows).fill_diagonal_(0)  # [source, destination]
    sent = (
        traffic.sum(1) * row_bytes  # dispatch: this rank's tokens
        + traffic.sum(0) * row_bytes  # combine: partial sums of the rows it received
    )
    return int(sent.max()) * (1 + BACKWARD_BYTES * backward)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; of 2 and 8 it is 4; of none it is ``None``."""
    present = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, present)) / len(present)) if present else None
