"""Analytic model of the layer: what a setting should cost on a machine, and which settings are worth measuring.

*Layer 0.* Compute blocks start with own rows. With two phases the others arrive in the order of the experts, with more
a phase starts when its sources have arrived. While rows are pushed, ``comm_blocks`` fewer blocks compute, afterwards
all do (dynamic conversion). Copy engines take no block, but move every row to every rank.

*Layer 1.* The GEMM runs on all but the comm blocks. Panel p of P is complete after p/P of it; the comm blocks reduce
and send finished panels meanwhile, what is left all blocks do, and the final sum follows. Each panel reads hidden.

*Plain.* GEMMs, all-to-alls of every routed row, memory passes and host time, one after the other.

All functions are pure; every constant is a field of ``Machine``, except the ones below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

from comet.config import OverlapConfig, Transport
from comet.layout import MAX_PANELS
from comet.schedule import part_span
from comet.settings import TileShape
from comet.tuner.machine import Machine
from comet.tuner.problem import Problem

# Smooth maximum of compute and memory time, fit: DeepSeek-V3 at 2048 tokens takes 12 % more than its tiles.
ROOFLINE_POWER = 2.5
WAVES = 8  # steps in which rows arrive, of at most 31
# Passes of the plain path over its routed rows, counted in its source: gathers, zeroed buffers, scatters, weighted sum.
PLAIN_ROW_PASSES = 15
PLAIN_HIDDEN_PASSES = 6

COMM_BLOCKS = (4, 8, 16, 24, 32, 48, 64)
PANELS = (1, 2, 4, 8, 16)
BLOCK_ROWS = (16, 32, 64, 128)
PLAIN = "plain"
# Other values of each knob that are worth measuring.
KNOBS = {"comm_blocks": 4, "num_phases": 1, "num_panels": 2, "block_rows": 1, "beside": 1}


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


def layer_gemms(problem: Problem, block_rows: int, machine: Machine) -> tuple[GemmCost, GemmCost]:
    """The two GEMMs of the busiest rank with tiles of ``block_rows``."""
    hidden_size, width, itemsize = problem.moe.hidden_size, problem.width, problem.dtype.itemsize
    tile = TileShape.select(problem.dtype, hidden_size, width)
    num_tiles, columns = problem.num_tiles(block_rows), column_blocks(problem)
    rows, sm_flops = problem.routed_rows, machine.tflops(problem.dtype) * 1e9 / machine.num_sms
    layer_ms = 6 * rows * hidden_size * width / (machine.tflops(problem.dtype) * 1e9)
    reads = (problem.recv_rows * hidden_size, rows * width)
    writes = (rows * width, rows * hidden_size)
    gemms = []
    for number, (block_n, contraction, outputs) in enumerate(
        ((2 * tile.block_f, hidden_size, 2 * width), (tile.block_n, width, hidden_size))
    ):
        rate = sm_flops * (machine.narrow_share if block_rows < max(BLOCK_ROWS) else 1.0)
        flops = 2 * block_rows * block_n * contraction / rate
        operands = (block_rows + block_n) * contraction * itemsize / machine.l2_gbs_per_sm / 1e6
        weight_bytes = problem.experts_local * outputs * contraction * itemsize * min(1.0, num_tiles)
        traffic = weight_bytes + (reads[number] + writes[number]) * itemsize
        gemms.append(
            GemmCost(
                items=num_tiles * columns[number],
                tile_ms=max(flops, operands) + machine.tile_overhead_ms,
                weight_bytes=weight_bytes,
                memory_ms=traffic / machine.hbm_gbs / 1e6,
                layer_ms=layer_ms,
            )
        )
    return gemms[0], gemms[1]


def candidate_name(setting: OverlapConfig | None) -> str:
    """Short name of a candidate; the default setting is ``16 comm blocks, 2 phases, 4 panels, 128 rows, beside``.

    Where copy engines move the rows of layer 0, ``copy`` stands behind it.
    """
    if setting is None:
        return PLAIN
    return (
        f"{setting.comm_blocks} comm blocks, {setting.num_phases} phases, {setting.num_panels} panels, "
        f"{setting.block_rows} rows, {'beside' if setting.beside else 'split'}"
        f"{', copy' if setting.transport == 'copy' else ''}"
    )


def predict(problem: Problem, setting: OverlapConfig | None, machine: Machine) -> Prediction:
    """Expected time of the forward pass under one setting.

    Args:
        problem: Shape, tokens and routing density.
        setting: The candidate; ``None`` is the plain path.
        machine: Its rates.

    Returns:
        The prediction, with exposed communication apart from the GEMMs.
    """
    if setting is not None:
        return _predict_fused(problem, setting, machine, layer_gemms(problem, setting.block_rows, machine))
    return _prediction(None, _plain_parts(problem, machine))


def layer0_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of dispatch || GEMM || SwiGLU, for the first of ``layer_gemms``."""
    ranks, num_phases = problem.world_size, fitting_phases(setting.num_phases, problem.world_size)
    copies = setting.transport == "copy"
    comm_blocks = 0 if copies else min(setting.comm_blocks, machine.num_sms - 1)
    reread = (num_phases - 1) * machine.reread_share * gemm.weight_bytes / machine.hbm_gbs / 1e6
    work = gemm.ms(machine.num_sms, machine) / machine.fused_share + reread
    push = copy_rows_ms(problem, machine) if copies else push_rows_ms(problem, comm_blocks, machine)
    slowed = machine.num_sms / (machine.num_sms - comm_blocks)
    if not copies and num_phases == 2:
        return _in_waves_ms(problem, work, push, slowed, machine) + machine.launch_ms
    now, arrived = 0.0, 0
    for phase in range(num_phases):
        num_sources = len(part_span(phase - 1, ranks - 1, num_phases - 1)) if phase else 1
        if phase:
            arrived += num_sources
            now = max(now, push * arrived / (ranks - 1) + machine.signal_ms)
        now = _advance(now, work * num_sources / ranks, push, slowed)
    return now + machine.launch_ms


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


