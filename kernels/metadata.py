"""The plan on the device: three small kernels turn the top-k ids of all ranks into ``comet.plan.Plan``'s tensors.

1. ``exchange_kernel``, (chunk of 128 tokens, peer): copies this rank's ids and weights into the peer's pool, signals.
2. ``count_kernel``, (source, chunk) x block of experts: waits for the chunk, counts what comes to this rank's experts,
   and gives every routed row its position among the rows of its expert inside the chunk.
3. ``place_kernel``, one program per piece of output: position plus what lies before the chunk is the final address.
   Each program adds up the few counts before it by itself, which is quicker than one more launch for a scan.

Order is (source, token, slot) everywhere. A *list* of M places (rows received from one source, tokens sent to one rank)
is a permutation: needed tokens first, in order, then the others, whose places are marked -1. So every place is written
once. With 4 tokens, of which 1 and 3 are needed, tokens 0..3 take the places 2, 0, 3, 1: the list is 1, 3, -1, -1.

Counts and ids can disagree only after a wait met its deadline; indices are bounded so that even then nothing is written
outside its tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import CHUNK_ROWS
from .placement import place_kernel, shard_of
from .primitives import PLACE_EXCHANGE, signal, wait_flag

EXPERT_BLOCK = 32
NARROW_EXPERT_BLOCK = 8
FEW_PROGRAMS = 64  # so few programs leave most multiprocessors idle: narrower blocks of experts use them
SCAN_ELEMENTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingPool:
    """Where ids and weights of all ranks arrive, as one rank sees it.

    Args:
        ids: ``(2, W, M, K_pool)`` int32, this rank's copy; half [parity, s] is written by source s, densely as (M, K).
        id_pointers: ``(W,)`` int64 address of every rank's ``ids``.
        weights: ``(2, W, M, K_pool)`` float32, likewise.
        weight_pointers: ``(W,)`` int64.
        flags: ``(W, C)`` int32: epoch in which chunk c of source s arrived.
        flag_pointers: ``(W,)`` int64.
        epoch: ``(1,)`` int32: the exchange is number ``epoch + 1``; afterwards it is the epoch.
        fault: ``(8,)`` int64 record of a spin that met its deadline.
        rank: This rank.
        timeout_ns: Deadline of every spin.
    """

    ids: Tensor
    id_pointers: Tensor
    weights: Tensor
    weight_pointers: Tensor
    flags: Tensor
    flag_pointers: Tensor
    epoch: Tensor
    fault: Tensor
    rank: int
    timeout_ns: int

    @property
    def max_tokens(self) -> int:
        """M."""
        return self.ids.shape[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Numbers that shape a plan; all but the capacity are compile-time constants.

    Args:
        top_k: K of this layer, at most K_pool.
        experts_local: e.
        ep: EP.
        tp: TP.
        num_phases: P.
        block_rows: Rows of a GEMM tile.
        expert_capacity: Routed rows one expert keeps; 2**31 - 1 keeps all.
        by_token: Rows arrive where their tokens' numbers say, not where the plan's: ``arrival_row_ids`` is written.
    """

    top_k: int
    experts_local: int
    ep: int
    tp: int
    num_phases: int
    block_rows: int
    expert_capacity: int
    by_token: bool = False

    @property
    def world_size(self) -> int:
        """W."""
        return self.ep * self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScratch:
    """What the kernels hand to each other; int32, free for reuse after ``build``.

    Args:
        epoch: ``(1,)`` the epoch of this plan.
        totals: ``(W, e)`` routed rows of each source and expert.
        counts: ``(W, C, e)`` the same per chunk.
        row_counts: ``(W, C)`` tokens of each chunk that come to this rank.
        shard_counts: ``(C, EP)`` tokens of each own chunk that go to each EP shard.
        positions: ``(W, C, K, 128)`` position of a routed row among those of its expert in its chunk.
        bases: ``(W, C, 2, e)`` first routed row, and how many are kept, of each expert in each chunk.
    """

    epoch: Tensor
    totals: Tensor
    counts: Tensor
    row_counts: Tensor
    shard_counts: Tensor
    positions: Tensor
    bases: Tensor

    @classmethod
    def allocate(cls, pool: RoutingPool, config: PlanConfig) -> "PlanScratch":
        """Uninitialised scratch, one allocation."""
        sources, chunks, experts = config.world_size, pool.max_tokens // CHUNK_ROWS, config.experts_local
        shapes = {
            "epoch": (1,),
            "totals": (sources, experts),
            "counts": (sources, chunks, experts),
            "row_counts": (sources, chunks),
            "shard_counts": (chunks, config.ep),
            "positions": (sources, chunks, config.top_k, CHUNK_ROWS),
            "bases": (sources, chunks, 2, experts),
        }
        return cls(**cut(shapes, pool.ids.device))


