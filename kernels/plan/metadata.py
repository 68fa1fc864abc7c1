"""The plan on the device: two small kernels turn the top-k ids of all ranks into ``comet.layer.plan.Plan``'s tensors.

1. ``counting.exchange_kernel``. Its first programs, (peer, chunk of 128 tokens), copy this rank's ids and weights into
   the peer's pool and signal. The others, (source, chunk) x block of experts, wait for the chunk, count what comes to
   this rank's experts, and give every routed row its position among the rows of its expert inside the chunk,
   and of its bucket.
2. ``placement.place_kernel``, one program per piece of output: position plus what lies before the chunk is the final
   address. Each program adds up the few counts before it by itself, which is quicker than one more launch for a scan.

Routed rows are in (source, token, slot) order. A *list* of M places (rows received from one source, tokens sent to one
rank) is a permutation by bucket (see ``placement``), then token; places of the last bucket, tokens not needed, are
marked -1. So every place is written once. With 4 tokens, of which 1 is needed by the rank's second expert and 3 by its
first, tokens 0..3 take the places 2, 1, 3, 0: the list is 3, 1, -1, -1.

Counts and ids can disagree only after a wait met its deadline, as ids may come between the two launches. Then the plan
has no rows: no segment, no tile, and no slot with a routed row. Kernels that read it before the host raises find no
index that was not written, and nothing is written outside its tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from ..runtime.arguments import power_of_2
from ..runtime.buffers import allocate, cut
from ..runtime.limits import CHUNK_ROWS, num_buckets
from .counting import exchange_kernel
from .placement import place_kernel

EXPERT_BLOCK = 32
NARROW_EXPERT_BLOCK = 8
FEW_PROGRAMS = 64  # so few programs leave most SMs idle: narrower blocks of experts use them
SCAN_ELEMENTS = 1024
SUM_CHUNKS = 32


class PoolTensors(NamedTuple):
    """Memory of one rank where ids and weights of all ranks arrive; source s writes half [parity, s]."""

    ids: Tensor  # (2, W, M, K_pool) int32, this rank's copy; a half densely as (M, K)
    id_pointers: Tensor  # (W,) int64 address of every rank's ids
    weights: Tensor  # (2, W, M, K_pool) float32, as the ids
    weight_pointers: Tensor  # (W,) int64
    flags: Tensor  # (W, C) int32: epoch in which chunk c of source s arrived
    flag_pointers: Tensor  # (W,) int64
    calls: Tensor  # (4, W) int32: source s writes its call at [parity, s]
    call_pointers: Tensor  # (W,) int64
    epoch: Tensor  # (1,) int32: the exchange is number epoch + 1; afterwards it is the epoch
    fault: Tensor  # (8,) int64 record of a spin that met its deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingPool:
    """A rank and its pool."""

    tensors: PoolTensors
    rank: int
    timeout_ns: int  # deadline of every spin

    @property
    def max_tokens(self) -> int:
        return self.tensors.ids.shape[2]

    @property
    def max_top_k(self) -> int:
        return self.tensors.ids.shape[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Numbers that shape a plan; all but the capacity are compile-time constants."""

    top_k: int  # K of this layer, at most K_pool
    experts_local: int  # e
    ep: int
    tp: int
    block_rows: int  # rows of a GEMM tile
    expert_capacity: int  # routed rows one expert keeps; 2**31 - 1 keeps all

    @property
    def world_size(self) -> int:
        return self.ep * self.tp


class PlanScratch(NamedTuple):
    """Memory between the two kernels; int32, free for reuse after ``place_plan``."""

    epoch: Tensor  # (1,) the epoch of this plan
    totals: Tensor  # (W, e) routed rows of each source and expert
    counts: Tensor  # (W, C, e) the same per chunk
    recv_buckets: Tensor  # (W, C, buckets) tokens of each chunk in each bucket of this rank
    send_buckets: Tensor  # (EP, C, buckets) tokens of each own chunk in each bucket of each EP shard
    recv_ranks: Tensor  # (W, C, 128) bucket * 128 + place in the chunk's part of the bucket, of each token
    send_ranks: Tensor  # (EP, C, 128) the same of own tokens at each EP shard
    positions: Tensor  # (W, C, 128, K) position of a routed row among those of its expert in its chunk

    @classmethod
    def allocate(cls, pool: RoutingPool, config: PlanConfig) -> "PlanScratch":
        """Uninitialised scratch, one allocation."""
        sources, chunks, experts = config.world_size, pool.max_tokens // CHUNK_ROWS, config.experts_local
        buckets = num_buckets(experts)
        shapes = {
            "epoch": (1,),
            "totals": (sources, experts),
            "counts": (sources, chunks, experts),
            "recv_buckets": (sources, chunks, buckets),
            "send_buckets": (config.ep, chunks, buckets),
            "recv_ranks": (sources, chunks, CHUNK_ROWS),
            "send_ranks": (config.ep, chunks, CHUNK_ROWS),
            "positions": (sources, chunks, CHUNK_ROWS, config.top_k),
        }
        return cls(**cut(allocate(shapes, pool.tensors.ids.device), shapes))


