"""The experts of one MoE block as Comet computes them, under the interface transformers gives its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comet.decode.runners import Runner
from comet.layout import ExpertLayout


class CometExperts(nn.Module):
    """In the place of a stock experts module; parameters of the same names hold this rank's experts.

    Args:
        gate_up_proj: ``(e, 2F/TP, D)``, gate rows first, then up rows.
        down_proj: ``(e, D, F/TP)``.
        layout: This rank's place among the experts.
        runner: Computes them; one serves all layers of a model.
    """

    def __init__(
        self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, layout: ExpertLayout, runner: Runner
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.layout = layout
        self.runner = runner

    # A compiler could only break its graph here, in the middle of the collectives.
    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: ``(T, D)``.
            top_k_index: ``(T, K)`` integer, global expert ids.
            top_k_weights: ``(T, K)`` of any floating dtype.

        Returns:
            ``(T, D)``, same dtype as ``hidden_states``.
        """
        ids, weights = top_k_index.to(torch.int32), top_k_weights.float()
        return self.runner(hidden_states, ids, weights, self.gate_up_proj, self.down_proj)

    def extra_repr(self) -> str:
        """The part of the experts held here."""
        layout = self.layout
        last = layout.first_expert + layout.experts_local - 1
        return f"experts {layout.first_expert}..{last} of {layout.num_experts}, slice {layout.tp_rank} of {layout.tp}"
