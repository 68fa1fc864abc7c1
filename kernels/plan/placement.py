"""Last step of the plan on the device: from counts and in-chunk positions to addresses (see ``metadata``).

Programs of ``place_kernel``, W*C each for received rows and sent tokens, e for segments, one for everything small:

    [0, W*C)                    received and routed rows of a (source, chunk); first chunks: rows received
    [W*C, 2*W*C)                send list of a (destination, chunk); first chunks: rows sent
    [2*W*C, 2*W*C + e)          tiles and padding of an expert's segment
    2*W*C + e                   segment table, tile starts, status, epoch

A *list* (rows received from one source, tokens sent to one rank) is ordered by wave, then token. The wave of a token
says which of the receiving rank's experts needs it first, so that rows arrive in the order in which layer 0 goes
through the experts; tokens that are not needed there form the last wave.

A rank of which a wait has met its deadline gets a plan without rows, none to compute, to send or to return, and stays
at its epoch (see ``primitives``).
"""

import triton
import triton.language as tl

from ..runtime.primitives import FAULT_ROWS_NEEDED
from .counting import load_local


@triton.jit
def load_counts(counts_ptr, first, end, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, WIDTH): counts ``(chunks, WIDTH)`` of the chunks from ``first`` on, 0 from ``end`` on."""
    chunks = first + tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, WIDTH_PAD)[None, :]
    return tl.load(counts_ptr + chunks * WIDTH + columns, mask=(chunks < end) & (columns < WIDTH), other=0)


@triton.jit
def start_waves(counts, counts_ptr, chunk, num_chunks, WAVES: tl.constexpr, BLOCK: tl.constexpr):
    """(waves,) place in the list of the first token of each wave that a chunk holds; needed tokens of the list.

    ``counts`` are those of the first BLOCK chunks, the others are loaded here.
    """
    blocks = tl.arange(0, BLOCK)[:, None]
    before = tl.sum(tl.where(blocks < chunk, counts, 0), axis=0)
    total = tl.sum(counts, axis=0)
    for first in range(BLOCK, num_chunks, BLOCK):
        counts = load_counts(counts_ptr, first, num_chunks, WAVES, WAVES, BLOCK)
        before += tl.sum(tl.where(first + blocks < chunk, counts, 0), axis=0)
        total += tl.sum(counts, axis=0)
    needed = tl.sum(tl.where(tl.arange(0, WAVES) < WAVES - 1, total, 0), axis=0)
    return tl.cumsum(total, axis=0) - total + before, needed


@triton.jit
def list_places(ranks, starts, CHUNK: tl.constexpr, WAVES: tl.constexpr):
    """Place of each token of a chunk in its list, and whether the token is needed."""
    waves = ranks // CHUNK
    return tl.gather(starts, waves, 0) + ranks % CHUNK, waves < WAVES - 1


@triton.jit
def look_up(table, index, CHUNK: tl.constexpr, K_PAD: tl.constexpr):
    """(CHUNK, K): elements of a vector at an index."""
    flat = tl.gather(table, tl.reshape(index, (CHUNK * K_PAD,)), 0)
    return tl.reshape(flat, (CHUNK, K_PAD))


@triton.jit
def unless_failed(value, fault_ptr):
    """``value``, but 0 once a wait of this rank met its deadline; none is under way beside this kernel."""
    return tl.where(tl.load(fault_ptr) == 0, value, 0)


@triton.jit
def load_kept(
    totals_ptr, fault_ptr, capacity,
    WORLD: tl.constexpr, W_PAD: tl.constexpr, E_LOCAL: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """(W, e): routed rows of each source, and how many of them the capacity keeps.

    None once a wait met its deadline: ids that came after they were counted are not those that the counts are of.
    """
    sources = tl.arange(0, W_PAD)[:, None]
    experts = tl.arange(0, E_PAD)[None, :]
    mask = (sources < WORLD) & (experts < E_LOCAL)
    totals = tl.load(totals_ptr + sources * E_LOCAL + experts, mask=mask, other=0)
    totals = unless_failed(totals, fault_ptr)
    lower = tl.cumsum(totals, axis=0) - totals
    return totals, tl.minimum(totals, tl.maximum(capacity - lower, 0))


@triton.jit
def expert_segments(kept, BLOCK_ROWS: tl.constexpr):
    """(e,) valid rows and first row of each expert's segment, and the rows of all segments with their padding."""
    counts = tl.sum(kept, axis=0)
    padded = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    return counts, tl.cumsum(padded, axis=0) - padded, tl.sum(padded, axis=0)


