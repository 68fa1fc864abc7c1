"""Layer 1 of several ranks on one device, each rank over its own buffers, by either of the two implementations.

A launch takes the whole GPU, so ranks run one after the other, twice. Flags of other ranks pretend from the start that
everything has arrived: in the first round a rank adds up whatever is there, but what it sends arrives; in the second
round all partial sums are there. A rank's flags of its own are raised by the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal
from unittest.mock import patch

import torch
from layer_cases import MASKED, LayerCase, rank_inputs
from torch import Tensor

from comet.kernels import gemm_combine as gemm_combine_module
from comet.kernels import gemm_combine_cuda as cuda_module
from comet.kernels.arguments import COMBINE_CHUNK_ROWS, MAX_PANELS, Returns, TileTable, Wire, power_of_2
from comet.kernels.gemm_combine import GemmCombineConfig, gemm_combine
from comet.layout import CHUNK_ROWS, ExpertLayout, round_up
from comet.plan import Plan, plan_from_ids, routed_row_capacity

Kind = Literal["cuda", "triton"]
DEADLINE_NS = 10_000_000_000
EPOCH = 7


@dataclass(frozen=True)
class Layer1Case(LayerCase):
    """A layer whose layer 1 is launched, on one device; experts are not split (TP = 1)."""

    dtype: torch.dtype = torch.bfloat16
    block_rows: int = 128
    device: str = "cuda"


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.call_count = function, 0

    def __call__(self, *arguments: object) -> None:
        self.call_count += 1
        self.function(*arguments)


@contextmanager
def layer1_in(kind: Kind) -> Iterator[Counted]:
    """Layer 1 of any size in CUDA C++ or in Triton; yields what counts the launches of the former."""
    least = 0 if kind == "cuda" else 1 << 62
    spy = Counted(cuda_module.gemm_combine_cuda)
    with (
        patch.object(cuda_module, "LEAST_PRODUCTS", least),
        patch.object(cuda_module, "MOST_DEPTH", 1 << 62),
        patch.object(gemm_combine_module, "gemm_combine_cuda", spy),
    ):
        yield spy


def routing_of(case: Layer1Case) -> tuple[Tensor, Tensor]:
    """Ids ``(W, M, K)`` int32 and weights float32 of all ranks, masked past the tokens of a rank."""
    shape = (case.world_size, max_tokens(case), case.top_k)
    ids, weights = torch.full(shape, MASKED, dtype=torch.int32), torch.zeros(shape)
    for rank, num_tokens in enumerate(case.num_tokens):
        inputs = rank_inputs(case, rank)
        ids[rank, :num_tokens], weights[rank, :num_tokens] = inputs.top_k_ids, inputs.top_k_weights
    return ids, weights


def max_tokens(case: Layer1Case) -> int:
    """M."""
    return round_up(max(1, *case.num_tokens), CHUNK_ROWS)


def plan_of(case: Layer1Case, rank: int) -> Plan:
    """The rank's plan, on the device."""
    ids, weights = routing_of(case)
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    plan = plan_from_ids(
        ids,
        weights,
        layout,
        num_tokens=case.num_tokens[rank],
        overlap=replace(case.overlap, num_phases=min(case.num_phases, case.world_size)),
        expert_capacity=None,
        max_routed_rows=routed_row_capacity(layout, max_tokens(case), case.block_rows, None),
    )
    tensors = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return replace(plan, **{name: t.to(case.device) for name, t in tensors.items() if isinstance(t, Tensor)})


