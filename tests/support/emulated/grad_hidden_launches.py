"""Gradients of hidden of several ranks on one device (``emulated_ranks``), by either of the two implementations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from emulated_ranks import Buffers, EmulatedCase, Kind, fresh, launched_in, plans_of, play, unwritten
from layer0_launches import check_flags, landed, make_buffers
from layer_cases import rank_inputs
from torch import Tensor

from comet.kernels.layer import dispatch_gemm as cuda_module
from comet.kernels.runtime.arguments import SymmBuffer
from comet.layer.fused import launch_fc2_dgrad
from comet.layer.launch_arguments import sends_of, tile_table
from comet.layer.plan import Launch, Plan


@dataclass(frozen=True)
class Gradients:
    """Of the routed rows of a rank's experts: gradients of their outputs ``(N, D)`` and of their hidden ``(N, F)``."""

    rows: Tensor
    hidden: Tensor


grad_hidden_in = partial(launched_in, module=cuda_module, function="fc2_dgrad_cuda")


def grads_of(case: EmulatedCase, rank: int) -> Tensor:
    """``(T, D)``: gradients of a rank's outputs."""
    return rank_inputs(case, rank).grad_output.to(case.device)


def expert_weights(case: EmulatedCase, rank: int) -> Tensor:
    """``(e, D, F)`` of a rank."""
    generator = torch.Generator(case.device).manual_seed(300 + rank)
    shape = (case.num_experts // case.world_size, case.hidden_size, case.ffn_size)
    return (torch.randn(shape, generator=generator, device=case.device) / case.hidden_size**0.5).to(case.dtype)


def launch(
    case: EmulatedCase, plans: list[Plan], rank: int, symm: SymmBuffer, *, apart: Collection[int] = ()
) -> Gradients:
    """One launch of one rank: results of all routed rows, NaN where nothing was written; ranks ``apart`` in Triton."""
    plan, grad_y, w2 = fresh(plans[rank]), grads_of(case, rank), expert_weights(case, rank)
    grads, out = (unwritten(case, plan.routed_row_ids.numel(), cols) for cols in (case.hidden_size, case.ffn_size))
    table = tile_table(plan, Launch.DISPATCH_DGRAD)
    with grad_hidden_in("triton") if rank in apart else nullcontext():
        launch_fc2_dgrad(grad_y, w2, grads, out, symm, sends_of(plan), table, plan.tiles)
    return Gradients(grads, out)


def launch_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Gradients]]:
    """For ``fault_of`` and ``sent_after``."""
    return make_buffers(case), partial(launch, case, plans_of(case))


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


def check(case: EmulatedCase, found: list[Gradients], what: str) -> None:
    """Gradients of outputs are copies; those of hidden are rounded once, of sums in float32."""
    rounding = 1.1 * torch.finfo(case.dtype).eps / 2
    summing = case.hidden_size / 8 * torch.finfo(torch.float32).eps / 2  # 16 products are added at once, or lost bits
    plans = plans_of(case)
    for rank, (plan, result) in enumerate(zip(plans, found, strict=True)):
        rows = landed(case, plans, rank, grads_of)[plan.routed_row_ids[plan.routed_row_ids >= 0].long()]
        assert torch.equal(result.rows, rows), f"{what}: gradients of outputs, rank {rank} of {case}"
        pairs = list(zip(rows.double().split(plan.segment_counts.tolist()), expert_weights(case, rank), strict=True))
        exact = torch.cat([a @ w.double() for a, w in pairs])
        size = torch.cat([a.abs() @ w.double().abs() for a, w in pairs])
        excess = (result.hidden.double() - exact).abs() - (rounding * exact.abs() + summing * size + 1e-7)
        assert bool((excess <= 0).all()), f"{what}: gradient of hidden, rank {rank} of {case}: {excess.max()} beyond"
