"""The backward pass of several ranks on one device (``emulated_ranks``), by either implementation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from unittest.mock import patch

import torch
from emulated_ranks import Buffers, EmulatedCase, Kind, fresh, max_tokens, plans_of, play, unwritten
from layer1_launches import config_of, final_sums, layer1_in, make_buffers, partial_sums
from torch import Tensor

from comet.kernels.runtime.arguments import GradBuffer, SymmBuffer
from comet.layer import fused
from comet.layer.fused import launch_gemm_combine
from comet.layer.launch_arguments import returns_of, tile_table
from comet.layer.plan import Launch, Plan

Gradients = tuple[Tensor, Tensor]


def weights_in(kind: Kind) -> AbstractContextManager[object]:
    """Weight gradients in CUDA C++, where it can run, or in Triton."""
    return patch.object(fused, "runs_cuda", fused.runs_cuda if kind == "cuda" else lambda *_: False)


def inputs_of(case: EmulatedCase, rank: int, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate | up ``(Q, C)``, weights ``(e, C, D)`` and gradients of routing weights ``(R, K)`` of a rank.

    Rows of no expert are NaN, as whatever they hold.
    """
    generator = torch.Generator(case.device).manual_seed(200 + rank)
    shape = dict(generator=generator, device=case.device)
    rows = torch.full((plan.routed_row_ids.numel(), case.ffn_size), torch.nan, device=case.device)
    for start, count in zip(plan.segment_starts.tolist(), plan.segment_counts.tolist(), strict=False):
        rows[start : start + count] = torch.randn(count, case.ffn_size, **shape)
    w1 = torch.randn(case.num_experts // case.world_size, case.ffn_size, case.hidden_size, **shape)
    row_grads = torch.where(plan.row_slots >= 0, torch.randn(plan.row_slots.shape, **shape), 0.0)
    return rows.to(case.dtype), (w1 / case.ffn_size**0.5).to(case.dtype), row_grads


def launch(
    case: EmulatedCase, plans: list[Plan], receive_buffers: list[Tensor], rank: int, symm: SymmBuffer
) -> Gradients:
    """One launch of one rank: gradients of its tokens ``(T, D)`` and of their routing weights ``(T, K)``."""
    plan = fresh(plans[rank])
    rows, w1, row_grads = inputs_of(case, rank, plan)
    out, y = (unwritten(case, count, case.hidden_size) for count in (plan.num_tokens, rows.shape[0]))
    grads = GradBuffer(
        row_grads=row_grads,
        received=receive_buffers[rank],
        received_pointers=torch.tensor([each.data_ptr() for each in receive_buffers], device=case.device),
        out=torch.full((plan.num_tokens, case.top_k), torch.nan, device=case.device),
    )
    returns, table = returns_of(plan, weighted=False, grads=grads), tile_table(plan, Launch.DGRAD_COMBINE)
    launch_gemm_combine(rows, w1, y, out, symm, returns, table, config_of(case))
    return out, grads.out


def launch_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Gradients]]:
    """For ``play`` and ``fault_of``."""
    shape = case.world_size * max_tokens(case), case.top_k
    receive_buffers = [torch.full(shape, torch.nan, device=case.device) for _ in range(case.world_size)]
    return make_buffers(case), partial(launch, case, plans_of(case), receive_buffers)


def run_gradients(case: EmulatedCase, kind: Kind) -> list[Gradients]:
    """Both gradients of every rank."""
    with layer1_in(kind) as spy:
        outputs = play(case, *launch_alone(case))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    return outputs


def exact_gradients(case: EmulatedCase) -> list[list[Tensor]]:
    """Of every rank in float64: gradients of tokens, the sum of the absolute values added up, those of weights."""
    plans, partials = plans_of(case), []
    for rank, plan in enumerate(plans):
        rows, w1, row_grads = (tensor.double() for tensor in inputs_of(case, rank, plan))
        partials.append([*partial_sums(case, plan, rows, w1), row_grads])
    return final_sums(case, plans, partials)
