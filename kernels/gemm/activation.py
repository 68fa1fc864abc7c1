"""Activations in Triton: device functions, and the backward pass over the routed rows.

The backward pass also yields the gradient of the routing weights and the weighted hidden rows that w2's gradient needs,
so that layer-1 outputs are never kept.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.activation import GELU_CUBIC, GELU_SCALE, SWIGLU, Activation
from ..runtime.arguments import TileTable, power_of_2, require_multiples_of_16, require_shapes
from .group_gemm import num_blocks
from .tiles import rows_of_piece

ROWS = 8  # rows a block works on at once; divides every tile
COLS = 256
BLOCKS_PER_PROCESSOR = 8
CUBIC, SCALE = tl.constexpr(GELU_CUBIC), tl.constexpr(GELU_SCALE)


class BackwardResults(NamedTuple):
    """Results of the backward pass."""

    grad_pre: Tensor  # (Q, 2F)
    hidden: Tensor  # (Q, F) weighted
    grad_weights: Tensor  # (R, K) float32


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """Hidden of gate and up, float32 blocks of one shape; ``ACTIVATION`` is an ``Activation``. A NaN stays one."""
    if ACTIVATION.name == "swiglu":
        hidden = gate * tl.sigmoid(gate) * up
    elif ACTIVATION.name == "geglu":
        hidden = gate * tl.sigmoid(SCALE * gate * (1.0 + CUBIC * gate * gate)) * up
    elif ACTIVATION.name == "reglu":
        hidden = tl.where(gate <= 0.0, 0.0, gate) * up
    else:
        tl.static_assert(ACTIVATION.name == "clamped_swiglu")
        gate, up = clamp_gate(gate, ACTIVATION), clamp_up(up, ACTIVATION)
        hidden = gate * tl.sigmoid(ACTIVATION.alpha * gate) * (up + 1.0)
    return hidden


@triton.jit
def activate_gradients(gate, up, grad, ACTIVATION: tl.constexpr):
    """Gradients of gate and of up for hidden's, float32 blocks of one shape; ``ACTIVATION`` is an ``Activation``."""
    if ACTIVATION.name == "swiglu":
        sigmoid = tl.sigmoid(gate)
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad_up = grad * gate * sigmoid
    elif ACTIVATION.name == "geglu":
        sigmoid = tl.sigmoid(SCALE * gate * (1.0 + CUBIC * gate * gate))
        slope = SCALE * gate * (1.0 + 3 * CUBIC * gate * gate)
        grad_gate = grad * up * sigmoid * (1.0 + slope * (1.0 - sigmoid))
        grad_up = grad * gate * sigmoid
    elif ACTIVATION.name == "reglu":
        grad_gate = tl.where(gate > 0.0, grad * up, 0.0)
        grad_up = grad * tl.where(gate <= 0.0, 0.0, gate)
    else:
        tl.static_assert(ACTIVATION.name == "clamped_swiglu")
        limited, linear = clamp_gate(gate, ACTIVATION), clamp_up(up, ACTIVATION)
        sigmoid = tl.sigmoid(ACTIVATION.alpha * limited)
        grad_gate = grad * (linear + 1.0) * sigmoid * (1.0 + ACTIVATION.alpha * limited * (1.0 - sigmoid))
        grad_gate = tl.where(gate > ACTIVATION.limit, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > ACTIVATION.limit, 0.0, grad * limited * sigmoid)
    return grad_gate, grad_up


@triton.jit
def clamp_gate(gate, ACTIVATION: tl.constexpr):
    return tl.where(gate > ACTIVATION.limit, ACTIVATION.limit, gate)


@triton.jit
def clamp_up(up, ACTIVATION: tl.constexpr):
    up = tl.where(up > ACTIVATION.limit, ACTIVATION.limit, up)
    return tl.where(up < -ACTIVATION.limit, -ACTIVATION.limit, up)


@triton.jit
def hidden_of(gate, up, b1_ptr, expert, cols, F, ACTIVATION: tl.constexpr, IN_TURN: tl.constexpr = False):
    """Return ``activate`` of float32 products of the columns ``cols``, undefined from F on.

    An expert's row of ``b1_ptr (e, 2F)`` is added first, gate, then up, or both ``IN_TURN``, unless that is ``None``.
    """
    if b1_ptr is not None:
        EVERY: tl.constexpr = 2 if IN_TURN else 1
        up_column = 1 if IN_TURN else F
        biases = b1_ptr + expert.to(tl.int64) * (2 * F) + cols * EVERY
        gate += tl.load(biases, mask=cols < F, other=0.0).to(tl.float32)
        up += tl.load(biases + up_column, mask=cols < F, other=0.0).to(tl.float32)
    return activate(gate, up, ACTIVATION)


