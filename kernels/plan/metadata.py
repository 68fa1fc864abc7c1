"""The plan on the device: two small kernels turn the top-k ids of all ranks into ``comet.layer.plan.Plan``'s tensors.

1. ``counting.exchange_kernel``. Its first programs, (peer, chunk of 128 tokens), copy this rank's ids and weights into
   the peer's pool and signal. The others, (source, chunk) x block of experts, wait for the chunk, count what comes to
   this rank's experts, and give every routed row its position among the rows of its expert inside the chunk; waves
   likewise.
2. ``placement.place_kernel``, one program per piece of output: position plus what lies before the chunk is the final
   address. Each program adds up the few counts before it by itself, which is quicker than one more launch for a scan.

Routed rows are in (source, token, slot) order. A *list* of M places (rows received from one source, tokens sent to one
rank) is a permutation by wave (see ``placement``), then token; places of the last wave, tokens that are not needed, are
marked -1. So every place is written once. With 4 tokens, of which 1 is needed by the rank's second expert and 3 by its
first, tokens 0..3 take the places 2, 1, 3, 0: the list is 3, 1, -1, -1.

Counts and ids can disagree only after a wait met its deadline, as ids may come between the two launches. Then the plan
has no rows: no segment, no tile, and no slot with a routed row. Kernels that read it before the host raises find no
index that nobody wrote, and nothing is written outside its tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import triton
from torch import Tensor

from ..runtime.arguments import CHUNK_ROWS, MAX_WAVES, power_of_2
from ..runtime.buffers import allocate, cut
from .counting import exchange_kernel
from .placement import place_kernel

EXPERT_BLOCK = 32
NARROW_EXPERT_BLOCK = 8
FEW_PROGRAMS = 64  # so few programs leave most SMs idle: narrower blocks of experts use them
SCAN_ELEMENTS = 1024
SUM_CHUNKS = 32

# Programs of ``exchange_kernel`` that one launch runs.
Part = Literal["all", "send", "count"]


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
        block_rows: Rows of a GEMM tile.
        expert_capacity: Routed rows one expert keeps; 2**31 - 1 keeps all.
    """

    top_k: int
    experts_local: int
    ep: int
    tp: int
    block_rows: int
    expert_capacity: int

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
    """What the kernels hand to each other; int32, free for reuse after ``place_plan``.

    Args:
        epoch: ``(1,)`` the epoch of this plan.
        totals: ``(W, e)`` routed rows of each source and expert.
        counts: ``(W, C, e)`` the same per chunk.
        recv_waves: ``(W, C, waves)`` tokens of each chunk in each wave of this rank.
        send_waves: ``(EP, C, waves)`` tokens of each own chunk in each wave of each EP shard.
        recv_ranks: ``(W, C, 128)`` wave * 128 + place in the chunk's part of the wave, of each token.
        send_ranks: ``(EP, C, 128)`` the same of own tokens at each EP shard.
        positions: ``(W, C, 128, K)`` position of a routed row among those of its expert in its chunk.
    """

    epoch: Tensor
    totals: Tensor
    counts: Tensor
    recv_waves: Tensor
    send_waves: Tensor
    recv_ranks: Tensor
    send_ranks: Tensor
    positions: Tensor

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
            "positions": (sources, chunks, CHUNK_ROWS, config.top_k),
        }
        return cls(**cut(allocate(shapes, pool.ids.device), shapes))


