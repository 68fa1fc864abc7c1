"""The ways to run routed experts, chosen by name; each is a callable over (tokens, ids, weights, w1, w2)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, get_args

from torch import Tensor
from torch.nn.functional import pad

from comet.comm.base import require_memory
from comet.comm.collectives import in_steps, wants_grad
from comet.config import DIM_MULTIPLE, MoEConfig, OverlapConfig, Path, check_kernel_dtype, require
from comet.errors import CapacityError
from comet.layer.autograd import Pieces, fp8_experts, routed_experts
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan, begin_plan, check_tokens, routed_row_capacity
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8
from comet.quantization.packed import match_fp8_weights
from comet.reference.plain import CollectiveExperts, gather_reference_experts, plain_experts
from comet.schedule.settings import LayerSettings
from comet.schedule.tiles import check_phases
from comet.tuner.choice import Resolved
from comet.tuner.problem import Problem
from comet.tuner.profile import token_bucket
from comet.utils.match import MatchOnce, Sizes
from comet.utils.streams import SideStream
from comet.utils.uncompiled import uncompiled

WITHOUT_MEMORY = "use path 'plain' (moe_path=plain, or auto), or groups of ep x tp ranks on one node of Hopper GPUs"


class ExpertPath(Protocol):
    """Computes the weighted sum of each token's experts, differentiably."""

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """``(T, D)``, ``(T, K)`` int32, ``(T, K)`` float32, ``(e, 2F/TP, D)``, ``(e, D, F/TP)`` -> ``(T, D)``."""
        ...


