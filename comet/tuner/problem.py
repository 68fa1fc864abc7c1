"""A layer call and a machine, for which a setting is chosen; the settings that are tried there, and their names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from comet.config import MOE_DTYPES, MoEConfig, OverlapConfig, ParallelConfig, require
from comet.kernels.runtime.limits import MAX_PANELS
from comet.schedule.settings import TileShape

SPLITS = (8, 16, 32)  # comm blocks that are tried
PANELS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The traits of a GPU that settings depend on; the defaults describe the H200."""

    name: str = "NVIDIA H200"  # device name as the driver gives it
    num_sms: int = 132  # SMs, and thread blocks of a fused kernel

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """A device's name and number of SMs; a CPU is taken to have those of the H200."""
        if device.type != "cuda":
            return cls(name=device.type)
        properties = torch.cuda.get_device_properties(device)
        return cls(name=properties.name, num_sms=properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Problem:
    """One layer call, as every rank sees it."""

    moe: MoEConfig  # shape of the layer
    parallel: ParallelConfig  # EP and TP
    num_tokens: int  # T of this call, 0 or more
    dtype: torch.dtype  # element type of tokens and weights

    def __post_init__(self) -> None:
        self.parallel.check(self.moe)
        require(self.num_tokens >= 0, f"num_tokens={self.num_tokens} must be at least 0")
        require(self.dtype in MOE_DTYPES, f"dtype={self.dtype} must be one of {MOE_DTYPES}")

    @property
    def width(self) -> int:
        """F / TP, the part of an expert one rank holds."""
        return self.moe.ffn_size // self.parallel.tp

    @property
    def column_blocks(self) -> int:
        """Column blocks of the tiles of layer 1; bfloat16, D=2048, F=768: 8."""
        tile = TileShape.select(self.dtype, self.moe.hidden_size, self.width)
        return -(-self.moe.hidden_size // tile.block_n)


def default_setting(problem: Problem) -> OverlapConfig:
    """The setting where nothing was measured: that of ``OverlapConfig``, but no more panels than ranks.

    The fewer rows travel, the less there is to hide, and each panel costs: four instead of one are 1 to 6 % of a layer
    on one rank, four instead of two 1 to 6 % on two (``benchmarks/results/tuner.md``).
    """
    default = OverlapConfig()
    return replace(default, num_panels=min(default.num_panels, problem.parallel.world_size))


def effective(setting: OverlapConfig, problem: Problem) -> OverlapConfig:
    """The setting as the layer takes it, within its limits; settings that come to the same launches have equal results.

    Example: 8 panels of D=512 in bfloat16, which are 2 column blocks: 2 panels.
    """
    return replace(setting, num_panels=min(setting.num_panels, MAX_PANELS, problem.column_blocks))


def candidates(problem: Problem, machine: Machine) -> list[OverlapConfig | None]:
    """The settings that are worth measuring, each launch once.

    These are plain, the default, all panels, and splits with the default's panels.

    With the default among them, a tuned layer is never slower than an untuned one.
    """
    default = effective(default_setting(problem), problem)
    colocated = [effective(OverlapConfig(num_panels=panels), problem) for panels in PANELS]
    splits = [replace(default, comm_blocks=blocks) for blocks in SPLITS if blocks < machine.num_sms]
    return [None, *dict.fromkeys([default, *colocated, *splits])]


def candidate_name(setting: OverlapConfig | None, problem: Problem) -> str:
    """Short name of a candidate: ``plain``, ``4 panels``; with a split ``16 comm blocks, 4 panels``."""
    if setting is None:
        return "plain"
    split = [counted(setting.comm_blocks, "comm block")] if setting.comm_blocks else []
    return ", ".join([*split, counted(effective(setting, problem).num_panels, "panel")])


def counted(num: int, name: str) -> str:
    """``1 panel``, ``2 panels``."""
    return f"{num} {name}" if num == 1 else f"{num} {name}s"
