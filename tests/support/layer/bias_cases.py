"""The gradients that biases add, against their twins and float64."""

from __future__ import annotations

import torch
from gemm_cases import Rows, assert_as_good, chain_of, poison_padding, valid_mask, values

from comet.kernels.gemm.bias import add_bias_products, add_bias_products_torch, bias_gradient, bias_gradient_torch


def check_bias_gradient(rows: Rows, width: int, dtype: torch.dtype, seed: int, device: str, *, weighted: bool) -> None:
    """Of weighted and of plain rows; the padding is NaN, and a second run gives the same bits."""
    given = poison_padding(values((rows.num_rows, width), dtype, device, seed), rows)
    weights = values((rows.num_received, rows.top_k), torch.float32, device, seed + 1)
    segments, experts = (rows.segment_starts, rows.segment_counts), len(rows.segment_counts)
    results = []
    twin = bias_gradient_torch
    for fn, kind in ((bias_gradient, dtype), (bias_gradient, dtype), (twin, dtype), (twin, torch.float64)):
        out = torch.full((experts, width), torch.nan, dtype=kind, device=device)
        wide = weights.double() if kind == torch.float64 else weights
        fn(given.to(kind), out, segments, (rows.table.row_ids, rows.slots, wide) if weighted else None)
        results.append(out)
    first, second, same, exact = results
    assert torch.equal(first, second), "other bits in another run"
    assert (first[rows.segment_counts == 0] == 0).all(), "an expert without rows must get zeros"
    longest = int(rows.segment_counts.max())
    where = f"bias gradient N={width} {dtype} weighted={weighted} seed={seed}"
    assert_as_good(where, first, same, exact, chain=chain_of(longest, dtype))


def check_bias_products(rows: Rows, width: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """Entries of no routed row keep what they held."""
    given = poison_padding(values((rows.num_rows, width), dtype, device, seed), rows)
    bias = values((len(rows.segment_counts), width), dtype, device, seed + 1)
    held = values((rows.num_received, rows.top_k), torch.float32, device, seed + 2)
    got, twin, exact = held.clone(), held.clone(), held.double()
    add_bias_products(given, bias, rows.slots, rows.table, got)
    add_bias_products_torch(given, bias, rows.slots, rows.table, twin)
    add_bias_products_torch(given.double(), bias.double(), rows.slots, rows.table, exact)
    valid = valid_mask(rows)
    covered = torch.zeros(held.shape, dtype=torch.bool, device=device)
    covered[rows.table.row_ids[valid].long(), rows.slots[valid].long()] = True
    assert torch.equal(got[~covered], held[~covered]), "an entry that belongs to no routed row was written"
    where = f"bias products N={width} {dtype} seed={seed}"
    assert_as_good(where, got, twin, exact, chain=chain_of(width, torch.float32))
