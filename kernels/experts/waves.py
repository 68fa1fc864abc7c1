"""Which experts of a decode step are computed in which wave, where its cache has fewer slots than the step may need.

A wave computes at most S distinct experts, as many as there are slots, for all tokens of the step. Those that are
cached, or in flight since before the step, come first, so that none gives its slot away before it was computed, and
each missing one is fetched once. How many waves a step has follows from its shape, so that it stays one CUDA graph;
those behind the last expert find nothing to do.

Every wave leaves the partial sums of its routed rows where a step without waves does, and the last one adds up all of
them in the same order: results are equal bit for bit. What bounds it: its launch.

The host's cores (``experts.host``) compute no experts of a step in waves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from .tables import FIRST, LAST, PLANNED, HostExperts, tables_of

ALIGNMENT = 4  # int32 of 16 bytes: kernels are compiled for ids that start at a multiple of them
NUM_WARPS = 4


def count_waves(num_rows: int, num_held: int, num_slots: int) -> int:
    """Waves of a step of so many routed rows on a rank of so many experts.

    Example: 5 tokens with K = 8 need at most 40 of 128 experts, so 12 slots serve them in 4 waves, and 40 in one.
    """
    return max(1, triton.cdiv(min(num_rows, num_held), num_slots))


def waves_of(ids: Tensor, host: HostExperts) -> int:
    return count_waves(ids.numel(), host.w1.shape[0], host.tables.num_slots)


@triton.jit
def is_served(experts, state_ptr, E, S):
    """Whether this rank serves each of ``experts``, any shape, cached or not."""
    header_ptr = tables_of(state_ptr, E, S).header
    return (experts >= tl.load(header_ptr + FIRST)) & (experts < tl.load(header_ptr + LAST))


@triton.jit(do_not_specialize=["J", "E", "S", "R"])
def waves_kernel(
    ids_ptr, state_ptr, waves_ptr, J, E, S, R, WAVES: tl.constexpr, J_BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """One block; see ``split_waves``. Behind the waves each expert has a word: whether it is needed, then its wave."""
    tables = tables_of(state_ptr, E, S)
    experts, js, word_ptr = tl.arange(0, EXPERTS), tl.arange(0, J_BLOCK), waves_ptr + WAVES * R
    ids = tl.load(ids_ptr + js, mask=js < J, other=-1).to(tl.int32)
    served = is_served(ids, state_ptr, E, S)
    tl.store(word_ptr + experts, 0, mask=experts < E)
    tl.debug_barrier()
    tl.store(word_ptr + ids, 1, mask=served)
    tl.debug_barrier()
    needed = tl.load(word_ptr + experts, mask=experts < E, other=0)
    tl.debug_barrier()
    there = tl.where(tl.load(tables.slots + experts, mask=experts < E, other=-1) >= 0, needed, 0)
    for copy in range(tl.load(tables.header + PLANNED)):
        there = tl.where(experts == tl.load(tables.ahead_experts + copy), needed, there)
    behind = tl.sum(there, axis=0) + tl.cumsum(needed - there, axis=0)
    place = tl.where(there > 0, tl.cumsum(there, axis=0), behind) - 1
    tl.store(word_ptr + experts, place // S, mask=experts < E)
    tl.debug_barrier()
    wave = tl.load(word_ptr + ids, mask=served, other=-1)
    for number in tl.static_range(WAVES):
        tl.store(waves_ptr + number * R + js, tl.where(wave == number, ids, -1), mask=js < J)


def wave_memory(ids: Tensor, host: HostExperts, num_waves: int) -> Tensor:
    stride = triton.cdiv(ids.numel(), ALIGNMENT) * ALIGNMENT
    return torch.empty(num_waves * stride + host.tables.num_experts, dtype=torch.int32, device=ids.device)


def split_waves(ids: Tensor, host: HostExperts, num_waves: int, memory: Tensor | None = None) -> Tensor:
    """The ids of each wave of a step, contiguous ``ids (T, K)``; the others are masked there.

    Args:
        memory: ``wave_memory``, for callers that must not fail here.

    Returns:
        ``(num_waves, R)`` int32, of which the first T * K of a row are routed rows; R is a multiple of 4.
    """
    tables, num_rows = host.tables, ids.numel()
    waves = wave_memory(ids, host, num_waves) if memory is None else memory
    found = waves[: -tables.num_experts].view(num_waves, -1)
    waves_kernel[(1,)](
        ids, tables.state, waves, num_rows, tables.num_experts, tables.num_slots, found.shape[1], WAVES=num_waves,
        J_BLOCK=power_of_2(num_rows), EXPERTS=power_of_2(tables.num_experts), num_warps=NUM_WARPS,
    )  # fmt: skip
    return found


def split_waves_torch(ids: Tensor, host: HostExperts, num_waves: int) -> Tensor:
    """Twin of ``split_waves`` without room behind the routed rows: ``(num_waves, T, K)``.

    Example (S = 2, two waves; expert 4 is cached): ids ``[[3, 1], [4, 3]]`` give ``[[-1, 1], [4, -1]]`` and
    ``[[3, -1], [-1, 3]]``: experts 4, 1 and 3 are numbers 0, 1 and 2.
    """
    tables = host.tables
    first, end = tables.served.tolist()
    served = ids.masked_fill((ids < first) | (ids >= end), -1)
    planned = tables.ahead[0, : int(tables.header[PLANNED.value])]
    there = (tables.slots >= 0).index_fill(0, planned.long(), True)
    needed = sorted(set(served.flatten().tolist()) - {-1}, key=lambda expert: (not there[expert], expert))
    wave = torch.full((tables.num_experts + 1,), -1)
    wave[needed] = torch.arange(len(needed)) // tables.num_slots
    number = torch.arange(num_waves)[:, None, None]
    return ids.where(wave[served.long()] == number, -1)
