"""Layer 1 of several ranks on one device (``emulated_ranks``), by either of the two implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from emulated_ranks import Buffers, EmulatedCase, Kind, fresh, launched_in, max_tokens, plans_of, play, unwritten
from torch import Tensor

from comet.kernels.layer import gemm_combine as cuda_module
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arguments import CHUNK_FLAGS, COMBINE_CHUNK_ROWS, SymmBuffer, power_of_2
from comet.layer.fused import launch_gemm_combine
from comet.layer.launch_arguments import returns_of, tile_table
from comet.layer.plan import Launch, Plan

layer1_in = partial(launched_in, module=cuda_module, function="gemm_combine_cuda")  # also with weights in block FP8


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


def config_of(case: EmulatedCase) -> GemmCombineConfig:
    return GemmCombineConfig(
        comm_blocks=case.comm_blocks,
        num_panels=case.num_panels,
        num_stages=3,
        move_cols=256,
        block_k=min(64, power_of_2(case.ffn_size)),
    )


def launch(case: EmulatedCase, plans: list[Plan], rank: int, symm: SymmBuffer) -> Tensor:
    """One launch of one rank: its output ``(T, D)``."""
    plan = fresh(plans[rank])
    hidden, w2 = expert_inputs(case, rank, plan.routed_row_ids.numel())
    out, y = (unwritten(case, rows, case.hidden_size) for rows in (plan.num_tokens, hidden.shape[0]))
    returns, table = returns_of(plan, weighted=True), tile_table(plan, Launch.GEMM_COMBINE)
    launch_gemm_combine(hidden, w2, y, out, symm, returns, table, config_of(case))
    return out


def launch_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Tensor]]:
    """For ``play``, ``fault_of`` and ``sent_after``."""
    return make_buffers(case), partial(launch, case, plans_of(case))


def run_layer1(case: EmulatedCase, kind: Kind) -> list[Tensor]:
    """Output ``(T, D)`` of every rank."""
    with layer1_in(kind) as spy:
        outputs = play(case, *launch_alone(case))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    return outputs


def exact_layer1(case: EmulatedCase) -> list[list[Tensor]]:
    """Output ``(T, D)`` of every rank in float64, and the sum of the absolute values of what was added up."""
    plans, partials = plans_of(case), []
    for rank, plan in enumerate(plans):
        hidden, w2 = (tensor.double() for tensor in expert_inputs(case, rank, plan.routed_row_ids.numel()))
        weights = plan.row_weights[plan.routed_row_ids.long(), plan.routed_slots.long()].double()
        partials.append(partial_sums(case, plan, hidden * weights[:, None], w2.mT))
    return final_sums(case, plans, partials)


def partial_sums(case: EmulatedCase, plan: Plan, rows: Tensor, weights: Tensor) -> list[Tensor]:
    """``(R, D)`` of one rank: routed ``rows`` times their experts' ``weights (e, C, D)``; and of absolute values."""
    sums = rows.new_zeros(2, case.world_size * max_tokens(case), case.hidden_size)
    for expert, (start, count) in enumerate(zip(plan.segment_starts, plan.segment_counts, strict=False)):
        of_expert = torch.arange(int(start), int(start + count), device=case.device)
        y, received = rows[of_expert] @ weights[expert], plan.routed_row_ids[of_expert].long()
        sums[0].index_add_(0, received, y)
        sums[1].index_add_(0, received, y.abs())
    return list(sums)


def final_sums(case: EmulatedCase, plans: list[Plan], partials: list[list[Tensor]]) -> list[list[Tensor]]:
    """What every rank's tokens get from all ranks' ``partials``, each ``(R, n)``."""
    outputs = []
    for rank, plan in enumerate(plans):
        num_tokens, first = case.num_tokens[rank], rank * max_tokens(case)
        found = [part.new_zeros(num_tokens, part.shape[1]) for part in partials[0]]
        for peer, parts in enumerate(partials):
            row = plan.send_rows[:num_tokens, peer].long()
            sent = row >= 0
            for total, part in zip(found, parts, strict=True):
                total[sent] += part[first + row[sent]]
        outputs.append(found)
    return outputs
