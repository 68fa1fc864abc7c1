"""The two implementations of each layer in block FP8, launched with what ``comet.fused`` would hand them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from fp8 import quantize_experts
from layer_points import Point
from torch import Tensor

from comet.config import require
from comet.fused_arguments import (
    combine_config,
    combine_wire,
    dispatch_config,
    make_wire,
    returns_of,
    sends_of,
    table_of,
)
from comet.kernels import fp8_dispatch_gemm_cuda as layer0_cuda
from comet.kernels import fp8_gemm_combine_cuda as layer1_cuda
from comet.kernels.arguments import Scaled, Wire, power_of_2
from comet.kernels.dispatch import Sends
from comet.kernels.fp8 import pack_rows
from comet.kernels.fp8_dispatch_gemm import fp8_dispatch_gemm
from comet.kernels.gemm_combine import gemm_combine
from comet.packed import packed_columns
from comet.paths import SymmetricPath
from comet.plan import Plan
from comet.quantize import FP8_BLOCK


def quantize_weights(point: Point) -> tuple[Scaled, Scaled]:
    """The point's w1 and w2."""
    w1, w2 = (quantize_experts(weight) for weight in (point.layer.w1, point.layer.w2))
    return Scaled(elements=w1.elements, scales=w1.scales), Scaled(elements=w2.elements, scales=w2.scales)


def fp8_layer0_kernels(point: Point, path: SymmetricPath, plan: Plan, w1: Scaled) -> list[Callable[[], Scaled]]:
    """Layer 0 in Triton, in CUDA C++, and in CUDA C++ with nothing to send and all arrived; see ``layer_compare``.

    The first two quantise this rank's tokens before, as the layer does; the last reads what is there.
    """
    x, workspace = point.tokens, path.workspace
    columns = packed_columns(x.shape[1], x.dtype)
    landing = workspace.recv_rows.with_columns(columns)
    wire = make_wire(workspace, landing, workspace.recv_flags)
    wire = replace(wire, rows=wire.rows.view(torch.int32))
    own = wire.rows[wire.rank * wire.max_tokens :][: len(x)]
    sends, table = sends_of(plan), table_of(plan, launch=0)
    rows, ffn = plan.routed_row_ids.numel(), w1.elements.shape[1] // 2

    def result() -> Scaled:
        elements = x.new_empty(rows, ffn, dtype=w1.elements.dtype)
        return Scaled(elements=elements, scales=x.new_empty(ffn // FP8_BLOCK, rows, dtype=torch.float32))

    def in_triton() -> Scaled:
        pack_rows(x, own)
        hidden, config = result(), dispatch_config(path.settings, x, save_pre=False)
        config = replace(config, push_cols=min(512, power_of_2(columns)))
        fp8_dispatch_gemm(w1, hidden, wire, sends, replace(table, segments=None), config)
        return hidden

    def in_cuda(wire: Wire, sends: Sends) -> Scaled:
        require(
            layer0_cuda.runs_cuda(w1, wire, sends, table),
            f"w1={tuple(w1.elements.shape)} in FP8 must be of a kind that the kernel takes",
        )
        hidden = result()
        layer0_cuda.fp8_dispatch_gemm_cuda(w1, hidden, wire, sends, table)
        return hidden

    def packed_in_cuda() -> Scaled:
        pack_rows(x, own)
        return in_cuda(wire, sends)

    def alone() -> Scaled:
        return in_cuda(arrived, nothing)

    arrived = replace(wire, epoch=torch.zeros_like(wire.epoch))
    nothing = replace(sends, counts=torch.zeros_like(sends.counts))
    return [in_triton, packed_in_cuda, alone]


def fp8_layer1_kernels(
    point: Point, path: SymmetricPath, plan: Plan, hidden: Scaled, w2: Scaled
) -> list[Callable[[], Tensor]]:
    """Layer 1 in Triton and in CUDA C++, both of ``hidden (Q, F/TP)``."""
    workspace, hidden_size = path.workspace, w2.elements.shape[1]
    wire, returns, table = combine_wire(workspace), returns_of(plan, weighted=True), table_of(plan, launch=1)
    settings = replace(path.settings, beside=True)
    num_panels = settings.layer1.num_panels

    def results() -> tuple[Tensor, Tensor]:
        new = point.tokens.new_empty
        return new(hidden.elements.shape[0], hidden_size), new(plan.num_tokens, hidden_size)

    def in_triton() -> Tensor:
        y, out = results()
        config = combine_config(settings, num_panels, out)
        config = replace(config, block_k=FP8_BLOCK, num_stages=settings.tile.num_stages)
        gemm_combine(hidden, w2, y, out, wire, returns, replace(table, segments=None), config)
        return out

    def in_cuda() -> Tensor:
        y, out = results()
        require(
            layer1_cuda.can_run(y, w2, wire, returns, table),
            f"w2={tuple(w2.elements.shape)} in FP8 must be of a kind that the kernel takes",
        )
        layer1_cuda.fp8_gemm_combine_cuda(hidden, w2, y, out, wire, returns, table, num_panels)
        return out

    return [in_triton, in_cuda]
