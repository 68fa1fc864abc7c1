"""Layer 0 of several ranks on one device (``emulated_ranks``), by either of the two implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from emulated_ranks import EPOCH, Buffers, EmulatedCase, Kind, fresh, launched_in, max_tokens, plans_of, play, unwritten
from layer_cases import rank_inputs
from torch import Tensor
from torch.nn.functional import silu

from comet.kernels.layer import dispatch_gemm as cuda_module
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.runtime.arguments import SymmBuffer, power_of_2
from comet.layer.fused import launch_dispatch_gemm
from comet.layer.launch_arguments import sends_of, tile_table
from comet.layer.plan import Launch, Plan
from comet.layout import CHUNK_ROWS
from comet.schedule.settings import TileShape

STEEPEST = 1.1  # slope of SiLU, at most


@dataclass(frozen=True)
class Hidden:
    """Results for the routed rows of a rank's experts: hidden ``(N, F)`` and gate | up ``(N, 2F)``."""

    hidden: Tensor
    pre: Tensor | None


layer0_in = partial(launched_in, module=cuda_module, function="dispatch_gemm_cuda")  # also with weights in block FP8


Rows = Callable[[EmulatedCase, int], Tensor]  # what a rank has to send, by its number


def make_buffers(case: EmulatedCase) -> Buffers:
    """Where tokens land."""
    return Buffers.allocate(case, max_tokens(case) // CHUNK_ROWS)


def tokens_of(case: EmulatedCase, rank: int) -> Tensor:
    """``(T, D)`` of a rank, on the device."""
    return rank_inputs(case, rank).tokens.to(case.device)


def expert_weights(case: EmulatedCase, rank: int) -> Tensor:
    """``(e, 2F, D)`` of a rank."""
    generator = torch.Generator(case.device).manual_seed(100 + rank)
    shape = (case.num_experts // case.world_size, 2 * case.ffn_size, case.hidden_size)
    weights = torch.randn(shape, generator=generator, device=case.device)
    return (1.5 * weights / case.hidden_size**0.5).to(case.dtype)


def config_of(case: EmulatedCase) -> DispatchGemmConfig:
    """What the layer would launch, as far as it depends on the shape."""
    tile = TileShape.select(case.dtype, case.hidden_size, case.ffn_size)
    in_32_bits = case.dtype == torch.float32
    return DispatchGemmConfig(
        comm_blocks=case.comm_blocks,
        block_f=tile.block_f,
        block_k=tile.block_k,
        push_cols=min(256 if in_32_bits else 1024, power_of_2(case.hidden_size)),
        flatten=not in_32_bits,
        num_stages=tile.num_stages,
    )


def launch(case: EmulatedCase, plans: list[Plan], rank: int, symm: SymmBuffer, *, save_pre: bool = False) -> Hidden:
    """One launch of one rank: results of all routed rows, NaN where nothing was written."""
    plan, x = fresh(plans[rank]), tokens_of(case, rank)
    rows = plan.routed_row_ids.numel()
    hidden, pre = (unwritten(case, rows, parts * case.ffn_size) for parts in (1, 2))
    table, config = tile_table(plan, Launch.DISPATCH_GEMM), config_of(case)
    w1 = expert_weights(case, rank)
    launch_dispatch_gemm(x, w1, hidden, pre if save_pre else None, symm, sends_of(plan), table, config)
    return Hidden(hidden, pre if save_pre else None)


def launch_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Hidden]]:
    """For ``fault_of``."""
    return make_buffers(case), partial(launch, case, plans_of(case))


def sent_rows(case: EmulatedCase, plans: list[Plan], source: int, target: int, of: Rows = tokens_of) -> Tensor:
    """The rows that one rank sends to another, ``(n, D)``, in the order in which they lie there."""
    tokens, plan = of(case, source), plans[source]
    if source == target:
        return tokens
    return tokens[plan.send_token_ids[target, : int(plan.send_counts[target])].long()]


def run_layer0(case: EmulatedCase, kind: Kind, *, save_pre: bool) -> list[Hidden]:
    """The rows of each rank's experts, after a look at all the rest: who received what, and what was left alone."""
    plans, buffers = plans_of(case), make_buffers(case)
    with layer0_in(kind) as spy:
        found = play(case, buffers, partial(launch, case, plans, save_pre=save_pre))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    for rank in range(case.world_size):
        check_received(case, plans, buffers, rank)
    return [experts_rows(plan, result) for plan, result in zip(plans, found, strict=True)]


