"""Inputs and checks for the grouped GEMM kernels and SwiGLU's backward, shared by the interpreter and the GPU tests."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comet.kernels.gemm.activation import activation_backward
from comet.kernels.gemm.bias import add_bias_products, bias_gradient
from comet.kernels.gemm.gather_rows import OwnRows, gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm, group_gemm_torch
from comet.kernels.gemm.wgrad import group_gemm_wgrad
from comet.kernels.gemm.wgrad_cuda import group_gemm_wgrad_cuda
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.kernels.runtime.arguments import TileTable
from comet.layer.twin.layer import Twin
from comet.schedule.settings import LayerSettings

NAN = float("nan")


@dataclass(frozen=True)
class Rows:
    table: TileTable
    slots: Tensor
    segment_starts: Tensor
    segment_counts: Tensor
    num_received: int
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.table.row_ids.numel()

    @property
    def segments(self) -> tuple[Tensor, Tensor]:
        return self.segment_starts, self.segment_counts

    def plan(self, row_weights: Tensor | None = None) -> Any:
        """Return a plan with the fields that the twin reads."""
        rows = dict(routed_row_ids=self.table.row_ids, routed_slots=self.slots, row_weights=row_weights)
        return SimpleNamespace(**rows, segment_starts=self.segment_starts, segment_counts=self.segment_counts)


def make_table(tiles: Tensor, num_tiles: Tensor, row_ids: Tensor, block_rows: int) -> TileTable:
    """A tile table whose counters must not be touched."""
    counters = torch.empty(0, dtype=torch.int32, device=tiles.device)
    return TileTable(tiles=tiles, num_tiles=num_tiles, row_ids=row_ids, counters=counters, block_rows=block_rows)


def make_rows(counts: list[list[int]], block_rows: int, device: str, seed: int) -> Rows:
    """Lay out ``counts[phase][expert]`` routed rows as the plan does; each (received row, slot) is used at most once.

    Padding has row id and slot -1; tiles behind the last one hold numbers that must never be followed.
    """
    generator = random.Random(seed)
    total = sum(map(sum, counts))
    top_k, num_received = 3, max(1, total)
    pairs = generator.sample([(row, slot) for row in range(num_received) for slot in range(top_k)], total)
    row_ids: list[int] = []
    slots: list[int] = []
    tiles: list[list[int]] = []
    starts: list[int] = []
    for phase, of_phase in enumerate(counts):
        for expert, count in enumerate(of_phase):
            starts.append(len(row_ids))
            for first in range(0, count, block_rows):
                valid = min(block_rows, count - first)
                tiles.append([expert, len(row_ids), valid, phase])
                chosen = [pairs.pop() for _ in range(valid)] + [(-1, -1)] * (block_rows - valid)
                row_ids += [row for row, _ in chosen]
                slots += [slot for _, slot in chosen]
    num_tiles = len(tiles)
    tiles += [[2**30, 2**30, block_rows, 9]] * 2
    row_ids += [-1] * block_rows  # capacity beyond the rows used
    slots += [-1] * block_rows

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = make_table(ints(tiles).reshape(-1, 4), ints([num_tiles]), ints(row_ids), block_rows)
    flat = [count for of_phase in counts for count in of_phase]
    return Rows(table, ints(slots), ints([*starts, len(row_ids) - block_rows]), ints(flat), num_received, top_k)


def random_counts(generator: random.Random, num_phases: int, num_experts: int, most: int) -> list[list[int]]:
    """Rows per phase and expert; about a third of the segments are empty."""
    return [
        [0 if generator.random() < 0.3 else generator.randint(1, most) for _ in range(num_experts)]
        for _ in range(num_phases)
    ]


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / 2).to(dtype).to(device)


def twin(activation: Activation = SWIGLU) -> Twin:
    """Return a ``Twin`` without a pool: it can multiply and activate."""
    made = object.__new__(Twin)
    made.settings = LayerSettings(activation=activation)
    return made


def valid_mask(rows: Rows) -> Tensor:
    return rows.table.row_ids >= 0


def poison_padding(tensor: Tensor, rows: Rows) -> Tensor:
    tensor[~valid_mask(rows)] = NAN
    return tensor


def assert_as_good(name: str, got: Tensor, twin: Tensor, exact: Tensor, *, chain: int = 4) -> None:
    """``got`` is at most twice as far from the float64 result as the same-dtype torch result, plus rounding.

    ``chain`` additions in the dtype one after the other round like a random walk of half units; 4 of them are one unit.
    """
    assert not torch.isnan(exact).any(), f"{name}: the test itself produced NaN"
    error = (got.double() - exact).abs()
    worst = error.nan_to_num(nan=float("inf")).max().item() if error.numel() else 0.0
    twin_error = (twin.double() - exact).abs().max().item() if error.numel() else 0.0
    unit = torch.finfo(got.dtype).eps * (exact.abs().max().item() if error.numel() else 0.0)
    where = torch.nonzero(error == error.max())[:1].tolist() if error.numel() else []
    assert worst <= 2 * twin_error + unit * chain**0.5 / 2, (
        f"{name}: error {worst:.3e} at {where}, torch {twin_error:.3e}, unit {unit:.3e}"
    )


def chain_of(contraction: int, dtype: torch.dtype) -> int:
    """Additions one after the other in the kernels' float32; 16-bit results hide them behind their own rounding."""
    return max(contraction, 4) if dtype == torch.float32 else 4


