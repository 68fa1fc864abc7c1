"""Last step of the plan on the device: from counts and in-chunk positions to addresses (see ``metadata``).

Programs of ``place_kernel``, W*C each for received rows and sent tokens, e for segments, one for everything small:

    [0, W*C)                    received and routed rows of a (source, chunk); first chunks: rows received
    [W*C, 2*W*C)                send list of a (destination, chunk); first chunks: rows sent
    [2*W*C, 2*W*C + e)          tiles and padding of an expert's segment
    2*W*C + e                   segment table, tile starts, status, epoch

A *list* (rows received from one source, tokens sent to one rank) is ordered by bucket, then token. A token's bucket is
that of the first of the receiving rank's experts that needs it, so that rows arrive in the order in which layer 0 goes
through the experts; tokens that are not needed there form the last bucket.

A rank of which a wait has met its deadline gets a plan without rows, none to compute, to send or to return, and stays
at its epoch (see ``primitives``).
"""

import triton
import triton.language as tl

from ..runtime.primitives import FAULT_ROWS_NEEDED
from .counting import load_local

TILES_AT_ONCE = tl.constexpr(64)


@triton.jit
def load_counts(counts_ptr, first, end, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, WIDTH): counts ``(chunks, WIDTH)`` of the chunks from ``first`` on, 0 from ``end`` on."""
    chunks = first + tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, WIDTH_PAD)[None, :]
    return tl.load(counts_ptr + chunks * WIDTH + columns, mask=(chunks < end) & (columns < WIDTH), other=0)


@triton.jit
def start_buckets(counts, counts_ptr, chunk, num_chunks, PLAN: tl.constexpr):
    """(buckets,) place in the list of the first token of each bucket that a chunk holds; needed tokens of the list.

    ``counts`` are those of the first ``sum_block`` chunks, the others are loaded here.
    """
    BLOCK: tl.constexpr = PLAN.sum_block
    BUCKETS: tl.constexpr = PLAN.buckets
    blocks = tl.arange(0, BLOCK)[:, None]
    before = tl.sum(tl.where(blocks < chunk, counts, 0), axis=0)
    total = tl.sum(counts, axis=0)
    for first in range(BLOCK, num_chunks, BLOCK):
        counts = load_counts(counts_ptr, first, num_chunks, BUCKETS, BUCKETS, BLOCK)
        before += tl.sum(tl.where(first + blocks < chunk, counts, 0), axis=0)
        total += tl.sum(counts, axis=0)
    needed = tl.sum(tl.where(tl.arange(0, BUCKETS) < BUCKETS - 1, total, 0), axis=0)
    return tl.cumsum(total, axis=0) - total + before, needed


@triton.jit
def list_places(ranks, starts, PLAN: tl.constexpr):
    """Place of each token of a chunk in its list, and whether the token is needed."""
    buckets = ranks // PLAN.chunk
    return tl.gather(starts, buckets, 0) + ranks % PLAN.chunk, buckets < PLAN.buckets - 1


@triton.jit
def look_up(table, index):
    flat = tl.gather(table, tl.reshape(index, (index.shape[0] * index.shape[1],)), 0)
    return tl.reshape(flat, (index.shape[0], index.shape[1]))


@triton.jit
def unless_failed(value, fault_ptr):
    """Return ``value``, or 0 after a wait of this rank met its deadline; no wait is under way in this kernel."""
    return tl.where(tl.load(fault_ptr) == 0, value, 0)


@triton.jit
def load_kept(totals_ptr, fault_ptr, capacity, PLAN: tl.constexpr):
    """(W, e): routed rows of each source, and how many of them the capacity keeps.

    All are 0 after a wait met its deadline: ids that came after the count would disagree with the counts.
    """
    sources = tl.arange(0, PLAN.sources)[:, None]
    experts = tl.arange(0, PLAN.padded_experts)[None, :]
    mask = (sources < PLAN.world_size) & (experts < PLAN.experts_local)
    totals = tl.load(totals_ptr + sources * PLAN.experts_local + experts, mask=mask, other=0)
    totals = unless_failed(totals, fault_ptr)
    lower = tl.cumsum(totals, axis=0) - totals
    return totals, tl.minimum(totals, tl.maximum(capacity - lower, 0))


@triton.jit
def expert_segments(kept, PLAN: tl.constexpr):
    """(e,) valid rows and first row of each expert's segment, and the rows of all segments with their padding."""
    counts = tl.sum(kept, axis=0)
    padded = (counts + PLAN.block_rows - 1) // PLAN.block_rows * PLAN.block_rows
    return counts, tl.cumsum(padded, axis=0) - padded, tl.sum(padded, axis=0)


