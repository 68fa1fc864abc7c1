"""Which kernels a setting stands for: where layers run in CUDA C++ some knobs do nothing, and settings coincide.

In CUDA C++ every block has warps that communicate: comm blocks do nothing there, and in layer 0 neither do phases.
Nothing waits for comm blocks in a Triton layer 1 whose comm blocks share all multiprocessors either.
"""

from __future__ import annotations

from dataclasses import replace

from comet.config import DIM_MULTIPLE, OverlapConfig
from comet.layout import CHUNK_ROWS, MAX_PANELS, round_up
from comet.settings import TileShape
from comet.tuner.problem import Machine, Problem

PLAIN = "plain"


def cuda_layers(setting: OverlapConfig, problem: Problem, machine: Machine) -> tuple[bool, bool]:
    """Whether layer 0 and layer 1 of a forward pass run in CUDA C++ rather than Triton.

    Args:
        setting: Of the layer.
        problem: The call; the layer is made for as many tokens.
        machine: Where it runs.

    Returns:
        The two answers; Qwen3-30B-A3B on four H200 with the default setting at 512 tokens: yes, no; at 8192: yes, yes.
    """
    if not (machine.cuda_kernels and setting.beside):
        return False, False
    # Not above: these modules need Triton, and what is asked of a machine without GPUs works without it.
    from comet.kernels import dispatch_gemm_cuda as layer0
    from comet.kernels import gemm_combine_cuda as layer1

    moe, experts, width = problem.moe, problem.experts_local, round_up(problem.width, DIM_MULTIPLE)
    tokens = round_up(problem.num_tokens, CHUNK_ROWS)
    tile = problem.dtype.itemsize, setting.block_rows
    pushes = setting.transport == "push"
    return (
        pushes and layer0.takes(tokens, experts, 2 * width, moe.hidden_size, *tile),
        layer1.takes(tokens, moe.top_k, problem.world_size, experts, moe.hidden_size, width, *tile),
    )


def effective(setting: OverlapConfig, problem: Problem, machine: Machine) -> OverlapConfig:
    """The setting as the layer takes it: within its limits, with the default for each knob that does nothing.

    Settings that come to the same launches have equal results. Copy engines without comm blocks beside them have 0.

    Example: 8 comm blocks, 3 phases and 8 panels of Qwen3-30B-A3B at 8192 tokens on four H200, both of whose layers
    run in CUDA C++: 16 comm blocks, 2 phases, 8 panels.
    """
    default, pushes = OverlapConfig(), setting.transport == "push"
    layer0, _ = cuda_layers(setting, problem, machine)
    have_work = not setting.beside or (pushes and not layer0)
    idle = min(default.comm_blocks, machine.num_sms - 1) if pushes else 0
    return replace(
        setting,
        comm_blocks=setting.comm_blocks if have_work else idle,
        num_phases=fitting_phases(default.num_phases if layer0 else setting.num_phases, problem.world_size),
        num_panels=fitting_panels(setting.num_panels, problem),
    )


def candidate_name(setting: OverlapConfig | None, problem: Problem, machine: Machine) -> str:
    """Short name of a candidate: the knobs that do something, and where its layers run in CUDA C++.

    Example: the default setting is ``16 comm blocks, 2 phases, 4 panels, 128 rows, beside`` in Triton, ``4 panels, both
    layers in CUDA C++`` or ``4 panels, layer 0 in CUDA C++``. ``copy``: copy engines move the rows of layer 0.
    """
    if setting is None:
        return PLAIN
    taken, in_cuda = effective(setting, problem, machine), cuda_layers(setting, problem, machine)
    copies = taken.transport == "copy"
    parts = [counted(taken.num_panels, "panel")]
    if not in_cuda[0]:
        parts.insert(0, counted(taken.num_phases, "phase"))
        if not (copies and taken.beside):
            parts.insert(0, counted(taken.comm_blocks, "comm block"))
    if any(in_cuda):
        parts.append(f"{'both layers' if all(in_cuda) else f'layer {in_cuda.index(True)}'} in CUDA C++")
    else:
        parts += [f"{taken.block_rows} rows", "beside" if taken.beside else "split"]
    return ", ".join([*parts, "copy"] if copies else parts)


def counted(num: int, name: str) -> str:
    """``1 panel``, ``2 panels``."""
    return f"{num} {name}" if num == 1 else f"{num} {name}s"


def fitting_phases(num_phases: int, world_size: int) -> int:
    """The number of phases a layer uses: 1 for a rank alone, else within 2 .. W."""
    return 1 if world_size == 1 else min(max(2, num_phases), world_size)


def fitting_panels(num_panels: int, problem: Problem) -> int:
    """The number of panels layer 1 uses: no more than its column blocks."""
    return min(num_panels, MAX_PANELS, column_blocks(problem)[1])


def column_blocks(problem: Problem) -> tuple[int, int]:
    """Column blocks of the tiles of layer 0 and of layer 1; bfloat16, D=2048, F=768: 6 and 8."""
    tile = TileShape.select(problem.dtype, problem.moe.hidden_size, problem.width)
    return -(-problem.width // tile.block_f), -(-problem.moe.hidden_size // tile.block_n)
