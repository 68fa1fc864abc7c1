"""A model as generation sees it: prompts in, then one token of every sequence per step.

All ranks of a group hold the same tokens. Few of them (decode steps and short prompts) take warp decode: each rank
computes what its experts contribute and the contributions are added up. More take the layer's own path, each rank with
its share of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet.capabilities import refuse
from comet.config import SpeculationConfig, require
from comet.decode import FrozenExperts, SequenceClock, SharedSlots, before_replay, matrices_of, shared_columns
from comet.decode.runners import ReplicatedRunner, Runner
from comet.decode.shared import state_of
from comet.experts.budget import most_tokens, plan_budget
from comet.experts.cache import CacheReport, ExpertCache
from comet.experts.host.cores import HostCores
from comet.experts.options import StoreOptions
from comet.experts.paths import CachedPath, Slots, cores_of_paths, host_paths, report_of_paths
from comet.experts.staged import StagedCache
from comet.experts.store import HeldExperts, MemoryFile, QuantisedReader
from comet.graphed.step import Passes, batch_obstacle
from comet.layer.group import ExpertGroup
from comet.layer.sharding import absent, local
from comet.layer.shared_expert import SharedExpert
from comet.layout import Biases, added_biases
from comet.limits import at_most, check_values
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.moe import MoE
from comet.quantization.formats import MXType
from comet.router.router import Router, router_of
from comet.utils.graphs import TOO_FEW, GraphMode
from comet.utils.hooks import additions_of

ALL_ON_DEVICE = StoreOptions()
# So many numbers of each expert tensor in a store are compared at each prompt; that takes 0.1 ms a tensor on a CPU.
SAMPLES = 256


class Engine:
    """A model with the attention memory of the sequences it is generating; logits are float32.

    Its memory outlives calls, so these leave inference mode, outside of which torch would not write to it again.
    One that was made with settings of drafts also ``draft``s and ``verify``s.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # everything is computed there
        self.runners: Sequence[Runner] = ()  # compute the experts of all layers
        self.stored: Sequence[CachedPath] = ()  # the layers' experts where they are in a store
        self._drafts: Sequence[Router] = ()  # of all layers, where it drafts
        self._passes: Passes | None = None  # that append tokens; there are none before the prompts of some models

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        """Forget everything and read prompts ``(B, S)`` int64 of ``(B,)`` tokens: ``(B, V)`` logits of the next ones.

        Sequences may grow to ``max_length`` positions. Prompts as many and with as much room as the last ones take
        their memory and their graph, unless hooks were added or removed. Of a hook a graph replays what it computes
        on the device, not its Python.
        """
        return self._read(ids, lengths, max_length)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Append ``(B,)`` int64 tokens with all experts; ``(B, V)`` logits of the next ones."""
        return self._take(ids[:, None])[:, 0]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def draft(self, ids: Tensor) -> Tensor:
        """``decode`` with few experts."""
        return self._take(ids[:, None], drafts=True)[:, 0]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def verify(self, ids: Tensor) -> Tensor:
        """Append ``(B, S)`` int64 tokens with all experts; ``(B, S, V)`` logits of what follows each."""
        return self._take(ids)

    @property
    def lengths(self) -> Tensor:
        """``(B,)`` int64: tokens of each sequence in the cache."""
        return self._room().lengths

    def rewind(self, lengths: Tensor) -> None:
        """Keep the first ``lengths (B,)`` tokens of each sequence; one that is at its end may keep fewer."""
        self._room().rewind(lengths)

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why a kind of pass was launched kernel by kernel; empty if all were replayed from a CUDA graph."""
        return TOO_FEW if self._passes is None else self._passes.graph_fallback_reason

    @property
    def cores(self) -> HostCores | None:
        return cores_of_paths(self.stored)

    def cache_report(self) -> CacheReport | None:
        """The work of expert caches so far; ``None`` where all experts are on the device. Waits for it."""
        return report_of_paths(self.stored)

    def check(self) -> None:
        """Raise what went wrong on the device or the host's cores so far; waits for them."""
        if self.cores is not None:
            self.cores.check()
        for runner in self.runners:
            runner.check()

    def _take(self, ids: Tensor, *, drafts: bool = False) -> Tensor:
        """Append ``(B, S)`` tokens by the pass of this shape; ``(B, S, V)`` logits."""
        if self.cores is not None:
            self.cores.raise_if_failed()
        self._room()
        assert self._passes is not None
        return self._passes(ids, drafts=drafts)

    def _room(self) -> Any:
        raise NotImplementedError

    def _read(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        raise NotImplementedError


def draft_routers(routers: Sequence[Router], config: SpeculationConfig) -> list[Router]:
    """Route tokens to their r best experts by the scores of a model's layers, whose own ``routers`` take K.

    Routing weights follow the layer's rule: where it renormalises its K weights to sum to one, the r weights do; where
    it does not, they are the scores as they are, and their sum is smaller than that of K.
    """
    numbers = config.experts_per_layer(min((each.config.top_k for each in routers), default=2), len(routers))
    return [
        router_of(each.weight, each.selection_bias, replace(each.config, top_k=number))
        for each, number in zip(routers, numbers, strict=True)
    ]


def freeze_experts(runner: ReplicatedRunner, layer: MoE, columns: int, clock: SequenceClock) -> FrozenExperts:
    """A layer's routed experts in decode steps, which include its shared expert where that adds ``columns`` to K."""
    if not columns or layer.shared is None:
        return FrozenExperts(runner)
    shared = SharedSlots(layer.layout, columns, layer.shared, matrices_of, layer.config.activation, clock)
    shared.expect(layer, shared=layer.shared)
    return FrozenExperts(runner, layer, shared)


def take_experts(layer: MoE, expert_dtype: MXType | None = None, file: MemoryFile | None = None) -> HeldExperts:
    """The experts of a layer in host memory, as they are, quantised, or copied to a file of it; the layer has none."""
    w1, w2 = layer.expert_weights()
    matrices, device, biases = w1.flatten(1, 2), layer.group.device, {}
    if layer.b1 is not None and layer.b2 is not None:
        b1, b2 = added_biases(Biases(local(layer.b1).detach().flatten(1), local(layer.b2).detach()), layer.layout)
        biases = {name: bias for name, bias in (("b1", b1), ("b2", b2)) if bias is not None}
    if expert_dtype is None:
        held = HeldExperts.hold({"w1": matrices, "w2": w2, **biases}, device, file)
        w1, w2 = held.w1.view_as(w1), held.w2
    else:
        reader = QuantisedReader(HeldExperts(matrices, w2, readable=True, **biases), expert_dtype)
        held = HeldExperts.fill(reader, device, file)
        w1, w2 = absent(w1), absent(w2)
    local(layer.w1).data, local(layer.w2).data = w1, w2
    return held


class GPTEngine(Engine):
    """A GPT that generates; the model is frozen and can no longer be trained.

    Args:
        group: The model's ranks; all of them call the engine equally.
        decode_tokens: Most tokens that take warp decode; ``None``: 64, or 16 with an ``expert_budget``.
        store: Where experts are. With an ``expert_budget`` all of the model's are in host memory (``expert_device`` of
            ``GPT``).
        speculation: Settings of drafts; ``None``: ``draft`` and ``verify`` are not called.
    """

    def __init__(
        self,
        model: GPT,
        group: ExpertGroup,
        *,
        decode_tokens: int | None = None,
        cuda_graph: GraphMode = "auto",
        store: StoreOptions = ALL_ON_DEVICE,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        decode_tokens = most_tokens(store, decode_tokens, group)
        super().__init__(group.device)
        moe = model.config.moe
        refuse("in generation", capacity_factor=moe.capacity_factor)
        freeze(model)
        self.model = model
        self.cuda_graph: GraphMode = cuda_graph
        layout = group.layout(moe)
        apart = store.in_store or moe.expert_bias  # a shared expert has no biases to join theirs with
        columns = 0 if apart else shared_columns(layout, moe.ffn_size, moe.shared_ffn_size)
        self.runner = ReplicatedRunner(moe, group, decode_tokens, shared_columns=columns)
        self.runners = [self.runner]
        self._clock = SequenceClock()
        self._experts: list[FrozenExperts] = []
        budget = plan_budget(store, moe, len(model.moe_layers()), model.dtype, group.parallel)
        if budget is None:
            self._experts = [freeze_experts(self.runner, layer, columns, self._clock) for layer in model.moe_layers()]
        else:
            where: dict[str, Any] = dict(device=group.device, group=group, dtype=model.dtype)
            slots = Slots(options=store, num_slots=budget.num_slots, layout=layout, runner=self.runner, **where)
            self.stored = host_paths(
                slots,
                lambda file: [take_experts(layer, store.expert_dtype, file) for layer in model.moe_layers()],
                lambda: [layer.router for layer in model.moe_layers()],
                moe.hidden_size,
            )
        for layer, path in zip(model.moe_layers(), self._experts or self.stored, strict=True):
            layer.experts = path
        if speculation is not None:
            self._drafts = draft_routers([layer.router for layer in model.moe_layers()], speculation)
        self._tensors, self._stored_state = self._tensors_of_model(), self._state_of_store()
        self._cache: KeyValueCache | None = None
        self._passes = self._make_passes()

    @property
    def caches(self) -> list[ExpertCache | StagedCache]:
        return [path.cache for path in self.stored]

    def _read(self, ids: Tensor, lengths: Tensor, max_length: int) -> Tensor:
        # Or steps would go on with former weights: of graphs, shared experts, slots.
        kept, ways = list(map(id, self._tensors)), "write to them in place, or make a new engine"
        rule = f"must not be replaced (load_state_dict(assign=True)): {ways}"
        require(kept == list(map(id, self._tensors_of_model())), f"parameters and buffers of the model {rule}")
        rule = "must not be written to, for slots hold copies: make a new engine"
        require(self._state_of_store() == self._stored_state, f"experts of a model with an expert_budget {rule}")
        cache, num_sequences, most = self._cache, ids.shape[0], self.runner.decode.max_tokens
        if cache is None or (len(cache.lengths), cache.length) != (num_sequences, max_length):
            if self._drafts and not self.caches:
                check_values(at_most(most, "speculate='off' takes more"), prompts=num_sequences)
            self._passes = self._make_passes()  # a graph keeps its memory
            room: dict[str, Any] = dict(num_sequences=num_sequences, length=max_length, device=self.device)
            cache = self._cache = KeyValueCache(self.model.config, dtype=self.model.dtype, **room)
        assert self._passes is not None
        self._passes.renew()
        cache.clear()
        self._clock.start()
        return self.model.prefill(ids, lengths, cache).logits[:, 0]

    def _tensors_of_model(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _state_of_store(self) -> list[Any]:
        """Return what a write to experts in host memory changes; of writes that torch does not count, a sample."""
        held = [local(each).detach() for each in self.model.expert_parameters() if self.stored]
        flat = [each.flatten() for each in held if all(each.stride())]  # those that ``absent`` made hold nothing
        samples = [each[:: max(len(each) // SAMPLES, 1)].float().view(torch.int32).tolist() for each in flat]
        return [*state_of(self.model.expert_parameters() if self.stored else []), *samples]

    def _room(self) -> KeyValueCache:
        assert self._cache is not None, "prompts are read before tokens are appended"
        return self._cache

    def _make_passes(self) -> Passes:
        return Passes(
            self._append,
            before=partial(before_replay, [self.runner], [each.shared for each in self._experts]),
            cuda_graph=self.cuda_graph,
            obstacle=self._obstacle,
            reads=partial(additions_of, self.model),
        )

    def _obstacle(self, num_tokens: int) -> str:
        reason = next((path.graph_obstacle for path in self.stored), "")
        return reason or batch_obstacle(num_tokens, self.runner.captured_tokens)

    def _append(self, ids: Tensor, drafts: bool) -> Tensor:
        self._clock.proceed()
        return self.model.extend(ids, self._room(), self._drafts if drafts else None).logits


def freeze(model: GPT) -> None:
    """Keep the matrices in the dtype their products run in, to which each forward pass would cast them: no bit changes.

    The router's losses, a sixth of the operations of a decode step, are no longer computed. A model whose experts
    another engine holds quantised is refused (``MoE._apply``).
    """
    for layer in model.moe_layers():
        layer.router.config = replace(layer.router.config, aux_loss_coef=0.0, z_loss_coef=0.0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Linear, MoE, SharedExpert)):
            module._apply(lambda weight: weight.to(model.dtype), recurse=False)
