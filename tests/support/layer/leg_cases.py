"""Legs between nodes whose ranks are all in one process."""

import torch

from comet.kernels.network.legs import Leg
from comet.kernels.runtime.faults import Place
from comet.kernels.runtime.limits import CHUNK_ROWS, LEG_HEADER

MOST, COLUMNS, TIMEOUT_NS = 2 * CHUNK_ROWS, 16, 40_000_000  # 2,000 polls


def make_legs(
    num_nodes: int,
    top_k: int,
    *,
    is_home: bool,
    ring: int | None = None,
    epoch: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Leg]:
    """One leg of a rank in each node."""
    slots, ints, longs = num_nodes - 1, dict(dtype=torch.int32, device=device), dict(dtype=torch.int64, device=device)
    ring = ring or slots
    words = [torch.full((ring, LEG_HEADER + MOST * 2 * top_k), -7, **ints) for _ in range(num_nodes)]
    rows = [torch.full((ring, MOST, COLUMNS), torch.nan, dtype=dtype, device=device) for _ in range(num_nodes)]
    flags = [torch.zeros(slots, 1 + MOST // CHUNK_ROWS, 2, **ints) for _ in range(num_nodes)]
    targets = [torch.tensor([each.data_ptr() for each in of], **longs) for of in (words, rows, flags)]
    return [
        Leg(
            words=words[node], rows=rows[node], flags=flags[node], word_targets=targets[0], row_targets=targets[1],
            flag_targets=targets[2], epoch=torch.tensor([epoch], **ints), fault=torch.zeros(8, **longs),
            inner_fault=torch.zeros(8, **longs), node=node, timeout_ns=TIMEOUT_NS,
            place=Place.SUMS if is_home else Place.GUESTS,
        )
        for node in range(num_nodes)
    ]  # fmt: skip