def check_received(case: EmulatedCase, plans: list[Plan], buffers: Buffers, rank: int) -> None:
    """What is sent has arrived, with its flags; neither a row nor a flag more than that."""
    rows = landed(case, plans, rank)
    rows[rank * max_tokens(case) :][: max_tokens(case)] = torch.nan
    assert torch.allclose(buffers.rows[rank], rows, rtol=0, atol=0, equal_nan=True), f"rows of rank {rank} of {case}"
    check_flags(case, plans, buffers, rank)


def check_flags(case: EmulatedCase, plans: list[Plan], buffers: Buffers, rank: int) -> None:
    """The flags of all chunks that others send to a rank are up, and no more."""
    flags = torch.full_like(buffers.flags[rank], EPOCH - 1)
    for source in range(case.world_size):
        if source != rank:
            num_chunks = -(-int(plans[source].send_counts[rank]) // CHUNK_ROWS)
            flags[source, :num_chunks] = EPOCH
    assert torch.equal(buffers.flags[rank], flags), f"flags of rank {rank} of {case}"


def landed(case: EmulatedCase, plans: list[Plan], rank: int, of: Rows = tokens_of) -> Tensor:
    """Received rows ``(R, D)`` of a rank with its own among them, NaN where there is none."""
    rows = unwritten(case, case.world_size, max_tokens(case), case.hidden_size)
    for source in range(case.world_size):
        sent = sent_rows(case, plans, source, rank, of)
        rows[source, : len(sent)] = sent
    return rows.flatten(0, 1)


def experts_rows(plan: Plan, found: Hidden) -> Hidden:
    """What was found in the rows that belong to an expert; rows of no tile must not have been written."""
    mine, used = plan.routed_row_ids >= 0, int(plan.segment_starts[-1])
    tensors = [tensor for tensor in (found.hidden, found.pre) if tensor is not None]
    for tensor in tensors:
        assert tensor[used:].isnan().all(), f"rows of no tile were written by rank {plan.layout.rank}"
    return Hidden(*(None if tensor is None else tensor[mine] for tensor in (found.hidden, found.pre)))


@dataclass(frozen=True)
class Exact:
    """Results of one rank in float64, and how far off they may be; rows and columns as in ``Hidden``."""

    hidden: Tensor
    hidden_limit: Tensor
    pre: Tensor
    pre_limit: Tensor

    def check(self, found: Hidden, what: str) -> None:
        """Raise unless ``found`` is within the limits."""
        pairs = [(found.hidden, self.hidden, self.hidden_limit), (found.pre, self.pre, self.pre_limit)]
        for name, (tensor, exact, limit) in zip(("hidden", "pre"), pairs, strict=True):
            if tensor is None:
                continue
            assert tensor.shape == exact.shape, f"{what}: {name} is {tuple(tensor.shape)}"
            within = (tensor.double() - exact).abs() <= limit
            row_col = (~within).nonzero()[:1].flatten().tolist()
            assert within.all(), f"{what}: {name} is wrong {int((~within).sum())} times, first at {row_col}"


def exact_layer0(case: EmulatedCase) -> list[Exact]:
    """The rows of each rank's experts in float64.

    Gate and up are rounded once, and so is their product; before that, sums and SwiGLU are computed in float32.
    """
    rounding = 1.1 * torch.finfo(case.dtype).eps / 2
    summing = case.hidden_size / 8 * torch.finfo(torch.float32).eps / 2  # 16 products are added at once, or lost bits
    plans, found = plans_of(case), []
    for rank, plan in enumerate(plans):
        row_ids = plan.routed_row_ids[plan.routed_row_ids >= 0].long()
        x, w1 = landed(case, plans, rank)[row_ids].double(), expert_weights(case, rank).double()
        counts = plan.segment_counts.tolist()
        of_experts = list(zip(x.split(counts), w1, strict=True))
        pre, size = torch.cat([a @ w.T for a, w in of_experts]), torch.cat([a.abs() @ w.T.abs() for a, w in of_experts])
        pre_limit = rounding * pre.abs() + summing * size + 1e-7
        (gate, up), (gate_limit, up_limit) = pre.chunk(2, dim=1), pre_limit.chunk(2, dim=1)
        hidden = silu(gate) * up
        swiglu = rounding + 8 * torch.finfo(torch.float32).eps
        limit = STEEPEST * gate_limit * (up.abs() + up_limit) + silu(gate).abs() * up_limit + swiglu * hidden.abs()
        found.append(Exact(hidden, limit + 1e-7, pre, pre_limit))
    return found
