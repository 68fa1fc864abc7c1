"""Modules of Comet's in the place of a model's own, which they call; its weights stay where they were, by name.

The experts of one MoE block, under the interface transformers gives its own; the shared expert of decode steps that
include it; and the routers of a model as Comet's: drafts put them in the place of its own, prefetch asks them early.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import MoEConfig, Score, require
from comet.decode import DecodeWeights, SequenceClock, SharedMatrices, SharedSlots, joins_step
from comet.decode.runners import ReplicatedRunner, Runner
from comet.experts.options import PrefetchSetting, prefetch_wanted
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.adapters import own_part, unadapted
from comet.integrations.hf.families import (
    ADAPTED,
    PROJECTIONS,
    UNFIT,
    SharedExpert,
    block_of,
    close,
    samples,
    twin,
)
from comet.integrations.hf.stored import BIASES, FUSED
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.router.router import Router, router_of
from comet.utils.autocast import alike
from comet.utils.graphs import is_capturing

logger = logging.getLogger(__name__)

GATES = ("gate", "router")  # names of routers in MoE blocks
BIAS, _SCALE = "e_score_correction_bias", "routed_scaling_factor"  # names in routers
SCORES: tuple[Score, ...] = ("softmax", "sigmoid")
_ROUTES = "by which drafts and prefetch route: set speculate='off', expert_prefetch=false"


class StandIn(nn.Module):
    """Has the parameters, buffers and submodules of ``own``, the same ones under the same names, and its attributes."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self._own = (own,)  # in a tuple: a submodule would add its name to those of the weights
        self._parameters, self._buffers, self._modules = own._parameters, own._buffers, own._modules
        self._non_persistent_buffers_set = own._non_persistent_buffers_set

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_own")
        return super().__getattr__(name) if own is None else getattr(own[0], name)