class SymmetricPath:
    """plan -> layer 0 -> layer 1 over symmetric memory, by kernels or by their torch twins.

    Args:
        config: Shape of the layer.
        group: The ranks, and the pool.
        overlap: Split and order of the work; ``None`` takes what was measured for the group's maximum of tokens, and
            for each call as many comm blocks as were measured best for about its tokens. All else has to be equal on
            all ranks, whose numbers of tokens may differ.
        use_kernels: Kernels rather than their twins.

    Raises:
        ValueError: If the layer does not fit the pool, or the setting the ranks.
        UnavailableError: If the group spans several nodes.
    """

    def __init__(
        self, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, use_kernels: bool
    ) -> None:
        require_memory(group.comm, f"path={'fused' if use_kernels else 'twin'!r}", WITHOUT_MEMORY)
        group.workspace.shape.check(config)
        dtype, device = group.workspace.shape.dtype, group.device
        if use_kernels:
            check_kernel_dtype(dtype, device)
        store = group.resolver.store if overlap is None else None
        self.measured = group_problem(config, group) if store is not None and store.entries else None
        self.resolver = group.resolver
        self.settings_of_bucket: dict[int, LayerSettings] = {}
        overlap = layer_choice(config, group, overlap).setting or OverlapConfig()
        # A rank alone has no remote rows to wait for, whatever the setting.
        self.overlap = overlap if group.parallel.world_size > 1 else replace(overlap, num_phases=1)
        check_phases(self.overlap.num_phases, group.parallel.world_size)
        self.layout = group.layout(config)
        self.workspace = group.workspace
        self.match = match_once(match_weights, config, self.layout, dtype=dtype, device=device)
        self.match_fp8 = match_once(match_fp8_weights, config, self.layout, device=device)
        settings = LayerSettings.create(config, self.layout, self.overlap, dtype)
        self.settings = replace(
            settings,
            cuda_kernels=group.cuda_kernels,
            spare_multiprocessors=group.spare_multiprocessors,
        )
        self.use_kernels = use_kernels
        self.ops = importlib.import_module("comet.layer.fused" if use_kernels else "comet.layer.twin.layer")
        self.expert_capacity = expert_capacity(config, group)
        self.max_imbalance = config.max_imbalance
        self.max_routed_rows = routed_row_capacity(
            self.layout, self.workspace.max_tokens, self.overlap.block_rows, config.max_imbalance
        )
        self.plan_stream = group.plan_stream if config.shared_ffn_size else SideStream(None)
        self.later: list[Callable[[], Tensor]] | None = None

    @uncompiled
    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Plan, then layer 0 and layer 1; see ``ExpertPath``.

        Raises:
            ValueError: If tokens or routing do not fit the pool or each other, or weights the layer; on a CPU, on all
                ranks, if gradients are wanted on some of them only.
            StepFailedError: If an earlier step failed on any rank; ``Workspace.restart`` goes on.
        """
        check_tokens(tokens, top_k_ids, self.workspace)
        self.match(w1, w2)
        w1, w2 = w1.contiguous(), w2.contiguous()  # kernels find their rows by address
        padded_w1, padded_w2 = pad_width(w1, w2)
        later = self.later if padded_w1 is w1 else None
        pieces = Pieces(self.ops, self.workspace, self.settings_for(tokens.shape[0]), later)
        trains = wants_grad(tokens, w1, w2, top_k_weights)
        with self.workspace.forward_step:
            plan = self.plan_stream.start(lambda: self.plan(top_k_ids, top_k_weights, trains=trains))()
            return routed_experts(tokens, padded_w1, padded_w2, top_k_weights, plan, pieces)

    @contextmanager
    def weight_gradients_later(self) -> Iterator[list[Callable[[], Tensor]]]:
        """Backward passes of calls made inside leave the gradients of the weights to their caller.

        Yields:
            A list: each such backward pass puts two functions there, which make the gradients of ``w1 (e, 2F/TP, D)``
            and of ``w2 (e, D, F/TP)`` in new memory; call them before the layer runs again. It stays empty, and the
            gradients go their usual way, where F/TP is no multiple of 16.
        """
        self.later = []
        try:
            yield self.later
        finally:
            self.later = None

    @uncompiled
    def fp8(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: FP8, w2: FP8) -> Tensor:
        """As a call, for inference, with e4m3 products: tokens and hidden are quantised on the way.

        Args:
            tokens: ``(T, D)`` of the pool's type.
            top_k_ids: ``(T, K)`` int32.
            top_k_weights: ``(T, K)`` float32.
            w1: ``(e, 2F/TP, D)`` with a scale per 128 x 128; elements and scales are contiguous.
            w2: ``(e, D, F/TP)``, likewise.

        Returns:
            ``(T, D)``.

        Raises:
            ValueError: If D or F/TP is not a multiple of 128, a gradient is wanted, tokens or routing do not fit the
                pool or each other, or weights the layer.
        """
        check_tokens(tokens, top_k_ids, self.workspace)
        self.match_fp8(w1.elements, w2.elements, w1.scales, w2.scales)
        require(
            not wants_grad(tokens, top_k_weights),
            "requires_grad=True of tokens or top_k_weights must be False: experts in block FP8 are for inference",
        )
        pieces = Pieces(self.ops, self.workspace, self.settings_for(tokens.shape[0]))
        with self.workspace.forward_step:
            plan = self.plan_stream.start(lambda: self.plan(top_k_ids, top_k_weights))()
            return fp8_experts(tokens, w1, w2, plan, pieces)

    def settings_for(self, num_tokens: int) -> LayerSettings:
        """The layer's settings, with the comm blocks measured for about so many tokens of this rank."""
        if self.measured is None:
            return self.settings
        bucket = token_bucket(num_tokens)  # what the resolver tells apart; asking it takes tens of microseconds
        if bucket not in self.settings_of_bucket:
            choice = self.resolver(replace(self.measured, num_tokens=bucket)).setting
            comm_blocks = choice.comm_blocks if choice is not None else self.settings.comm_blocks
            self.settings_of_bucket[bucket] = replace(self.settings, comm_blocks=comm_blocks)
        return self.settings_of_bucket[bucket]

    def plan(self, top_k_ids: Tensor, top_k_weights: Tensor, *, trains: bool = False) -> Plan:
        """Who goes where, for ids and weights ``(T, K)`` (collective); ``trains`` where a backward pass will follow.

        Raises:
            ValueError: On the CPU, on all ranks, if a backward pass will follow on some of them only.
            RuntimeError: If the group has been closed.
            CapacityError: On the CPU, where a plan that does not fit is known at once; on a GPU ``workspace.check``
                tells.
        """
        return self.begin_plan(top_k_ids, top_k_weights.detach(), at_once=True, trains=trains)()

    def begin_plan(
        self, top_k_ids: Tensor, top_k_weights: Tensor, *, at_once: bool = False, trains: bool = False
    ) -> Callable[[], Plan]:
        """``plan`` in halves: ids are sent; what is returned waits for those of the others."""
        finish = begin_plan(
            top_k_ids,
            top_k_weights,
            self.layout,
            self.workspace,
            overlap=self.overlap,
            expert_capacity=self.expert_capacity,
            max_routed_rows=self.max_routed_rows,
            use_kernels=self.use_kernels,
            at_once=at_once,
            trains=trains,
        )

        def checked() -> Plan:
            plan = finish()
            if not self.use_kernels and plan.status[2]:
                raise CapacityError(
                    f"rank {self.layout.rank} needs {int(plan.status[0])} routed rows, more than the "
                    f"{self.max_routed_rows} that max_imbalance={self.max_imbalance} reserves; raise it or leave it "
                    "unset"
                )
            return plan

        return checked


