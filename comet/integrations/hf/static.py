"""The sequences of a transformers model in its static cache, extended token by token from a CUDA graph.

transformers counts a static cache's positions on the device, so a step is the same launches each time. What it counts
on the host (sliding windows) would stand still in a graph: such models are not captured.

Letters: B sequences, S positions of the longest prompt, C places of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.decode import before_replay
from comet.experts.staged import WHY_EAGER
from comet.generation.step import DecodeStep, batch_obstacle
from comet.graphs import GraphMode
from comet.integrations.hf.experts import CometExperts
from comet.integrations.hf.stored_experts import StoredExperts

ALIGNMENT = 16  # elements of a mask's row; torch copies masks that are not, in every layer
DEVICE_COUNTED = "StaticLayer"


class StaticDecoder:
    """B sequences that all append at the same place: shorter prompts are padded in front.

    Args:
        model: A causal language model of transformers, converted or not, in evaluation mode; all ranks of a converted
            one call this equally.
        num_sequences: B.
        num_places: Places a sequence may take, padding included; rounded up to C.
        cuda_graph: Whether steps are replayed from a CUDA graph (see ``DecodeStep``).
        after_step: Called after each step's forward pass, as a part of what is captured.

    Raises:
        ValueError: If there are no sequences or places, or a graph is insisted on and cannot be had.
        UnavailableError: If transformers is missing.
    """

    def __init__(
        self,
        model: Any,
        num_sequences: int,
        num_places: int,
        *,
        cuda_graph: GraphMode = "auto",
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        from transformers import StaticCache

        require(num_sequences >= 1, f"num_sequences={num_sequences} must be at least 1")
        require(num_places >= 1, f"num_places={num_places} must be at least 1")
        self.model = model
        self.num_places = -(-num_places // ALIGNMENT) * ALIGNMENT
        self.cache = StaticCache(config=model.config, max_cache_len=self.num_places)
        counters: dict[str, Any] = dict(dtype=torch.int64, device=model.device)
        self.place = torch.zeros(1, **counters)
        self.pads = torch.zeros(num_sequences, **counters)
        self._places = torch.arange(self.num_places, **counters)
        self._ids = torch.zeros(num_sequences, **counters)
        self._mask = torch.ones(num_sequences, self.num_places, dtype=torch.bool, device=model.device)
        self._after_step = after_step
        experts = [module for module in model.modules() if isinstance(module, CometExperts)]
        runners = {id(module.runner): module.runner for module in experts}
        self.step = DecodeStep(
            self._append,
            self._ids,
            before=partial(before_replay, list(runners.values()), [module.shared for module in experts]),
            cuda_graph=cuda_graph,
            obstacle=graph_obstacle(model, self.cache, num_sequences),
        )

    @torch.no_grad()
    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Forget everything and read the prompts.

        Args:
            ids: ``(B, S)`` int64; what lies behind a shorter prompt's last token is ignored.
            lengths: ``(B,)`` int64, tokens of each prompt.

        Returns:
            ``(B, V)`` float32 logits of each sequence's next token.
        """
        longest = ids.shape[1]
        self.cache.reset()
        self.skip_to(longest, longest - lengths)
        places = self._places[:longest]
        shifted = (places - self.pads[:, None]) % longest
        # A mask of the prompt alone lets transformers see that nothing is masked, where nothing is.
        return self._forward(ids.gather(1, shifted), places, self._mask[:, :longest])

    @torch.no_grad()
    def append(self, ids: Tensor) -> Tensor:
        """Append ``(B,)`` int64 tokens; returns ``(B, V)`` float32 logits of the next ones."""
        return self.step(ids)

    def skip_to(self, place: int, pads: Tensor) -> None:
        """Append at ``place`` from now on, with ``(B,)`` padded places in front; the cache itself is left alone."""
        self.place.fill_(place)
        self.pads.copy_(pads)
        self._mask.copy_(self._places >= self.pads[:, None])

    def _append(self) -> Tensor:
        logits = self._forward(self._ids[:, None], self.place, self._mask)
        self.place.add_(1)
        self._after_step()
        return logits

    def _forward(self, ids: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(places - self.pads[:, None]).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, 0].float()
        return logits


def graph_obstacle(model: Any, cache: Any, num_sequences: int) -> str:
    """Why a step must not be captured, for what a capture would not notice or get wrong; empty if nothing is known."""
    others = sorted({type(layer).__name__ for layer in cache.layers} - {DEVICE_COUNTED})
    if others:
        return f"transformers counts the positions of {', '.join(others)} on the host"
    if any(isinstance(module, StoredExperts) and module.host_driven for module in model.modules()):
        return WHY_EAGER
    limits = [module.runner.decode.max_tokens for module in model.modules() if isinstance(module, CometExperts)]
    return batch_obstacle(num_sequences, min(limits, default=num_sequences))