class InDecodeSteps(StandIn):
    """A shared expert ``(..., D)`` -> ``(..., D)`` that decode steps read from ``slots``."""

    def __init__(self, own: nn.Module, decode_tokens: int, slots: SharedSlots) -> None:
        super().__init__(own)
        self._decode_tokens, self._slots = decode_tokens, slots
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # none is replaced: graphs read them

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return what ``own`` computes, or ``()`` zero in steps of at most ``decode_tokens`` tokens that include it."""
        if not (joins_step(tokens, self._decode_tokens) and self._slots.joins()):
            output: Tensor = super().__call__(tokens)
            return output
        kind = tokens.dtype, tokens.device
        nothing = self._nothing.get(kind)
        if nothing is None:
            nothing = tokens.new_zeros(())
            if not is_capturing(tokens.device):  # a capture makes no zeros yet
                self._nothing[kind] = nothing
        return nothing

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self._own[0](tokens)
        return output


class DraftingGate(StandIn):
    """A gate that leaves its decision to ``routers[0]`` for as long as it has one."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__(own)
        self.routers: tuple[Router, ...] = ()  # a tuple: its weight is the gate's own, and no other parameter

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``(T, E)``, weights ``(T, r)`` and ids ``(T, r)`` int64, as gates of transformers do."""
        if not self.routers:
            found: tuple[Tensor, Tensor, Tensor] = self._own[0](hidden_states)
            return found
        routing = self.routers[0](hidden_states.reshape(-1, hidden_states.shape[-1]))
        return routing.logits, routing.top_k_weights, routing.top_k_ids.to(torch.int64)


def gate_beside(model: nn.Module, experts: str) -> tuple[str, nn.Module]:
    """The name of the router in the MoE block whose experts have this name, and the router."""
    block, _ = block_of(model, experts)
    child = next((name for name, _ in block.named_children() if name in GATES), GATES[0])
    return f"{experts.removesuffix(ADAPTED).rpartition('.')[0]}.{child}", getattr(block, child, nn.Identity())


def router_beside(model: nn.Module, experts: str, moe: MoEConfig) -> Router:
    """A router with the weight and the rule of the gate in the block of these experts, which have this shape.

    Example: DeepSeek-V3's gate scores by sigmoids, chooses 8 experts in 4 of 8 groups, and scales by 2.5.
    """
    name, gate = gate_beside(model, experts)
    own: Any = gate._own[0] if isinstance(gate, DraftingGate) else gate
    weight, bias = getattr(own, "weight", None), getattr(own, BIAS, None)
    is_linear = isinstance(weight, Tensor) and weight.ndim == 2 and not (list(own.children()) or hasattr(own, "bias"))
    require(is_linear, f"{name} ({type(own).__name__}) must have a weight (E, D) and no other, {_ROUTES}")
    names = dict(num_groups="num_group", top_groups="topk_group", routed_scale=_SCALE)
    own_fields: dict[str, Any] = {field: getattr(own, named, None) for field, named in names.items()}
    given = {field: value for field, value in own_fields.items() if value}
    moe = replace(moe, top_k=own.top_k, balance="none" if bias is None else "bias", **given)
    for score, renormalize in product(SCORES, (True, False)):
        rule = replace(moe, score=score, renormalize=renormalize)
        if _routes_as(own, rule):
            return router_of(own.weight, bias, rule)
    raise ValueError(f"{name} ({type(own).__name__}) must score by softmax or sigmoid, {_ROUTES}")


@torch.no_grad()
def _routes_as(gate: Any, rule: MoEConfig) -> bool:
    """Whether a gate of transformers decides by this rule, tried out on sample tokens."""
    weight, bias = samples(*gate.weight.shape).float(), samples(rule.num_experts).float() / 8
    buffers = {} if rule.balance == "none" else {BIAS: bias}
    tokens = samples(9, rule.hidden_size).float() * rule.hidden_size**-0.5
    router = router_of(nn.Parameter(weight), buffers.get(BIAS), rule)
    wanted, nothing = router(tokens), tokens.new_zeros(len(tokens), rule.num_experts)
    try:
        _, weights, ids = type(gate).forward(twin(gate, _parameters={"weight": weight}, _buffers=buffers), tokens)
        found = nothing.scatter(1, ids, weights.float())
    except UNFIT:
        return False
    return close(found, nothing.scatter(1, wanted.top_k_ids.long(), wanted.top_k_weights))


def routers_beside(model: Any, experts: Sequence[str], moe: MoEConfig, setting: PrefetchSetting) -> list[Router]:
    """The routers by which the experts of all layers, given by name, are prefetched."""
    try:
        return [router_beside(model, name, moe) for name in experts]
    except ValueError as error:
        if prefetch_wanted(setting):
            raise
        logger.warning("expert_prefetch=auto prefetches no expert: %s", error)
        return []


def drafting_gate(model: nn.Module, experts: str) -> DraftingGate:
    """Return a gate that can draft, which takes the place of the one in the block of these experts."""
    name, gate = gate_beside(model, experts)
    if not isinstance(gate, DraftingGate):
        gate = DraftingGate(gate)
        model.set_submodule(name, gate)
    return gate


class CometExperts(nn.Module):
    """In the place of a stock experts module; parameters of the same names hold this rank's experts.

    Args:
        gate_up_proj: ``(e, 2F/TP, D)``, gate rows first; ``down_proj`` is ``(e, D, F/TP)``.
        runner: Computes them; one serves all layers of a model.
        biases: ``(e, 2F/TP)`` and ``(e, D)``, for parameters ``gate_up_proj_bias`` and ``down_proj_bias``, or none.
        is_transposed: Whether the experts are gpt-oss's: ``(e, D, 2F/TP)``, columns of gate and up in turn, and ``(e,
            F/TP, D)``. Peft looks at the attribute of this name to shape adapters.
    """

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        layout: ExpertLayout,
        runner: Runner,
        biases: Sequence[nn.Parameter] = (),
        *,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        b1, b2 = biases or (None, None)
        # The order of the stock module, by which optimizers and flat vectors of parameters find them.
        self.gate_up_proj = gate_up_proj
        self.gate_up_proj_bias: nn.Parameter | None = b1
        self.down_proj = down_proj
        self.down_proj_bias: nn.Parameter | None = b2
        self.is_transposed = is_transposed
        self.layout = layout
        self.runner = runner
        self.shared: SharedSlots | None = None
        self._gate: str | None = None
        self._comes_after = False

    def join(self, block: nn.Module, own: SharedExpert, columns: int, clock: SequenceClock) -> None:
        """Let decode steps include the block's ``own`` shared expert, if it is one of plain linear layers."""
        shared = block.get_submodule(own.name)
        if not all(map(is_plain, projections(shared))):
            return
        self.shared = self.shared_slots(shared, columns, clock)
        self._comes_after, self._gate = own.comes_first, own.gate
        stand_in = InDecodeSteps(shared, self.runner.decode.max_tokens, self.shared)
        block.set_submodule(own.name, stand_in)
        self.shared.expect(block, experts=self, **{own.name: stand_in})

    def shared_slots(self, shared: nn.Module, columns: int, clock: SequenceClock) -> SharedSlots:
        return SharedSlots(self.layout, columns, shared, shared_matrices, self.runner.activation, clock)

    # A compiler could only break its graph here, in the middle of the collectives.
    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum ``(T, D)`` of each token's experts, of ``(T, D)``, ``(T, K)`` global ids and weights of any
        type.
        """
        routed, shared = RoutedTokens(hidden_states, top_k_index.to(torch.int32), top_k_weights.float()), self.shared
        if shared is None or not joins_step(hidden_states, self.runner.decode.max_tokens):
            return self.run(routed)
        if not (shared.taken() if self._comes_after else shared.joins()):
            return self.run(routed)
        joined = shared.weights(self.gate_up_proj, self.down_proj)
        weighs = None if self._gate is None else shared.neighbours[self._gate]
        gate = None if weighs is None else weighs(hidden_states).sigmoid()
        return self.run(RoutedTokens(hidden_states, *shared.routing(*routed[1:], gate)), joined)

    def run(self, routed: RoutedTokens, joined: DecodeWeights | None = None) -> Tensor:
        """``(T, D)`` of the experts, or of those of a step that the shared expert has joined."""
        runner = self.runner
        # Kernels of a group need contiguous rows for any number of tokens.
        in_step = isinstance(runner, ReplicatedRunner) or gpt_oss.is_step(routed.tokens, runner.decode.max_tokens)
        tokens, w1, w2, biases = operands(self, routed.tokens, in_step=in_step)
        if joined is not None and joined.w1.dtype != tokens.dtype:
            joined = replace(joined, w1=joined.w1.to(tokens.dtype), w2=joined.w2.to(tokens.dtype))
        return runner(routed._replace(tokens=tokens), w1, w2, biases, experts=joined).to(routed.tokens.dtype)

    def extra_repr(self) -> str:
        layout = self.layout
        last = layout.first_expert + layout.experts_local - 1
        return f"experts {layout.first_expert}..{last} of {layout.num_experts}, slice {layout.tp_rank} of {layout.tp}"


def operands(
    experts: Any, tokens: Tensor, *, in_step: bool, without_adapters: bool = False
) -> tuple[Tensor, Tensor, Tensor, Biases | None]:
    """Tokens, w1, w2 and biases of experts with the stock names, in one type; ``in_step`` as of ``gpt_oss.turned``."""
    is_turned = getattr(experts, "is_transposed", False)
    if without_adapters:
        weights: Sequence[Tensor] = [unadapted(experts, name) for name in FUSED]
        weights = [weight.mT for weight in weights] if is_turned else weights
    elif is_turned:
        weights = gpt_oss.turned(experts, in_step=in_step)
    else:
        weights = (experts.gate_up_proj, experts.down_proj)
    biases = (getattr(experts, name, None) for name in BIASES)
    tokens, (w1, w2, b1, b2) = alike(tokens, *map(own_part, weights), *biases)
    return tokens, w1, w2, None if b1 is None else Biases(b1, b2)


def shared_matrices(module: nn.Module) -> SharedMatrices:
    """Return the matrices of a gated MLP of transformers."""
    found = projections(module)
    for projection in found:
        rule = (
            "must be a torch.nn.Linear without bias, which decode steps read: convert the model after it got adapters"
        )
        require(is_plain(projection), f"{type(projection).__name__} of the shared expert {rule}")
    return SharedMatrices(*(projection.weight for projection in found))


def projections(module: nn.Module) -> list[Any]:
    return [getattr(module, name) for name in PROJECTIONS]


def is_plain(projection: Any) -> bool:
    """Whether all that a projection does is to multiply by its weight."""
    return type(projection) is nn.Linear and projection.bias is None
