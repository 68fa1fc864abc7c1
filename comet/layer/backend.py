"""The backend of a layer: one object for its plan, its launches, and all that they share.

``Fused`` (``comet.layer.fused``) does it by kernels, ``Twin`` (``comet.layer.twin.layer``) in plain torch. A layer
makes one of them once; ``comet.layer.routed_experts`` says in which order its methods run.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, Self

from torch import Tensor

from comet.comm.collectives import call_number
from comet.config import MoEConfig, OverlapConfig
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan, PlanRules, check_routing, routed_row_capacity
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8
from comet.schedule.choice import Problem, Resolved
from comet.schedule.settings import LayerSettings, tile_rows


class ActivationGradients(NamedTuple):
    """Gradients behind the backward pass of the activation; rows of no tile are undefined, or 0."""

    pre_activation: Tensor  # ``(Q, 2F)`` gradient of gate | up
    weighted_hidden: Tensor  # ``(Q, F)`` hidden times routing weight, which the gradient of w2 is made of
    row_weights: Tensor  # ``(R, K)`` float32 gradients of the routing weights


class Backend(ABC):
    """The plan, layer 0, layer 1 and their gradients, on a pool and with the settings of one layer.

    All methods but those of weights and activation are collective.

    Raises:
        ValueError: If the rules do not fit layout and pool.
    """

    def __init__(self, layout: ExpertLayout, workspace: Workspace, rules: PlanRules, settings: LayerSettings) -> None:
        rules.check(layout, workspace)
        self.layout, self.workspace, self.rules, self.settings = layout, workspace, rules, settings
        self.number = workspace.layers_made  # the layer's

    @classmethod
    def create(cls, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> Self:
        """The backend of one layer; an ``overlap`` of ``None`` takes what was measured for the group's most tokens.

        Raises:
            ValueError: If the setting does not fit the ranks, or the layer the pool.
        """
        workspace, layout = group.workspace, group.layout(config)
        workspace.shape.check(config)
        overlap = layer_choice(config, group, overlap).setting or OverlapConfig()
        block_rows = tile_rows(group.device)
        rows = routed_row_capacity(layout, workspace.max_tokens, block_rows, config.max_imbalance)
        settings = replace(
            LayerSettings.create(config, layout, overlap, workspace.shape.dtype),
            cuda_kernels=group.cuda_kernels,
            reserved_sms=group.reserved_sms,
        )
        return cls(
            layout,
            workspace,
            PlanRules.create(block_rows, expert_capacity(config, group), rows),
            settings,
        )

    def with_tokens(self, num_tokens: int) -> Self:
        """The backend for calls with at most so many tokens on every rank, which reserves fewer routed rows."""
        rows = routed_row_capacity(self.layout, num_tokens, self.rules.block_rows, None)
        other = copy.copy(self)
        other.rules = replace(self.rules, max_routed_rows=rows)
        return other

    def call(self, *, trains: bool) -> int:
        """Return the number of what all ranks have to call at the same time."""
        return call_number(self.number, trains)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def check(self, top_k_ids: Tensor, top_k_weights: Tensor) -> None:
        """Raise ``ValueError`` unless ids and weights fit the pool, ``RuntimeError`` if the group has been closed."""
        check_routing(top_k_ids, top_k_weights, self.layout, self.workspace)
        self.workspace.comm.require_open()

    def plan(self, top_k_ids: Tensor, top_k_weights: Tensor, *, trains: bool = False) -> Plan:
        """Decide who goes where; the host reads nothing back, and the pool's epoch grows by one.

        Called inside of ``comm.in_flight``, behind ``check``: other ranks wait for what this one sends.

        Args:
            top_k_ids: ``(T, K)`` int32 experts, 0 .. E-1; -1 masks a slot. T may differ between ranks, or be 0.
            top_k_weights: ``(T, K)`` float32 routing weights.
            trains: Whether a backward pass will follow here; equal on all ranks.

        Returns:
            The plan, whose ``status[2]`` is 1 if Q was too small.

        Raises:
            AgreedError: On the CPU, if ids of any rank are out of range, or ranks call different layers, or a backward
                pass will follow on some of them only (on a GPU ``Workspace.check`` raises).
            CommTimeoutError: On the CPU, if another rank is late (on a GPU ``Workspace.check`` raises).
            CapacityError: On the CPU, if the plan needs more than Q rows (on a GPU ``Workspace.check`` raises).

        Example:
            One rank, E=2, K=2, block_rows=16, ids [[1, 0], [1, -1]]: expert 0 has token 0, expert 1 tokens 0 and 1, so
            segment_starts is [0, 16, 32], segment_counts [1, 2], row_slots [[16, 0], [17, -1], ...].
        """
        return self._plan(top_k_ids.contiguous(), top_k_weights.detach().contiguous(), trains=trains)

    @abstractmethod
    def _plan(self, ids: Tensor, weights: Tensor, *, trains: bool) -> Plan:
        """``plan`` of ids and weights that fit."""

    # ---- forward -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def dispatch_gemm(
        self, x: Tensor, w1: Tensor | FP8, plan: Plan, b1: Tensor | None = None, *, save_pre_activation: bool
    ) -> tuple[Tensor | FP8, Tensor | None]:
        """Layer 0: dispatch || grouped GEMM || activation.

        In block FP8 tokens are quantised before they travel, hidden as soon as it is computed, in float32.

        Args:
            x: ``(T, D)`` this rank's tokens.
            w1: ``(e, 2F, D)`` gate rows, then up rows; in block FP8 D and F are multiples of 128.
            plan: Where rows go.
            b1: ``(e, 2F)`` biases of gate | up, of the pool's type; ``None``: none.
            save_pre_activation: Keep gate | up for the backward pass, which block FP8 has not.

        Returns:
            hidden ``(Q, F)``, of the kind of ``w1`` (block FP8 with a scale per row and 128 columns), and gate | up
            ``(Q, 2F)`` (``None`` unless asked for); rows of no tile are undefined.
        """

    @abstractmethod
    def gemm_combine(self, hidden: Tensor | FP8, w2: Tensor | FP8, plan: Plan, b2: Tensor | None = None) -> Tensor:
        """Layer 1: grouped GEMM || weighted top-k reduce || combine.

        Args:
            hidden: ``(Q, F)`` from ``dispatch_gemm``.
            w2: ``(e, D, F)``, of the kind of ``hidden``.
            plan: Where rows go; holds the routing weights.
            b2: ``(e, D)`` biases that this rank adds; ``None``: none.

        Returns:
            ``(T, D)`` of the pool's type for this rank's tokens.
        """

    # ---- backward ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, plan: Plan) -> None:
        """Advance the epoch once every rank has arrived to begin the backward pass of the call that made ``plan``.

        Ranks that come from different calls are refused: on the CPU by an ``AgreedError``, on a GPU by the next check.
        """

    @abstractmethod
    def dispatch_dgrad(self, grad_output: Tensor, w2: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Dispatch || grouped GEMM of the output's gradient.

        Args:
            grad_output: ``(T, D)`` contiguous.
            w2: ``(e, D, F)``.
            plan: Where rows go.

        Returns:
            Its routed rows ``(Q, D)``, and hidden's gradient ``(Q, F)`` before routing weights.
        """

    @abstractmethod
    def activation_backward(self, pre_activation: Tensor, grad_hidden: Tensor, plan: Plan) -> ActivationGradients:
        """Backward of ``weight * activation(gate, up)``.

        Args:
            pre_activation: ``(Q, 2F)`` gate | up.
            grad_hidden: ``(Q, F)`` from ``dispatch_dgrad``.
            plan: Holds the routing weights.
        """

    @abstractmethod
    def bias_backward(
        self, grad_pre: Tensor, grad_rows: Tensor, b2: Tensor | None, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Gradients of both biases: sums over an expert's rows, in one order.

        Args:
            grad_pre: ``(Q, 2F)`` gradient of gate | up.
            grad_rows: ``(Q, D)`` gradient of the output, by routed row.
            b2: ``(e, D)`` biases that this rank added; ``None``: none.
            grad_row_weights: ``(R, K)`` float32 gradients of the routing weights; what comes through b2 is added here.
            plan: Holds the routing weights.

        Returns:
            ``(e, 2F)`` and ``(e, D)``; the second on every TP rank, whichever added the bias.
        """

    @abstractmethod
    def dgrad_combine(
        self, grad_pre: Tensor, w1: Tensor, grad_row_weights: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Grouped GEMM || reduce || combine of the tokens' gradient.

        Args:
            grad_pre: ``(Q, 2F)`` gradient of gate | up.
            w1: ``(e, 2F, D)``.
            grad_row_weights: ``(R, K)`` float32 gradients of the routing weights, which travel along.
            plan: Where rows go.

        Returns:
            Gradients of x ``(T, D)`` and of the routing weights ``(T, K)`` float32.
        """

    @abstractmethod
    def routed_rows(self, received: Tensor, plan: Plan) -> Tensor:
        """``(Q, D)``: for each routed row what arrived, from ``(R, D)``; the padding of segments is undefined."""

    @abstractmethod
    def fc1_wgrad(self, grad_pre: Tensor, received: Tensor, plan: Plan) -> Tensor:
        """Gradient of w1 ``(e, 2F, D)`` from that of gate | up ``(Q, 2F)`` and the tokens that arrived ``(R, D)``."""

    @abstractmethod
    def fc2_wgrad(self, grad_rows: Tensor, weighted_hidden: Tensor, plan: Plan) -> Tensor:
        """Gradient of w2 ``(e, D, F)`` from that of the output's routed rows ``(Q, D)`` and weighted hidden."""

    # ---- without GEMMs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        """Send ``rows (T, C)`` along the plan; returns the received rows ``(R, C)``, own rows included.

        The result is a view of the pool: the next dispatch overwrites it. C is at most D, the same on all ranks.
        """

    @abstractmethod
    def combine(self, y: Tensor, plan: Plan, *, weighted: bool) -> Tensor:
        """Add up each received row's routed rows of ``y (Q, D)``, send the sums home, and add those up: ``(T, D)``.

        Args:
            y: ``(Q, D)`` expert outputs.
            plan: Where rows came from; ``row_slots`` says which of ``y`` make up each.
            weighted: Apply the plan's routing weights.
        """

    def keep_received(self, x: Tensor, plan: Plan) -> Tensor:
        """``(R, D)``: tokens that arrived and own ``x``, copied before the next layer overwrites the receive buffer."""
        rows = self.workspace.recv_rows.local.clone()
        rows[plan.own_rows] = x
        return rows


def expert_capacity(config: MoEConfig, group: ExpertGroup) -> int | None:
    """Routed rows one expert keeps, from the configured maximum of tokens; ``None`` when dropless.

    The factor is the decimal number that the user wrote: as a float 1.1 is a little more.

    Example: capacity_factor 1.25, W=2, max_tokens=100, K=2, E=8: ceil(1.25 * 2 * 100 * 2 / 8) = 63.
    capacity_factor 1.1, W=1, max_tokens=500, K=6, E=60: 1.1 * 500 * 6 / 60 = 55 (in floats 55.00000000000001, so 56).
    """
    if config.capacity_factor is None:
        return None
    routed = group.parallel.world_size * group.workspace.shape.max_tokens * config.top_k
    return math.ceil(Fraction(str(float(config.capacity_factor))) * routed / config.num_experts)


def layer_choice(config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> Resolved:
    """The setting of a layer, equal on all ranks: the user's, else measured for its most tokens, else the default.

    Raises:
        ValueError: If the user's setting is impossible here; the message names the rule.
    """
    shape = group.workspace.shape
    return group.resolver(Problem(config, group.parallel, shape.max_tokens, shape.dtype), forced=overlap)