class CollectivePath:
    """One of the functions of ``comet.reference.plain`` for a layer: runs wherever ``torch.distributed`` does.

    Args:
        compute: ``plain_experts`` (all-to-all, grouped GEMMs, all-to-all, one after the other: what Comet is measured
            against) or ``gather_reference_experts`` (every rank gathers all weights: the specification).
        config: Shape of the layer.
        group: The ranks.
    """

    def __init__(self, compute: CollectiveExperts, config: MoEConfig, group: ExpertGroup) -> None:
        self.compute = compute
        self.layout = group.layout(config)
        self.comm = group.comm
        self.process_group = group.process_group
        self.match = match_once(match_weights, config, self.layout)

    @uncompiled
    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """See ``ExpertPath``."""
        self.match(w1, w2)
        w1, w2 = pad_width(w1, w2)
        inputs = (tokens, top_k_ids, top_k_weights, w1, w2)
        if self.layout.world_size > 1:
            return in_steps(self.comm, self._run, *inputs)
        with self.comm.step("forward pass"):
            return self._run(*inputs)

    def _run(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return self.compute(tokens, top_k_ids, top_k_weights, w1, w2, self.layout, self.process_group)


def match_once(match: Callable[..., None], config: MoEConfig, layout: ExpertLayout, **rules: Any) -> MatchOnce:
    """``match`` with the sizes of a layer, for weights that come with every call."""
    sizes = Sizes(
        e=(layout.experts_local, "num_experts / ep"),
        F=(config.ffn_size // layout.tp, "ffn_size / tp"),
        D=(config.hidden_size, "hidden_size"),
    )
    return MatchOnce(partial(match, sizes, **rules))


def match_weights(sizes: Sizes, w1: Tensor, w2: Tensor, **rules: Any) -> None:
    """Raise ``ValueError`` unless w1 is ``(e, 2F/TP, D)`` and w2 ``(e, D, F/TP)``; ``rules`` are of ``Sizes.match``."""
    sizes.match("w1", w1, "e 2F D", **rules)
    sizes.match("w2", w2, "e D F", **rules)


def pad_width(w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights, copied where F/TP is no multiple of 16: padded with zeros, to the next one, which the kernels take.

    Exact: a hidden column of zero weights is silu(0) * 0 = 0 and meets a zero column of w2; gradients are those of the
    weights themselves.

    Args:
        w1: ``(e, 2F/TP, D)``, gate rows first, then up rows.
        w2: ``(e, D, F/TP)``.

    Returns:
        Both, of a width that is a multiple of 16; F/TP = 24: ``(e, 64, D)``, ``(e, D, 32)``.
    """
    missing = -w2.shape[2] % DIM_MULTIPLE
    if not missing:
        return w1, w2
    return pad(w1.unflatten(1, (2, -1)), (0, 0, 0, missing)).flatten(1, 2), pad(w2, (0, missing))


def expert_capacity(config: MoEConfig, group: ExpertGroup) -> int | None:
    """Routed rows one expert keeps, from the configured maximum of tokens; ``None`` when dropless.

    Example: capacity_factor 1.25, W=2, max_tokens=100, K=2, E=8: ceil(1.25 * 2 * 100 * 2 / 8) = 63.
    """
    if config.capacity_factor is None:
        return None
    routed = group.parallel.world_size * group.workspace.shape.max_tokens * config.top_k
    return math.ceil(config.capacity_factor * routed / config.num_experts)


def group_problem(config: MoEConfig, group: ExpertGroup) -> Problem:
    """The layer call all ranks of a group agree on: its configured maximum of tokens."""
    shape = group.workspace.shape
    return Problem.create(config, group.parallel, shape.max_tokens, shape.dtype)


def layer_choice(config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> Resolved:
    """The setting of a layer, equal on all ranks: the user's, else measured, else the default.

    Raises:
        ValueError: If the user's setting is impossible here; the message names the rule.
    """
    return group.resolver(group_problem(config, group), forced=overlap)


def make_path(
    name: Path | str, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None = None
) -> ExpertPath:
    """The path called ``name``.

    ``auto`` is ``fused`` on a GPU and ``twin`` on a CPU, or ``plain`` where that was measured to be faster or the group
    spans several nodes.

    Raises:
        ValueError: If there is no such path, or it cannot honour the configuration or the setting.
        UnavailableError: If it needs symmetric memory and the group has none.
    """
    if name == "auto" and group.comm.memory_obstacle:
        require(overlap is None, f"overlap={overlap} must be left out for path 'plain': {group.comm.memory_obstacle}")
        group.resolver.warn(
            f"{group.comm.memory_obstacle}. So its layers take path 'plain', also to decode, whose communication no "
            "computation hides; groups of ep x tp ranks on one node of Hopper GPUs are faster"
        )
        name = "plain"
    if name == "auto":
        name = "fused" if group.device.type == "cuda" else "twin"
        if config.capacity_factor is None and layer_choice(config, group, overlap).setting is None:
            name = "plain"
    known = get_args(Path)
    require(name in known, f"path={name!r} must be 'auto' or one of {known}")
    if name in ("fused", "twin"):
        return SymmetricPath(config, group, overlap, use_kernels=name == "fused")
    require(
        config.capacity_factor is None,
        f"capacity_factor={config.capacity_factor} needs path 'fused' or 'twin'; {name!r} is dropless"
        + (group.comm.memory_obstacle and f", and {group.comm.memory_obstacle}: only groups within a node drop rows"),
    )
    return CollectivePath(plain_experts if name == "plain" else gather_reference_experts, config, group)