@triton.jit(do_not_specialize_on_alignment=["num_tiles_ptr"])
def activation_backward_kernel(
    pre_ptr, grad_act_ptr, row_ids_ptr, slots_ptr, weights_ptr, tiles_ptr, num_tiles_ptr, results, F, K,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Persistent blocks over pieces of ROWS rows of a tile, K slots per received row."""
    element = results.hidden.dtype.element_ty
    num_pieces = tl.load(num_tiles_ptr) * (BLOCK_M // ROWS)
    for piece in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        q, valid = rows_of_piece(piece, tiles_ptr, BLOCK_M, ROWS)
        row_ids = tl.load(row_ids_ptr + q, mask=valid, other=0).to(tl.int64)
        slots = tl.load(slots_ptr + q, mask=valid, other=0)
        weight = tl.load(weights_ptr + row_ids * K + slots, mask=valid, other=0.0)[:, None]
        products = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for first in range(0, F, COLS):
            cols = first + tl.arange(0, COLS)
            mask = valid[:, None] & (cols < F)[None, :]
            narrow = q[:, None].to(tl.int64) * F + cols[None, :]
            wide = q[:, None].to(tl.int64) * (2 * F) + cols[None, :]
            gate = tl.load(pre_ptr + wide, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + wide + F, mask=mask, other=0.0).to(tl.float32)
            grad_act = tl.load(grad_act_ptr + narrow, mask=mask, other=0.0).to(tl.float32)
            # Rounded as the forward pass rounded it.
            hidden = activate(gate, up, ACTIVATION).to(element).to(tl.float32)
            products += grad_act * hidden
            grad_gate, grad_up = activate_gradients(gate, up, grad_act * weight, ACTIVATION)
            tl.store(results.hidden + narrow, (hidden * weight).to(element), mask=mask)
            tl.store(results.grad_pre + wide, grad_gate.to(element), mask=mask)
            tl.store(results.grad_pre + wide + F, grad_up.to(element), mask=mask)
        tl.store(results.grad_weights + row_ids * K + slots, tl.sum(products, axis=1), mask=valid)


def activation_backward(
    pre: Tensor,
    grad_act: Tensor,
    slots: Tensor,
    row_weights: Tensor,
    table: TileTable,
    grad_pre: Tensor,
    weighted_hidden: Tensor,
    grad_weights: Tensor,
    activation: Activation = SWIGLU,
) -> None:
    """Backward of the activation and of the routing weight, for every valid routed row.

    With h = activation(gate, up), rounded to the dtype, and w the routing weight, the row's contribution to the layer
    is ``w * (h @ w2^T)``; ``grad_act`` is the incoming gradient times w2, without w.

    Args:
        pre: ``(Q, 2F)`` gate | up before the activation; F a multiple of 16.
        grad_act: ``(Q, F)`` dY @ w2 of each routed row.
        slots: ``(Q,)`` int32 expert slot of each routed row.
        row_weights: ``(R, K)`` float32 routing weights.
        table: Tiles and ``row_ids``.
        grad_pre: ``(Q, 2F)`` receives the gradient of ``pre``.
        weighted_hidden: ``(Q, F)`` receives w * h.
        grad_weights: ``(R, K)`` float32, receives sum_f grad_act * h at [row_ids[q], slots[q]]; other entries, and the
            padding rows of the other results, are left alone.
        activation: Of the forward pass.

    Example (swiglu):
        gate 0, up 3, grad_act 4, w 0.5: h = 0, weighted_hidden 0, grad_weight 0,
        grad_pre = [0.5*4 * 3 * 0.5, 0.5*4 * 0] = [3, 0].
    """
    num_rows, ffn = grad_act.shape
    require_multiples_of_16(F=ffn)
    require_shapes(
        pre=(pre, (num_rows, 2 * ffn)), slots=(slots, (num_rows,)), grad_pre=(grad_pre, (num_rows, 2 * ffn)),
        weighted_hidden=(weighted_hidden, (num_rows, ffn)), grad_act=(grad_act, (num_rows, ffn)),
        row_weights=(row_weights, tuple(row_weights.shape)), grad_weights=(grad_weights, tuple(row_weights.shape)),
    )  # fmt: skip
    if table.block_rows % ROWS:
        raise ValueError(f"block_rows={table.block_rows} must be a multiple of {ROWS}")
    if pre.shape[0] == 0 or row_weights.shape[0] == 0:
        return
    max_items = table.tiles.shape[0] * (table.block_rows // ROWS)
    activation_backward_kernel[(num_blocks(pre.device, max_items, per_processor=BLOCKS_PER_PROCESSOR),)](
        pre, grad_act, table.row_ids, slots, row_weights, table.tiles, table.num_tiles,
        BackwardResults(grad_pre, weighted_hidden, grad_weights), ffn, row_weights.shape[1],
        BLOCK_M=table.block_rows, ROWS=ROWS, COLS=min(COLS, power_of_2(ffn)), ACTIVATION=activation, num_warps=4,
    )  # fmt: skip
