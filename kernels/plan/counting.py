"""First launch of the plan on the device: send ids, and count what is in the chunks of all ranks (see ``metadata``).

Programs of ``exchange_kernel``, C chunks of W ranks, blocks of experts:

    [0, W*C)                        send a chunk to a peer
    [W*C, 2*W*C)                    buckets of a chunk of own tokens at an EP shard, if the peer is its first rank
    [2*W*C, 3*W*C)                  buckets of a (source, chunk) at this rank
    [3*W*C, (3 + blocks)*W*C)       routed rows of a (source, chunk), for one block of experts

It ends on every rank: programs that send never wait, and no program that waits keeps one of its own grid from
running, for a grid's programs start in the order of their numbers, on a GPU as many at once as have room, under the
interpreter one after the other. So whichever programs hold the SMs, those that send have run or run among
them; then all ranks' flags are raised, and all waits end. CUDA does not promise that order; it has only been seen to
keep it. Between two grids nothing is sure: where two workspaces plan on two streams, the waiting programs of one can
keep the other's senders out, and crosswise on another rank, until the deadline.
"""

import triton
import triton.language as tl

from ..runtime.primitives import PLACE_CALL, PLACE_EXCHANGE, any_of, record_fault, signal, wait_flags


@triton.jit
def buckets_of(first, PLAN: tl.constexpr):
    """Bucket of each token from the first local expert that needs it; e: none does.

    With 8 experts and 4 buckets, experts 0..2 are bucket 0, 3..5 bucket 1, 6 and 7 bucket 2; 3 is not needed here.
    """
    return tl.where(first < PLAN.experts_local, first * (PLAN.buckets - 1) // PLAN.experts_local, PLAN.buckets - 1)


@triton.jit
def load_local(chunk_ids, first_expert, PLAN: tl.constexpr):
    """(CHUNK, K): expert of each slot from ``first_expert`` on, e where it is not among the next e."""
    slots = tl.arange(0, triton.next_power_of_2(PLAN.top_k))[None, :]
    ids = tl.load(chunk_ids + tl.arange(0, PLAN.chunk)[:, None] * PLAN.top_k + slots, mask=slots < PLAN.top_k, other=-1)
    local = ids - first_expert
    return tl.where((ids >= 0) & (local >= 0) & (local < PLAN.experts_local), local, PLAN.experts_local)


@triton.jit
def rank_tokens(chunk_ids, shard, counts_ptr, ranks_ptr, PLAN: tl.constexpr):
    """Store each token's bucket * CHUNK + place in the chunk's part of the bucket, and how many tokens each bucket has.

    ``chunk_ids`` points at the first id; the buckets are an EP shard's. They are counted in bytes of words: of 32
    buckets and K=2, words 0..3 hold 8 each, and bucket 13 is bits 40..47 of word 1. If it has the tokens 4 and 9, these
    store 13 * CHUNK and 13 * CHUNK + 1, and the bucket stores 2.
    """
    tl.static_assert(PLAN.chunk < 256)
    # At least as many words as ids: Triton 3.6 gives a wrong scan of a tensor narrower than the one it comes from.
    WORDS: tl.constexpr = 4 if PLAN.top_k <= 4 else triton.next_power_of_2(PLAN.top_k)
    PER_WORD: tl.constexpr = (PLAN.buckets + WORDS - 1) // WORDS
    local = load_local(chunk_ids, shard * PLAN.experts_local, PLAN)
    buckets = buckets_of(tl.min(local, axis=1), PLAN)
    one = tl.full((), 1, tl.int64 if PER_WORD > 4 else tl.int32)
    shifts = buckets % PER_WORD * 8
    words = tl.arange(0, WORDS)
    here = (buckets // PER_WORD)[:, None] == words[None, :]
    hot = tl.where(here, (one << shifts)[:, None], 0)
    until = tl.sum(tl.where(here, tl.cumsum(hot, axis=0), 0), axis=1)
    ranks = buckets * PLAN.chunk + ((until >> shifts) & 255).to(tl.int32) - 1
    tl.store(ranks_ptr + tl.arange(0, PLAN.chunk), ranks)
    bytes_of_word = tl.arange(0, PER_WORD)[None, :]
    numbers = words[:, None] * PER_WORD + bytes_of_word
    counts = (tl.sum(hot, axis=0)[:, None] >> (bytes_of_word * 8)) & 255
    tl.store(counts_ptr + numbers, counts.to(tl.int32), mask=numbers < PLAN.buckets)


@triton.jit
def count_experts(chunk_ids, first_expert, block, totals_ptr, counts_ptr, positions_ptr, PLAN: tl.constexpr):
    """Count one chunk for one block of this rank's experts; pointers are those of the chunk, totals of its source.

    Up to four experts are counted in one word, in 16 bits each; slots of one token that name the same expert follow
    each other. Of a block of 8, expert 6 is bits 32..47 of word 1. With K=2, tokens whose ids are (6, 5) and (6, 6)
    have the positions (0, 0) and (1, 2), and expert 6 stores 3.
    """
    tl.static_assert(PLAN.chunk * PLAN.top_k < 2**16)
    PER_WORD: tl.constexpr = 4 if PLAN.expert_block > 4 else PLAN.expert_block
    tokens = tl.arange(0, PLAN.chunk)[:, None]
    slots = tl.arange(0, triton.next_power_of_2(PLAN.top_k))[None, :]
    local = load_local(chunk_ids, first_expert, PLAN)
    shifts = local % PER_WORD * 16
    for word in tl.static_range(PLAN.expert_block // PER_WORD):
        first = block * PLAN.expert_block + word * PER_WORD
        mine = (local < PLAN.experts_local) & (local // PER_WORD * PER_WORD == first)
        hot = tl.where(mine, tl.full((), 1, tl.int64) << shifts, 0)
        of_token = tl.sum(hot, axis=1)
        before = (tl.cumsum(of_token, axis=0) - of_token)[:, None] + tl.cumsum(hot, axis=1) - hot
        position = ((before >> shifts) & (2**16 - 1)).to(tl.int32)
        tl.store(positions_ptr + tokens * PLAN.top_k + slots, position, mask=mine)
        experts = first + tl.arange(0, PER_WORD)
        count = (tl.sum(of_token, axis=0) >> (tl.arange(0, PER_WORD) * 16)) & (2**16 - 1)
        count = count.to(tl.int32)
        tl.store(counts_ptr + experts, count, mask=experts < PLAN.experts_local)
        tl.atomic_add(totals_ptr + experts, count, mask=(experts < PLAN.experts_local) & (count > 0), sem="relaxed")


@triton.jit
def send_chunk(own_ids_ptr, own_weights_ptr, pool, epoch, peer, chunk, rank, num_tokens, call, M, PLAN: tl.constexpr):
    """Copy a chunk of own ids and weights, and the call, to the pool of ``peer``; nothing if this rank failed."""
    flat = tl.arange(0, PLAN.flat)
    inside = flat < PLAN.chunk * PLAN.top_k
    first = chunk * (PLAN.chunk * PLAN.top_k)
    valid = inside & (first + flat < num_tokens * PLAN.top_k)
    # All loads stand before what needs them, so that they travel together.
    ids = tl.load(own_ids_ptr + first + flat, mask=valid, other=-1)
    weights = tl.load(own_weights_ptr + first + flat, mask=valid, other=0.0)
    ids_target = tl.multiple_of(tl.load(pool.id_pointers + peer).to(tl.pointer_type(tl.int32)), 16)
    weights_target = tl.multiple_of(tl.load(pool.weight_pointers + peer).to(tl.pointer_type(tl.float32)), 16)
    flags = tl.load(pool.flag_pointers + peer).to(tl.pointer_type(tl.int32))
    calls = tl.load(pool.call_pointers + peer).to(tl.pointer_type(tl.int32))
    failed = tl.load(pool.fault, volatile=True)
    offset = ((epoch & 1) * PLAN.world_size + rank) * (M * PLAN.pool_top_k) + first
    if any_of(failed != 0, flat) == 0:
        tl.store(ids_target + offset + flat, ids, mask=inside)
        # The weight of a masked slot is never read.
        tl.store(weights_target + offset + flat, weights, mask=inside & (chunk * PLAN.chunk < num_tokens))
        tl.store(calls + (epoch & 1) * PLAN.world_size + rank, call, mask=chunk == 0)
        signal(flags + rank * (M // PLAN.chunk) + chunk, epoch)


@triton.jit
def wait_for_chunk(pool, epoch, source, chunk, rank, num_chunks, timeout_ns, PLAN: tl.constexpr):
    """Wait for a chunk of ``source`` and for this rank's first chunk, whose sender zeroes the totals before."""
    both = tl.arange(0, 2)
    sources, chunks = tl.where(both == 0, source, rank), tl.where(both == 0, chunk, 0)
    flags = pool.flags + sources * num_chunks + chunks
    always = tl.full((2,), True, tl.int1)
    wait_flags(flags, always, epoch, pool.fault, timeout_ns, PLACE_EXCHANGE, sources, chunks, PLAN.interpret)


@triton.jit
def compare_call(pool, epoch, source, call, PLAN: tl.constexpr):
    """Record a fault if ``source`` calls another layer, or in another way: then its ids belong to another call.

    The first chunk of ``source`` must be here. If its wait met the deadline, the record of that stays.
    """
    seen = tl.load(pool.calls + (epoch & 1) * PLAN.world_size + source)
    if seen != call:
        record_fault(pool.fault, PLACE_CALL, source, 0, call, seen, PLAN.interpret)


@triton.jit(do_not_specialize=["rank", "num_tokens", "timeout_ns", "call"])
def exchange_kernel(
    own_ids_ptr, own_weights_ptr, pool, scratch, counters_ptr, rank, num_tokens, timeout_ns, call, M,
    PLAN: tl.constexpr,
):  # fmt: skip
    """Send, wait and count; the module's docstring has the programs.

    ``pool``, ``scratch`` and ``PLAN`` are ``PoolTensors``, ``PlanScratch`` and ``PlanConstants``.
    """
    NUM_TOTALS: tl.constexpr = PLAN.world_size * PLAN.experts_local
    num_chunks = M // PLAN.chunk
    program = tl.program_id(0)
    part = program // (PLAN.world_size * num_chunks)
    pair = program - part * (PLAN.world_size * num_chunks)  # number of a (peer, chunk)
    # Each rank begins with itself: at different moments all send to different peers.
    peer = (rank + pair // num_chunks) % PLAN.world_size
    chunk = pair % num_chunks
    epoch = tl.load(pool.epoch) + 1
    if part == 0:
        if pair == 0:
            totals = tl.arange(0, triton.next_power_of_2(NUM_TOTALS))
            tl.store(scratch.totals + totals, totals * 0, mask=totals < NUM_TOTALS)
            counters = tl.arange(0, triton.next_power_of_2(PLAN.num_counters))
            tl.store(counters_ptr + counters, counters * 0, mask=counters < PLAN.num_counters)
        send_chunk(own_ids_ptr, own_weights_ptr, pool, epoch, peer, chunk, rank, num_tokens, call, M, PLAN)
        if pair == 0:
            tl.store(scratch.epoch, epoch)
    elif (part != 1) | (peer % PLAN.tp == 0):
        # Own tokens at an EP shard, whose first rank is ``peer``, or tokens of ``peer`` here.
        source = tl.where(part == 1, rank, peer)
        wait_for_chunk(pool, epoch, source, chunk, rank, num_chunks, timeout_ns, PLAN)
        if (part == 2) & (chunk == 0):
            compare_call(pool, epoch, source, call, PLAN)
        chunk_ids = pool.ids + ((epoch & 1) * PLAN.world_size + source) * (M * PLAN.pool_top_k)
        chunk_ids += chunk * (PLAN.chunk * PLAN.top_k)
        source_chunk = peer * num_chunks + chunk
        if part > 2:
            count_experts(
                chunk_ids, rank // PLAN.tp * PLAN.experts_local, part - 3, scratch.totals + peer * PLAN.experts_local,
                scratch.counts + source_chunk * PLAN.experts_local,
                scratch.positions + source_chunk * (PLAN.top_k * PLAN.chunk), PLAN,
            )  # fmt: skip
        else:
            shard, buckets_ptr, ranks_ptr = rank // PLAN.tp, scratch.recv_buckets, scratch.recv_ranks
            if part == 1:
                shard, buckets_ptr, ranks_ptr = peer // PLAN.tp, scratch.send_buckets, scratch.send_ranks
                source_chunk = shard * num_chunks + chunk
            buckets_ptr, ranks_ptr = buckets_ptr + source_chunk * PLAN.buckets, ranks_ptr + source_chunk * PLAN.chunk
            rank_tokens(chunk_ids, shard, buckets_ptr, ranks_ptr, PLAN)