class PlanTensors(NamedTuple):
    """The tensor fields of ``comet.layer.plan.Plan`` that ``place_kernel`` writes."""

    send_token_ids: Tensor
    send_counts: Tensor
    send_rows: Tensor
    recv_counts: Tensor
    row_slots: Tensor
    row_weights: Tensor
    routed_row_ids: Tensor
    routed_slots: Tensor
    segment_starts: Tensor
    segment_counts: Tensor
    tiles: Tensor
    segment_tiles: Tensor
    tile_starts: Tensor
    status: Tensor


class PlanConstants(NamedTuple):
    """The constants for which the kernels are compiled."""

    top_k: int  # K
    pool_top_k: int  # K_pool
    experts_local: int  # e
    world_size: int
    tp: int
    chunk: int  # tokens of a chunk
    buckets: int
    interpret: bool
    expert_block: int  # experts that a program of exchange_kernel counts
    flat: int  # power of two, at least the slots of a chunk
    num_counters: int  # that are set to zero
    padded_experts: int  # power of two, at least e; for place_kernel
    sources: int  # power of two, at least W
    phases: int
    block_rows: int  # rows of a GEMM tile
    scan_rows: int  # chunks whose counts are added up at once
    sum_block: int  # chunks whose buckets are added up at once


def exchange(
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    pool: RoutingPool,
    config: PlanConfig,
    scratch: PlanScratch,
    counters: Tensor,
    *,
    call: int = 0,
    sends_only: bool = False,
) -> None:
    """Launch the exchange: send this rank's ids and weights to every pool, wait for every rank's chunks, count them.

    Args:
        top_k_ids: ``(T, K)`` int32, contiguous; -1 masks a slot.
        top_k_weights: ``(T, K)`` float32, contiguous.
        scratch: Here goes all that ``place_plan`` reads of it.
        counters: int32; they are set to zero.
        call: Which layer is called and how; ranks that say different numbers record a fault.
        sends_only: Neither wait nor count. Where one process or GPU plays several ranks, all of them send before one
            of them waits.
    """
    num_chunks = pool.max_tokens // CHUNK_ROWS
    num_pairs = config.world_size * num_chunks
    constants = plan_constants(config, pool.max_top_k, num_chunks, counters.numel())
    parts = 1 if sends_only else 3 + -(-config.experts_local // constants.expert_block)
    exchange_kernel[(num_pairs * parts,)](
        top_k_ids, top_k_weights, pool.tensors, scratch, counters, pool.rank, top_k_ids.shape[0],
        pool.timeout_ns, call, pool.max_tokens, PLAN=constants, num_warps=num_warps(config),
    )  # fmt: skip


def place_plan(pool: RoutingPool, config: PlanConfig, scratch: PlanScratch, tensors: Mapping[str, Tensor]) -> None:
    """Write the plan behind ``exchange``: the tensor fields of ``comet.layer.plan.Plan`` but ``counters``, by name."""
    num_chunks = pool.max_tokens // CHUNK_ROWS
    place_kernel[(2 * config.world_size * num_chunks + config.experts_local + 1,)](
        pool.tensors, scratch, PlanTensors(**tensors), pool.rank, config.expert_capacity,
        tensors["routed_row_ids"].numel(), pool.max_tokens,
        PLAN=plan_constants(config, pool.max_top_k, num_chunks), num_warps=num_warps(config),
    )  # fmt: skip


def plan_constants(config: PlanConfig, pool_top_k: int, num_chunks: int, num_counters: int = 0) -> PlanConstants:
    """Constants of both kernels for ``num_chunks`` chunks per source; every block of experts is a program.

    Example: K=8, e=32, W=4: ``flat`` 1024, experts in blocks of 32 for M=8192 (64 chunks), of 8 for M=512 (4 chunks).
    e=64: ``scan_rows`` 16 and ``sum_block`` 32 for M=8192, both 4 for M=512.
    """
    padded_experts = power_of_2(config.experts_local)
    num_programs = config.world_size * num_chunks * -(-config.experts_local // EXPERT_BLOCK)
    widest = NARROW_EXPERT_BLOCK if num_programs <= FEW_PROGRAMS else EXPERT_BLOCK
    return PlanConstants(
        top_k=config.top_k,
        pool_top_k=pool_top_k,
        experts_local=config.experts_local,
        world_size=config.world_size,
        tp=config.tp,
        chunk=CHUNK_ROWS,
        buckets=num_buckets(config.experts_local),
        interpret=triton.knobs.runtime.interpret,
        expert_block=min(padded_experts, widest),
        flat=power_of_2(CHUNK_ROWS * config.top_k),
        num_counters=num_counters,
        padded_experts=padded_experts,
        sources=power_of_2(config.world_size),
        phases=min(config.world_size, 2),
        block_rows=config.block_rows,
        scan_rows=min(max(SCAN_ELEMENTS // padded_experts, 1), power_of_2(num_chunks)),
        sum_block=min(SUM_CHUNKS, power_of_2(num_chunks)),
    )


def num_warps(config: PlanConfig) -> int:
    """Warps of both kernels: they keep 128 x K values in registers."""
    return 8 if config.top_k > 8 else 4
