"""First launch of the plan on the device: send ids, and count what is in the chunks of all ranks (see ``metadata``).

Programs of ``exchange_kernel``, C chunks of W ranks, blocks of experts:

    [0, W*C)                        send a chunk to a peer
    [W*C, 2*W*C)                    waves of a chunk of own tokens at an EP shard
    [2*W*C, 3*W*C)                  waves of a (source, chunk) at this rank
    [3*W*C, (3 + blocks)*W*C)       routed rows of a (source, chunk), for one block of experts

It ends on every rank: programs that send wait for nobody, and no program that waits can keep one from running, for a
grid's programs start in the order of their numbers, on a GPU as many at once as have room, under the interpreter one
after the other. So whichever programs hold the multiprocessors, those that send have run or run among them; then all
ranks' flags are raised, and all waits end.
"""

import triton
import triton.language as tl

from .primitives import PLACE_EXCHANGE, signal, wait_flags


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


@triton.jit
def send_chunk(
    ids_ptr, weights_ptr, id_addresses, weight_addresses, flag_addresses, epoch, peer, chunk, rank, num_tokens, M,
    WORLD: tl.constexpr, K: tl.constexpr, POOL_K: tl.constexpr, FLAT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of this rank's ids and weights into the pool of ``peer``, and signal."""
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


@triton.jit
def wait_for_chunk(flag_ptr, epoch, source, chunk, rank, num_chunks, fault_ptr, timeout_ns, INTERPRET: tl.constexpr):
    """Until a chunk of ``source`` is here, and this rank's first chunk, whose sender zeroes the totals before."""
    both = tl.arange(0, 2)
    sources, chunks = tl.where(both == 0, source, rank), tl.where(both == 0, chunk, 0)
    flags = flag_ptr + sources * num_chunks + chunks
    wait_flags(flags, both >= 0, epoch, fault_ptr, timeout_ns, PLACE_EXCHANGE, sources, chunks, INTERPRET)


@triton.jit(do_not_specialize=["first_program", "rank", "num_tokens", "timeout_ns"])
def exchange_kernel(
    own_ids_ptr, own_weights_ptr, id_addresses, weight_addresses, flag_addresses, ids_ptr, flag_ptr, epoch_ptr,
    fault_ptr, plan_epoch_ptr, counters_ptr, totals_ptr, counts_ptr, recv_waves_ptr, send_waves_ptr, recv_ranks_ptr,
    send_ranks_ptr, positions_ptr, first_program, rank, num_tokens, timeout_ns, M,
    K: tl.constexpr, POOL_K: tl.constexpr, E_LOCAL: tl.constexpr, E_BLOCK: tl.constexpr, EP: tl.constexpr,
    TP: tl.constexpr, CHUNK: tl.constexpr, FLAT: tl.constexpr, WAVES: tl.constexpr, NUM_COUNTERS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """See the module; ``first_program`` is the number of the launch's first program."""
    WORLD: tl.constexpr = EP * TP
    NUM_TOTALS: tl.constexpr = WORLD * E_LOCAL
    num_chunks = M // CHUNK
    program = tl.program_id(0) + first_program
    part = program // (WORLD * num_chunks)
    place = program - part * (WORLD * num_chunks)
    # Each rank begins with itself: at different moments all send to different peers.
    peer = (rank + place // num_chunks) % WORLD
    chunk = place % num_chunks
    epoch = tl.load(epoch_ptr) + 1
    half = ids_ptr + (epoch & 1) * WORLD * (M * POOL_K) + (chunk * CHUNK + tl.arange(0, CHUNK)) * K
    if part == 0:
        if place == 0:
            tl.store(plan_epoch_ptr, epoch)
            totals = tl.arange(0, triton.next_power_of_2(NUM_TOTALS))
            tl.store(totals_ptr + totals, totals * 0, mask=totals < NUM_TOTALS)
            counters = tl.arange(0, triton.next_power_of_2(NUM_COUNTERS))
            tl.store(counters_ptr + counters, counters * 0, mask=counters < NUM_COUNTERS)
        send_chunk(
            own_ids_ptr, own_weights_ptr, id_addresses, weight_addresses, flag_addresses, epoch, peer, chunk, rank,
            num_tokens, M, WORLD, K, POOL_K, FLAT, CHUNK,
        )  # fmt: skip
    else:
        # Own tokens at the EP shard of ``peer``, or tokens of ``peer`` here.
        source = tl.where(part == 1, rank, peer)
        wait_for_chunk(flag_ptr, epoch, source, chunk, rank, num_chunks, fault_ptr, timeout_ns, INTERPRET)
        chunk_ids = half + source * (M * POOL_K)
        source_chunk = peer * num_chunks + chunk
        if part == 1:
            shard_chunk = peer // TP * num_chunks + chunk
            if peer % TP == 0:
                rank_tokens(
                    chunk_ids, peer // TP, send_waves_ptr + shard_chunk * WAVES, send_ranks_ptr + shard_chunk * CHUNK,
                    K, E_LOCAL, CHUNK, WAVES,
                )  # fmt: skip
        elif part == 2:
            rank_tokens(
                chunk_ids, rank // TP, recv_waves_ptr + source_chunk * WAVES, recv_ranks_ptr + source_chunk * CHUNK,
                K, E_LOCAL, CHUNK, WAVES,
            )  # fmt: skip
        else:
            count_experts(
                chunk_ids, rank // TP * E_LOCAL, part - 3, totals_ptr + peer * E_LOCAL,
                counts_ptr + source_chunk * E_LOCAL, positions_ptr + source_chunk * (K * CHUNK), K, E_LOCAL, E_BLOCK,
                CHUNK,
            )  # fmt: skip
