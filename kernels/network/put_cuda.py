"""Puts rows to rail peers in CUDA C++ (``cuda/put_rows.cu``): what ``put`` of Triton does, and over NVSHMEM."""

import functools

import torch
from torch import Tensor

from ..runtime.case import CudaCase
from ..runtime.cuda_source import INT32, POINTER, CudaSource, DeviceStruct, fields
from ..runtime.limits import CHUNK_ROWS, LEG_HEADER
from ..runtime.nvrtc import CudaKernel, load_source
from .legs import Leg, Message

BLOCKS = 16  # a launch has so many: to copy into staging memory is quick, and the network takes its time afterwards


class PutArgs(DeviceStruct):
    """Arguments of the kernel."""

    _fields_ = (
        *fields(POINTER, "x tokens words counts number own_words own_rows own_flags"),
        *fields(POINTER, "word_targets row_targets flag_targets ranks epoch fault inner_fault"),
        *fields(INT32, "call node num_nodes ring num_chunks slot_words is_home is_nbi first_slot num_slots per_token"),
        *fields(INT32, "row_bytes by_slot first_chunk sent_chunks has_words"),
    )


def put_cuda(leg: Leg, message: Message, ranks: Tensor | None = None) -> None:
    """``comet.kernels.network.put.put``; ``ranks (N,)`` int32 are rail peers that NVSHMEM reaches, not mapped ones."""
    shape, x, slots, chunks = leg.shape, message.x, message.slots, message.chunks
    # In a ring the next sums are staged before any peer has said that the last ones came.
    is_nbi = not shape.is_home or shape.ring == shape.num_nodes - 1
    args = PutArgs.of(
        x=x, tokens=message.tokens, words=message.words, counts=message.counts, number=message.number,
        own_words=leg.words, own_rows=leg.rows, own_flags=leg.flags, word_targets=leg.word_targets,
        row_targets=leg.row_targets, flag_targets=leg.flag_targets, ranks=ranks, epoch=leg.epoch, fault=leg.fault,
        inner_fault=leg.inner_fault, call=message.call, node=leg.node, num_nodes=shape.num_nodes, ring=shape.ring,
        num_chunks=shape.num_chunks, slot_words=shape.slot_words, is_home=shape.is_home, is_nbi=is_nbi,
        first_slot=slots.start, num_slots=len(slots), per_token=message.words.shape[-1],
        row_bytes=x.shape[1] * x.element_size(), by_slot=message.tokens.dim() == 2, first_chunk=chunks.start,
        sent_chunks=len(chunks), has_words=message.has_words,
    )  # fmt: skip
    _kernel(torch.cuda.current_device(), is_nvshmem=ranks is not None).launch(BLOCKS, [args])


@functools.cache
def _kernel(device: int, *, is_nvshmem: bool) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_source(source(is_nvshmem=is_nvshmem))


def source(*, is_nvshmem: bool) -> CudaSource:
    """The source of the kernel for a transport."""
    transport = "Nvshmem" if is_nvshmem else "Mapped"
    return CudaSource(
        template="put_rows",
        entry=f"put_rows_{transport.lower()}",
        arguments=dict(args=PutArgs),
        types=dict(Transport=transport),
        constants=dict(HEADER=LEG_HEADER, CHUNK=CHUNK_ROWS),
        shared_bytes=0,
        library="nvshmem" if is_nvshmem else "",
    )


def aot_cases() -> list[CudaCase]:
    """Rows to peers that are mapped; over NVSHMEM the kernel is linked where its device library is."""
    return [CudaCase(source(is_nvshmem=False), "mapped peers", expects=("wide_loads", "wide_stores"), registers=None)]
