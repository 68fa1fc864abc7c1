"""Arguments of the fused kernels: tensors, integers and pointer tables, grouped by meaning.

Letters as in ``comet.layer.plan``: W ranks, M tokens at most per rank, R = W*M received-row slots, Q routed rows, K, D,
F, C = M / 128 chunks of rows, P phases.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .recorder import Recorder, recording


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmBuffer:
    """Symmetric rows with their arrival flags, as one rank sees them."""

    rows: Tensor  # ``(R, D)`` this rank's copy; source s writes rows s*M + i
    row_pointers: Tensor  # ``(W,)`` int64 address of every rank's ``rows``
    # ``(W, C)`` int32, of the combine ``(W, 4C, 64)``: this rank's copy; slot [s, c] is written by source s
    flags: Tensor
    flag_pointers: Tensor  # ``(W,)`` int64 address of every rank's ``flags``
    epoch: Tensor  # ``(1,)`` int32; flags that carry at least this epoch have arrived
    fault: Tensor  # ``(8,)`` int64 record of a spin that met its deadline
    rank: int  # this rank
    max_tokens: int  # M
    timeout_ns: int  # deadline of every spin
    recorder: Recorder | None = None  # where the launch writes what its blocks do and when, or ``None``

    @property
    def world_size(self) -> int:
        return self.row_pointers.numel()

    @property
    def event_capacity(self) -> int:
        """Events that a block can record; 0 where none does."""
        return 0 if self.recorder is None else self.recorder.capacity

    def tensors(self, num_blocks: int) -> "SymmTensors":
        """The tensors of the rows, as a kernel of so many blocks takes them."""
        symm = (self.rows, self.row_pointers, self.flags, self.flag_pointers, self.epoch, self.fault)
        return SymmTensors(*symm, recording(self.recorder, num_blocks))


class SymmTensors(NamedTuple):
    """The tensors of a ``SymmBuffer``, and where to record."""

    rows: Tensor
    row_pointers: Tensor
    flags: Tensor
    flag_pointers: Tensor
    epoch: Tensor
    fault: Tensor
    events: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTable:
    """The routed rows in GEMM tiles (see ``comet.layer.plan.Plan`` for the fields)."""

    tiles: Tensor  # ``(max_tiles, 4)`` int32: local expert, first routed row, valid rows, phase
    num_tiles: Tensor  # ``(1,)`` int32
    row_ids: Tensor  # ``(Q,)`` int32 received row of each routed row
    # ``(32,)`` int32 zeros: tickets and panel counters, used up by one launch; one of them is the ticket of the weight
    # gradients that follow
    counters: Tensor
    block_rows: int  # rows of a tile
    # ``(e + 1,)`` int32 first routed row and ``(e,)`` int32 routed rows of each local expert, for kernels that cut an
    # expert's rows their own way; ``None`` where they are not known
    segments: tuple[Tensor, Tensor] | None = None
    # routed rows of each expert if all have equally many and all ranks as many tokens as this one; to choose a kernel's
    # blocks by, 0 where it is not known
    expected_tokens_per_expert: float = 0.0

    @property
    def tensors(self) -> "TileTensors":
        """The tensors of the tiles, as kernels take them."""
        return TileTensors(self.tiles, self.num_tiles, self.row_ids, self.counters)


class TileTensors(NamedTuple):
    """The tensors of a ``TileTable``, without segments."""

    tiles: Tensor
    num_tiles: Tensor
    row_ids: Tensor
    counters: Tensor


class GradBuffer(NamedTuple):
    """Gradients ``(R, K)`` float32 of the routing weights of received rows, and the addresses they return to."""

    row_grads: Tensor  # ``(R, K)`` gradient of each (received row, slot) computed here, 0 elsewhere
    received: Tensor  # ``(R, K)`` this rank's symmetric copy
    received_pointers: Tensor  # ``(W,)`` int64 address of every rank's copy
    out: Tensor  # ``(T, K)`` result for this rank's tokens


class CombineLists(NamedTuple):
    """How routed rows become token rows again (``comet.layer.plan``)."""

    row_slots: Tensor  # ``(R, K)`` int32 routed row of each (received row, slot), or -1
    row_weights: Tensor | None  # ``(R, K)`` float32 routing weights, or ``None`` to add rows up unweighted
    send_rows: Tensor  # ``(M, W)`` int32 the row of each token at each rank, or -1
    recv_counts: Tensor  # ``(W,)`` int32
    grads: GradBuffer | None = None  # gradients of the routing weights to send along, or ``None``


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A matrix in block FP8: float8_e4m3fn elements, and float32 scales in the layout that its kernel asks for."""

    elements: Tensor
    scales: Tensor


def parts(matrix: Tensor | Scaled) -> tuple[Tensor, Tensor | None]:
    return (matrix.elements, matrix.scales) if isinstance(matrix, Scaled) else (matrix, None)


def require_shapes(**expected: tuple[Tensor, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` unless tensors, by their names, are contiguous and of these shapes."""
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}, strides {tensor.stride()} must be contiguous of shape {shape}"
            )


def require_multiples_of_16(**widths: int) -> None:
    """Raise ``ValueError`` unless widths, by their names, are positive multiples of 16."""
    for name, width in widths.items():
        if width <= 0 or width % 16:
            raise ValueError(f"{name}={width} must be a positive multiple of 16")


@functools.cache
def num_sms(device: torch.device) -> int:
    """SMs of a GPU; kept, for torch takes ten microseconds to tell, and each launch asks. Recorded launches get 132."""
    return 132 if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


def power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value``, 1 or more; ``power_of_2(5) == 8``.

    For the host of a launch: Triton's own can be called in kernels, too, and takes microseconds.
    """
    return 1 << (value - 1).bit_length()


def as_triton_dtype(dtype: torch.dtype) -> str:
    """Triton's short name of a torch element type: ``bf16``, ``fp16`` or ``fp32``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def aligned(rows: Tensor) -> Tensor:
    """``rows`` itself, or a copy where it does not start at 16 bytes: kernels read rows in pieces of 16 bytes."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
