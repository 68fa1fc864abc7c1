"""The layers in block FP8 of several ranks on one device (``emulated_ranks``), by either of the two implementations.

Packed rows travel between the ranks. Whatever no rank writes, and hidden rows of no expert, are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import layer1_launches
import torch
from emulated_ranks import Buffers, EmulatedCase, Kind, fresh, max_tokens, plans_of, play, unwritten
from fp8_cases import compare, layer_of
from layer0_launches import check_flags, layer0_in, sent_rows, tokens_of
from layer1_launches import layer1_in
from layer_cases import rank_inputs
from torch import Tensor

from comet.kernels.gemm.fp8 import pack_rows
from comet.kernels.runtime.arguments import Scaled, SymmBuffer, power_of_2
from comet.layer.fused import launch_dispatch_gemm, launch_gemm_combine
from comet.layer.launch_arguments import combine_config, dispatch_config, returns_of, sends_of, tile_table
from comet.layer.plan import Launch, Plan
from comet.layout import CHUNK_ROWS
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8, quantize_rows
from comet.quantization.packed import pack, packed_columns
from comet.schedule.settings import LayerSettings

E4M3_NAN = 0x7F
# Blocks of a weight differ by these powers of two, so that the scale of another one is far off.
LEAST_EXPONENT, MOST_EXPONENT = -2, 2


def make_buffers(case: EmulatedCase) -> Buffers:
    """Where packed rows land."""
    columns = packed_columns(case.hidden_size, case.dtype)
    return Buffers.allocate(case, max_tokens(case) // CHUNK_ROWS, columns=columns)


def expert_weights(case: EmulatedCase, rank: int) -> tuple[FP8, FP8]:
    """w1 ``(e, 2F, D)`` and w2 ``(e, D, F)`` of a rank."""
    generator = torch.Generator(case.device).manual_seed(100 * case.seed + rank)
    experts, width, depth = case.num_experts // case.world_size, case.ffn_size, case.hidden_size

    def draw(rows: int, columns: int) -> FP8:
        weight = torch.randn(experts, rows, columns, generator=generator, device=case.device) / columns**0.5
        blocks = experts, rows // FP8_BLOCK, columns // FP8_BLOCK
        exponents = torch.randint(
            LEAST_EXPONENT, MOST_EXPONENT + 1, blocks, generator=generator, device=case.device
        ).float()
        factors = exponents.exp2().repeat_interleave(FP8_BLOCK, dim=1).repeat_interleave(FP8_BLOCK, dim=2)
        return quantize_fp8(weight * factors)

    return draw(2 * width, depth), draw(depth, width)


def scaled(weight: FP8) -> Scaled:
    """What a launch is handed of a weight."""
    return Scaled(elements=weight.elements, scales=weight.scales)


def settings_of(case: EmulatedCase, plan: Plan) -> LayerSettings:
    """As the layer makes them."""
    return LayerSettings.create(case.config, plan.layout, case.overlap, case.dtype)


def empty_hidden(case: EmulatedCase, num_rows: int) -> Scaled:
    """``(Q, F)`` of NaN, with scales ``(F / 128, Q)`` of NaN."""
    elements = torch.full((num_rows, case.ffn_size), E4M3_NAN, dtype=torch.uint8, device=case.device)
    scales = torch.full((case.ffn_size // FP8_BLOCK, num_rows), torch.nan, device=case.device)
    return Scaled(elements=elements.view(torch.float8_e4m3fn), scales=scales)


def launch_layer0(case: EmulatedCase, plans: list[Plan], rank: int, symm: SymmBuffer) -> Scaled:
    """One launch of one rank, whose rows are packed first: hidden of all routed rows."""
    plan, x = fresh(plans[rank]), tokens_of(case, rank)
    symm = replace(symm, rows=symm.rows.view(torch.int32))
    own = symm.rows[rank * symm.max_tokens :][: len(x)]
    pack_rows(x, own)
    hidden = empty_hidden(case, plan.routed_row_ids.numel())
    config = dispatch_config(settings_of(case, plan), x)
    config = replace(config, push_cols=min(512, power_of_2(packed_columns(case.hidden_size, case.dtype))))
    w1, _ = expert_weights(case, rank)
    table = tile_table(plan, Launch.DISPATCH_GEMM)
    launch_dispatch_gemm(None, scaled(w1), hidden, None, symm, sends_of(plan), table, config)
    return hidden


def launch_layer1(case: EmulatedCase, plans: list[Plan], hidden: list[Scaled], rank: int, symm: SymmBuffer) -> Tensor:
    """One launch of one rank: its output ``(T, D)``."""
    plan, (_, w2) = fresh(plans[rank]), expert_weights(case, rank)
    settings = settings_of(case, plan)
    out, y = (unwritten(case, rows, case.hidden_size) for rows in (plan.num_tokens, plan.routed_row_ids.numel()))
    config = combine_config(settings, settings.layer1.num_panels, out)
    config = replace(config, block_k=FP8_BLOCK)
    returns, table = returns_of(plan, weighted=True), tile_table(plan, Launch.GEMM_COMBINE)
    launch_gemm_combine(hidden[rank], scaled(w2), y, out, symm, returns, table, config)
    return out


def run_fp8_layer0(case: EmulatedCase, kind: Kind) -> list[Scaled]:
    """Hidden of every rank, after a look at all the rest: who received what, and what was left alone."""
    plans, buffers = plans_of(case), make_buffers(case)
    with layer0_in(kind) as spy:
        found = play(case, buffers, partial(launch_layer0, case, plans))
    assert spy.call_count == (2 * case.world_size if kind == "cuda" else 0)
    for rank, plan in enumerate(plans):
        check_received(case, plans, buffers, rank)
        left = plan.routed_row_ids < 0
        if kind != "cuda":  # its tiles of 128 rows end past an expert's
            left[: int(plan.segment_starts[-1])] = False
        assert (found[rank].elements.view(torch.uint8)[left] == E4M3_NAN).all(), f"elements of rank {rank} of {case}"
        assert found[rank].scales[:, left].isnan().all(), f"scales of rank {rank} of {case}"
    return found


def run_fp8_layer1(case: EmulatedCase, hidden: list[Scaled], kind: Kind) -> list[Tensor]:
    """Output ``(T, D)`` of every rank; with a pool in float32 in Triton, whatever the kind."""
    launch = partial(launch_layer1, case, plans_of(case), hidden)
    with layer1_in(kind) as spy:
        outputs = play(case, layer1_launches.make_buffers(case), launch)
    in_cuda = kind == "cuda" and case.dtype.itemsize == 2
    assert spy.call_count == (2 * case.world_size if in_cuda else 0)
    return outputs


def check_received(case: EmulatedCase, plans: list[Plan], buffers: Buffers, rank: int) -> None:
    """What is sent has arrived packed, with its flags; neither a row nor a flag more than that."""
    used = case.hidden_size + case.hidden_size // FP8_BLOCK * torch.float32.itemsize  # bytes of a row
    rows = torch.full_like(buffers.rows[rank], torch.nan).unflatten(0, (case.world_size, -1))
    for source in range(case.world_size):
        sent = sent_rows(case, plans, source, rank)
        rows[source, : len(sent)] = pack(quantize_rows(sent), case.dtype)
    found, wanted = (tensor.view(torch.uint8)[:, :used] for tensor in (buffers.rows[rank], rows.flatten(0, 1)))
    assert torch.equal(found, wanted), f"rows of rank {rank} of {case}"
    check_flags(case, plans, buffers, rank)


def rows_of_experts(plan: Plan, hidden: Scaled) -> tuple[Tensor, Tensor]:
    """Bytes of the elements and scales of those rows that belong to an expert."""
    mine = plan.routed_row_ids >= 0
    return hidden.elements.view(torch.uint8)[mine], hidden.scales[:, mine]


def launch_layer0_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Scaled]]:
    """For ``fault_of``."""
    return make_buffers(case), partial(launch_layer0, case, plans_of(case))


def launch_layer1_alone(case: EmulatedCase) -> tuple[Buffers, Callable[[int, SymmBuffer], Tensor]]:
    """The same of layer 1."""
    plans = plans_of(case)
    hidden = [empty_hidden(case, plan.routed_row_ids.numel()) for plan in plans]
    return layer1_launches.make_buffers(case), partial(launch_layer1, case, plans, hidden)


def check_outputs(case: EmulatedCase, outputs: list[Tensor], products: float) -> None:
    """Outputs of both layers against float64; see ``fp8_cases`` for ``products`` and the limits."""
    shards = [expert_weights(case, rank) for rank in range(case.world_size)]
    for rank, output in enumerate(outputs):
        inputs = rank_inputs(case, rank).to(case.device)
        wanted = layer_of(case, inputs, inputs.top_k_ids, shards, products)
        compare(output, wanted, f"rank {rank} of {case}")
