"""Comet's plan, dispatch and combine as separate steps, by Triton kernels or by their torch twins.

Rows of the pool can carry FP8 rows and their scales side by side. A packed row begins with D elements of one byte, then
has ceil(D / 128) float32 scales, then nothing of use up to a multiple of 16 columns of the pool's dtype, so that every
row starts where the kernels' wide accesses can. As D is a multiple of 16, a packed row is never longer than a row of
the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from comet.config import DIM_MULTIPLE, MoEConfig, OverlapConfig, require, resolve_kernels
from comet.group import ExpertGroup
from comet.layout import round_up
from comet.modular.interfaces import RoutedTokens
from comet.paths import SymmetricPath
from comet.plan import Plan, begin_plan
from comet.quantize import FP8, FP8_BLOCK, quantize_rows
from comet.workspace import Workspace

SCALE_BYTES = 4


def packed_columns(hidden_size: int, dtype: torch.dtype) -> int:
    """Columns of a packed row, in elements of the pool's dtype.

    Example: D=2048 in bfloat16: 2048 + 16 * 4 = 2112 bytes, 1056 columns instead of 2048. D=16: 20 bytes, 16 columns.
    """
    num_bytes = hidden_size + SCALE_BYTES * math.ceil(hidden_size / FP8_BLOCK)
    return round_up(math.ceil(num_bytes / dtype.itemsize), DIM_MULTIPLE)


def pack_rows(rows: FP8, dtype: torch.dtype) -> Tensor:
    """``(..., T, columns)`` of ``dtype`` for FP8 rows ``(..., T, D)``; what the numbers look like means nothing."""
    *outer, hidden_size = rows.elements.shape
    packed = torch.empty(*outer, packed_columns(hidden_size, dtype), dtype=dtype, device=rows.elements.device)
    elements, scales = _parts(packed, hidden_size)
    elements.copy_(rows.elements)
    scales.copy_(rows.scales)
    return packed


def unpack_rows(packed: Tensor, hidden_size: int) -> FP8:
    """Undo ``pack_rows`` without a copy: views of packed rows, of which some may hold anything."""
    elements, scales = _parts(packed, hidden_size)
    return FP8(elements=elements, scales=scales, block_rows=1, trusted=True)


def _parts(packed: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    first = hidden_size // SCALE_BYTES
    elements = packed.view(torch.float8_e4m3fn)[..., :hidden_size]
    return elements, packed.view(torch.float32)[..., first : first + math.ceil(hidden_size / FP8_BLOCK)]


class SymmetricTransport:
    """Moves rows over the pool of an expert group; one dispatch and one combine per plan.

    Args:
        config: Shape of the layer.
        group: The ranks and the pool.
        overlap: ``comm_blocks`` and ``block_rows`` are used; ``None`` takes the defaults.
        use_kernels: Triton kernels or plain torch; ``None``: kernels on a GPU.
    """

    def __init__(
        self, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, use_kernels: bool | None
    ) -> None:
        kernels = resolve_kernels(group.device, use_kernels)
        self.path = SymmetricPath(config, group, overlap or OverlapConfig(), use_kernels=kernels)
        self.layout = self.path.layout
        self.workspace: Workspace = self.path.workspace
        self.plan_stream = group.plan_stream

    def bring(self, routed: RoutedTokens, *, quantize: bool) -> tuple[Plan, Tensor]:
        """Send this rank's tokens and wait for the rows of all: ``start`` for a caller with nothing to run in between.

        Returns:
            What ``start``'s result returns.

        Raises:
            ValueError: If the tokens do not fit the pool.
        """
        self._check(routed)
        return self.plan_stream.start(lambda: self._bring(routed, quantize))()

    def start(self, routed: RoutedTokens, *, quantize: bool) -> Callable[[], tuple[Plan, Tensor]]:
        """Begin to send this rank's tokens, quantised and packed if asked for (collective).

        On a GPU the plan and the rows travel on a stream of their own, beside whatever the caller launches next; on a
        CPU only the ids are on their way when this returns, which by kernels costs the plan a launch.

        Returns:
            To be called once: waits for the rows of all ranks, and returns the plan and the received rows ``(R, D)``,
            or packed ones (see ``pack_rows``), a view of the pool.

        Raises:
            ValueError: If the tokens do not fit the pool.
        """
        self._check(routed)
        if self.plan_stream.stream is None:
            return self._begin(routed, quantize)
        return self.plan_stream.start(lambda: self._bring(routed, quantize))

    def combine_partials(self, partial: Tensor, plan: Plan) -> Tensor:
        """Send one partial sum per received row ``(R, D)`` home and add them up: ``(T, D)`` (collective)."""
        numbers = torch.arange(partial.shape[0], dtype=torch.int32, device=partial.device)
        return self.combine(partial, plan, numbers[:, None], weighted=False)

    def combine(self, outputs: Tensor, plan: Plan, row_slots: Tensor, *, weighted: bool) -> Tensor:
        """Add up the outputs of each received row, send the sums home, and add those up in rank order (collective).

        Args:
            outputs: ``(Q', D)``.
            plan: Of the dispatch the rows came with.
            row_slots: ``(R, K')`` int32 rows of ``outputs``, -1 for none; K' = K when weighted.
            weighted: Apply the plan's routing weights.

        Returns:
            ``(T, D)``.
        """
        path, plan = self.path, replace(plan, row_slots=row_slots)
        combined: Tensor = path.ops.combine(
            outputs.contiguous(), plan, self.workspace, path.settings, weighted=weighted
        )
        return combined

    def _bring(self, routed: RoutedTokens, quantize: bool) -> tuple[Plan, Tensor]:
        """The plan is made in halves, a launch more, only where there are rows to quantise while ids travel."""
        if quantize:
            return self._begin(routed, quantize)()
        path = self.path
        plan = path.plan(routed.top_k_ids, routed.top_k_weights)
        return plan, path.ops.dispatch(routed.tokens.contiguous(), plan, path.workspace, path.settings)

    def _begin(self, routed: RoutedTokens, quantize: bool) -> Callable[[], tuple[Plan, Tensor]]:
        path, rows = self.path, routed.tokens.contiguous()
        finish = begin_plan(
            routed.top_k_ids,
            routed.top_k_weights,
            path.layout,
            path.workspace,
            overlap=path.overlap,
            expert_capacity=path.expert_capacity,
            max_routed_rows=path.max_routed_rows,
            use_kernels=path.use_kernels,
        )
        if quantize:  # while ids travel
            rows = pack_rows(quantize_rows(rows, trusted=True), rows.dtype)

        def arrive() -> tuple[Plan, Tensor]:
            plan = finish()
            path.check_reserved(plan)
            return plan, path.ops.dispatch(rows, plan, path.workspace, path.settings)

        return arrive

    def _check(self, routed: RoutedTokens) -> None:
        shape, tokens = self.workspace.shape, routed.tokens
        require(
            tokens.shape[1] == shape.hidden_size,
            f"hidden_size={tokens.shape[1]} of tokens must be the pool's {shape.hidden_size}",
        )
        require(tokens.dtype == shape.dtype, f"dtype={tokens.dtype} of tokens must be the pool's {shape.dtype}")