def check_group_gemm(
    rows: Rows, num_experts: int, shape: tuple[int, int], dtype: torch.dtype, gather: bool, layout: str,
    config: GemmConfig, seed: int, device: str,
) -> None:  # fmt: skip
    """Compare with the twin and with float64; rows that are not valid keep what they held."""
    n, k = shape
    if gather:
        a = values((rows.num_received, k), dtype, device, seed)
    else:
        a = poison_padding(values((rows.num_rows, k), dtype, device, seed), rows)
    b = values((num_experts, n, k) if layout == "nk" else (num_experts, k, n), dtype, device, seed + 1)
    outs = [torch.full((rows.num_rows, n), 77.0, dtype=kind, device=device) for kind in (dtype, dtype, torch.float64)]
    group_gemm(a, b, outs[0], rows.table, gather=gather, layout=layout, config=config)
    group_gemm_torch(a, b, outs[1], rows.table, gather=gather, layout=layout, config=config)
    group_gemm_torch(a.double(), b.double(), outs[2], rows.table, gather=gather, layout=layout, config=config)
    assert (outs[0][~valid_mask(rows)] == 77).all(), "a row that is not valid was written"
    where = f"group_gemm {layout} gather={gather} N,K={shape} {dtype} seed={seed}"
    assert_as_good(where, *outs, chain=chain_of(k, dtype))


