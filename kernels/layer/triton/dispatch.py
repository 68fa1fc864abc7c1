"""Dispatch: token rows go straight into the receive rows of the ranks that compute them.

``push_rows`` draws (destination, chunk of 128 rows) tickets, copies the rows of a chunk into the peer's receive rows
and publishes the epoch in the peer's flag of (this rank, chunk). Layer 0 calls it from its communication blocks;
``dispatch_kernel`` is the same without compute, for the backward pass and modular layers: push, then wait for the rows
of every rank.

Why it terminates: ``push_rows`` never waits, and a block of ``dispatch_kernel`` waits only after all pushes of
its rank have been drawn. This holds on every rank, so each flag that is waited for is raised, also when blocks run one
after the other (the interpreter). A rank that died is met by the deadline of the spin.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.arguments import SymmBuffer, num_sms, power_of_2
from ...runtime.limits import CHUNK_ROWS
from ...runtime.primitives import MOST_THREADS, PLACE_LAYER0, any_of, signal, wait_flags
from ...runtime.recorder import KIND_DISPATCH, KIND_RECEIVE, now, record

PUSH_ROWS = 32  # rows that a block moves at once
PUSH_COLS = 1024  # columns that a block moves at once, at most
NUM_WARPS = 8  # warps of a block, here and in the layer's GEMMs
COMM_BLOCKS = 16  # the default, for layers with colocated communication in a kernel that cannot colocate it


class PushConstants(NamedTuple):
    """The constants for which kernels that push rows are compiled."""

    rows: int  # that a block moves at once
    cols: int  # of these, a power of two
    chunk: int  # rows that share a flag
    events: int  # that a block records at most
    interpret: bool


def move_cols(dtype: torch.dtype, num_cols: int, most: int) -> int:
    """The columns that a block moves at once, of so many: a power of two, fewer in float32."""
    return min(most // 4 if dtype == torch.float32 else most, power_of_2(num_cols))


def push_constants(dtype: torch.dtype, num_cols: int, events: int, *, most: int = PUSH_COLS) -> PushConstants:
    """Constants of a launch that moves rows of so many columns, whose blocks record up to ``events`` events."""
    interpret = triton.knobs.runtime.interpret
    return PushConstants(PUSH_ROWS, move_cols(dtype, num_cols, most), CHUNK_ROWS, events, interpret)


@triton.jit
def push_chunk(
    x_ptr, send_token_ids, target_ptr, first, count, D, PUSH: tl.constexpr
):  # fmt: skip
    """Copy the rows ``first .. min(first + chunk, count)`` of a send list to consecutive rows at ``target_ptr``."""
    cols = tl.arange(0, PUSH.cols)
    for start in range(0, PUSH.chunk, PUSH.rows):
        rows = first + start + tl.arange(0, PUSH.rows)
        valid = rows < count
        tokens = tl.load(send_token_ids + rows, mask=valid, other=0)
        valid = valid & (tokens >= 0)
        source = x_ptr + tokens[:, None].to(tl.int64) * D
        target = target_ptr + rows[:, None].to(tl.int64) * D
        for col in range(0, D, PUSH.cols):
            mask = valid[:, None] & (col + cols < D)[None, :]
            block = tl.load(source + col + cols[None, :], mask=mask)
            tl.store(target + col + cols[None, :], block, mask=mask)


@triton.jit
def push_rows(
    x_ptr, sends, symm, ticket_ptr, epoch, rank, world_size, M, D, INCLUDE_SELF: tl.constexpr, PUSH: tl.constexpr
):  # fmt: skip
    """Draw (destination, chunk) tickets until none is left, all destinations in turn: first waves come from all.

    ``sends``, ``symm`` and ``PUSH`` are ``DispatchLists``, ``SymmTensors`` and ``PushConstants``.
    """
    CHUNK: tl.constexpr = PUSH.chunk
    num_targets = world_size - 1 + INCLUDE_SELF
    num_chunks = M // CHUNK
    ticket = tl.atomic_add(ticket_ptr, 1)
    while ticket < num_targets * num_chunks:
        hop = ticket % num_targets
        first = ticket // num_targets * CHUNK
        target = (rank + world_size - 1 - hop) % world_size
        count = tl.load(sends.counts + target)
        if INCLUDE_SELF:
            # Rows that stay are not compacted: token t is row t.
            count = tl.where(target == rank, M, count)
        if first < count:
            begin = now(PUSH.events, PUSH.interpret)
            rows = tl.load(symm.row_pointers + target).to(tl.pointer_type(x_ptr.dtype.element_ty))
            rows = tl.multiple_of(rows, 16) + rank.to(tl.int64) * M * D
            push_chunk(x_ptr, sends.token_ids + target * M, rows, first, count, D, PUSH)
            flags = tl.load(symm.flag_pointers + target).to(tl.pointer_type(tl.int32))
            signal(flags + rank * num_chunks + first // CHUNK, epoch)
            record(
                symm.events, KIND_DISPATCH, epoch, target, first // CHUNK, 0, begin, begin, PUSH.events,
                PUSH.interpret,
            )  # fmt: skip
        ticket = tl.atomic_add(ticket_ptr, 1)


@triton.jit(do_not_specialize=["rank", "world_size", "timeout_ns"])
def dispatch_kernel(
    x_ptr, sends, symm, counters, rank, world_size, timeout_ns, M, D, PUSH: tl.constexpr
):  # fmt: skip
    """Dispatch alone, own rows included: push all, then wait for all; ``counters[0]`` and ``[1]`` hold tickets."""
    CHUNK: tl.constexpr = PUSH.chunk
    epoch = tl.load(symm.epoch)
    # A plan may be older than what failed.
    if any_of(tl.load(symm.fault, volatile=True) != 0, tl.arange(0, MOST_THREADS)) == 0:
        push_rows(x_ptr, sends, symm, counters, epoch, rank, world_size, M, D, True, PUSH)
    # The block that draws the last ticket is not the last to finish: every block draws chunks to wait for.
    num_chunks = M // CHUNK
    ticket = tl.atomic_add(counters + 1, 1)
    while ticket < world_size * num_chunks:
        source = ticket // num_chunks
        first = ticket % num_chunks * CHUNK
        count = tl.where(source == rank, M, tl.load(sends.recv_counts + source))
        late = tl.arange(0, 1)
        begin = now(PUSH.events, PUSH.interpret)
        wait_flags(
            symm.flags + ticket + late, first + late < count, epoch, symm.fault, timeout_ns, PLACE_LAYER0,
            source + late, first // CHUNK + late, PUSH.interpret,
        )  # fmt: skip
        if PUSH.events:
            if first < count:
                ready = now(PUSH.events, PUSH.interpret)
                record(
                    symm.events, KIND_RECEIVE, epoch, source, first // CHUNK, 0, begin, ready, PUSH.events,
                    PUSH.interpret,
                )  # fmt: skip
        ticket = tl.atomic_add(counters + 1, 1)


class DispatchLists(NamedTuple):
    """The tokens that this rank sends, all int32 (``comet.layer.plan``)."""

    token_ids: Tensor  # ``(W, M)``
    counts: Tensor  # ``(W,)``
    recv_counts: Tensor  # ``(W,)``
    pushed: Tensor  # ``(W, M / 128)`` zeros, used up where warps share a chunk


def dispatch(x: Tensor, symm: SymmBuffer, sends: DispatchLists, counters: Tensor) -> None:
    """Dispatch without compute: on return (in stream order) all received rows, own rows included, are in ``symm.rows``.

    Args:
        x: ``(T, D)`` this rank's rows.
        symm: Receive rows and flags.
        sends: Send lists.
        counters: ``(2,)`` int32 zeros, used up.
    """
    interpret = triton.knobs.runtime.interpret
    num_blocks = 1 if interpret else num_sms(x.device)
    dispatch_kernel[(num_blocks,)](
        x, sends, symm.tensors(num_blocks), counters, symm.rank, symm.world_size, symm.timeout_ns, symm.max_tokens,
        x.shape[1], PUSH=push_constants(x.dtype, x.shape[1], symm.event_capacity), num_warps=NUM_WARPS,
    )  # fmt: skip
