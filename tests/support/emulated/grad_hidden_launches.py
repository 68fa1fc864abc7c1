"""Gradients of hidden of several ranks on one device (``emulated_ranks``), by either of the two implementations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from emulated_ranks import (
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
from layer0_launches import check_flags, make_buffers
from layer_cases import rank_inputs
from torch import Tensor

from comet.kernels.layer import dispatch_gemm as cuda_module
from comet.kernels.runtime.arguments import Wire
from comet.layer.fused import launch_fc2_dgrad
from comet.layer.launch_arguments import sends_of, tile_table
from comet.layer.plan import Launch, Plan


@dataclass(frozen=True)
class Gradients:
    """Of the routed rows of a rank's experts: gradients of their outputs ``(N, D)`` and of their hidden ``(N, F)``."""

    rows: Tensor
    hidden: Tensor


@contextmanager
def grad_hidden_in(kind: Kind) -> Iterator[Counted]:
    """Launches in CUDA C++ or in Triton; yields what counts the former."""
    with launched_in(kind, cuda_module, "fc2_dgrad_cuda") as spy:
        yield spy


def inputs_of(case: EmulatedCase, rank: int) -> tuple[Tensor, Tensor]:
    """Gradients ``(T, D)`` of a rank's outputs and its weights ``(e, D, F)``."""
    generator = torch.Generator(case.device).manual_seed(300 + rank)
    shape = (case.num_experts // case.world_size, case.hidden_size, case.ffn_size)
    w2 = torch.randn(shape, generator=generator, device=case.device) / case.hidden_size**0.5
    return rank_inputs(case, rank).grad_output.to(case.device), w2.to(case.dtype)


def launch(case: EmulatedCase, plans: list[Plan], rank: int, wire: Wire, *, apart: Collection[int] = ()) -> Gradients:
    """One launch of one rank: results of all routed rows, NaN where nothing was written; ranks ``apart`` in Triton."""
    plan, (grad_y, w2) = fresh(plans[rank]), inputs_of(case, rank)
    rows = plan.routed_row_ids.numel()
    grads, out = (
        torch.full((rows, cols), torch.nan, dtype=case.dtype, device=case.device)
        for cols in (case.hidden_size, case.ffn_size)
    )
    table = tile_table(plan, Launch.DISPATCH_DGRAD)
    with grad_hidden_in("triton") if rank in apart else nullcontext():
        launch_fc2_dgrad(grad_y, w2, grads, out, wire, sends_of(plan), table, plan.tiles)
    return Gradients(grads, out)


def run_grad_hidden(case: EmulatedCase, kind: Kind, *, apart: Collection[int] = ()) -> list[Gradients]:
    """The rows of each rank's experts, after a look at who received what, and what was left alone."""
    plans, buffers = plans_of(case), make_buffers(case)
    with grad_hidden_in(kind) as spy:
        found = play(case, buffers, partial(launch, case, plans, apart=apart))
    in_cuda = kind == "cuda"
    assert spy.call_count == (2 * (case.world_size - len(apart)) if in_cuda else 0), case
    for rank, plan in enumerate(plans):
        if in_cuda and rank not in apart:
            check_flags(case, plans, buffers, rank)
            own = buffers.rows[rank].view(case.world_size, -1, case.hidden_size)[rank]
            assert own.isnan().all(), f"own rows of rank {rank} of {case} have travelled"
        assert found[rank].rows[int(plan.segment_starts[-1]) :].isnan().all(), f"rows of no tile, rank {rank} of {case}"
    return [of_experts(plan, result) for plan, result in zip(plans, found, strict=True)]


def of_experts(plan: Plan, found: Gradients) -> Gradients:
    """What was found in the rows that belong to an expert."""
    mine = plan.routed_row_ids >= 0
    return Gradients(found.rows[mine], found.hidden[mine])


def landed(case: EmulatedCase, plans: list[Plan], rank: int) -> Tensor:
    """Received gradients ``(R, D)`` of a rank with its own among them, NaN where there is none."""
    shape = (case.world_size, max_tokens(case), case.hidden_size)
    rows = torch.full(shape, torch.nan, dtype=case.dtype, device=case.device)
    for source, plan in enumerate(plans):
        sent, _ = inputs_of(case, source)
        if source != rank:
            sent = sent[plan.send_token_ids[rank, : int(plan.send_counts[rank])].long()]
        rows[source, : len(sent)] = sent
    return rows.flatten(0, 1)


def check(case: EmulatedCase, found: list[Gradients], what: str) -> None:
    """Gradients of outputs are copies; those of hidden are rounded once, of sums in float32."""
    rounding = 1.1 * torch.finfo(case.dtype).eps / 2
    summing = case.hidden_size / 8 * torch.finfo(torch.float32).eps / 2  # 16 products are added at once, or lost bits
    plans = plans_of(case)
    for rank, (plan, result) in enumerate(zip(plans, found, strict=True)):
        rows = landed(case, plans, rank)[plan.routed_row_ids[plan.routed_row_ids >= 0].long()]
        assert torch.equal(result.rows, rows), f"{what}: gradients of outputs, rank {rank} of {case}"
        pairs = list(zip(rows.double().split(plan.segment_counts.tolist()), inputs_of(case, rank)[1], strict=True))
        exact = torch.cat([a @ w.double() for a, w in pairs])
        size = torch.cat([a.abs() @ w.double().abs() for a, w in pairs])
        excess = (result.hidden.double() - exact).abs() - (rounding * exact.abs() + summing * size + 1e-7)
        assert bool((excess <= 0).all()), f"{what}: gradient of hidden, rank {rank} of {case}: {excess.max()} beyond"


def alone(case: EmulatedCase, deadline_ns: int) -> list[int]:
    """The record of a fault that rank 0 leaves when no other rank ever comes."""
    return fault_of(case, make_buffers(case), partial(launch, case, plans_of(case)), deadline_ns)


def sent_after_a_fault(case: EmulatedCase) -> list[tuple[int, int]]:
    """Values that rank 0 stored for each other rank, and flags that it raised there, if a wait had failed before."""
    return sent_after(case, make_buffers(case), partial(launch, case, plans_of(case)))