def exchange(
    top_k_ids: Tensor,
    top_k_weights: Tensor,
    pool: RoutingPool,
    config: PlanConfig,
    scratch: PlanScratch,
    counters: Tensor,
    part: Part,
) -> None:
    """Launch the exchange: send this rank's ids and weights to every pool, wait for every rank's chunks, count them.

    Args:
        top_k_ids: ``(T, K)`` int32, contiguous; -1 masks a slot.
        top_k_weights: ``(T, K)`` float32, contiguous.
        pool: Where they go.
        config: Shape of the plan.
        scratch: Here goes all that ``place_plan`` reads of it.
        counters: int32; they are set to zero.
        part: ``all``, or ``send`` now and ``count`` later: where something is to run in between, or where one process
            or GPU plays several ranks, of which all have to send before one waits.
    """
    num_chunks = pool.max_tokens // CHUNK_ROWS
    num_pairs = config.world_size * num_chunks
    constants = exchange_constants(config, pool.ids.shape[3], num_chunks, counters.numel())
    first = num_pairs if part == "count" else 0
    end = num_pairs * (1 if part == "send" else 3 + -(-config.experts_local // constants["E_BLOCK"]))
    exchange_kernel[(end - first,)](
        top_k_ids, top_k_weights, pool.id_pointers, pool.weight_pointers, pool.flag_pointers, pool.ids, pool.flags,
        pool.epoch, pool.fault, scratch.epoch, counters, scratch.totals, scratch.counts, scratch.recv_waves,
        scratch.send_waves, scratch.recv_ranks, scratch.send_ranks, scratch.positions, first, pool.rank,
        top_k_ids.shape[0], pool.timeout_ns, pool.max_tokens, num_warps=num_warps(config), **constants,
    )  # fmt: skip


def place_plan(pool: RoutingPool, config: PlanConfig, scratch: PlanScratch, tensors: Mapping[str, Tensor]) -> None:
    """Launch the rest: write the plan.

    Args:
        pool: As for ``exchange``.
        config: As for ``exchange``.
        scratch: As ``exchange`` left it.
        tensors: The tensor fields of ``comet.layer.plan.Plan`` but ``counters``, by name, uninitialised.
    """
    num_chunks = pool.max_tokens // CHUNK_ROWS
    place_kernel[(2 * config.world_size * num_chunks + config.experts_local + 1,)](
        pool.ids, pool.weights, pool.epoch, pool.fault, scratch.epoch, scratch.totals, scratch.counts,
        scratch.recv_waves, scratch.send_waves, scratch.recv_ranks, scratch.send_ranks,
        scratch.positions, pool.rank, config.expert_capacity,
        tensors["routed_row_ids"].numel(), pool.max_tokens, num_warps=num_warps(config), **tensors,
        **place_constants(config, pool.ids.shape[3], num_chunks),
    )  # fmt: skip


def exchange_constants(
    config: PlanConfig, pool_top_k: int, num_chunks: int, num_counters: int
) -> dict[str, int | bool]:
    """Constants of ``exchange_kernel`` for ``num_chunks`` chunks per source; every block of experts is a program.

    Example: K=8, e=32, W=4: FLAT = 1024, experts in blocks of 32 for M=8192 (256 chunks), of 8 for M=512 (16 chunks).
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
        "FLAT": power_of_2(CHUNK_ROWS * config.top_k),
        "WAVES": config.num_waves,
        "NUM_COUNTERS": num_counters,
        "INTERPRET": triton.knobs.runtime.interpret,
    }


def place_constants(config: PlanConfig, pool_top_k: int, num_chunks: int) -> dict[str, int | bool]:
    """Constants of ``place_kernel``; the counts of SCAN_ROWS chunks, and the waves of SUM_BLOCK, are added up at once.

    Example: e=64: SCAN_ROWS = 16 and SUM_BLOCK = 32 for M=8192 (64 chunks of a source), both 4 for M=512.
    """
    e_pad = power_of_2(config.experts_local)
    return {
        "K": config.top_k,
        "POOL_K": pool_top_k,
        "E_LOCAL": config.experts_local,
        "E_PAD": e_pad,
        "EP": config.ep,
        "TP": config.tp,
        "W_PAD": power_of_2(config.world_size),
        "P": min(config.world_size, 2),
        "BLOCK_ROWS": config.block_rows,
        "CHUNK": CHUNK_ROWS,
        "SCAN_ROWS": min(max(SCAN_ELEMENTS // e_pad, 1), power_of_2(num_chunks)),
        "SUM_BLOCK": min(SUM_CHUNKS, power_of_2(num_chunks)),
        "WAVES": config.num_waves,
    }


def num_warps(config: PlanConfig) -> int:
    """Warps of both kernels: they keep 128 x K values in registers."""
    return 8 if config.top_k > 8 else 4