@triton.jit
def tiles_until(kept, phases, counts, phase, PLAN: tl.constexpr):
    """(e,) tiles of each expert whose last row belongs to ``phase`` or an earlier one.

    With 300 rows, 100 of them in phase 0, and tiles of 128 rows: 0 tiles until phase 0, 3 until phase 1.
    """
    rows = tl.sum(tl.where(((phases <= phase) & (phases >= 0))[:, None], kept, 0), axis=0)
    return tl.where(rows >= counts, (counts + PLAN.block_rows - 1) // PLAN.block_rows, rows // PLAN.block_rows)


@triton.jit
def place_experts(kept, phases, counts, count, counts_ptr, source, chunk, num_routed_rows, PLAN: tl.constexpr):
    """(e,) first routed row of a chunk, and how many of its rows are kept.

    ``count`` is the chunk's, ``counts`` are of the first ``scan_rows`` chunks before it; others are loaded here.
    """
    sources = tl.arange(0, PLAN.sources)
    phase = tl.sum(tl.where(sources == source, phases, 0), axis=0)
    before = ((phases < phase) & (phases >= 0)) | ((phases == phase) & (sources < source))
    _, starts, _ = expert_segments(kept, PLAN)
    base = starts + tl.sum(tl.where(before[:, None], kept, 0), axis=0)
    of_source = tl.sum(tl.where((sources == source)[:, None], kept, 0), axis=0)
    earlier = tl.sum(counts, axis=0)
    for first in range(PLAN.scan_rows, chunk, PLAN.scan_rows):
        counts = load_counts(counts_ptr, first, chunk, PLAN.experts_local, PLAN.padded_experts, PLAN.scan_rows)
        earlier += tl.sum(counts, axis=0)
    earlier = tl.minimum(earlier, of_source)
    base += earlier
    return base, tl.maximum(tl.minimum(tl.minimum(count, of_source - earlier), num_routed_rows - base), 0)


@triton.jit
def place_rows(local, weight, position, place, base, count, plan, source, num_chunks, PLAN: tl.constexpr):
    """Write the received rows of a chunk and their routed rows; ``local`` is e in slots that are not ours."""
    slots = tl.arange(0, local.shape[1])[None, :]
    mine = local < PLAN.experts_local
    expert = tl.where(mine, local, 0)
    base = look_up(base, expert)
    kept = mine & (position >= 0) & (position < look_up(count, expert))
    in_list = (slots < PLAN.top_k) & (place < num_chunks * PLAN.chunk)[:, None]
    row = (source * (num_chunks * PLAN.chunk) + place)[:, None]
    tl.store(plan.row_slots + row * PLAN.top_k + slots, tl.where(kept, base + position, -1), mask=in_list)
    tl.store(plan.row_weights + row * PLAN.top_k + slots, tl.where(kept, weight, 0.0), mask=in_list)
    tl.store(plan.routed_row_ids + base + position, row + slots * 0, mask=kept)
    tl.store(plan.routed_slots + base + position, slots + row * 0, mask=kept)


@triton.jit
def place_sends(place, needed, plan, target, chunk, rank, num_chunks, PLAN: tl.constexpr):
    """Write the part of the send list of rank ``target`` that a chunk decides."""
    token = chunk * PLAN.chunk + tl.arange(0, PLAN.chunk)
    place = tl.where(target == rank, token, place)
    tl.store(plan.send_token_ids + target * (num_chunks * PLAN.chunk) + place, tl.where(needed, token, -1))
    tl.store(plan.send_rows + token * PLAN.world_size + target, tl.where(needed, place, -1))


@triton.jit
def place_segment(kept, phases, plan, expert, num_routed_rows, PLAN: tl.constexpr):
    """Write the tiles of an expert's segment, each among those of its phase and at its place, and mark its padding."""
    experts = tl.arange(0, PLAN.padded_experts)
    counts, starts, _ = expert_segments(kept, PLAN)
    counts = tl.maximum(tl.minimum(counts, num_routed_rows - starts), 0)
    start = tl.sum(tl.where(experts == expert, starts, 0), axis=0)
    count = tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    earlier = tl.zeros(counts.shape, dtype=tl.int32)
    for phase in range(PLAN.phases):
        until = tiles_until(kept, phases, counts, phase, PLAN)
        first_tile = tl.sum(tl.where(experts == expert, earlier, 0), axis=0)
        num_tiles = tl.sum(tl.where(experts == expert, until, 0), axis=0)
        entries = tl.sum(earlier, axis=0) + tl.sum(tl.where(experts < expert, until - earlier, 0), axis=0)
        for first in range(first_tile, num_tiles, TILES_AT_ONCE):
            tile = first + tl.arange(0, TILES_AT_ONCE)
            mask = tile < num_tiles
            rows = tl.minimum(count - tile * PLAN.block_rows, PLAN.block_rows)
            values = (expert, start + tile * PLAN.block_rows, rows, phase)
            for field in tl.static_range(4):
                value = values[field] + tile * 0
                tl.store(plan.tiles + (entries + tile - first_tile) * 4 + field, value, mask=mask)
                tl.store(plan.segment_tiles + (start // PLAN.block_rows + tile) * 4 + field, value, mask=mask)
        earlier = until
    row = count + tl.arange(0, PLAN.block_rows)
    mask = row < tl.cdiv(count, PLAN.block_rows) * PLAN.block_rows
    tl.store(plan.routed_row_ids + start + row, row * 0 - 1, mask=mask)
    tl.store(plan.routed_slots + start + row, row * 0 - 1, mask=mask)


@triton.jit
def place_totals(totals, kept, phases, plan, epoch, fault_ptr, num_routed_rows, PLAN: tl.constexpr):
    """Write the segment table, tile starts and status."""
    experts = tl.arange(0, PLAN.padded_experts)
    counts, starts, num_rows = expert_segments(kept, PLAN)
    counts = tl.maximum(tl.minimum(counts, num_routed_rows - starts), 0)
    tl.store(plan.segment_starts + experts, tl.minimum(starts, num_routed_rows), mask=experts < PLAN.experts_local)
    tl.store(plan.segment_counts + experts, counts, mask=experts < PLAN.experts_local)
    tl.store(plan.segment_starts + PLAN.experts_local, tl.minimum(num_rows, num_routed_rows))
    tl.store(plan.tile_starts, 0)
    for phase in range(PLAN.phases):
        tl.store(plan.tile_starts + phase + 1, tl.sum(tiles_until(kept, phases, counts, phase, PLAN), axis=0))
    tl.store(plan.status, num_rows)
    tl.store(plan.status + 1, tl.sum(tl.sum(totals - kept, axis=1), axis=0))
    tl.store(plan.status + 2, (num_rows > num_routed_rows).to(tl.int32))
    if num_rows > num_routed_rows:
        tl.store(fault_ptr + FAULT_ROWS_NEEDED, tl.cast(num_rows, tl.int64))
    tl.store(plan.status + 3, unless_failed(epoch, fault_ptr))


@triton.jit(do_not_specialize=["rank", "capacity", "num_routed_rows"])
def place_kernel(pool, scratch, plan, rank, capacity, num_routed_rows, M, PLAN: tl.constexpr):
    """Write the plan; ``pool``, ``scratch``, ``plan``: ``PoolTensors``, ``PlanScratch``, ``PlanTensors``.

    Each program issues all loads that it can before it computes: loads of a group overlap and cost one memory latency.
    """
    K: tl.constexpr = PLAN.top_k
    E: tl.constexpr = PLAN.experts_local
    num_chunks = M // PLAN.chunk
    num_pairs = PLAN.world_size * num_chunks  # pairs of a peer and a chunk
    program = tl.program_id(0)
    pair = program % num_pairs
    peer = pair // num_chunks
    chunk = pair - peer * num_chunks
    tokens = tl.arange(0, PLAN.chunk)
    sources = tl.arange(0, PLAN.sources)
    # Rows of this rank, then all others.
    phases = tl.where(sources < PLAN.world_size, (sources != rank).to(tl.int32), -1)
    epoch = tl.load(scratch.epoch)
    if program < num_pairs:
        buckets_ptr = scratch.recv_buckets + peer * num_chunks * PLAN.buckets
        buckets = load_counts(buckets_ptr, 0, num_chunks, PLAN.buckets, PLAN.buckets, PLAN.sum_block)
        ranks = tl.load(scratch.recv_ranks + pair * PLAN.chunk + tokens)
        counts_ptr = scratch.counts + peer * num_chunks * E
        counts = load_counts(counts_ptr, 0, chunk, E, PLAN.padded_experts, PLAN.scan_rows)
        experts = tl.arange(0, PLAN.padded_experts)
        count = tl.load(counts_ptr + chunk * E + experts, mask=experts < E, other=0)
        slots = tl.arange(0, triton.next_power_of_2(K))[None, :]
        offsets = chunk * (PLAN.chunk * K) + tokens[:, None] * K + slots
        # The position of a slot whose expert is not here was never written, and is not used.
        positions_ptr = scratch.positions + peer * num_chunks * (PLAN.chunk * K)
        position = tl.load(positions_ptr + offsets, mask=slots < K, other=0)
        _, kept = load_kept(scratch.totals, pool.fault, capacity, PLAN)
        block = ((epoch & 1) * PLAN.world_size + peer) * (M * PLAN.pool_top_k)
        local = load_local(pool.ids + block + chunk * (PLAN.chunk * K), rank // PLAN.tp * E, PLAN)
        starts, needed = start_buckets(buckets, buckets_ptr, chunk, num_chunks, PLAN)
        base, count = place_experts(kept, phases, counts, count, counts_ptr, peer, chunk, num_routed_rows, PLAN)
        weight = tl.load(pool.weights + block + offsets, mask=slots < K, other=0.0)
        places, _ = list_places(ranks, starts, PLAN)
        # Rows of this rank to itself do not travel.
        places = tl.where(peer == rank, chunk * PLAN.chunk + tokens, places)
        place_rows(local, weight, position, places, base, count, plan, peer, num_chunks, PLAN)
        if chunk == 0:
            tl.store(plan.recv_counts + peer, unless_failed(needed, pool.fault))
    elif program < 2 * num_pairs:
        shard = peer // PLAN.tp
        buckets_ptr = scratch.send_buckets + shard * num_chunks * PLAN.buckets
        buckets = load_counts(buckets_ptr, 0, num_chunks, PLAN.buckets, PLAN.buckets, PLAN.sum_block)
        ranks = tl.load(scratch.send_ranks + (shard * num_chunks + chunk) * PLAN.chunk + tokens)
        starts, needed = start_buckets(buckets, buckets_ptr, chunk, num_chunks, PLAN)
        places, is_needed = list_places(ranks, starts, PLAN)
        place_sends(places, is_needed, plan, peer, chunk, rank, num_chunks, PLAN)
        if chunk == 0:
            tl.store(plan.send_counts + peer, unless_failed(needed, pool.fault))
    else:
        totals, kept = load_kept(scratch.totals, pool.fault, capacity, PLAN)
        if program < 2 * num_pairs + E:
            place_segment(kept, phases, plan, program - 2 * num_pairs, num_routed_rows, PLAN)
        else:
            place_totals(totals, kept, phases, plan, epoch, pool.fault, num_routed_rows, PLAN)
            # The other programs read the plan's copy of the epoch, so this store races with none of their loads.
            tl.store(pool.epoch, epoch, mask=tl.load(pool.fault) == 0)
