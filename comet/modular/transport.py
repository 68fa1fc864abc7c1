"""Comet's plan, dispatch and combine as separate steps, by Triton kernels or by their torch twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from comet import twin
from comet.config import MoEConfig, OverlapConfig, require
from comet.group import ExpertGroup
from comet.modular.interfaces import RoutedTokens
from comet.paths import SymmetricPath
from comet.plan import Plan, begin_plan
from comet.workspace import Workspace

COUNTERS = slice(32, 64)  # of the plan: those of layer 1, which does not run here
MOVE_COLS = {2: 512, 4: 128}  # columns the combine moves at once, by bytes per element


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
        kernels = group.device.type == "cuda" if use_kernels is None else use_kernels
        self.path = SymmetricPath(config, group, overlap or OverlapConfig(), use_kernels=kernels)
        self.layout = self.path.layout
        self.workspace: Workspace = self.path.workspace
        self.plan_stream = group.plan_stream

    def start(self, routed: RoutedTokens) -> Callable[[], tuple[Plan, Tensor]]:
        """Begin to send this rank's tokens (collective).

        On a GPU the plan and the rows travel on a stream of their own, beside whatever the caller launches next; on a
        CPU only the ids are on their way when this returns.

        Returns:
            To be called once: waits for the rows of all ranks, and returns the plan and the received rows ``(R, D)``, a
            view of the pool.

        Raises:
            ValueError: If the tokens do not fit the pool.
        """
        self._check(routed)
        if self.plan_stream.stream is None:
            return self._begin(routed)
        return self.plan_stream.start(lambda: self._begin(routed)())

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
        outputs, plan = outputs.contiguous(), replace(plan, row_slots=row_slots)
        if self.path.use_kernels:
            return self._combine_by_kernel(outputs, plan, weighted)
        return twin.combine(outputs, plan, self.workspace, weighted=weighted, row_grads=None)[0]

    def _begin(self, routed: RoutedTokens) -> Callable[[], tuple[Plan, Tensor]]:
        path = self.path
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

        def arrive() -> tuple[Plan, Tensor]:
            plan = finish()
            path.check_reserved(plan)
            return plan, path.ops.dispatch(routed.tokens.contiguous(), plan, path.workspace, path.settings)

        return arrive

    def _combine_by_kernel(self, outputs: Tensor, plan: Plan, weighted: bool) -> Tensor:
        """The launch of layer 1 with no tile to multiply: what remains of it is the combine."""
        from comet.kernels.arguments import Returns, TileTable, Wire
        from comet.kernels.gemm_combine import GemmCombineConfig, gemm_combine

        workspace, tile = self.workspace, self.path.settings.tile
        columns = outputs.shape[1]
        out = outputs.new_empty(plan.num_tokens, columns)
        wire = Wire(
            rows=workspace.combine_rows.local,
            row_pointers=workspace.combine_rows.pointers,
            flags=workspace.combine_flags.local,
            flag_pointers=workspace.combine_flags.pointers,
            epoch=workspace.epoch,
            fault=workspace.fault,
            rank=self.layout.rank,
            max_tokens=plan.max_tokens,
            timeout_ns=workspace.timeout_ns,
        )
        returns = Returns(
            row_slots=plan.row_slots,
            row_weights=plan.row_weights if weighted else None,
            send_rows=plan.send_rows,
            recv_counts=plan.recv_counts,
        )
        no_tiles = TileTable(
            tiles=plan.tiles,
            num_tiles=torch.zeros(1, dtype=torch.int32, device=outputs.device),
            row_ids=plan.routed_row_ids,
            counters=plan.counters[COUNTERS],
            block_rows=plan.block_rows,
        )
        config = GemmCombineConfig(
            comm_blocks=self.path.settings.comm_blocks,
            num_panels=1,
            block_n=tile.block_n,
            block_k=tile.block_k,
            move_cols=min(MOVE_COLS[outputs.element_size()], power_of_2(columns)),
            flatten=False,
            num_stages=tile.num_stages,
        )
        gemm_combine(outputs, outputs[None], outputs, out, wire, returns, no_tiles, config)
        return out

    def _check(self, routed: RoutedTokens) -> None:
        shape, tokens = self.workspace.shape, routed.tokens
        require(
            tokens.shape[1] == shape.hidden_size,
            f"hidden_size={tokens.shape[1]} of tokens must be the pool's {shape.hidden_size}",
        )
        require(tokens.dtype == shape.dtype, f"dtype={tokens.dtype} of tokens must be the pool's {shape.dtype}")


def power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value``: ``power_of_2(48) == 64``."""
    return 1 << (value - 1).bit_length()