def check_gather(rows: Rows, width: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """Check that valid rows are copied, also from ``OwnRows``, and that other rows keep their values.

    Rows that must not be read are NaN: rows that no tile names, and received rows that ``OwnRows`` replace.
    """
    received, valid = values((rows.num_received, width), dtype, device, seed), valid_mask(rows)
    used = torch.zeros(rows.num_received, dtype=torch.bool, device=device)
    used[rows.table.row_ids[valid].long()] = True
    received[~used] = NAN
    first, last = rows.num_received // 3, rows.num_received // 2
    own = OwnRows(rows=received[first:last].clone(), first=first)
    apart = received.clone()
    apart[first:last] = NAN
    wanted = torch.full((rows.num_rows, width), 77.0, dtype=dtype, device=device)
    outs = [wanted.clone() for _ in range(2)]
    wanted[valid] = received[rows.table.row_ids[valid].long()]
    gather_rows(received, outs[0], rows.table.row_ids, rows.table)
    gather_rows(apart, outs[1], rows.table.row_ids, rows.table, own)
    assert all(torch.equal(out, wanted) for out in outs), f"gather_rows {width} {dtype} seed={seed}"


def wgrad_operands(rows: Rows, shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> list[Tensor]:
    """Two of so many columns, NaN in all padding."""
    return [
        poison_padding(values((rows.num_rows, width), dtype, device, seed + place), rows)
        for place, width in enumerate(shape)
    ]


def check_wgrad(
    rows: Rows, shape: tuple[int, int], dtype: torch.dtype, config: GemmConfig, seed: int, device: str
) -> Tensor:
    """Compare with the twin and with float64; every segment is an expert's. The kernel's result."""
    operands = wgrad_operands(rows, shape, dtype, seed, device)
    out = torch.full((len(rows.segment_counts), *shape), NAN, dtype=dtype, device=device)
    group_gemm_wgrad(*operands, out, *rows.segments, config=config)
    same, exact = (
        twin().fc2_wgrad(*(each.to(kind) for each in operands), rows.plan()) for kind in (dtype, torch.float64)
    )
    where = f"wgrad {shape} {dtype} seed={seed}"
    assert_as_good(where, out, same, exact, chain=chain_of(int(rows.segment_counts.max()), dtype))
    assert (out[rows.segment_counts == 0] == 0).all(), "an expert without rows must get zeros"
    return out


def check_wgrad_cuda(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype, max_blocks: int | None = None
) -> None:
    """In CUDA C++: equal to Triton's twice, which is near the twin, and nothing written before or behind."""
    rows = make_rows([counts], 128, "cuda", len(counts))
    operands = wgrad_operands(rows, shape, dtype, 3, "cuda")
    wanted = check_wgrad(rows, shape, dtype, GemmConfig.select(dtype), 3, "cuda")
    for _ in range(2):
        out = torch.full((len(counts) + 2, *shape), 77.0, dtype=dtype, device="cuda")
        ticket = torch.zeros(1, dtype=torch.int32, device="cuda")
        group_gemm_wgrad_cuda(*operands, out[1:-1], *rows.segments, ticket, max_blocks=max_blocks)
        assert torch.equal(out[1:-1], wanted), f"not Triton's: {counts} {shape} {dtype}"
        assert (out[[0, -1]] == 77).all()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def check_activation_backward(
    rows: Rows, ffn: int, dtype: torch.dtype, seed: int, device: str, activation: Activation = SWIGLU
) -> None:
    """Compare with the twin and with float64; padding and uncovered routing weights keep what they held."""
    pre = poison_padding(4 * values((rows.num_rows, 2 * ffn), dtype, device, seed), rows)
    grad_act = poison_padding(values((rows.num_rows, ffn), dtype, device, seed + 1), rows)
    weights = values((rows.num_received, rows.top_k), torch.float32, device, seed + 2)
    found = [torch.full_like(like, 77.0) for like in (pre, grad_act, weights)]
    activation_backward(pre, grad_act, rows.slots, weights, rows.table, *found, activation)
    same, exact = (
        twin(activation).activation_backward(pre.to(kind), grad_act.to(kind), rows.plan(weights.to(wide_type(kind))))
        for kind in (dtype, torch.float64)
    )
    covered, valid = covered_slots(rows), valid_mask(rows)
    for name, *tensors in zip(("grad_pre", "hidden", "grad_weights"), found, same, exact, strict=True):
        touched = covered if name == "grad_weights" else valid
        assert (tensors[0][~touched] == 77).all(), f"{name}: an entry that belongs to no routed row was written"
        where = f"activation_backward {name} F={ffn} {activation.name} {dtype} seed={seed}"
        assert_as_good(where, *(each[touched] for each in tensors))


def covered_slots(rows: Rows) -> Tensor:
    """``(R, K)``: which received row and slot belong to a routed row."""
    covered = torch.zeros(rows.num_received, rows.top_k, dtype=torch.bool, device=rows.slots.device)
    valid = valid_mask(rows)
    covered[rows.table.row_ids[valid].long(), rows.slots[valid].long()] = True
    return covered


def check_biases(rows: Rows, width: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """Gradients of both biases and of the routing weights, which keep what they held where there is no routed row; the
    padding is NaN, and a second run gives the same bits.
    """
    given = poison_padding(values((rows.num_rows, width), dtype, device, seed), rows)
    weights, held = (values((rows.num_received, rows.top_k), torch.float32, device, seed + each) for each in (1, 2))
    bias = values((len(rows.segment_counts), width), dtype, device, seed + 3)
    runs = []
    for _ in range(2):
        b1_grad, b2_grad, products = torch.full_like(bias, NAN), torch.full_like(bias, NAN), held.clone()
        bias_gradient(given, b1_grad, rows.segments, None)
        bias_gradient(given, b2_grad, rows.segments, (rows.table.row_ids, rows.slots, weights))
        add_bias_products(given, bias, rows.slots, rows.table, products)
        runs.append((b1_grad, b2_grad, products))
    assert all(map(torch.equal, *runs)), "other bits in another run"
    wanted = []
    for kind in (dtype, torch.float64):
        added = held.to(wide_type(kind), copy=True)
        plan, of_kind = rows.plan(weights.to(wide_type(kind))), given.to(kind)
        wanted.append((*twin().bias_backward(of_kind, of_kind, bias.to(kind), added, plan), added))
    for found in runs[0][:2]:
        assert (found[rows.segment_counts == 0] == 0).all(), "an expert without rows must get zeros"
    assert torch.equal(runs[0][2][~covered_slots(rows)], held[~covered_slots(rows)]), "an entry of no routed row"
    chains = [chain_of(int(rows.segment_counts.max()), dtype)] * 2 + [chain_of(width, torch.float32)]
    names = "b1", "b2", "routing weights"
    for name, chain, *tensors in zip(names, chains, runs[0], *wanted, strict=True):
        assert_as_good(f"gradient of {name}, N={width} {dtype} seed={seed}", *tensors, chain=chain)