def cut(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Uninitialised int32 tensors of these shapes, each 256-byte aligned, cut out of one allocation."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    padded = [-(-size // 64) * 64 for size in sizes]
    pieces = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return {
        name: piece[:size].view(shape) for (name, shape), piece, size in zip(shapes.items(), pieces, sizes, strict=True)
    }


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def exchange_kernel(
    ids_ptr, weights_ptr, id_addresses, weight_addresses, flag_addresses, epoch_ptr, plan_epoch_ptr, totals_ptr,
    counters_ptr, rank, num_tokens, M,
    WORLD: tl.constexpr, K: tl.constexpr, POOL_K: tl.constexpr, FLAT: tl.constexpr, NUM_TOTALS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of ids and weights to one peer; program (0, 0) also zeroes what later kernels count in."""
    chunk = tl.program_id(0)
    peer = (rank + tl.program_id(1)) % WORLD
    epoch = tl.load(epoch_ptr) + 1
    if (chunk == 0) & (tl.program_id(1) == 0):
        tl.store(plan_epoch_ptr, epoch)
        totals = tl.arange(0, triton.next_power_of_2(NUM_TOTALS))
        tl.store(totals_ptr + totals, totals * 0, mask=totals < NUM_TOTALS)
        counters = tl.arange(0, triton.next_power_of_2(NUM_COUNTERS))
        tl.store(counters_ptr + counters, counters * 0, mask=counters < NUM_COUNTERS)
    flat = tl.arange(0, FLAT)
    inside = flat < CHUNK * K
    first = chunk * (CHUNK * K)
    valid = inside & (first + flat < num_tokens * K)
    offset = ((epoch & 1) * WORLD + rank) * (M * POOL_K) + first
    target = tl.multiple_of(tl.load(id_addresses + peer).to(tl.pointer_type(tl.int32)), 16) + offset
    tl.store(target + flat, tl.load(ids_ptr + first + flat, mask=valid, other=-1), mask=inside)
    # Nobody reads the weight of a masked slot.
    if chunk * CHUNK < num_tokens:
        weights = tl.multiple_of(tl.load(weight_addresses + peer).to(tl.pointer_type(tl.float32)), 16) + offset
        tl.store(weights + flat, tl.load(weights_ptr + first + flat, mask=valid, other=0.0), mask=inside)
    flags = tl.load(flag_addresses + peer).to(tl.pointer_type(tl.int32))
    signal(flags + rank * (M // CHUNK) + chunk, epoch)


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def count_kernel(
    ids_ptr, flag_ptr, fault_ptr, plan_epoch_ptr, totals_ptr, counts_ptr, row_counts_ptr, shard_counts_ptr,
    positions_ptr, rank, timeout_ns, M,
    K: tl.constexpr, POOL_K: tl.constexpr, E_LOCAL: tl.constexpr, E_BLOCK: tl.constexpr, EP: tl.constexpr,
    TP: tl.constexpr, CHUNK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Count one chunk of one source for one block of this rank's experts."""
    source_chunk = tl.program_id(0)
    num_chunks = M // CHUNK
    source = source_chunk // num_chunks
    chunk = source_chunk - source * num_chunks
    epoch = tl.load(plan_epoch_ptr)
    wait_flag(flag_ptr + source_chunk, epoch, fault_ptr, timeout_ns, PLACE_EXCHANGE, source, chunk, INTERPRET)
    tokens = tl.arange(0, CHUNK)
    chunk_ids = ids_ptr + ((epoch & 1) * (EP * TP) + source) * (M * POOL_K) + (chunk * CHUNK + tokens) * K
    first_expert = rank // TP * E_LOCAL
    experts = tl.program_id(1) * E_BLOCK + tl.arange(0, E_BLOCK)
    # ---- how many of each token's slots name each expert
    hot = tl.zeros((CHUNK, E_BLOCK), dtype=tl.int32)
    needed = tl.zeros((CHUNK,), dtype=tl.int32)
    for k in range(K):
        local = tl.load(chunk_ids + k) - first_expert
        mine = (local >= 0) & (local < E_LOCAL)
        needed = needed | mine.to(tl.int32)
        hot += (tl.where(mine, local, -1)[:, None] == experts[None, :]).to(tl.int32)
    count = tl.sum(hot, axis=0)
    tl.store(counts_ptr + source_chunk * E_LOCAL + experts, count, mask=experts < E_LOCAL)
    # ---- position of each slot; slots of one token that name the same expert follow each other
    if tl.sum(count, axis=0) > 0:
        tl.atomic_add(totals_ptr + source * E_LOCAL + experts, count, mask=experts < E_LOCAL, sem="relaxed")
        before = tl.cumsum(hot, axis=0) - hot
        for k in range(K):
            local = tl.load(chunk_ids + k) - first_expert
            mine = (local >= 0) & (local < E_LOCAL)
            here = tl.where(mine, local, -1)[:, None] == experts[None, :]
            position = tl.sum(tl.where(here, before, 0), axis=1)
            in_block = mine & (local // E_BLOCK == tl.program_id(1))
            tl.store(positions_ptr + (source_chunk * K + k) * CHUNK + tokens, position, mask=in_block)
            before += here.to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(row_counts_ptr + source_chunk, tl.sum(needed, axis=0))
        if source == rank:
            shards = tl.arange(0, triton.next_power_of_2(EP))
            going = tl.zeros((CHUNK, triton.next_power_of_2(EP)), dtype=tl.int32)
            for k in range(K):
                shard = shard_of(tl.load(chunk_ids + k), E_LOCAL)
                going = going | (shard[:, None] == shards[None, :]).to(tl.int32)
            tl.store(shard_counts_ptr + chunk * EP + shards, tl.sum(going, axis=0), mask=shards < EP)


def exchange(
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    pool: RoutingPool,
    config: PlanConfig,
    scratch: PlanScratch,
    counters: Tensor,
) -> None:
    """Launch the exchange: all ranks' ids and weights start to arrive in every pool.

    Args:
        top_k_ids: ``(T, K)`` int32, contiguous; -1 masks a slot.
        top_k_weights: ``(T, K)`` float32, contiguous.
        pool: Where they go.
        config: Shape of the plan.
        scratch: Its ``epoch`` is set and its ``totals`` are zeroed.
        counters: int32, zeroed.
    """
    num_chunks = pool.max_tokens // CHUNK_ROWS
    exchange_kernel[(num_chunks, config.world_size)](
        top_k_ids, top_k_weights, pool.id_pointers, pool.weight_pointers, pool.flag_pointers, pool.epoch,
        scratch.epoch, scratch.totals, counters, pool.rank, top_k_ids.shape[0], pool.max_tokens,
        **exchange_constants(config, pool.ids.shape[3], counters.numel()),
    )  # fmt: skip


def build(pool: RoutingPool, config: PlanConfig, scratch: PlanScratch, tensors: Mapping[str, Tensor]) -> None:
    """Launch the rest: wait for every rank's chunks, count them, and write the plan.

    Args:
        pool: As for ``exchange``.
        config: As for ``exchange``.
        scratch: As ``exchange`` left it.
        tensors: The tensor fields of ``comet.plan.Plan`` but ``counters``, by name, uninitialised;
            ``arrival_row_ids`` only ``by_token``.
    """
    num_chunks, pool_top_k = pool.max_tokens // CHUNK_ROWS, pool.ids.shape[3]
    num_programs = config.world_size * num_chunks
    constants = count_constants(config, pool_top_k, num_chunks)
    count_kernel[(num_programs, triton.cdiv(config.experts_local, constants["E_BLOCK"]))](
        pool.ids, pool.flags, pool.fault, scratch.epoch, scratch.totals, scratch.counts, scratch.row_counts,
        scratch.shard_counts, scratch.positions, pool.rank, pool.timeout_ns, pool.max_tokens, **constants,
    )  # fmt: skip
    tensors = {"arrival_row_ids": tensors["routed_row_ids"], **tensors}
    place_kernel[(2 * num_programs + config.experts_local + 1,)](
        pool.ids, pool.weights, pool.epoch, pool.fault, scratch.epoch, scratch.totals, scratch.counts,
        scratch.row_counts, scratch.shard_counts, scratch.positions, scratch.bases, pool.rank, config.expert_capacity,
        tensors["routed_row_ids"].numel(), pool.max_tokens, num_warps=place_warps(config), **tensors,
        **place_constants(config, pool_top_k),
    )  # fmt: skip


def exchange_constants(config: PlanConfig, pool_top_k: int, num_counters: int) -> dict[str, int]:
    """Constants of ``exchange_kernel``.

    Example: K=8 of 8, e=32, EP=4, TP=1, 128 counters: FLAT = 1024, NUM_TOTALS = 128.
    """
    return {
        "WORLD": config.world_size,
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "FLAT": triton.next_power_of_2(CHUNK_ROWS * config.top_k),
        "NUM_TOTALS": config.world_size * config.experts_local,
        "NUM_COUNTERS": num_counters,
        "CHUNK": CHUNK_ROWS,
    }


def count_constants(config: PlanConfig, pool_top_k: int, num_chunks: int) -> dict[str, int | bool]:
    """Constants of ``count_kernel`` for ``num_chunks`` chunks per source; every block of experts is a program.

    Example: e=32 in blocks of 32 for W=4 and M=8192 (256 chunks), of 8 for M=512 (16 chunks).
    """
    num_programs = config.world_size * num_chunks * triton.cdiv(config.experts_local, EXPERT_BLOCK)
    widest = NARROW_EXPERT_BLOCK if num_programs <= FEW_PROGRAMS else EXPERT_BLOCK
    return {
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "E_LOCAL": config.experts_local,
        "E_BLOCK": min(triton.next_power_of_2(config.experts_local), widest),
        "EP": config.ep,
        "TP": config.tp,
        "CHUNK": CHUNK_ROWS,
        "INTERPRET": triton.knobs.runtime.interpret,
    }


def place_constants(config: PlanConfig, pool_top_k: int) -> dict[str, int | bool]:
    """Constants of ``place_kernel``; SCAN_ROWS chunks' counts are added up at a time."""
    e_pad = triton.next_power_of_2(config.experts_local)
    return {
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "E_LOCAL": config.experts_local,
        "E_PAD": e_pad,
        "EP": config.ep,
        "TP": config.tp,
        "W_PAD": triton.next_power_of_2(config.world_size),
        "P": config.num_phases,
        "BLOCK_ROWS": config.block_rows,
        "CHUNK": CHUNK_ROWS,
        "SCAN_ROWS": max(SCAN_ELEMENTS // e_pad, 1),
        "BY_TOKEN": config.by_token,
    }


def place_warps(config: PlanConfig) -> int:
    """Warps of ``place_kernel``: it keeps 128 x K addresses in registers."""
    return 8 if config.top_k > 8 else 4
