"""What launches of emulated ranks record: whether it is what there was to do."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from comet.kernels.runtime.limits import CHUNK_ROWS, COMBINE_CHUNK_ROWS
from comet.kernels.runtime.recorder import (
    KIND_DISPATCH,
    KIND_FINAL_SUM,
    KIND_LAYER0_TILE,
    KIND_LAYER1_TILE,
    KIND_REDUCE,
    Recorder,
)
from comet.layer.plan import Plan

Items = set[tuple[int, int, int]]


def recorded_items(recorder: Recorder, epoch: int) -> dict[int, Items]:
    """The three numbers of every work item, by its kind, after a look at counts, epochs and times."""
    events = recorder.events
    assert int(events[:, 0, 0].max()) <= recorder.capacity, "more events than there is room for"
    there = torch.arange(recorder.capacity, device=events.device) < events[:, :1, 0]
    found = events[:, 1:][there]
    begin, ready, end = found[:, 6:].contiguous().view(torch.int64).T
    assert ((begin <= ready) & (ready <= end)).all()
    kinds, epochs, _, *numbers = found[:, :6].T.tolist()
    assert set(epochs) <= {epoch}
    items: dict[int, Items] = {}
    for kind, *item in zip(kinds, *numbers, strict=True):
        items.setdefault(kind, set()).add(tuple(item))
    return items


def check_layer0_events(plan: Plan, recorder: Recorder, epoch: int, *, num_cols: int | None = None) -> None:
    """Every chunk that was sent, and items of every expert with rows: all column blocks, ``num_cols`` where it counts.

    Items name a tile of rows of an expert, or of the plan's tiles, whose numbers go from 0 on either way.
    """
    items, rank = recorded_items(recorder, epoch), plan.layout.rank
    counts = enumerate(plan.send_counts.tolist())
    chunks = {(to, chunk) for to, count in counts if to != rank for chunk in range(-(-count // CHUNK_ROWS))}
    assert {item[:2] for item in items.get(KIND_DISPATCH.value, ())} == chunks
    tiles = items.get(KIND_LAYER0_TILE.value, set())
    check_products(plan, {item[:2] for item in tiles}, num_cols)


def check_layer1_events(plan: Plan, recorder: Recorder, epoch: int, *, num_cols: int, num_panels: int) -> None:
    """Every column block of every expert with rows in one panel, and every reduce and sum of each panel."""
    items, panels = recorded_items(recorder, epoch), range(num_panels)
    tiles = items.get(KIND_LAYER1_TILE.value, set())
    check_products(plan, {item[:2] for item in tiles}, num_cols)
    panel_of = {(col, panel) for _, col, panel in tiles}
    if tiles:
        assert len(panel_of) == num_cols, "a column block belongs to one panel"
        assert sorted({panel for _, panel in panel_of}) == list(panels)
        assert [panel for _, panel in sorted(panel_of)] == sorted(panel for _, panel in panel_of), "from left to right"
    rows = plan.recv_counts.tolist()
    rows[plan.layout.rank] = plan.max_tokens  # of its own all that there may be
    chunks = [(source, chunk) for source, count in enumerate(rows) for chunk in range(-(-count // COMBINE_CHUNK_ROWS))]
    assert items.get(KIND_REDUCE.value, set()) == {(*chunk, panel) for chunk, panel in product(chunks, panels)}
    summed = {
        (token, panel)
        for first, count, panel in items.get(KIND_FINAL_SUM.value, set())
        for token in range(first, min(first + count, plan.num_tokens))
    }
    assert summed == set(product(range(plan.num_tokens), panels))


def check_products(plan: Plan, tiles: set[tuple[int, int]], num_cols: int | None) -> None:
    """Tiles of all experts with rows, in each all columns."""
    if num_cols is None:
        num_cols = 1 + max((col for _, col in tiles), default=-1)
    found = set(zip(experts_of(plan, [tile for tile, _ in tiles]), [col for _, col in tiles], strict=True))
    with_rows = plan.segment_counts.nonzero().flatten().tolist()
    assert found == set(product(with_rows, range(num_cols)))


def experts_of(plan: Plan, tiles: list[int]) -> list[int]:
    """The expert that each tile of rows belongs to."""
    first_rows = torch.tensor([tile * plan.block_rows for tile in tiles]).to(plan.segment_starts)
    experts: Tensor = torch.searchsorted(plan.segment_starts[1:], first_rows, right=True)
    return experts.tolist()
