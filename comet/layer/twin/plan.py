"""The plan in plain torch: what the kernels of ``comet.kernels.plan.metadata`` compute, and the CPU's way to a plan.

Letters and row numbering as in ``comet.layer.plan``. ``exchange_ids`` and ``receive_ids`` move the ids,
``plan_tensors`` is a pure function of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.collectives import bad_ids, check_calls, check_ids
from comet.comm.signals import signal, wait
from comet.errors import CommTimeoutError
from comet.kernels.runtime.buffers import allocate, cut
from comet.kernels.runtime.faults import Place
from comet.kernels.runtime.limits import CHUNK_ROWS, num_buckets
from comet.layer.plan import PlanRules, num_counters
from comet.layer.workspace import Workspace
from comet.layout import ExpertLayout, positions_in_groups


def exchange_ids(ids: Tensor, weights: Tensor, workspace: Workspace, *, call: int) -> None:
    """Write this rank's ids ``(T, K)`` and weights ``(T, K)`` into every rank's pool and signal; -1 past T."""
    rank, epoch = workspace.comm.rank, int(workspace.epoch) + 1
    num_tokens, top_k = ids.shape
    for peer in range(workspace.comm.world_size):
        peer_ids = _half(workspace.ids.peers[peer], epoch, top_k)[rank]
        peer_ids[:num_tokens] = ids
        peer_ids[num_tokens:] = -1
        _half(workspace.weights.peers[peer], epoch, top_k)[rank, :num_tokens] = weights
        workspace.calls.peers[peer][epoch & 1, rank] = call
        # The whole block is written at once, so the flag of its first chunk speaks for all.
        signal(workspace.ids_flags.peers[peer], rank * _chunks(workspace), epoch)


def receive_ids(ids: Tensor, layout: ExpertLayout, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Wait for the ids of all ranks and advance the epoch; ids and weights ``(W, M, K)`` as they lie in the pool."""
    epoch = int(workspace.epoch) + 1
    for source in range(workspace.comm.world_size):
        first = source * _chunks(workspace)
        try:
            wait_flag(workspace, workspace.ids_flags.local, first, epoch, source, f"{Place.EXCHANGE.words}, chunk 0")
        except CommTimeoutError as late:
            raise CommTimeoutError(workspace.explained(str(late), Place.EXCHANGE, source, epoch)) from None
    workspace.epoch.fill_(epoch)
    check_calls(workspace.calls.local[epoch & 1].tolist(), "tokens, top_k_weights, w1 or w2")
    received = _half(workspace.ids.local, epoch, layout.top_k)
    check_ids(bad_ids(received, layout).flatten(1).sum(1).tolist(), ids, layout)
    return received, _half(workspace.weights.local, epoch, layout.top_k)


def wait_flag(workspace: Workspace, flags: Tensor, index: int, epoch: int, peer: int, place: str) -> None:
    """Wait until ``peer`` has raised one of this rank's flags to ``epoch``."""
    comm = workspace.comm
    wait(flags, index, epoch, rank=comm.rank, peer=peer, place=place, timeout_s=comm.timeout_s, check=comm.board.check)


def _half(region: Tensor, epoch: int, top_k: int) -> Tensor:
    """The half ``(W, M, K)`` of a region ``(2, W, M, K_pool)`` that an epoch uses; every source's block is dense."""
    ranks, tokens = region.shape[1:3]
    return region[epoch & 1].view(ranks, -1)[:, : tokens * top_k].view(ranks, tokens, top_k)


def _chunks(workspace: Workspace) -> int:
    return workspace.max_tokens // CHUNK_ROWS


