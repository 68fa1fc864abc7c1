"""The backward pass of several ranks on one device (``emulated_ranks``), by either implementation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from unittest.mock import patch

import torch
from emulated_ranks import EmulatedCase, Kind, fault_of, fresh, max_tokens, plans_of, play
from layer1_launches import layer1_in, make_buffers
from torch import Tensor

from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import GradWire, Wire, power_of_2
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


def launch(case: EmulatedCase, plans: list[Plan], landings: list[Tensor], rank: int, wire: Wire) -> Gradients:
    """One launch of one rank: gradients of its tokens ``(T, D)`` and of their routing weights ``(T, K)``."""
    plan = fresh(plans[rank])
    rows, w1, row_grads = inputs_of(case, rank, plan)
    out = torch.full((plan.num_tokens, case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    y = torch.full((rows.shape[0], case.hidden_size), torch.nan, dtype=case.dtype, device=case.device)
    grads = GradWire(
        row_grads=row_grads,
        landing=landings[rank],
        landing_pointers=torch.tensor([each.data_ptr() for each in landings], device=case.device),
        out=torch.full((plan.num_tokens, case.top_k), torch.nan, device=case.device),
    )
    config = GemmCombineConfig(
        comm_blocks=case.comm_blocks,
        num_panels=case.num_panels,
        num_stages=3,
        move_cols=256,
        block_k=min(64, power_of_2(case.ffn_size)),
    )
    returns = returns_of(plan, weighted=False, grads=grads)
    launch_gemm_combine(rows, w1, y, out, wire, returns, tile_table(plan, Launch.DGRAD_COMBINE), config)
    return out, grads.out


def _launcher(case: EmulatedCase) -> partial[Gradients]:
    ranks = range(case.world_size)
    shape = case.world_size * max_tokens(case), case.top_k
    return partial(launch, case, plans_of(case), [torch.full(shape, torch.nan, device=case.device) for _ in ranks])


def run_gradients(case: EmulatedCase, kind: Kind) -> list[Gradients]:
    """Both gradients of every rank."""
    with layer1_in(kind) as spy:
        outputs = play(case, make_buffers(case), _launcher(case))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    return outputs


def gradients_alone(case: EmulatedCase, deadline_ns: int) -> list[int]:
    """The record of a fault that rank 0 leaves when no other rank ever comes."""
    return fault_of(case, make_buffers(case), _launcher(case), deadline_ns)


def exact_gradients(case: EmulatedCase) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every rank in float64: gradients of tokens, the sum of the absolute values added up, those of weights."""
    plans, num_rows = plans_of(case), max_tokens(case)
    partials = []
    for rank, plan in enumerate(plans):
        rows, w1, row_grads = (tensor.double() for tensor in inputs_of(case, rank, plan))
        sums = rows.new_zeros(2, case.world_size * num_rows, case.hidden_size)
        for expert, (start, count) in enumerate(zip(plan.segment_starts, plan.segment_counts, strict=False)):
            of_expert = torch.arange(int(start), int(start + count), device=case.device)
            y, received = rows[of_expert] @ w1[expert], plan.routed_row_ids[of_expert].long()
            sums[0].index_add_(0, received, y)
            sums[1].index_add_(0, received, y.abs())
        partials.append((*sums, row_grads))
    return [_sum_up(case, rank, plan, partials) for rank, plan in enumerate(plans)]


def _sum_up(
    case: EmulatedCase, rank: int, plan: Plan, partials: list[tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, first = case.num_tokens[rank], rank * max_tokens(case)
    found = [partials[0][0].new_zeros(num_tokens, part.shape[1]) for part in partials[0]]
    for peer, parts in enumerate(partials):
        row = plan.send_rows[:num_tokens, peer].long()
        sent = row >= 0
        for total, part in zip(found, parts, strict=True):
            total[sent] += part[first + row[sent]]
    grad, size, weights = found
    return grad, size, weights
