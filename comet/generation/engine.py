"""A model as generation sees it: prompts in, then one token of every sequence per step.

All ranks of a group hold the same tokens. Few of them (decode steps and short prompts) take warp decode: each rank
computes what its experts contribute and the contributions are added up. More take the layer's own path, each rank with
its share of the tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from comet.decode import SharedMatrices, SharedSlots, before_replay, joins_step, shared_columns, stand_back
from comet.decode.runners import DECODE_TOKENS, ReplicatedRunner
from comet.experts import CachedExperts, CacheReport, ExpertCache
from comet.generation.step import DecodeStep, batch_obstacle
from comet.graphs import TOO_FEW, GraphMode
from comet.group import ExpertGroup
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.moe import MoE
from comet.sharding import local
from comet.shared_expert import SharedExpert


class Engine(Protocol):
    """A model with the attention memory of the sequences it is generating."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def prefill(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        """Forget everything and read the prompts.

        Args:
            ids: ``(B, S)`` int64; what lies behind a shorter prompt's last token is ignored.
            lengths: ``(B,)`` int64, tokens of each prompt.
            max_length: Positions a sequence may grow to.

        Returns:
            ``(B, V)`` float32 logits of each sequence's next token.
        """
        ...

    def decode(self, ids: Tensor) -> Tensor:
        """Append ``(B,)`` int64 tokens; returns ``(B, V)`` float32 logits of the next ones."""
        ...

    @property
    def why_eager(self) -> str:
        """Why the last ``decode`` was launched kernel by kernel; empty if it was replayed from a CUDA graph."""
        ...

    def weight_bytes_per_step(self) -> float:
        """Bytes of weights this rank read per decode step since ``prefill``, on average; 0 without a step."""
        ...

    def cache_report(self) -> CacheReport | None:
        """What expert caches did so far; ``None`` where all experts are on the device. Waits for it."""
        ...

    def check(self) -> None:
        """Raise what went wrong on the device so far; waits for it."""
        ...


class FrozenExperts:
    """Routed experts of a layer whose tokens all ranks hold, in decode steps with its shared expert; for inference.

    An ``ExpertPath``.

    Args:
        runner: Serves all layers.
        layer: The layer, its weights in the dtype of the products.
        columns: What its shared expert adds to K (``shared_columns``); 0: nothing, it runs by itself.
    """

    def __init__(self, runner: ReplicatedRunner, layer: MoE, columns: int) -> None:
        self.runner = runner
        self.parameters = layer.expert_parameters()
        self.shared: SharedSlots | None = None
        if columns and layer.shared is not None:
            self.shared = SharedSlots(layer.layout, columns, layer.shared, shared_matrices)
            stand_back(layer.shared, runner.decode.max_tokens)

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """See ``ExpertPath``; equal on all ranks."""
        experts = None
        if self.shared is not None and joins_step(tokens, self.runner.decode.max_tokens):
            parts: Any = map(local, self.parameters)  # moved in place, as parameters are
            experts = self.shared.weights(*parts)
            top_k_ids, top_k_weights = self.shared.routing(top_k_ids, top_k_weights)
        with torch.autocast(tokens.device.type, enabled=False):  # decode rounds where it means to
            return self.runner(tokens, top_k_ids, top_k_weights, w1, w2, experts=experts)


def shared_matrices(module: nn.Module) -> SharedMatrices:
    """Those of a ``SharedExpert``."""
    assert isinstance(module, SharedExpert)
    gate, up = module.w1.chunk(2)
    return SharedMatrices(gate, up, module.w2)


class GPTEngine:
    """A GPT that generates; the model is frozen and can no longer be trained.

    Args:
        model: With its final weights.
        group: The model's ranks; all of them call the engine equally.
        decode_tokens: Most tokens that take warp decode.
        cuda_graph: Whether decode steps are replayed from a CUDA graph (see ``DecodeStep``).
        expert_slots: Experts of each layer on the device, the others in host memory, where all of the model's are
            (``expert_device`` of ``GPT``); ``None``: all on the device.

    Raises:
        NotImplementedError: If experts in host memory belong to a group of several ranks.
    """

    def __init__(
        self,
        model: GPT,
        group: ExpertGroup,
        *,
        decode_tokens: int = DECODE_TOKENS,
        cuda_graph: GraphMode = "auto",
        expert_slots: int | None = None,
    ) -> None:
        if expert_slots is not None and group.parallel.world_size > 1:
            raise NotImplementedError("expert_budget is for one rank: leave parallel.ep and parallel.tp at 1")
        freeze(model)
        self.model = model
        self.cuda_graph: GraphMode = cuda_graph
        moe = model.config.moe
        layout = group.layout(moe)
        columns = 0 if expert_slots is not None else shared_columns(layout, moe.ffn_size, moe.shared_ffn_size)
        self.runner = ReplicatedRunner(moe, group, decode_tokens, shared_columns=columns)
        self.caches: list[ExpertCache] = []
        self._experts: list[FrozenExperts] = []
        for layer in model.moe_layers():
            if expert_slots is None:
                self._experts.append(FrozenExperts(self.runner, layer, columns))
                layer.experts = self._experts[-1]
            else:
                w1, w2 = layer.expert_weights()
                self.caches.append(ExpertCache(w1.flatten(1, 2), w2, expert_slots, group.device))
                layer.experts = CachedExperts(self.caches[-1], self.runner.decode, moe.top_k)
                layer.w1.data, layer.w2.data = self.caches[-1].w1.view_as(w1), self.caches[-1].w2  # one copy, pinned
        self._held = slice(layout.first_expert, layout.first_expert + layout.experts_local)
        self._group = group
        self._cache: KeyValueCache | None = None
        self._step: DecodeStep | None = None
        self._ids = torch.empty(0, dtype=torch.int64)
        self._steps = 0
        self._touched = torch.zeros((), dtype=torch.int64, device=group.device)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._group.device

    @property
    def why_eager(self) -> str:
        """See ``Engine``."""
        return TOO_FEW if self._step is None else self._step.why_eager

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        """See ``Engine``; prompts as many and with as much room as the last ones take their memory and their graph."""
        cache = self._cache
        if cache is None or (len(cache.lengths), cache.length) != (ids.shape[0], max_length):
            cache = self._make_room(ids.shape[0], max_length)
        cache.clear()
        self._steps = 0
        self._touched.zero_()
        return self.model.prefill(ids, lengths, cache).logits[:, 0]

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """See ``Engine``."""
        assert self._step is not None, "prompts are read before tokens are appended"
        self._steps += 1
        return self._step(ids)

    def _make_room(self, num_sequences: int, max_length: int) -> KeyValueCache:
        self._step = None  # a graph keeps its memory
        self._cache = cache = KeyValueCache(
            self.model.config,
            num_sequences=num_sequences,
            length=max_length,
            dtype=self.model.dtype,
            device=self.device,
        )
        self._ids = torch.zeros(num_sequences, dtype=torch.int64, device=self.device)
        self._step = DecodeStep(
            self._append,
            self._ids,
            before=partial(before_replay, [self.runner], [each.shared for each in self._experts]),
            cuda_graph=self.cuda_graph,
            obstacle=batch_obstacle(num_sequences, self.runner.decode.max_tokens),
        )
        return cache

    def _append(self) -> Tensor:
        """One step, from and to memory that stays where it is."""
        assert self._cache is not None, "there is a cache for every step"
        output = self.model.decode(self._ids, self._cache)
        self._touched += (output.expert_load[:, self._held] > 0).sum()
        return output.logits[:, 0]

    def check(self) -> None:
        """See ``Engine``."""
        self.runner.check()

    def cache_report(self) -> CacheReport | None:
        """What the expert caches did so far; ``None`` where all experts are on the device. Waits for it."""
        if not self.caches:
            return None
        needed, fetched = torch.stack([cache.tables.counts[1:] for cache in self.caches]).sum(0).tolist()
        cache = self.caches[0]
        return CacheReport(
            slots=cache.num_slots, needed=needed, fetched=fetched, fetched_bytes=fetched * cache.expert_bytes
        )

    def weight_bytes_per_step(self) -> float:
        """See ``Engine``; an expert's matrices count in every step that sends it a token, all others in every step.

        ``(touched experts of this rank, summed over layers and steps) / steps * bytes of one expert's part
        + bytes of all replicated weights but the embedding + bytes of B rows of the embedding``. Of shared experts
        that decode steps include, only the pieces of this rank count.
        """
        if not self._steps or self._cache is None:
            return 0.0
        embedding = self.model.embedding.weight
        rows = len(self._cache.lengths) * embedding[0].nbytes
        dense = sum(weight.nbytes for weight in self.model.dense_parameters()) - embedding.nbytes
        expert = sum(local(weight)[0].nbytes for weight in self.model.expert_parameters()[:2])
        if len(self._cache.lengths) <= self.runner.decode.max_tokens:
            dense -= sum(layer.shared.bytes_elsewhere(expert) for layer in self._experts if layer.shared is not None)
        return int(self._touched) / self._steps * expert + dense + rows


def freeze(model: GPT) -> None:
    """Keep the matrices in the dtype their products run in, where a forward pass would otherwise cast them every time.

    Router, norms and embedding stay float32, as in training, so the results stay the same bit for bit. The router's
    losses, a sixth of the operations of a decode step, are no longer computed.
    """
    for layer in model.moe_layers():
        layer.router.config = replace(layer.router.config, aux_loss_coef=0.0, z_loss_coef=0.0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Linear, MoE, SharedExpert)):
            module._apply(lambda weight: weight.to(model.dtype), recurse=False)