@triton.jit
def tiles_until(kept, phases, counts, phase, BLOCK_ROWS: tl.constexpr):
    """(e,) tiles of each expert whose last row belongs to ``phase`` or an earlier one.

    With 300 rows, 100 of them in phase 0, and tiles of 128 rows: 0 tiles until phase 0, 3 until phase 1.
    """
    rows = tl.sum(tl.where(((phases <= phase) & (phases >= 0))[:, None], kept, 0), axis=0)
    return tl.where(rows >= counts, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, rows // BLOCK_ROWS)


@triton.jit
def place_experts(
    kept, phases, counts, count, counts_ptr, source, chunk, num_routed_rows,
    E_LOCAL: tl.constexpr, E_PAD: tl.constexpr, W_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, SCAN_ROWS: tl.constexpr,
):  # fmt: skip
    """(e,) first routed row of a chunk, and how many of its rows are kept.

    ``count`` is the chunk's, ``counts`` are those of the first SCAN_ROWS chunks before it, the others are loaded here.
    """
    sources = tl.arange(0, W_PAD)
    phase = tl.sum(tl.where(sources == source, phases, 0), axis=0)
    before = ((phases < phase) & (phases >= 0)) | ((phases == phase) & (sources < source))
    _, starts, _ = expert_segments(kept, BLOCK_ROWS)
    base = starts + tl.sum(tl.where(before[:, None], kept, 0), axis=0)
    of_source = tl.sum(tl.where((sources == source)[:, None], kept, 0), axis=0)
    earlier = tl.sum(counts, axis=0)
    for first in range(SCAN_ROWS, chunk, SCAN_ROWS):
        earlier += tl.sum(load_counts(counts_ptr, first, chunk, E_LOCAL, E_PAD, SCAN_ROWS), axis=0)
    earlier = tl.minimum(earlier, of_source)
    base += earlier
    return base, tl.maximum(tl.minimum(tl.minimum(count, of_source - earlier), num_routed_rows - base), 0)


@triton.jit
def place_rows(
    local, weight, position, place, base, count, row_slots, row_weights, routed_row_ids, routed_slots,
    source, num_chunks,
    K: tl.constexpr, E_LOCAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the received rows of a chunk and their routed rows; ``local`` is E_LOCAL in slots that are not ours."""
    K_PAD: tl.constexpr = local.shape[1]
    slots = tl.arange(0, K_PAD)[None, :]
    mine = local < E_LOCAL
    expert = tl.where(mine, local, 0)
    base = look_up(base, expert, CHUNK, K_PAD)
    kept = mine & (position >= 0) & (position < look_up(count, expert, CHUNK, K_PAD))
    in_list = (slots < K) & (place < num_chunks * CHUNK)[:, None]
    row = (source * (num_chunks * CHUNK) + place)[:, None]
    tl.store(row_slots + row * K + slots, tl.where(kept, base + position, -1), mask=in_list)
    tl.store(row_weights + row * K + slots, tl.where(kept, weight, 0.0), mask=in_list)
    tl.store(routed_row_ids + base + position, row + slots * 0, mask=kept)
    tl.store(routed_slots + base + position, slots + row * 0, mask=kept)


@triton.jit
def place_sends(
    place, needed, send_token_ids, send_rows, target, chunk, rank, num_chunks, WORLD: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the part of the send list of rank ``target`` that a chunk decides."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    place = tl.where(target == rank, token, place)
    tl.store(send_token_ids + target * (num_chunks * CHUNK) + place, tl.where(needed, token, -1))
    tl.store(send_rows + token * WORLD + target, tl.where(needed, place, -1))


@triton.jit
def place_segment(
    kept, phases, routed_row_ids, routed_slots, tiles, segment_tiles, expert, num_routed_rows,
    E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of an expert's segment, each among those of its phase and at its place, and mark its padding."""
    experts = tl.arange(0, E_PAD)
    counts, starts, _ = expert_segments(kept, BLOCK_ROWS)
    counts = tl.maximum(tl.minimum(counts, num_routed_rows - starts), 0)
    start = tl.sum(tl.where(experts == expert, starts, 0), axis=0)
    count = tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    earlier = tl.zeros((E_PAD,), dtype=tl.int32)
    for phase in range(P):
        until = tiles_until(kept, phases, counts, phase, BLOCK_ROWS)
        first_tile = tl.sum(tl.where(experts == expert, earlier, 0), axis=0)
        num_tiles = tl.sum(tl.where(experts == expert, until, 0), axis=0)
        entries = tl.sum(earlier, axis=0) + tl.sum(tl.where(experts < expert, until - earlier, 0), axis=0)
        for first in range(first_tile, num_tiles, TILE_BLOCK):
            tile = first + tl.arange(0, TILE_BLOCK)
            mask = tile < num_tiles
            values = (expert, start + tile * BLOCK_ROWS, tl.minimum(count - tile * BLOCK_ROWS, BLOCK_ROWS), phase)
            for field in tl.static_range(4):
                value = values[field] + tile * 0
                tl.store(tiles + (entries + tile - first_tile) * 4 + field, value, mask=mask)
                tl.store(segment_tiles + (start // BLOCK_ROWS + tile) * 4 + field, value, mask=mask)
        earlier = until
    row = count + tl.arange(0, BLOCK_ROWS)
    mask = row < tl.cdiv(count, BLOCK_ROWS) * BLOCK_ROWS
    tl.store(routed_row_ids + start + row, row * 0 - 1, mask=mask)
    tl.store(routed_slots + start + row, row * 0 - 1, mask=mask)


@triton.jit
def place_totals(
    totals, kept, phases, segment_starts, segment_counts, tile_starts, status, fault_ptr, num_routed_rows,
    E_LOCAL: tl.constexpr, E_PAD: tl.constexpr, P: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write the segment table, tile starts and status."""
    experts = tl.arange(0, E_PAD)
    counts, starts, num_rows = expert_segments(kept, BLOCK_ROWS)
    counts = tl.maximum(tl.minimum(counts, num_routed_rows - starts), 0)
    tl.store(segment_starts + experts, tl.minimum(starts, num_routed_rows), mask=experts < E_LOCAL)
    tl.store(segment_counts + experts, counts, mask=experts < E_LOCAL)
    tl.store(segment_starts + E_LOCAL, tl.minimum(num_rows, num_routed_rows))
    tl.store(tile_starts, 0)
    for phase in range(P):
        tl.store(tile_starts + phase + 1, tl.sum(tiles_until(kept, phases, counts, phase, BLOCK_ROWS), axis=0))
    tl.store(status, num_rows)
    tl.store(status + 1, tl.sum(tl.sum(totals - kept, axis=1), axis=0))
    tl.store(status + 2, (num_rows > num_routed_rows).to(tl.int32))
    if num_rows > num_routed_rows:
        tl.store(fault_ptr + FAULT_ROWS_NEEDED, tl.cast(num_rows, tl.int64))
    tl.store(status + 3, 0)


@triton.jit(do_not_specialize=["rank", "capacity", "num_routed_rows"])
def place_kernel(
    ids_ptr, weights_ptr, epoch_ptr, fault_ptr, plan_epoch_ptr, totals_ptr, counts_ptr, recv_waves_ptr,
    send_waves_ptr, recv_ranks_ptr, send_ranks_ptr, positions_ptr, rank, capacity, num_routed_rows, M,
    send_token_ids, send_counts, send_rows, recv_counts, row_slots, row_weights, routed_row_ids,
    routed_slots, segment_starts, segment_counts, tiles, segment_tiles, tile_starts, status,
    K: tl.constexpr, POOL_K: tl.constexpr, E_LOCAL: tl.constexpr, E_PAD: tl.constexpr, EP: tl.constexpr,
    TP: tl.constexpr, W_PAD: tl.constexpr, P: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    SCAN_ROWS: tl.constexpr, SUM_BLOCK: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """See the module; arguments without ``_ptr`` are the tensor fields of ``comet.layer.plan.Plan``.

    Every program loads all that it can before it computes anything: loads that nothing stands between travel together,
    and whatever needs one of them waits for it, so each group of loads costs one way to memory and back.
    """
    WORLD: tl.constexpr = EP * TP
    num_chunks = M // CHUNK
    num_pairs = WORLD * num_chunks  # of a peer and a chunk
    program = tl.program_id(0)
    pair = program % num_pairs
    peer = pair // num_chunks
    chunk = pair - peer * num_chunks
    tokens = tl.arange(0, CHUNK)
    sources = tl.arange(0, W_PAD)
    phases = tl.where(sources < WORLD, (sources != rank).to(tl.int32), -1)  # rows of this rank, then all others
    epoch = tl.load(plan_epoch_ptr)
    if program < num_pairs:
        waves_ptr = recv_waves_ptr + peer * num_chunks * WAVES
        waves = load_counts(waves_ptr, 0, num_chunks, WAVES, WAVES, SUM_BLOCK)
        ranks = tl.load(recv_ranks_ptr + pair * CHUNK + tokens)
        counts_ptr += peer * num_chunks * E_LOCAL
        counts = load_counts(counts_ptr, 0, chunk, E_LOCAL, E_PAD, SCAN_ROWS)
        experts = tl.arange(0, E_PAD)
        count = tl.load(counts_ptr + chunk * E_LOCAL + experts, mask=experts < E_LOCAL, other=0)
        slots = tl.arange(0, triton.next_power_of_2(K))[None, :]
        offsets = chunk * (CHUNK * K) + tokens[:, None] * K + slots
        # Of a slot whose expert is not here nobody has written the position; it is not used.
        position = tl.load(positions_ptr + peer * num_chunks * (CHUNK * K) + offsets, mask=slots < K, other=0)
        _, kept = load_kept(totals_ptr, fault_ptr, capacity, WORLD, W_PAD, E_LOCAL, E_PAD)
        block = ((epoch & 1) * WORLD + peer) * (M * POOL_K)
        local = load_local(ids_ptr + block + chunk * (CHUNK * K), rank // TP * E_LOCAL, K, CHUNK, E_LOCAL)
        starts, needed = start_waves(waves, waves_ptr, chunk, num_chunks, WAVES, SUM_BLOCK)
        base, count = place_experts(
            kept, phases, counts, count, counts_ptr, peer, chunk, num_routed_rows,
            E_LOCAL, E_PAD, W_PAD, BLOCK_ROWS, SCAN_ROWS,
        )  # fmt: skip
        weight = tl.load(weights_ptr + block + offsets, mask=slots < K, other=0.0)
        places, _ = list_places(ranks, starts, CHUNK, WAVES)
        # Rows of this rank to itself do not travel.
        places = tl.where(peer == rank, chunk * CHUNK + tokens, places)
        place_rows(
            local, weight, position, places, base, count, row_slots, row_weights, routed_row_ids,
            routed_slots, peer, num_chunks, K, E_LOCAL, CHUNK,
        )  # fmt: skip
        if chunk == 0:
            tl.store(recv_counts + peer, unless_failed(needed, fault_ptr))
    elif program < 2 * num_pairs:
        shard = peer // TP
        waves_ptr = send_waves_ptr + shard * num_chunks * WAVES
        waves = load_counts(waves_ptr, 0, num_chunks, WAVES, WAVES, SUM_BLOCK)
        ranks = tl.load(send_ranks_ptr + (shard * num_chunks + chunk) * CHUNK + tokens)
        starts, needed = start_waves(waves, waves_ptr, chunk, num_chunks, WAVES, SUM_BLOCK)
        places, is_needed = list_places(ranks, starts, CHUNK, WAVES)
        place_sends(places, is_needed, send_token_ids, send_rows, peer, chunk, rank, num_chunks, WORLD, CHUNK)
        if chunk == 0:
            tl.store(send_counts + peer, unless_failed(needed, fault_ptr))
    else:
        totals, kept = load_kept(totals_ptr, fault_ptr, capacity, WORLD, W_PAD, E_LOCAL, E_PAD)
        if program < 2 * num_pairs + E_LOCAL:
            place_segment(
                kept, phases, routed_row_ids, routed_slots, tiles, segment_tiles,
                program - 2 * num_pairs, num_routed_rows, E_PAD, P, BLOCK_ROWS, 64,
            )  # fmt: skip
        else:
            place_totals(
                totals, kept, phases, segment_starts, segment_counts, tile_starts, status, fault_ptr, num_routed_rows,
                E_LOCAL, E_PAD, P, BLOCK_ROWS,
            )  # fmt: skip
            # The other programs read the plan's copy of the epoch, so this store races with nobody.
            tl.store(epoch_ptr, epoch, mask=tl.load(fault_ptr) == 0)
