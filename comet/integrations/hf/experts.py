"""The experts of one MoE block as Comet computes them, under the interface transformers gives its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import require
from comet.decode import SharedMatrices, SharedSlots, joins_step
from comet.decode.runners import Runner
from comet.layout import Biases, ExpertLayout


class CometExperts(nn.Module):
    """In the place of a stock experts module; parameters of the same names hold this rank's experts.

    Args:
        gate_up_proj: ``(e, 2F/TP, D)``, gate rows first, then up rows.
        down_proj: ``(e, D, F/TP)``.
        runner: Computes them; one serves all layers of a model.
        biases: ``(e, 2F/TP)`` and ``(e, D)``, for parameters ``gate_up_proj_bias`` and ``down_proj_bias``; none: there
            are no such.
    """

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        layout: ExpertLayout,
        runner: Runner,
        biases: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        b1, b2 = biases or (None, None)
        self.gate_up_proj_bias: nn.Parameter | None = b1
        self.down_proj_bias: nn.Parameter | None = b2
        self.layout = layout
        self.runner = runner
        self.shared: SharedSlots | None = None
        self._gates: tuple[nn.Module, ...] = ()

    def join(self, shared: nn.Module, gate: nn.Module | None, columns: int) -> None:
        """Let decode steps include the block's shared expert, if it is one of plain linear layers.

        Args:
            gate: ``(T, D)`` -> ``(T, 1)`` before the sigmoid that weighs it; ``None``: it weighs 1.
            columns: From ``shared_columns``.
        """
        if all(map(is_plain, projections(shared))):
            self.shared = self.shared_slots(shared, columns)
            self._gates = () if gate is None else (gate,)  # in a tuple: a submodule has one name, the block's

    def shared_slots(self, shared: nn.Module, columns: int) -> SharedSlots:
        """Where steps read the pieces of a shared expert."""
        return SharedSlots(self.layout, columns, shared, shared_matrices)

    # A compiler could only break its graph here, in the middle of the collectives.
    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum ``(T, D)`` of each token's experts, of ``(T, D)``, ``(T, K)`` global ids and weights of any
        type.
        """
        ids, weights, experts = top_k_index.to(torch.int32), top_k_weights.float(), None
        if self.shared is not None and joins_step(hidden_states, self.runner.decode.max_tokens):
            experts = self.shared.weights(self.gate_up_proj, self.down_proj)
            gate = next((module(hidden_states).sigmoid() for module in self._gates), None)
            ids, weights = self.shared.routing(ids, weights, gate)
        w1, w2, b1, b2 = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        biases = None if b1 is None or b2 is None else Biases(b1, b2)
        return self.runner(hidden_states, ids, weights, w1, w2, biases, experts=experts)

    @property
    def expert_bytes(self) -> int:
        """Of one expert, or of this rank's slice of it."""
        return sum(weight.nbytes for weight in self.parameters(recurse=False)) // self.layout.experts_local

    def extra_repr(self) -> str:
        """The part of the experts held here."""
        layout = self.layout
        last = layout.first_expert + layout.experts_local - 1
        return f"experts {layout.first_expert}..{last} of {layout.num_experts}, slice {layout.tp_rank} of {layout.tp}"


def shared_matrices(module: nn.Module) -> SharedMatrices:
    """Those of a gated MLP of transformers."""
    found = projections(module)
    for projection in found:
        require(
            is_plain(projection),
            f"{type(projection).__name__} of the shared expert must be a torch.nn.Linear without bias, which decode "
            "steps read beside the routed experts: convert the model after it got its adapters, not before",
        )
    return SharedMatrices(*(projection.weight for projection in found))


def projections(module: nn.Module) -> list[Any]:
    """Gate, up and down of a gated MLP of transformers."""
    return [getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")]


def is_plain(projection: Any) -> bool:
    """Whether all that a projection does is to multiply by its weight."""
    return type(projection) is nn.Linear and projection.bias is None