def copy_rows_ms(problem: Problem, machine: Machine) -> float:
    """Until copy engines have moved all rows of one rank to every other.

    Example: T=1000, W=3, rows of 384 bytes at 384 GB/s, 0.012 ms to start: 2 * (0.012 + 0.001) = 0.026.
    """
    others = problem.world_size - 1
    return others * (machine.copy_ms + problem.num_tokens * problem.row_bytes / machine.link_gbs / 1e6)


def layer1_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """Expected time of GEMM || reduce || combine, for the second of ``layer_gemms``."""
    if setting.beside:
        return _layer1_beside_ms(problem, setting, machine, gemm)
    comm_blocks = min(setting.comm_blocks, machine.num_sms - 1)
    num_panels = min(setting.num_panels, MAX_PANELS, column_blocks(problem)[1])
    compute = gemm.ms(machine.num_sms - comm_blocks, machine) / machine.fused_share
    partial_bytes = problem.recv_rows * problem.row_bytes
    remote = (problem.world_size - 1) / problem.world_size
    rates = [
        min(blocks * machine.reduce_gbs_per_block, machine.link_gbs / remote if remote else math.inf) * 1e6
        for blocks in (comm_blocks, machine.num_sms)
    ]
    beside = min(partial_bytes * (num_panels - 1) / num_panels, rates[0] * compute * (num_panels - 1) / num_panels)
    rest = (partial_bytes - beside) / rates[1]
    return compute + rest + _passes_ms(problem, machine) + machine.signal_ms * num_panels**0.5 + machine.launch_ms


def _layer1_beside_ms(problem: Problem, setting: OverlapConfig, machine: Machine, gemm: GemmCost) -> float:
    """No multiprocessor is lost, but memory traffic slows the GEMM, and the last panel travels after it."""
    num_panels = min(setting.num_panels, MAX_PANELS, column_blocks(problem)[1])
    hidden_bytes = problem.routed_rows * problem.width * problem.dtype.itemsize
    reread = (num_panels - 1) * hidden_bytes / machine.hbm_gbs / 1e6
    compute = gemm.ms(machine.num_sms, machine, reread) / machine.fused_share
    sent = problem.recv_rows * problem.row_bytes * (problem.world_size - 1) / problem.world_size
    last = sent / (2 * num_panels) / machine.link_gbs / 1e6  # the last panel is half as wide
    slowed = machine.beside_passes * _passes_ms(problem, machine)
    return compute + slowed + last + machine.signal_ms * num_panels**0.5 + machine.launch_ms


def _passes_ms(problem: Problem, machine: Machine) -> float:
    """Memory traffic of the combine: expert outputs read once, partial sums written, read and added up."""
    returned = problem.num_tokens * (1 + problem.world_size * problem.reach) * problem.row_bytes
    return (problem.routed_rows * problem.row_bytes + returned) / machine.hbm_gbs / 1e6


def fitting_phases(num_phases: int, world_size: int) -> int:
    """The number of phases a layer uses: 1 for a rank alone, else within 2 .. W."""
    return 1 if world_size == 1 else min(max(2, num_phases), world_size)


