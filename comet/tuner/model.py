"""Analytic model of the layer: what a setting should cost on a machine.

*Colocated.* All blocks compute. In layer 0 the push lengthens the GEMM by a part of its time. In layer 1 the combine
slows the GEMM, each panel costs the same, and the last one travels after it: one panel is the whole result.

*A split* takes the time of colocated communication and a part more, by the number of its comm blocks: few of them move
too little, many leave too little to the GEMM.

*Plain.* GEMMs, all-to-alls of every routed row, memory passes and host time, one after the other.

Kernels are those in CUDA C++; their Triton twins are predicted like them, for what counts is which setting is fastest.
All functions are pure; every constant is a field of ``Machine``, except the ones below. Which settings are worth
measuring follows from it: the legal ones, each way to launch once, cut down by the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from comet.config import OverlapConfig
from comet.tuner.problem import Machine, Problem, default_setting, effective, fitting_panels

# Smooth maximum of compute and memory time, fit: DeepSeek-V3 at 2048 tokens takes 12 % more than its tiles.
ROOFLINE_POWER = 2.5
# Passes of the plain path over its routed rows, counted in its source: gathers, zeroed buffers, scatters, weighted sum.
PLAIN_ROW_PASSES = 15
PLAIN_HIDDEN_PASSES = 6
# Tiles (``kernels/layer/blocks.py``): most rows, which are whole steps, most of an expert's only one; columns.
MOST_ROWS, ROW_STEP, TALLEST, TILE_COLS = 256, 16, 272, 128
# N comm blocks cost SPLIT_FEW / N + SPLIT_MANY * N of the colocated time: the curve of benchmarks/results/layer.md.
SPLIT_FEW, SPLIT_MANY = 0.3, 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the model expects of one candidate, in ms."""

    setting: OverlapConfig | None  # the split and order, or None for the plain path
    ms: float  # the whole layer
    parts: tuple[tuple[str, float], ...]  # named parts that add up to ms

    @property
    def why(self) -> str:
        """The parts as one line."""
        return ", ".join(f"{name} {ms:.3f}" for name, ms in self.parts)


