"""Analytic model of the layer: what a setting should cost on a machine.

*Layer 0 in Triton.* Compute blocks start with own rows, the others arrive in the order of the experts. While rows are
pushed, ``comm_blocks`` fewer blocks compute, afterwards all do (dynamic conversion).

*Layer 1 in Triton.* The GEMM runs on all but the comm blocks. Panel p of P is complete after p/P of it; the comm blocks
reduce and send finished panels meanwhile, what is left all blocks do, and the final sum follows. Each panel reads
hidden and raises its flags. Beside the GEMM nothing hides the last panel, and one panel is the whole result: its rows
travel, and its blocks go through their rows and columns step by step, however few tokens there are.

*In CUDA C++* all blocks compute, pieces of an expert's rows that are of equal height. The push lengthens layer 0 by a
part of its time. In layer 1 the combine slows the GEMM, each panel costs the same, and the last one travels after it.

*Plain.* GEMMs, all-to-alls of every routed row, memory passes and host time, one after the other.

All functions are pure; every constant is a field of ``Machine``, except the ones below.

Which settings are worth measuring follows from it: the legal ones, each way to launch once, cut down by the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from comet.config import OverlapConfig
from comet.schedule.settings import GPU_TILE_ROWS, TileShape
from comet.tuner.problem import Machine, Problem, cuda_layers, effective, fitting_panels

# Smooth maximum of compute and memory time, fit: DeepSeek-V3 at 2048 tokens takes 12 % more than its tiles.
ROOFLINE_POWER = 2.5
WAVES = 8  # steps in which rows arrive, of at most 31
# Passes of the plain path over its routed rows, counted in its source: gathers, zeroed buffers, scatters, weighted sum.
PLAIN_ROW_PASSES = 15
PLAIN_HIDDEN_PASSES = 6
# Items in CUDA C++ (``kernels/layer/blocks.py``): most rows, which are whole steps, most of an expert's only one;
# columns.
CUDA_ROWS, CUDA_STEP, CUDA_TALLEST, CUDA_COLS = 256, 16, 272, 128

COMM_BLOCKS = 16  # in Triton, of a layer whose communication is colocated


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the model expects of one candidate, in ms.

    Args:
        setting: The split and order, or ``None`` for the plain path.
        ms: The whole layer.
        parts: Named parts that add up to ``ms``.
    """

    setting: OverlapConfig | None
    ms: float
    parts: tuple[tuple[str, float], ...]

    @property
    def why(self) -> str:
        """The parts as one line."""
        return ", ".join(f"{name} {ms:.3f}" for name, ms in self.parts)


@dataclass(frozen=True, slots=True)
class GemmCost:
    """A grouped GEMM: its work items, ms of one on one SM, weight bytes, ms of its memory traffic, ms of both GEMMs."""

    items: float
    tile_ms: float
    weight_bytes: float
    memory_ms: float
    layer_ms: float

    def ms(self, num_blocks: int, machine: Machine, more_memory_ms: float = 0.0) -> float:
        """Time on ``num_blocks`` SMs: whole waves of items, memory traffic and heat."""
        compute, memory = math.ceil(self.items / num_blocks) * self.tile_ms, self.memory_ms + more_memory_ms
        both = (compute**ROOFLINE_POWER + memory**ROOFLINE_POWER) ** (1 / ROOFLINE_POWER)
        return both * machine.throttle(self.layer_ms, num_blocks)


Gemms = Mapping[int, tuple[GemmCost, GemmCost]]


def all_gemms(problem: Problem, machine: Machine) -> Gemms:
    """The two GEMMs of the busiest rank, in Triton under ``GPU_TILE_ROWS`` and in CUDA C++ under ``CUDA_ROWS``."""
    return {rows: layer_gemms(problem, rows, machine) for rows in (GPU_TILE_ROWS, CUDA_ROWS)}


