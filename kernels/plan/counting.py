"""First launch of the plan on the device: send ids, and count what is in the chunks of all ranks (see ``metadata``).

Programs of ``exchange_kernel``, C chunks of W ranks, blocks of experts:

    [0, W*C)                        send a chunk to a peer
    [W*C, 2*W*C)                    waves of a chunk of own tokens at an EP shard, if the peer is its first rank
    [2*W*C, 3*W*C)                  waves of a (source, chunk) at this rank
    [3*W*C, (3 + blocks)*W*C)       routed rows of a (source, chunk), for one block of experts

It ends on every rank: programs that send wait for nobody, and no program that waits keeps one of its own grid from
running, for a grid's programs start in the order of their numbers, on a GPU as many at once as have room, under the
interpreter one after the other. So whichever programs hold the SMs, those that send have run or run among
them; then all ranks' flags are raised, and all waits end. CUDA does not promise that order; it has only been seen to
keep it. Between two grids nothing is sure: where two workspaces plan on two streams, the waiting programs of one can
keep the other's senders out, and crosswise on another rank, until the deadline.
"""

import triton
import triton.language as tl

from ..runtime.primitives import PLACE_EXCHANGE, any_of, signal, wait_flags


@triton.jit
def waves_of(first, E_LOCAL: tl.constexpr, WAVES: tl.constexpr):
    """Wave of each token from the first local expert that needs it; E_LOCAL: none does.

    With 8 experts and 4 waves, experts 0..2 are wave 0, 3..5 wave 1, 6 and 7 wave 2; wave 3 is not needed here.
    """
    return tl.where(first < E_LOCAL, first * (WAVES - 1) // E_LOCAL, WAVES - 1)


@triton.jit
def load_local(chunk_ids, first_expert, K: tl.constexpr, CHUNK: tl.constexpr, E_LOCAL: tl.constexpr):
    """(CHUNK, K): expert of each slot from ``first_expert`` on, E_LOCAL where it is not among the next E_LOCAL."""
    slots = tl.arange(0, triton.next_power_of_2(K))[None, :]
    ids = tl.load(chunk_ids + tl.arange(0, CHUNK)[:, None] * K + slots, mask=slots < K, other=-1)
    local = ids - first_expert
    return tl.where((ids >= 0) & (local >= 0) & (local < E_LOCAL), local, E_LOCAL)


@triton.jit
def rank_tokens(
    chunk_ids, shard, counts_ptr, ranks_ptr, K: tl.constexpr, E_LOCAL: tl.constexpr, CHUNK: tl.constexpr,
    WAVES: tl.constexpr,
):  # fmt: skip
    """Store each token's wave * CHUNK + place in the chunk's part of the wave, and how many tokens each wave has.

    ``chunk_ids`` points at the first id; the waves are those of an EP shard. They are counted in bytes of words: of 32
    waves and K=2, words 0..3 hold 8 each, and wave 13 is bits 40..47 of word 1. If it has the tokens 4 and 9, these
    store 13 * CHUNK and 13 * CHUNK + 1, and the wave stores 2.
    """
    tl.static_assert(CHUNK < 256)
    # As many words as ids, at least: Triton 3.6 scans a tensor wrongly that is narrower than the one it comes from.
    WORDS: tl.constexpr = 4 if K <= 4 else triton.next_power_of_2(K)
    PER_WORD: tl.constexpr = (WAVES + WORDS - 1) // WORDS
    local = load_local(chunk_ids, shard * E_LOCAL, K, CHUNK, E_LOCAL)
    waves = waves_of(tl.min(local, axis=1), E_LOCAL, WAVES)
    one = tl.full((), 1, tl.int64 if PER_WORD > 4 else tl.int32)
    shifts = waves % PER_WORD * 8
    words = tl.arange(0, WORDS)
    here = (waves // PER_WORD)[:, None] == words[None, :]
    hot = tl.where(here, (one << shifts)[:, None], 0)
    until = tl.sum(tl.where(here, tl.cumsum(hot, axis=0), 0), axis=1)
    ranks = waves * CHUNK + ((until >> shifts) & 255).to(tl.int32) - 1
    tl.store(ranks_ptr + tl.arange(0, CHUNK), ranks)
    bytes_of_word = tl.arange(0, PER_WORD)[None, :]
    numbers = words[:, None] * PER_WORD + bytes_of_word
    counts = (tl.sum(hot, axis=0)[:, None] >> (bytes_of_word * 8)) & 255
    tl.store(counts_ptr + numbers, counts.to(tl.int32), mask=numbers < WAVES)


@triton.jit
def count_experts(
    chunk_ids, first_expert, block, totals_ptr, counts_ptr, positions_ptr,
    K: tl.constexpr, E_LOCAL: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count one chunk for one block of this rank's experts; pointers are those of the chunk, totals of its source.

    Up to four experts are counted in one word, in 16 bits each; slots of one token that name the same expert follow
    each other. Of a block of 8, expert 6 is bits 32..47 of word 1. With K=2, tokens whose ids are (6, 5) and (6, 6)
    have the positions (0, 0) and (1, 2), and expert 6 stores 3.
    """
    tl.static_assert(CHUNK * K < 2**16)
    PER_WORD: tl.constexpr = 4 if E_BLOCK > 4 else E_BLOCK
    tokens = tl.arange(0, CHUNK)[:, None]
    slots = tl.arange(0, triton.next_power_of_2(K))[None, :]
    local = load_local(chunk_ids, first_expert, K, CHUNK, E_LOCAL)
    shifts = local % PER_WORD * 16
    for word in tl.static_range(E_BLOCK // PER_WORD):
        first = block * E_BLOCK + word * PER_WORD
        mine = (local < E_LOCAL) & (local // PER_WORD * PER_WORD == first)
        hot = tl.where(mine, tl.full((), 1, tl.int64) << shifts, 0)
        of_token = tl.sum(hot, axis=1)
        before = (tl.cumsum(of_token, axis=0) - of_token)[:, None] + tl.cumsum(hot, axis=1) - hot
        position = ((before >> shifts) & (2**16 - 1)).to(tl.int32)
        tl.store(positions_ptr + tokens * K + slots, position, mask=mine)
        experts = first + tl.arange(0, PER_WORD)
        count = (tl.sum(of_token, axis=0) >> (tl.arange(0, PER_WORD) * 16)) & (2**16 - 1)
        count = count.to(tl.int32)
        tl.store(counts_ptr + experts, count, mask=experts < E_LOCAL)
        tl.atomic_add(totals_ptr + experts, count, mask=(experts < E_LOCAL) & (count > 0), sem="relaxed")


@triton.jit
def send_chunk(
    ids_ptr, weights_ptr, id_addresses, weight_addresses, flag_addresses, epoch, fault_ptr, peer, chunk, rank,
    num_tokens, M, WORLD: tl.constexpr, K: tl.constexpr, POOL_K: tl.constexpr, FLAT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of own ids and weights into the pool of ``peer``, and signal; nothing if this rank failed."""
    flat = tl.arange(0, FLAT)
    inside = flat < CHUNK * K
    first = chunk * (CHUNK * K)
    valid = inside & (first + flat < num_tokens * K)
    # All loads stand before what needs them, so that they travel together.
    ids = tl.load(ids_ptr + first + flat, mask=valid, other=-1)
    weights = tl.load(weights_ptr + first + flat, mask=valid, other=0.0)
    ids_target = tl.multiple_of(tl.load(id_addresses + peer).to(tl.pointer_type(tl.int32)), 16)
    weights_target = tl.multiple_of(tl.load(weight_addresses + peer).to(tl.pointer_type(tl.float32)), 16)
    flags = tl.load(flag_addresses + peer).to(tl.pointer_type(tl.int32))
    failed = tl.load(fault_ptr, volatile=True)
    offset = ((epoch & 1) * WORLD + rank) * (M * POOL_K) + first
    if any_of(failed != 0, flat) == 0:
        tl.store(ids_target + offset + flat, ids, mask=inside)
        # Nobody reads the weight of a masked slot.
        tl.store(weights_target + offset + flat, weights, mask=inside & (chunk * CHUNK < num_tokens))
        signal(flags + rank * (M // CHUNK) + chunk, epoch)


@triton.jit
def wait_for_chunk(flag_ptr, epoch, source, chunk, rank, num_chunks, fault_ptr, timeout_ns, INTERPRET: tl.constexpr):
    """Until a chunk of ``source`` is here, and this rank's first chunk, whose sender zeroes the totals before."""
    both = tl.arange(0, 2)
    sources, chunks = tl.where(both == 0, source, rank), tl.where(both == 0, chunk, 0)
    flags = flag_ptr + sources * num_chunks + chunks
    always = tl.full((2,), True, tl.int1)
    wait_flags(flags, always, epoch, fault_ptr, timeout_ns, PLACE_EXCHANGE, sources, chunks, INTERPRET)


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
    pair = program - part * (WORLD * num_chunks)  # of a peer and a chunk
    # Each rank begins with itself: at different moments all send to different peers.
    peer = (rank + pair // num_chunks) % WORLD
    chunk = pair % num_chunks
    epoch = tl.load(epoch_ptr) + 1
    if part == 0:
        if pair == 0:
            totals = tl.arange(0, triton.next_power_of_2(NUM_TOTALS))
            tl.store(totals_ptr + totals, totals * 0, mask=totals < NUM_TOTALS)
            counters = tl.arange(0, triton.next_power_of_2(NUM_COUNTERS))
            tl.store(counters_ptr + counters, counters * 0, mask=counters < NUM_COUNTERS)
        send_chunk(
            own_ids_ptr, own_weights_ptr, id_addresses, weight_addresses, flag_addresses, epoch, fault_ptr, peer, chunk,
            rank, num_tokens, M, WORLD, K, POOL_K, FLAT, CHUNK,
        )  # fmt: skip
        if pair == 0:
            tl.store(plan_epoch_ptr, epoch)
    elif (part != 1) | (peer % TP == 0):
        # Own tokens at an EP shard, whose first rank is ``peer``, or tokens of ``peer`` here.
        source = tl.where(part == 1, rank, peer)
        wait_for_chunk(flag_ptr, epoch, source, chunk, rank, num_chunks, fault_ptr, timeout_ns, INTERPRET)
        chunk_ids = ids_ptr + ((epoch & 1) * WORLD + source) * (M * POOL_K) + chunk * (CHUNK * K)
        source_chunk = peer * num_chunks + chunk
        if part > 2:
            count_experts(
                chunk_ids, rank // TP * E_LOCAL, part - 3, totals_ptr + peer * E_LOCAL,
                counts_ptr + source_chunk * E_LOCAL, positions_ptr + source_chunk * (K * CHUNK), K, E_LOCAL, E_BLOCK,
                CHUNK,
            )  # fmt: skip
        else:
            shard, waves_ptr, ranks_ptr = rank // TP, recv_waves_ptr, recv_ranks_ptr
            if part == 1:
                shard, waves_ptr, ranks_ptr = peer // TP, send_waves_ptr, send_ranks_ptr
                source_chunk = shard * num_chunks + chunk
            rank_tokens(
                chunk_ids, shard, waves_ptr + source_chunk * WAVES, ranks_ptr + source_chunk * CHUNK, K, E_LOCAL, CHUNK,
                WAVES,
            )  # fmt: skip
