"""Comet's communication without its GEMMs: the dispatch alone, and layer 1 on a plan without tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from comet.paths import SymmetricPath


def exchange_alone(
    path: SymmetricPath, tokens: Sequence[Tensor], ids: Sequence[Tensor], weights: Sequence[Tensor], w2: Tensor
) -> Callable[[int], tuple[Tensor, ...]]:
    """A variant of the whole layer without GEMMs: plan, dispatch and combine of input set ``index``, all blocks at it.

    Args:
        path: By kernels or twins.
        tokens: ``(T, D)`` of each input set.
        ids: ``(T, K)`` int32.
        weights: ``(T, K)`` float32.
        w2: ``(e, D, F/TP)``.
    """
    hidden = tokens[0].new_zeros(path.max_routed_rows, w2.shape[2])

    def run(index: int) -> tuple[Tensor, ...]:
        plan = path.plan(ids[index], weights[index])
        path.ops.dispatch(tokens[index], plan, path.workspace, path.settings)
        if path.use_kernels:  # no tiles, so no GEMM: the expert outputs that travel are whatever is in memory
            without_tiles = replace(
                plan,
                tile_starts=torch.zeros_like(plan.tile_starts),
                segment_counts=torch.zeros_like(plan.segment_counts),
            )
            path.ops.layer1(hidden, w2, without_tiles, path.workspace, path.settings)
        else:
            y = hidden.new_zeros(hidden.shape[0], w2.shape[1])
            path.ops.combine(y, plan, path.workspace, path.settings, weighted=True)
        return ()

    return run
