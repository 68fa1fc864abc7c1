"""The plan on the device: three small kernels turn the top-k ids of all ranks into ``comet.plan.Plan``'s tensors.

1. ``exchange_kernel``, (chunk of 128 tokens, peer): copies this rank's ids and weights into the peer's pool, signals.
2. ``counting.count_kernel``, (source, chunk) x block of experts: waits for the chunk, counts what comes to this rank's
   experts, and gives every routed row its position among the rows of its expert inside the chunk; waves likewise.
3. ``placement.place_kernel``, one program per piece of output: position plus what lies before the chunk is the final
   address. Each program adds up the few counts before it by itself, which is quicker than one more launch for a scan.

Routed rows are in (source, token, slot) order. A *list* of M places (rows received from one source, tokens sent to one
rank) is a permutation by wave (see ``placement``), then token; places of the last wave, tokens that are not needed, are
marked -1. So every place is written once. With 4 tokens, of which 1 is needed by the rank's second expert and 3 by its
first, tokens 0..3 take the places 2, 1, 3, 0: the list is 3, 1, -1, -1.

Counts and ids can disagree only after a wait met its deadline; indices are bounded so that even then nothing is written
outside its tensor.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import CHUNK_ROWS, MAX_WAVES, power_of_2
from .counting import count_kernel
from .placement import place_kernel
from .primitives import signal

EXPERT_BLOCK = 32
NARROW_EXPERT_BLOCK = 8
FEW_PROGRAMS = 64  # so few programs leave most multiprocessors idle: narrower blocks of experts use them
SCAN_ELEMENTS = 4096
KEPT_PLACES = 64  # of a few layers

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and first element of a tensor


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

    @property
    def num_waves(self) -> int:
        """Waves of a list, a power of two: 2 experts make 4 (one for each, an empty one, and the tokens not needed)."""
        return min(MAX_WAVES, power_of_2(self.experts_local + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScratch:
    """What the kernels hand to each other; int32, free for reuse after ``build``.

    Args:
        epoch: ``(1,)`` the epoch of this plan.
        totals: ``(W, e)`` routed rows of each source and expert.
        counts: ``(W, C, e)`` the same per chunk.
        recv_waves: ``(W, C, waves)`` tokens of each chunk in each wave of this rank.
        send_waves: ``(EP, C, waves)`` tokens of each own chunk in each wave of each EP shard.
        recv_ranks: ``(W, C, 128)`` wave * 128 + place in the chunk's part of the wave, of each token.
        send_ranks: ``(EP, C, 128)`` the same of own tokens at each EP shard.
        starts: ``(2 * W * C, waves)`` place in a list of the first token of each wave that a chunk holds.
        positions: ``(W, C, K, 128)`` position of a routed row among those of its expert in its chunk.
        bases: ``(W, C, 2, e)`` first routed row, and how many are kept, of each expert in each chunk.
    """

    epoch: Tensor
    totals: Tensor
    counts: Tensor
    recv_waves: Tensor
    send_waves: Tensor
    recv_ranks: Tensor
    send_ranks: Tensor
    starts: Tensor
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
            "recv_waves": (sources, chunks, config.num_waves),
            "send_waves": (config.ep, chunks, config.num_waves),
            "recv_ranks": (sources, chunks, CHUNK_ROWS),
            "send_ranks": (config.ep, chunks, CHUNK_ROWS),
            "starts": (2 * sources * chunks, config.num_waves),
            "positions": (sources, chunks, config.top_k, CHUNK_ROWS),
            "bases": (sources, chunks, 2, experts),
        }
        return cls(**cut(shapes, pool.ids.device))


def cut(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Uninitialised int32 tensors of these shapes, each 256-byte aligned, cut out of one allocation."""
    places, total = _places(tuple(shapes.values()))
    whole = torch.empty(total, dtype=torch.int32, device=device)
    return {name: whole.as_strided(*place) for name, place in zip(shapes, places, strict=True)}


@functools.lru_cache(maxsize=KEPT_PLACES)
def _places(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[Place, ...], int]:
    """Where tensors lie one after the other, each from a multiple of 64 elements on, and how many elements that are.

    Example: shapes (2, 3) and (4,) begin at 0 and 64, with strides (3, 1) and (1,); 128 elements in all.
    """
    places, first = [], 0
    for shape in shapes:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append((shape, strides, first))
        first += -(-math.prod(shape) // 64) * 64
    return tuple(places), first


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
    num_blocks = -(-config.experts_local // constants["E_BLOCK"])
    count_kernel[(num_programs, num_blocks + 2)](
        pool.ids, pool.flags, pool.fault, scratch.epoch, scratch.totals, scratch.counts, scratch.recv_waves,
        scratch.send_waves, scratch.recv_ranks, scratch.send_ranks, scratch.positions, pool.rank, pool.timeout_ns,
        pool.max_tokens, **constants,
    )  # fmt: skip
    tensors = {"arrival_row_ids": tensors["routed_row_ids"], **tensors}
    place_kernel[(2 * num_programs + config.experts_local + 1,)](
        pool.ids, pool.weights, pool.epoch, pool.fault, scratch.epoch, scratch.totals, scratch.counts,
        scratch.recv_waves, scratch.send_waves, scratch.recv_ranks, scratch.send_ranks, scratch.starts,
        scratch.positions, scratch.bases, pool.rank, config.expert_capacity,
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
        "FLAT": power_of_2(CHUNK_ROWS * config.top_k),
        "NUM_TOTALS": config.world_size * config.experts_local,
        "NUM_COUNTERS": num_counters,
        "CHUNK": CHUNK_ROWS,
    }


def count_constants(config: PlanConfig, pool_top_k: int, num_chunks: int) -> dict[str, int | bool]:
    """Constants of ``count_kernel`` for ``num_chunks`` chunks per source; every block of experts is a program.

    Example: e=32 in blocks of 32 for W=4 and M=8192 (256 chunks), of 8 for M=512 (16 chunks).
    """
    num_programs = config.world_size * num_chunks * -(-config.experts_local // EXPERT_BLOCK)
    widest = NARROW_EXPERT_BLOCK if num_programs <= FEW_PROGRAMS else EXPERT_BLOCK
    return {
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "E_LOCAL": config.experts_local,
        "E_BLOCK": min(power_of_2(config.experts_local), widest),
        "EP": config.ep,
        "TP": config.tp,
        "CHUNK": CHUNK_ROWS,
        "WAVES": config.num_waves,
        "INTERPRET": triton.knobs.runtime.interpret,
    }


def place_constants(config: PlanConfig, pool_top_k: int) -> dict[str, int | bool]:
    """Constants of ``place_kernel``; SCAN_ROWS chunks' counts are added up at a time."""
    e_pad = power_of_2(config.experts_local)
    return {
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "E_LOCAL": config.experts_local,
        "E_PAD": e_pad,
        "EP": config.ep,
        "TP": config.tp,
        "W_PAD": power_of_2(config.world_size),
        "P": config.num_phases,
        "BLOCK_ROWS": config.block_rows,
        "CHUNK": CHUNK_ROWS,
        "SCAN_ROWS": max(SCAN_ELEMENTS // e_pad, 1),
        "BY_TOKEN": config.by_token,
        "WAVES": config.num_waves,
    }


def place_warps(config: PlanConfig) -> int:
    """Warps of ``place_kernel``: it keeps 128 x K addresses in registers."""
    return 8 if config.top_k > 8 else 4
