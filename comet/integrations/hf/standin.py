"""Modules of Comet's in the place of a model's own, which they call; its weights stay where they were, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comet.decode import joins_step
from comet.router.router import Routes
from comet.utils.graphs import is_capturing


class StandIn(nn.Module):
    """Has the parameters, buffers and submodules of ``own``, the same ones under the same names, and its attributes."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self._own = (own,)  # in a tuple: a submodule would add its name to those of the weights
        self._parameters, self._buffers, self._modules = own._parameters, own._buffers, own._modules
        self._non_persistent_buffers_set = own._non_persistent_buffers_set

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its own module."""
        own = self.__dict__.get("_own")
        return super().__getattr__(name) if own is None else getattr(own[0], name)


class InDecodeSteps(StandIn):
    """A shared expert ``(..., D)`` -> ``(..., D)`` that decode steps include: there it adds nothing itself.

    Args:
        own: The model's.
        decode_tokens: Most tokens of a step.
    """

    def __init__(self, own: nn.Module, decode_tokens: int) -> None:
        super().__init__(own)
        self._decode_tokens = decode_tokens
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # none is replaced: graphs read them

    def forward(self, tokens: Tensor) -> Tensor:
        """What ``own`` makes of them, or ``()`` zero in steps of at most ``decode_tokens`` tokens."""
        if not joins_step(tokens, self._decode_tokens):
            output: Tensor = self._own[0](tokens)
            return output
        kind = tokens.dtype, tokens.device
        nothing = self._nothing.get(kind)
        if nothing is None:
            nothing = tokens.new_zeros(())
            if not is_capturing(tokens.device):  # a capture makes no zeros yet
                self._nothing[kind] = nothing
        return nothing


class DraftingGate(StandIn):
    """A gate that leaves its decision to ``router`` for as long as it has one."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__(own)
        self.router: Routes | None = None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a gate of transformers returns: logits ``(T, E)``, weights ``(T, r)`` and ids ``(T, r)`` int64."""
        if self.router is None:
            found: tuple[Tensor, Tensor, Tensor] = self._own[0](hidden_states)
            return found
        routing = self.router(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return routing.logits, routing.top_k_weights, routing.top_k_ids.to(torch.int64)
