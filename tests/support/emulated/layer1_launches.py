"""Layer 1 of several ranks on one device (``emulated_ranks``), by either of the two implementations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from emulated_ranks import (
    Buffers,
    Counted,
    EmulatedCase,
    Kind,
    fault_of,
    fresh,
    launched_in,
    max_tokens,
    plans_of,
    play,
    sent_after,
)
from torch import Tensor

from comet.kernels.layer import gemm_combine as cuda_module
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import CHUNK_FLAGS, COMBINE_CHUNK_ROWS, Wire, power_of_2
from comet.layer.fused import launch_gemm_combine
from comet.layer.launch_arguments import returns_of, tile_table
from comet.layer.plan import Launch, Plan


@contextmanager
def layer1_in(kind: Kind) -> Iterator[Counted]:
    """Layer 1 in CUDA C++ or in Triton; yields what counts the launches of the former."""
    with launched_in(kind, cuda_module, "gemm_combine_cuda") as spy:
        yield spy


def make_buffers(case: EmulatedCase) -> Buffers:
    """Where partial sums land."""
    return Buffers.allocate(case, max_tokens(case) // COMBINE_CHUNK_ROWS, CHUNK_FLAGS)


def expert_inputs(case: EmulatedCase, rank: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Hidden ``(Q, C)`` and weights ``(e, D, C)`` of a rank."""
    generator = torch.Generator(case.device).manual_seed(100 + rank)
    experts = case.num_experts // case.world_size
    hidden = torch.randn(num_rows, case.ffn_size, generator=generator, device=case.device)
    w2 = torch.randn(experts, case.hidden_size, case.ffn_size, generator=generator, device=case.device)
    return hidden.to(case.dtype), (w2 / case.ffn_size**0.5).to(case.dtype)


def launch(case: EmulatedCase, plans: list[Plan], rank: int, wire: Wire) -> Tensor:
    """One launch of one rank: its output ``(T, D)``."""
    plan = fresh(plans[rank])
    hidden, w2 = expert_inputs(case, rank, plan.routed_row_ids.numel())
    out = torch.full((plan.num_tokens, case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    y = torch.full((hidden.shape[0], case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    config = GemmCombineConfig(
        comm_blocks=case.comm_blocks,
        num_panels=case.num_panels,
        num_stages=3,
        move_cols=256,
        block_k=min(64, power_of_2(case.ffn_size)),
    )
    returns, table = returns_of(plan, weighted=True), tile_table(plan, Launch.GEMM_COMBINE)
    launch_gemm_combine(hidden, w2, y, out, wire, returns, table, config)
    return out


def run_layer1(case: EmulatedCase, kind: Kind) -> list[Tensor]:
    """Output ``(T, D)`` of every rank."""
    with layer1_in(kind) as spy:
        outputs = play(case, make_buffers(case), partial(launch, case, plans_of(case)))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    return outputs


def layer1_alone(case: EmulatedCase, deadline_ns: int) -> list[int]:
    """The record of a fault that rank 0 leaves when no other rank ever comes."""
    return fault_of(case, make_buffers(case), partial(launch, case, plans_of(case)), deadline_ns)


def sent_after_a_fault(case: EmulatedCase) -> list[tuple[int, int]]:
    """Values that rank 0 stored for each other rank, and flags that it raised there, if a wait had failed before."""
    return sent_after(case, make_buffers(case), partial(launch, case, plans_of(case)))


def exact_layer1(case: EmulatedCase) -> list[tuple[Tensor, Tensor]]:
    """Output ``(T, D)`` of every rank in float64, and the sum of the absolute values of what was added up."""
    plans = plans_of(case)
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
