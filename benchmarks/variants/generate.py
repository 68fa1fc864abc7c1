"""The ways to take decode steps that the generation benchmark compares, each with a cache of its own.

Letters: L layers, B sequences, G key and value heads, C positions of the context, w width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from comet.decode import FrozenExperts
from comet.graphed.step import DecodeStep
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.utils.graphs import GraphMode

from baselines.library import Library, fill_library, library_version, make_library_model, rewind_library

COMET, LOOP = "comet", "eager"
STOCK = ("grouped_mm", "batched_mm", LOOP)  # transformers' own experts; the last is a loop that asks the device


class StepPath(Protocol):
    """One way to take decode steps."""

    def rewind(self) -> None:
        """Stand at the end of the context again; on the device, without waiting."""
        ...

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        """Append ``(B,)`` tokens, then the most probable ones; returns the choice of the last of ``num_steps``."""
        ...


class Stepwise:
    """Steps taken one after the other, ``(B,)`` tokens to ``(B, V)`` logits; the next token is chosen on the device."""

    def __init__(self, step: Callable[[Tensor], Tensor], rewind: Callable[[], object]) -> None:
        self.step = step
        self._rewind = rewind

    def rewind(self) -> None:
        self._rewind()

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            ids = self.step(ids).argmax(-1)
        return ids


class Paths:
    """Makes every path over the weights of one model, from ``make_gpt``."""

    def __init__(self, gpt: GPT) -> None:
        self.gpt = gpt
        self._library_model = cache(partial(make_library_model, gpt))

    def makers(self, contents: Tensor, num_places: int, *, with_graphs: bool) -> dict[str, Callable[[], StepPath]]:
        """What makes each path, by name; one may fail without the others.

        Those of transformers are only where it is installed and this rank holds all experts. The context's keys and
        values are ``contents (2, L, B, G, C, w)``; ``num_places`` is how many positions there must be room for.
        """
        modes: Mapping[str, GraphMode] = {"_graph": "on", "": "off"} if with_graphs else {"": "off"}
        found: dict[str, Callable[[], StepPath]] = {}
        for suffix, mode in modes.items():
            found[f"{COMET}{suffix}"] = partial(self._comet, contents, num_places, mode)
        if library_version() is None or self.gpt.moe_layers()[0].layout.world_size > 1:
            return found
        for experts in (COMET, *STOCK):
            for suffix, mode in modes.items():
                if mode == "off" or experts != LOOP:
                    found[f"hf_{experts}{suffix}"] = partial(self._library, experts, contents, num_places, mode)
        found["hf_generate"] = partial(self._generate, contents, num_places)
        return found

    def check(self) -> None:
        """Raise what went wrong on the device so far, such as a rank that did not come."""
        for layer in self.gpt.moe_layers():
            assert isinstance(layer.experts, FrozenExperts), "the model is ready to generate"
            layer.experts.runner.check()

    def _comet(self, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        """Comet's GPT."""
        gpt, batch, positions, device = self.gpt, contents.shape[2], contents.shape[4], contents.device
        held = KeyValueCache(gpt.config, num_sequences=batch, length=num_places, dtype=gpt.dtype, device=device)
        held.keys[:, :, :, :positions], held.values[:, :, :, :positions] = contents
        ids = torch.zeros(batch, dtype=torch.int64, device=device)
        step = DecodeStep(lambda: gpt.decode(ids, held).logits[:, 0], ids, cuda_graph=cuda_graph)
        return Stepwise(step, partial(held.lengths.fill_, positions))

    def _library(self, experts: str, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        """A model of transformers with experts of its own, or with Comet's."""
        from comet.integrations import hf

        decoder = hf.StaticDecoder(self._library_model(experts), contents.shape[2], num_places, cuda_graph=cuda_graph)
        fill_library(decoder.cache, contents)

        def rewind() -> None:
            decoder.skip_to(contents.shape[4], torch.zeros_like(decoder.pads))
            rewind_library(decoder.cache, contents.shape[4])

        return Stepwise(decoder.append, rewind)

    def _generate(self, contents: Tensor, num_places: int) -> StepPath:
        """transformers as it is."""
        from transformers import StaticCache

        model = self._library_model(None)
        static = StaticCache(config=model.config, max_cache_len=num_places)
        fill_library(static, contents)
        return Library(model, static, contents)