def plan_tensors(ids: Tensor, weights: Tensor, layout: ExpertLayout, rules: PlanRules) -> dict[str, Tensor]:
    """The tensor fields of one rank's ``comet.layer.plan.Plan``, by name.

    Args:
        ids: ``(W, M, K)`` int32 ids of all ranks; -1 in masked slots and past the tokens of a rank.
        weights: ``(W, M, K)`` float32.
    """
    local = ids - layout.first_expert
    mine = (local >= 0) & (local < layout.experts_local)
    needed = mine.any(dim=2)
    row_ids = torch.arange(needed.numel()).view(needed.shape)
    place = _places(buckets(local, mine, layout.experts_local)) + row_ids[:, :1]
    # Rows of this rank to itself do not travel: row and token are the same.
    place[layout.rank] = row_ids[layout.rank]
    source, token, slot = mine.nonzero(as_tuple=True)
    expert, row = local[source, token, slot].long(), place[source, token]
    kept = positions_in_groups(expert, layout.experts_local)[0] < rules.expert_capacity
    group = expert * layout.num_phases + (source != layout.rank)
    table, routed = _segments(group[kept], int((~kept).sum()), layout, rules)
    fits = routed < rules.max_routed_rows
    chosen = kept.nonzero()[:, 0][fits]
    weight = weights[source, token, slot][chosen]
    routed, row, slot = routed[fits], row[chosen], slot[chosen]
    shape = (needed.numel(), ids.shape[2])
    tensors = {
        **_send_lists(ids[layout.rank], layout),
        **table,
        "recv_counts": needed.sum(1).int(),
        "row_slots": _scatter(shape, (row, slot), routed.int(), -1),
        "row_weights": _scatter(shape, (row, slot), weight, 0.0),
        "routed_row_ids": _scatter((rules.max_routed_rows,), (routed,), row.int(), -1),
        "routed_slots": _scatter((rules.max_routed_rows,), (routed,), slot.int(), -1),
        "counters": torch.zeros(num_counters(*ids.shape[:2]), dtype=torch.int32),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    memory = allocate(shapes, ids.device)
    for name, place in cut(memory, shapes).items():
        tensors[name] = place.view(tensors[name].dtype).copy_(tensors[name])
    return tensors | {"memory": memory}


def buckets(local: Tensor, mine: Tensor, experts_local: int) -> Tensor:
    """Bucket of each token at a rank: which of its experts needs the token first, in steps; the last: none does.

    Example: 8 local experts make 15 buckets and the last: tokens whose first expert is 0, 1, 7 or none are in buckets
    0, 1, 13 and 15.

    Args:
        local: ``(..., K)`` expert ids relative to the rank's first.
        experts_local: e.
    """
    last = num_buckets(experts_local) - 1
    first = torch.where(mine, local, experts_local).amin(dim=-1).long()
    return torch.where(first < experts_local, first * last // experts_local, last)


def _places(buckets: Tensor) -> Tensor:
    return buckets.argsort(dim=-1, stable=True).argsort(dim=-1)


def _segments(
    group: Tensor, num_dropped: int, layout: ExpertLayout, rules: PlanRules
) -> tuple[dict[str, Tensor], Tensor]:
    """Tables of the segments, and the routed row of each element of ``group`` (expert * P + phase); may lie past Q."""
    block_rows, limit, experts_local = rules.block_rows, rules.max_routed_rows, layout.experts_local
    positions, sizes = positions_in_groups(group, experts_local * layout.num_phases)
    until = sizes.view(experts_local, layout.num_phases).cumsum(1)
    starts = torch.zeros(experts_local + 1, dtype=torch.int64)
    torch.cumsum((until[:, -1] + block_rows - 1) // block_rows * block_rows, 0, out=starts[1:])
    used = starts.clamp(max=limit)
    counts = torch.minimum(until[:, -1], limit - used[:-1])
    num_rows = int(starts[-1])
    table = {
        "segment_starts": used.int(),
        "segment_counts": counts.int(),
        **_tiles(used[:-1], counts, until, rules),
        "status": torch.tensor([num_rows, num_dropped, num_rows > limit, 0], dtype=torch.int32),
    }
    first = (starts[:-1, None] + until).flatten() - sizes
    return table, first[group] + positions


def _tiles(starts: Tensor, counts: Tensor, until: Tensor, rules: PlanRules) -> dict[str, Tensor]:
    """Tile tables and tile starts from each expert's first row, rows, and rows until each phase ``(e, P)``."""
    block_rows = rules.block_rows
    num_tiles = (counts + block_rows - 1) // block_rows
    experts = torch.arange(counts.numel()).repeat_interleave(num_tiles)
    index = torch.arange(experts.numel()) - (num_tiles.cumsum(0) - num_tiles)[experts]
    valid = (counts[experts] - index * block_rows).clamp(max=block_rows)
    # A tile is computed in the phase of its last row.
    phases = (until[experts] <= (index * block_rows + valid - 1)[:, None]).sum(1)
    entries = torch.stack((experts, starts[experts] + index * block_rows, valid, phases), dim=1).int()
    unused = torch.zeros(rules.max_routed_rows // block_rows - len(entries), 4, dtype=torch.int32)
    tile_starts = torch.zeros(until.shape[1] + 1, dtype=torch.int32)
    tile_starts[1:] = torch.bincount(phases, minlength=until.shape[1]).cumsum(0)
    return {
        "tiles": torch.cat((entries[phases.argsort(stable=True)], unused)),
        "segment_tiles": torch.cat((entries, unused)),
        "tile_starts": tile_starts,
    }


def _scatter(shape: tuple[int, ...], places: tuple[Tensor, ...], values: Tensor, fill: float) -> Tensor:
    return torch.full(shape, fill, dtype=values.dtype).index_put_(places, values)


def _send_lists(ids: Tensor, layout: ExpertLayout) -> dict[str, Tensor]:
    max_tokens, ranks = ids.shape[0], layout.world_size
    local = ids[:, None] - layout.experts_local * torch.arange(layout.ep)[:, None]
    bucket = buckets(local, (local >= 0) & (local < layout.experts_local), layout.experts_local)
    bucket = bucket.repeat_interleave(layout.tp, dim=1)
    going = bucket < num_buckets(layout.experts_local) - 1
    places = _places(bucket.T).T.contiguous()
    places[:, layout.rank] = torch.arange(max_tokens)
    token, rank = going.nonzero(as_tuple=True)
    send_token_ids = torch.full((ranks, max_tokens), -1, dtype=torch.int32)
    send_token_ids[rank, places[token, rank]] = token.int()
    return {
        "send_token_ids": send_token_ids,
        "send_counts": going.sum(0).int(),
        "send_rows": places.masked_fill_(~going, -1).int(),
    }
