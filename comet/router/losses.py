"""The losses that keep experts evenly loaded, and the loads: what a router measures over its own tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from comet.config import MoEConfig


class RouterStats(NamedTuple):
    """Losses and loads of one forward pass of the router over this rank's tokens."""

    aux_loss: Tensor  # () float32, load-balancing loss times its coefficient, with gradient; zero when unused
    z_loss: Tensor  # () float32, router z-loss times its coefficient, with gradient; zero when unused
    expert_load: Tensor  # (E,) float32, routed rows per expert; sums to T*K; no gradient

    @property
    def loss(self) -> Tensor:
        """The part of the training loss that this layer adds, ``()`` float32."""
        return self.aux_loss + self.z_loss


def measure_routing(logits: Tensor, scores: Tensor, top_k_ids: Tensor, config: MoEConfig) -> RouterStats:
    """Losses and loads of T routed tokens."""
    unused = logits.new_zeros(())
    expert_load = count_routed_rows(top_k_ids, config.num_experts)
    use_aux = config.balance == "aux" and config.aux_loss_coef != 0
    return RouterStats(
        aux_loss=config.aux_loss_coef * load_balancing_loss(scores, expert_load) if use_aux else unused,
        z_loss=config.z_loss_coef * router_z_loss(logits) if config.z_loss_coef != 0 else unused,
        expert_load=expert_load,
    )


def load_balancing_loss(scores: Tensor, expert_load: Tensor) -> Tensor:
    """The Switch Transformer loss for any K: ``E * sum_e f_e * P_e``, equal to 1 when load or scores are even.

    ``f_e`` is expert e's share of the routed rows (no gradient), ``P_e`` the mean over tokens of its score divided by
    the token's sum of scores. (Definitions that let ``f`` sum to K instead of 1 give K times this value.)

    Example: E = 2, K = 1, scores ``[[0.75, 0.25], [0.75, 0.25]]``, load ``[2, 0]``: ``2 * (1 * 0.75 + 0 * 0.25)``
    = 1.5.
    """
    num_tokens, num_experts = scores.shape
    share = (expert_load / expert_load.sum().clamp_min(1)).to(scores.dtype)
    mean_score = normalize(scores).sum(dim=0) / max(num_tokens, 1)
    return num_experts * (share * mean_score).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of ``logsumexp(logits) ** 2``: keeps logits small.

    Example: logits ``[[0.0, 0.0]]`` give ``ln(2) ** 2 = 0.480453...``.
    """
    return logits.logsumexp(dim=-1).square().sum() / max(logits.shape[0], 1)


def count_routed_rows(top_k_ids: Tensor, num_experts: int) -> Tensor:
    """Count the routed rows of every expert.

    Example: ids ``[[2, 0], [2, -1]]``, E = 4: ``[1, 0, 2, 0]``.
    """
    bins = top_k_ids.flatten().long() + 1  # bin 0 takes the masked slots, so that nothing depends on their number
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:].float()


def normalize(values: Tensor) -> Tensor:
    """Divide each row by its sum; rows whose sum underflows become zero.

    Example: ``[[1.0, 3.0], [0.0, 0.0]]`` gives ``[[0.25, 0.75], [0.0, 0.0]]``.
    """
    return values / values.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
