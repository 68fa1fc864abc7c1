"""Middle step of the plan on the device: what is in one chunk of one source (see ``metadata``)."""

import triton
import triton.language as tl

from .primitives import PLACE_EXCHANGE, wait_flag


@triton.jit
def waves_of(first, E_LOCAL: tl.constexpr, WAVES: tl.constexpr):
    """Wave of each token from the first local expert that needs it; E_LOCAL: none does.

    With 8 experts and 4 waves, experts 0..2 are wave 0, 3..5 wave 1, 6 and 7 wave 2; wave 3 is not needed here.
    """
    return tl.where(first < E_LOCAL, first * (WAVES - 1) // E_LOCAL, WAVES - 1)


@triton.jit
def rank_tokens(
    chunk_ids, shard, counts_ptr, ranks_ptr, K: tl.constexpr, E_LOCAL: tl.constexpr, CHUNK: tl.constexpr,
    WAVES: tl.constexpr,
):  # fmt: skip
    """Store each token's wave * CHUNK + place in the chunk's part of the wave, and how many tokens each wave has.

    ``chunk_ids`` points at each token's slots; the waves are those of an EP shard.
    """
    tokens = tl.arange(0, CHUNK)
    first = tokens * 0 + E_LOCAL
    for k in range(K):
        local = tl.load(chunk_ids + k) - shard * E_LOCAL
        first = tl.minimum(first, tl.where((local >= 0) & (local < E_LOCAL), local, E_LOCAL))
    waves = waves_of(first, E_LOCAL, WAVES)
    numbers = tl.arange(0, WAVES)
    hot = (waves[:, None] == numbers[None, :]).to(tl.int32)
    until = tl.cumsum(hot, axis=0)
    tl.store(ranks_ptr + tokens, waves * CHUNK + tl.sum(hot * until, axis=1) - 1)
    tl.store(counts_ptr + numbers, tl.max(until, axis=0))


@triton.jit
def count_experts(
    chunk_ids, first_expert, block, totals_ptr, counts_ptr, positions_ptr,
    K: tl.constexpr, E_LOCAL: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count one chunk for one block of this rank's experts; pointers are those of the chunk, totals of its source."""
    tokens = tl.arange(0, CHUNK)
    experts = block * E_BLOCK + tl.arange(0, E_BLOCK)
    # ---- how many of each token's slots name each expert
    hot = tl.zeros((CHUNK, E_BLOCK), dtype=tl.int32)
    for k in range(K):
        local = tl.load(chunk_ids + k) - first_expert
        mine = (local >= 0) & (local < E_LOCAL)
        hot += (tl.where(mine, local, -1)[:, None] == experts[None, :]).to(tl.int32)
    count = tl.sum(hot, axis=0)
    tl.store(counts_ptr + experts, count, mask=experts < E_LOCAL)
    # ---- position of each slot; slots of one token that name the same expert follow each other
    if tl.sum(count, axis=0) > 0:
        tl.atomic_add(totals_ptr + experts, count, mask=experts < E_LOCAL, sem="relaxed")
        before = tl.cumsum(hot, axis=0) - hot
        for k in range(K):
            local = tl.load(chunk_ids + k) - first_expert
            mine = (local >= 0) & (local < E_LOCAL)
            here = tl.where(mine, local, -1)[:, None] == experts[None, :]
            position = tl.sum(tl.where(here, before, 0), axis=1)
            tl.store(positions_ptr + k * CHUNK + tokens, position, mask=mine & (local // E_BLOCK == block))
            before += here.to(tl.int32)


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def count_kernel(
    ids_ptr, flag_ptr, fault_ptr, plan_epoch_ptr, totals_ptr, counts_ptr, recv_waves_ptr, send_waves_ptr,
    recv_ranks_ptr, send_ranks_ptr, positions_ptr, rank, timeout_ns, M,
    K: tl.constexpr, POOL_K: tl.constexpr, E_LOCAL: tl.constexpr, E_BLOCK: tl.constexpr, EP: tl.constexpr,
    TP: tl.constexpr, CHUNK: tl.constexpr, WAVES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Per (source, chunk) a program for every block of experts, one for the waves, one for the waves of own tokens."""
    source_chunk = tl.program_id(0)
    num_chunks = M // CHUNK
    source = source_chunk // num_chunks
    chunk = source_chunk - source * num_chunks
    epoch = tl.load(plan_epoch_ptr)
    block = tl.program_id(1)
    half = ids_ptr + (epoch & 1) * (EP * TP) * (M * POOL_K) + (chunk * CHUNK + tl.arange(0, CHUNK)) * K
    if block == tl.num_programs(1) - 1:
        if source % TP == 0:
            place = source // TP * num_chunks + chunk
            rank_tokens(
                half + rank * (M * POOL_K), source // TP, send_waves_ptr + place * WAVES,
                send_ranks_ptr + place * CHUNK, K, E_LOCAL, CHUNK, WAVES,
            )  # fmt: skip
    else:
        wait_flag(flag_ptr + source_chunk, epoch, fault_ptr, timeout_ns, PLACE_EXCHANGE, source, chunk, INTERPRET)
        chunk_ids = half + source * (M * POOL_K)
        if block == tl.num_programs(1) - 2:
            rank_tokens(
                chunk_ids, rank // TP, recv_waves_ptr + source_chunk * WAVES, recv_ranks_ptr + source_chunk * CHUNK,
                K, E_LOCAL, CHUNK, WAVES,
            )  # fmt: skip
        else:
            count_experts(
                chunk_ids, rank // TP * E_LOCAL, block, totals_ptr + source * E_LOCAL,
                counts_ptr + source_chunk * E_LOCAL, positions_ptr + source_chunk * (K * CHUNK), K, E_LOCAL, E_BLOCK,
                CHUNK,
            )  # fmt: skip