def gemm_ms(problem: Problem, layer: int, machine: Machine) -> float:
    """Time of a layer's grouped GEMM (0 or 1) on a rank, alone: whole waves of tiles, memory traffic and heat.

    Tiles are pieces of an expert's rows that are of equal height; two blocks share the rows of layer 1.
    """
    hidden_size, width, itemsize = problem.moe.hidden_size, problem.width, problem.dtype.itemsize
    rows, num_tiles = problem.routed_rows, problem.num_tiles(MOST_ROWS, TALLEST)
    contraction, outputs = (width, hidden_size) if layer else (hidden_size, 2 * width)
    height = rows / max(num_tiles, 1.0) + ROW_STEP / 2
    loaded_rows = height / 2 if layer else height
    rate = machine.tflops(problem.dtype) * 1e9
    products_ms = 2 * height * TILE_COLS * contraction * machine.num_sms / rate
    operands_ms = (loaded_rows + TILE_COLS) * contraction * itemsize / machine.l2_gbs_per_sm / 1e6
    compute = math.ceil(num_tiles * -(-outputs // TILE_COLS) / machine.num_sms) * max(products_ms, operands_ms)
    weights = problem.experts_local * outputs * contraction * min(1.0, num_tiles)
    activations = rows * (width + hidden_size) if layer else problem.recv_rows * hidden_size + rows * width
    memory = (weights + activations) * itemsize / machine.hbm_gbs / 1e6
    both = (compute**ROOFLINE_POWER + memory**ROOFLINE_POWER) ** (1 / ROOFLINE_POWER)
    return both * machine.throttle(6 * rows * hidden_size * width / rate)


def predict(problem: Problem, setting: OverlapConfig | None, machine: Machine) -> Prediction:
    """Expected time of the forward pass under one setting; ``None`` is the plain path.

    The prediction has exposed communication apart from the GEMMs, and what a split adds to both.
    """
    if setting is None:
        parts = _plain_parts(problem, machine)
    else:
        parts = _fused_parts(problem, setting, machine)
        if setting.comm_blocks:
            share = SPLIT_FEW / setting.comm_blocks + SPLIT_MANY * setting.comm_blocks
            parts["split"] = share * sum(parts.values())
    return Prediction(setting=setting, ms=sum(parts.values()), parts=tuple(parts.items()))


def _fused_parts(problem: Problem, setting: OverlapConfig, machine: Machine) -> dict[str, float]:
    """Plan, dispatch || GEMM || activation, and GEMM || reduce || combine, communication colocated."""
    num_ids = problem.world_size * problem.num_tokens * problem.moe.top_k
    alone = [gemm_ms(problem, layer, machine) for layer in (0, 1)]

    push = problem.sent_rows * problem.row_bytes / machine.link_gbs / 1e6
    whole0 = max(alone[0], push) + machine.exposed_push * push + machine.launch_ms

    num_panels = fitting_panels(setting.num_panels, problem)
    send = problem.recv_rows * problem.row_bytes * (1 - 1 / problem.world_size) / machine.link_gbs / 1e6
    # Expert outputs are read once, partial sums written, read and added up.
    returned = problem.num_tokens * (1 + problem.world_size * problem.reach) * problem.row_bytes
    combine = (problem.routed_rows * problem.row_bytes + returned) / machine.hbm_gbs / 1e6
    panels = (num_panels - 1) * machine.panel_ns * problem.moe.hidden_size / 1e6
    last = send / num_panels
    whole1 = max(alone[1] + machine.combine_passes * combine, send) + last + panels + machine.launch_ms
    return {
        "plan": machine.plan_ms + num_ids * machine.plan_ns_per_row / 1e6,
        "GEMM 0": alone[0],
        "exposed 0": whole0 - alone[0],
        "GEMM 1": alone[1],
        "exposed 1": whole1 - alone[1],
    }


def _plain_parts(problem: Problem, machine: Machine) -> dict[str, float]:
    rows, ranks = problem.routed_rows, problem.world_size
    moved = rows * (ranks - 1) / ranks * problem.row_bytes * 2
    hidden_bytes = problem.width * problem.dtype.itemsize
    passes = rows * (PLAIN_ROW_PASSES * problem.row_bytes + PLAIN_HIDDEN_PASSES * hidden_bytes)
    return {
        "GEMMs": sum(gemm_ms(problem, layer, machine) for layer in (0, 1)),
        "all-to-alls": moved / machine.nccl_gbs / 1e6,
        "passes": passes / machine.pass_gbs / 1e6,
        "host": machine.plain_ms,
    }


SPLITS = (8, 16, 32)  # comm blocks that are tried
PANELS = (1, 2, 3, 4, 6, 8)
# Beyond this ratio to the best not even a wrong prediction makes a setting the fastest.
HOPELESS = 1.3


def propose(problem: Problem, machine: Machine) -> list[Prediction]:
    """The candidates worth measuring, best first: plain, the default, all panels, and splits with the best of these.

    At most 11 with distinct settings. With the default among them, a tuned layer is never slower than an untuned one.
    """
    default = effective(default_setting(problem), problem)
    colocated = dict.fromkeys([default, *(effective(OverlapConfig(num_panels=panels), problem) for panels in PANELS)])
    tried = sorted((predict(problem, setting, machine) for setting in colocated), key=lambda item: item.ms)
    best = tried[0]
    assert best.setting is not None
    splits = [replace(best.setting, comm_blocks=blocks) for blocks in SPLITS if blocks < machine.num_sms]
    tried += [predict(problem, setting, machine) for setting in splits]
    chosen = [item for item in tried if item.ms <= HOPELESS * best.ms or item.setting == default]
    return sorted([predict(problem, None, machine), *chosen], key=lambda item: item.ms)