def column_blocks(problem: Problem) -> tuple[int, int]:
    """Column blocks of the tiles of layer 0 and of layer 1; bfloat16, D=2048, F=768: 6 and 8."""
    tile = TileShape.select(problem.dtype, problem.moe.hidden_size, problem.width)
    return -(-problem.width // tile.block_f), -(-problem.moe.hidden_size // tile.block_n)


def candidates(problem: Problem, machine: Machine) -> list[OverlapConfig]:
    """Every setting the model compares; all are legal for the problem and the machine.

    Comm blocks that nothing depends on are 0: beside compute blocks, where copy engines move the rows of layer 0.
    """
    ranks = problem.world_size
    phases = sorted({fitting_phases(num, ranks) for num in (2, 3, 4, ranks)})
    panels = sorted({min(num, MAX_PANELS, column_blocks(problem)[1]) for num in PANELS})
    blocks = [num for num in COMM_BLOCKS if num < machine.num_sms] or [1]
    splits: list[tuple[Transport, bool, int]] = [("push", beside, num) for num in blocks for beside in (True, False)]
    if ranks > 1:
        splits += [("copy", True, 0), *(("copy", False, num) for num in blocks)]
    return [
        OverlapConfig(
            comm_blocks=num,
            num_phases=num_phases,
            num_panels=num_panels,
            block_rows=block_rows,
            beside=beside,
            transport=transport,
        )
        for transport, beside, num in splits
        for num_phases in phases
        for num_panels in panels
        for block_rows in BLOCK_ROWS
    ]


def propose(problem: Problem, machine: Machine) -> list[Prediction]:
    """The candidates worth measuring, best first.

    They are the best of each transport, for each knob of the best that pushes its best other values, the default and
    plain. Measured neighbours tell where the model is wrong; the next best settings of the whole list would all be
    alike. With the default among them, a tuned layer is never slower than an untuned one.

    Args:
        problem: Shape, tokens and routing density.
        machine: Its rates.

    Returns:
        At most 13 predictions with distinct settings, ascending in ms; the plain path is one of them.
    """
    gemms = {block_rows: layer_gemms(problem, block_rows, machine) for block_rows in BLOCK_ROWS}
    settings = candidates(problem, machine)
    fused = (_predict_fused(problem, setting, machine, gemms[setting.block_rows]) for setting in settings)
    ranked = sorted(fused, key=_order)
    firsts = {item.setting.transport: item for item in reversed(ranked) if item.setting}
    chosen = {item.setting: item for item in firsts.values() if item.setting}
    best = firsts["push"].setting
    assert best is not None, "ranked predictions have settings"
    default = _default(problem)
    if default.comm_blocks < machine.num_sms:
        chosen[default] = predict(problem, default, machine)
    for knob, num in KNOBS.items():
        others = (item for item in ranked if item.setting and _differs_only(item.setting, best, knob))
        chosen.update((item.setting, item) for item in islice(others, num) if item.setting)
    return sorted([*chosen.values(), predict(problem, None, machine)], key=_order)


def _predict_fused(
    problem: Problem, setting: OverlapConfig, machine: Machine, gemms: tuple[GemmCost, GemmCost]
) -> Prediction:
    num_ids = problem.world_size * problem.num_tokens * problem.moe.top_k
    alone = [gemm.ms(machine.num_sms, machine) / machine.fused_share for gemm in gemms]
    parts = {
        "plan": machine.plan_ms + num_ids * machine.plan_ns_per_row / 1e6,
        "GEMM 0": alone[0],
        "exposed 0": layer0_ms(problem, setting, machine, gemms[0]) - alone[0],
        "GEMM 1": alone[1],
        "exposed 1": layer1_ms(problem, setting, machine, gemms[1]) - alone[1],
    }
    return _prediction(setting, parts)


def _prediction(setting: OverlapConfig | None, parts: dict[str, float]) -> Prediction:
    return Prediction(setting=setting, ms=sum(parts.values()), parts=tuple(parts.items()))


def _plain_parts(problem: Problem, machine: Machine) -> dict[str, float]:
    rows, ranks = problem.routed_rows, problem.world_size
    moved = rows * (ranks - 1) / ranks * problem.row_bytes * 2
    hidden_bytes = problem.width * problem.dtype.itemsize
    passes = rows * (PLAIN_ROW_PASSES * problem.row_bytes + PLAIN_HIDDEN_PASSES * hidden_bytes)
    gemms = layer_gemms(problem, max(BLOCK_ROWS), machine)
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


def _default(problem: Problem) -> OverlapConfig:
    """The default setting as a layer narrows it."""
    default = OverlapConfig()
    num_panels = min(default.num_panels, MAX_PANELS, column_blocks(problem)[1])
    return replace(default, num_phases=fitting_phases(default.num_phases, problem.world_size), num_panels=num_panels)


def _order(prediction: Prediction) -> tuple[float, str]:
    return prediction.ms, candidate_name(prediction.setting)


def _differs_only(setting: OverlapConfig, other: OverlapConfig, knob: str) -> bool:
    names = (*KNOBS, "transport")
    return [name for name in names if getattr(setting, name) != getattr(other, name)] == [knob]