def layer_gemms(problem: Problem, block_rows: int, machine: Machine) -> tuple[GemmCost, GemmCost]:
    """The two GEMMs of the busiest rank with tiles of ``block_rows``, or with pieces of at most ``CUDA_ROWS``."""
    hidden_size, width, itemsize = problem.moe.hidden_size, problem.width, problem.dtype.itemsize
    rows, in_cuda = problem.routed_rows, block_rows == CUDA_ROWS
    num_tiles = problem.num_tiles(block_rows, CUDA_TALLEST if in_cuda else 0)
    rate = machine.tflops(problem.dtype) * 1e9
    sm_flops, layer_ms = rate / machine.num_sms, 6 * rows * hidden_size * width / rate
    height, l2_gbs, overhead = float(block_rows), machine.l2_gbs_per_sm, machine.tile_overhead_ms
    if in_cuda:
        height, l2_gbs, overhead = rows / max(num_tiles, 1.0) + CUDA_STEP / 2, machine.cuda_l2_gbs_per_sm, 0.0
    tile = TileShape.select(problem.dtype, hidden_size, width)
    traffic = (problem.recv_rows * hidden_size + rows * width, rows * (width + hidden_size))
    gemms = []
    for number, (block_n, contraction, outputs) in enumerate(
        ((2 * tile.block_f, hidden_size, 2 * width), (tile.block_n, width, hidden_size))
    ):
        block_n = CUDA_COLS if in_cuda else block_n
        loaded_rows = height / 2 if in_cuda and number else height  # two blocks share the rows of layer 1
        flops = 2 * height * block_n * contraction / sm_flops
        operands = (loaded_rows + block_n) * contraction * itemsize / l2_gbs / 1e6
        weight_bytes = problem.experts_local * outputs * contraction * itemsize * min(1.0, num_tiles)
        gemms.append(
            GemmCost(
                items=num_tiles * -(-outputs // block_n),
                tile_ms=max(flops, operands) + overhead,
                weight_bytes=weight_bytes,
                memory_ms=(weight_bytes + traffic[number] * itemsize) / machine.hbm_gbs / 1e6,
                layer_ms=layer_ms,
            )
        )
    return gemms[0], gemms[1]


def predict(
    problem: Problem, setting: OverlapConfig | None, machine: Machine, gemms: Gemms | None = None
) -> Prediction:
    """Expected time of the forward pass under one setting.

    Args:
        problem: Shape, tokens and routing density.
        setting: The candidate; ``None`` is the plain path.
        machine: Its rates.
        gemms: ``all_gemms``, where many settings are compared.

    Returns:
        The prediction, with exposed communication apart from the GEMMs.
    """
    gemms = gemms or all_gemms(problem, machine)
    if setting is None:
        parts = _plain_parts(problem, machine, gemms[GPU_TILE_ROWS])
        return Prediction(setting=None, ms=sum(parts.values()), parts=tuple(parts.items()))
    num_ids = problem.world_size * problem.num_tokens * problem.moe.top_k
    parts = {"plan": machine.plan_ms + num_ids * machine.plan_ns_per_row / 1e6}
    in_cuda = cuda_layers(setting, problem, machine)
    for number, layer in enumerate(LAYERS):
        gemm = gemms[CUDA_ROWS if in_cuda[number] else GPU_TILE_ROWS][number]
        alone = gemm.ms(machine.num_sms, machine) / (1.0 if in_cuda[number] else machine.fused_share)
        whole = layer[in_cuda[number]](problem, setting, machine, gemm)
        parts |= {f"GEMM {number}": alone, f"exposed {number}": whole - alone}
    return Prediction(setting=setting, ms=sum(parts.values()), parts=tuple(parts.items()))


def layer0_cuda_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of dispatch || GEMM || SwiGLU in CUDA C++, which no knob changes."""
    push = problem.sent_rows * problem.row_bytes / machine.link_gbs / 1e6
    compute = gemm.ms(machine.num_sms, machine)
    return max(compute, push) + machine.cuda_exposed_push * push + machine.cuda_launch_ms


def layer1_cuda_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of GEMM || reduce || combine in CUDA C++."""
    num_panels = fitting_panels(setting.num_panels, problem)
    compute = gemm.ms(machine.num_sms, machine) + machine.cuda_passes * _passes_ms(problem, machine)
    send = _returned_ms(problem, machine)
    panels = (num_panels - 1) * machine.cuda_panel_ns * problem.moe.hidden_size / 1e6
    return max(compute, send) + send / num_panels + panels + machine.cuda_launch_ms


def layer0_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of dispatch || GEMM || SwiGLU in Triton, for the first of ``layer_gemms``."""
    reads = min(problem.world_size, 2)  # of the weights: in each phase
    comm_blocks = min(setting.comm_blocks or COMM_BLOCKS, machine.num_sms - 1)
    reread = (reads - 1) * machine.reread_share * gemm.weight_bytes / machine.hbm_gbs / 1e6
    work = gemm.ms(machine.num_sms, machine) / machine.fused_share + reread
    push = push_rows_ms(problem, comm_blocks, machine)
    slowed = machine.num_sms / (machine.num_sms - comm_blocks)
    waited = _in_waves_ms(problem, work, push, slowed, machine) if reads > 1 else work
    return waited + machine.launch_ms


def _in_waves_ms(problem: Problem, work: float, push: float, slowed: float, machine: Machine) -> float:
    """Layer 0 where all sources send at once, in the order in which experts are computed: own rows, then ``WAVES``.

    A row that h experts of a rank need travels with the first of them: a part p of the experts waits for the part
    1 - (1 - p)^h of the rows.
    """
    hits = problem.routed_rows / max(problem.recv_rows, 1e-9)
    own = work / problem.world_size
    now = _advance(0.0, own, push, slowed)
    for wave in range(1, WAVES + 1):
        now = max(now, push * (1 - (1 - wave / WAVES) ** hits) + machine.signal_ms)
        now = _advance(now, (work - own) / WAVES, push, slowed)
    return now


def push_rows_ms(problem: Problem, comm_blocks: int, machine: Machine) -> float:
    """Until comm blocks beside a GEMM have pushed the rows of one rank."""
    return problem.sent_rows * problem.row_bytes / machine.push_rate(comm_blocks) / 1e6


def layer1_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of GEMM || reduce || combine in Triton, for the second of ``layer_gemms``."""
    if not setting.comm_blocks:
        return _layer1_colocated_ms(problem, setting, machine, gemm)
    comm_blocks = min(setting.comm_blocks, machine.num_sms - 1)
    num_panels = fitting_panels(setting.num_panels, problem)
    compute = gemm.ms(machine.num_sms - comm_blocks, machine) / machine.fused_share
    partial_bytes = problem.recv_rows * problem.row_bytes
    remote = (problem.world_size - 1) / problem.world_size
    rates = [
        min(blocks * machine.reduce_gbs_per_block, machine.link_gbs / remote if remote else math.inf) * 1e6
        for blocks in (comm_blocks, machine.num_sms)
    ]
    beside = min(partial_bytes * (num_panels - 1) / num_panels, rates[0] * compute * (num_panels - 1) / num_panels)
    rest = (partial_bytes - beside) / rates[1]
    return compute + rest + _passes_ms(problem, machine) + machine.panel_ms * num_panels + machine.launch_ms


def _layer1_colocated_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """No SM is lost, but memory traffic slows the GEMM, and nothing hides the last panel's way."""
    num_panels = fitting_panels(setting.num_panels, problem)
    hidden_bytes = problem.routed_rows * problem.width * problem.dtype.itemsize
    reread = (num_panels - 1) * hidden_bytes / machine.hbm_gbs / 1e6
    compute = gemm.ms(machine.num_sms, machine, reread) / machine.fused_share
    last = (_returned_ms(problem, machine) + machine.last_ms) / num_panels
    slowed = machine.colocated_passes * _passes_ms(problem, machine)
    return compute + slowed + last + machine.panel_ms * num_panels + machine.launch_ms


def _passes_ms(problem: Problem, machine: Machine) -> float:
    """Memory traffic of the combine: expert outputs read once, partial sums written, read and added up."""
    returned = problem.num_tokens * (1 + problem.world_size * problem.reach) * problem.row_bytes
    return (problem.routed_rows * problem.row_bytes + returned) / machine.hbm_gbs / 1e6


def _returned_ms(problem: Problem, machine: Machine) -> float:
    """Partial sums over the link: those of the busiest rank for the tokens of others."""
    sent = problem.recv_rows * problem.row_bytes * (problem.world_size - 1) / problem.world_size
    return sent / machine.link_gbs / 1e6


# In Triton and in CUDA C++.
LAYERS = (layer0_ms, layer0_cuda_ms), (layer1_ms, layer1_cuda_ms)


def _plain_parts(problem: Problem, machine: Machine, gemms: tuple[GemmCost, GemmCost]) -> dict[str, float]:
    rows, ranks = problem.routed_rows, problem.world_size
    moved = rows * (ranks - 1) / ranks * problem.row_bytes * 2
    hidden_bytes = problem.width * problem.dtype.itemsize
    passes = rows * (PLAIN_ROW_PASSES * problem.row_bytes + PLAIN_HIDDEN_PASSES * hidden_bytes)
    return {
        "GEMMs": sum(gemm.ms(machine.num_sms, machine) for gemm in gemms),
        "all-to-alls": moved / machine.nccl_gbs / 1e6,
        "passes": passes / machine.pass_gbs / 1e6,
        "host": machine.plain_ms,
    }


def _advance(start: float, work: float, push: float, slowed: float) -> float:
    """When ``work`` ms (on all blocks) end that begin at ``start`` and take ``slowed`` times longer until ``push``."""
    before = max(0.0, push - start)
    if work * slowed <= before:
        return start + work * slowed
    return start + before + (work - before / slowed)


DEDICATED = (4, 8, 16, 24, 32, 48, 64)  # comm blocks of a split
PANELS = (1, 2, 3, 4, 6, 8)
MOST_SPLITS = 3  # that are worth measuring
# Beyond this ratio to the best not even a wrong prediction makes a setting the fastest.
HOPELESS = 1.3


def candidates(problem: Problem, machine: Machine) -> list[OverlapConfig]:
    """Every setting the model compares; all are legal for the problem and the machine, and differ in a launch."""
    blocks = [0, *(num for num in DEDICATED if num < machine.num_sms)]
    everything = (OverlapConfig(comm_blocks=num, num_panels=panels) for num in blocks for panels in PANELS)
    return list(dict.fromkeys(effective(setting, problem) for setting in everything))


def propose(problem: Problem, machine: Machine) -> list[Prediction]:
    """The candidates worth measuring, best first: plain, the default, and where they may pay, all panels and splits.

    Of splits, those of the three best numbers of comm blocks. With the default among the candidates, a tuned layer is
    never slower than an untuned one.

    Args:
        problem: Shape, tokens and routing density.
        machine: Its rates.

    Returns:
        At most 11 predictions with distinct settings, ascending in ms; the plain path is one of them.
    """
    gemms = all_gemms(problem, machine)
    ranked = sorted((predict(problem, item, machine, gemms) for item in candidates(problem, machine)), key=_order)
    colocated = [item for item in ranked if item.setting and not item.setting.comm_blocks]
    splits = {item.setting.comm_blocks: item for item in reversed(ranked) if item.setting and item.setting.comm_blocks}
    tried = [*colocated, *sorted(splits.values(), key=_order)[:MOST_SPLITS]]
    default = effective(OverlapConfig(), problem)
    plain = predict(problem, None, machine, gemms)
    chosen = [item for item in tried if item.ms <= HOPELESS * ranked[0].ms or item.setting == default]
    return sorted([plain, *chosen], key=_order)


def _order(prediction: Prediction) -> tuple[float, str]:
    return prediction.ms, str(prediction.setting)
