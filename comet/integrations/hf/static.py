"""The sequences of a transformers model in its static cache, extended token by token from a CUDA graph.

transformers counts a static cache's positions on the device, so a step is the same launches each time. What it counts
on the host (sliding windows) would stand still in a graph: such models are not captured.

Letters: B sequences, S positions of the longest prompt, C places of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.decode import before_replay
from comet.graphed.step import Passes, batch_obstacle
from comet.integrations.hf.modules import CometExperts
from comet.integrations.hf.stored_experts import stored_paths
from comet.layer.sharding import local
from comet.utils.graphs import GraphMode
from comet.utils.hooks import additions_of

ALIGNMENT = 16  # elements of a mask's row; torch copies masks that are not, in every layer
DEVICE_COUNTED = "StaticLayer"


class StaticDecoder:
    """B sequences that all append at the same place: shorter prompts are padded in front.

    Args:
        model: A causal language model of transformers, converted or not, in evaluation mode; all ranks of a converted
            one call this equally.
        num_places: Places a sequence may take, padding included; rounded up to C.
        drafting: Lets the model route as drafts do, around the forward pass of ``draft``.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        model: Any,
        num_sequences: int,
        num_places: int,
        *,
        cuda_graph: GraphMode = "auto",
        drafting: Callable[[], AbstractContextManager[None]] = nullcontext,
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
        self._mask = torch.ones(num_sequences, self.num_places, dtype=torch.bool, device=model.device)
        self._drafting = drafting
        experts = [module for module in model.modules() if isinstance(module, CometExperts)]
        runners = list(dict.fromkeys(module.runner for module in experts))
        self._clocks = list(dict.fromkeys(module.shared.clock for module in experts if module.shared is not None))
        for clock in self._clocks:
            clock.adopt(self.cache)
        self.passes = Passes(
            self._append,
            before=partial(before_replay, runners, [module.shared for module in experts]),
            cuda_graph=cuda_graph,
            obstacle=partial(graph_obstacle, model, self.cache),
            reads=lambda: chain(map(local, chain(model.parameters(), model.buffers())), additions_of(model)),
        )
        self.step = self.passes.of(torch.zeros(num_sequences, 1, **counters))

    @torch.inference_mode(mode=False)  # the cache outlives the mode
    @torch.no_grad()
    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Forget everything and read the prompts; later steps replay the hooks that modules have now."""
        longest = ids.shape[1]
        self.passes.renew()
        self.cache.reset()
        for clock in self._clocks:
            clock.start()
        self.skip_to(longest, longest - lengths)
        places = self._places[:longest]
        shifted = (places - self.pads[:, None]) % longest
        # A mask of the prompt alone lets transformers see that nothing is masked, where nothing is.
        return self._forward(ids.gather(1, shifted), places, self._mask[:, :longest], 1)[:, 0]

    @torch.inference_mode(mode=False)  # the cache outlives the mode
    @torch.no_grad()
    def append(self, ids: Tensor) -> Tensor:
        return self.passes(ids[:, None])[:, 0]

    @property
    def lengths(self) -> Tensor:
        return self.place - self.pads

    def rewind(self, lengths: Tensor) -> None:
        """Keep the first ``lengths (B,)`` tokens of each sequence; the longest has no padding from then on.

        Example (A and B are places of two sequences, ``.`` padding): ``AAAAA`` and ``.BBBB`` with lengths ``[2, 3]``
        become ``.AA`` and ``BBB``. A cache that forgets, as that of a sliding window, raises ``NotImplementedError``.
        """
        others = forgetful(self.cache)
        if others:
            raise NotImplementedError(
                f"tokens cannot be taken back from {others}, which transformers counts on the host"
            )
        place = lengths.max()
        pads = place - lengths
        if len(lengths) > 1:
            moved = (self._places + (self.pads - pads)[:, None]) % self.num_places
            for layer in self.cache.layers:
                for held in (layer.keys, layer.values):
                    held.copy_(held.gather(2, moved[:, None, :, None].expand_as(held)))
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(place)
        self.skip_to(place, pads)

    def skip_to(self, place: int | Tensor, pads: Tensor) -> None:
        """Append at ``place`` from now on, with ``(B,)`` padded places in front; the cache itself is left alone."""
        self.place.fill_(place)
        self.pads.copy_(pads)
        self._mask.copy_(self._places >= self.pads[:, None])

    def _append(self, ids: Tensor, drafts: bool) -> Tensor:
        count = ids.shape[1]
        with self._drafting() if drafts else nullcontext():
            logits = self._forward(ids, self.place + self._places[:count], self._mask, count)
        self.place.add_(count)
        return logits

    def _forward(self, ids: Tensor, places: Tensor, mask: Tensor, keep: int) -> Tensor:
        """``(B, keep, V)`` float32 logits behind the last tokens."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(places - self.pads[:, None]).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits.float()
        return logits


def forgetful(cache: Any) -> str:
    """The kinds of a static cache's layers that hold no position of every token, or count them on the host; or none."""
    return ", ".join(sorted({type(layer).__name__ for layer in cache.layers} - {DEVICE_COUNTED}))


def graph_obstacle(model: Any, cache: Any, num_tokens: int) -> str:
    """Return what a capture of a step would not notice or get wrong; empty if nothing is known."""
    others = forgetful(cache)
    if others:
        return f"transformers counts the positions of {others} on the host"
    if reason := next((path.graph_obstacle for path in stored_paths(model)), ""):
        return reason
    limits = [module.runner.captured_tokens for module in model.modules() if isinstance(module, CometExperts)]
    return batch_obstacle(num_tokens, min(limits, default=num_tokens))