@dataclass(frozen=True)
class Buffers:
    """What the other ranks write to."""

    rows: list[Tensor]
    flags: list[Tensor]

    @classmethod
    def allocate(cls, case: Layer1Case) -> Buffers:
        """Rows of NaN, so that nothing counts that was not sent, and flags of an earlier epoch."""
        world_size, most = case.world_size, max_tokens(case)
        shape = (world_size, most // COMBINE_CHUNK_ROWS, MAX_PANELS)
        ranks = range(world_size)
        return cls(
            rows=[
                torch.full((world_size * most, case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
                for _ in ranks
            ],
            flags=[torch.full(shape, EPOCH - 1, dtype=torch.int32, device=case.device) for _ in ranks],
        )

    def pretend(self) -> None:
        """Let the partial sums of other ranks look as if they had arrived, and none of a rank's own."""
        for rank, flags in enumerate(self.flags):
            flags.fill_(EPOCH)
            flags[rank] = EPOCH - 1

    def wire(self, rank: int, case: Layer1Case, fault: Tensor, deadline_ns: int) -> Wire:
        """As rank ``rank`` sees them."""
        rows, flags = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=case.device)
            for tensors in (self.rows, self.flags)
        )
        return Wire(
            rows=self.rows[rank],
            row_pointers=rows,
            flags=self.flags[rank],
            flag_pointers=flags,
            epoch=torch.tensor([EPOCH], dtype=torch.int32, device=case.device),
            fault=fault,
            rank=rank,
            max_tokens=max_tokens(case),
            timeout_ns=deadline_ns,
        )


def expert_inputs(case: Layer1Case, rank: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Hidden ``(Q, C)`` and weights ``(e, D, C)`` of a rank."""
    generator = torch.Generator(case.device).manual_seed(100 + rank)
    experts = case.num_experts // case.world_size
    hidden = torch.randn(num_rows, case.ffn_size, generator=generator, device=case.device)
    w2 = torch.randn(experts, case.hidden_size, case.ffn_size, generator=generator, device=case.device)
    return hidden.to(case.dtype), (w2 / case.ffn_size**0.5).to(case.dtype)


def launch(case: Layer1Case, rank: int, buffers: Buffers, deadline_ns: int = DEADLINE_NS) -> tuple[Tensor, Tensor]:
    """One launch of one rank: its output ``(T, D)`` and its record of a fault."""
    plan = plan_of(case, rank)
    hidden, w2 = expert_inputs(case, rank, plan.routed_row_ids.numel())
    fault = torch.zeros(8, dtype=torch.int64, device=case.device)
    out = torch.full((plan.num_tokens, case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    table = TileTable(
        tiles=plan.segment_tiles,
        num_tiles=plan.tile_starts[-1:].clone(),
        row_ids=plan.routed_row_ids,
        counters=torch.zeros(32, dtype=torch.int32, device=case.device),
        block_rows=plan.block_rows,
        segments=(plan.segment_starts, plan.segment_counts),
    )
    returns = Returns(
        row_slots=plan.row_slots,
        row_weights=plan.row_weights,
        send_rows=plan.send_rows,
        recv_counts=plan.recv_counts,
    )
    y = torch.full((hidden.shape[0], case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    config = GemmCombineConfig(
        num_panels=case.num_panels, beside=True, num_stages=3, move_cols=256, block_k=min(64, power_of_2(case.ffn_size))
    )
    gemm_combine(hidden, w2, y, out, buffers.wire(rank, case, fault, deadline_ns), returns, table, config)
    if case.device == "cuda":
        torch.cuda.synchronize()
    return out, fault


def run_layer1(case: Layer1Case, kind: Kind) -> list[Tensor]:
    """Output ``(T, D)`` of every rank."""
    buffers, results = Buffers.allocate(case), []
    with layer1_in(kind) as spy:
        for _ in range(2):
            buffers.pretend()
            results = [launch(case, rank, buffers) for rank in range(case.world_size)]
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    for rank, (_, fault) in enumerate(results):
        assert not fault.any(), f"rank {rank}: {fault.tolist()}"
    return [out for out, _ in results]


def exact_layer1(case: Layer1Case) -> list[tuple[Tensor, Tensor]]:
    """Output ``(T, D)`` of every rank in float64, and the sum of the absolute values of what was added up."""
    plans = [plan_of(case, rank) for rank in range(case.world_size)]
    shape = (case.world_size * max_tokens(case), case.hidden_size)
    partials = []
    for rank, plan in enumerate(plans):
        hidden, w2 = (tensor.double() for tensor in expert_inputs(case, rank, plan.routed_row_ids.numel()))
        sums = torch.zeros(2, *shape, dtype=torch.float64, device=case.device)
        for expert, (start, count) in enumerate(zip(plan.segment_starts, plan.segment_counts, strict=False)):
            rows = torch.arange(int(start), int(start + count), device=case.device)
            y = hidden[rows] @ w2[expert].T
            received, slots = plan.routed_row_ids[rows].long(), plan.routed_slots[rows].long()
            weighted = y * plan.row_weights[received, slots].double()[:, None]
            sums[0].index_add_(0, received, weighted)
            sums[1].index_add_(0, received, weighted.abs())
        partials.append(sums)
    outputs = []
    for rank, plan in enumerate(plans):
        found = torch.zeros(2, case.num_tokens[rank], case.hidden_size, dtype=torch.float64, device=case.device)
        for peer, sums in enumerate(partials):
            row = plan.send_rows[: case.num_tokens[rank], peer].long()
            sent = row >= 0
            found[:, sent] += sums[:, rank * max_tokens(case) + row[sent]]
        outputs.append((found[0], found[1]))
    return outputs
