"""The setting that a layer call takes: the user's, else a measured one, else the default, on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.kernels.runtime.limits import MAX_PANELS
from comet.schedule.settings import TileShape
from comet.schedule.table import Kernels, Profile, key_of, token_bucket

logger = logging.getLogger(__name__)


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
    """One layer call, as every rank sees it; whether layer and layout fit each other shows where they meet."""

    moe: MoEConfig
    parallel: ParallelConfig
    num_tokens: int  # T of this call, 0 or more
    dtype: torch.dtype  # element type of tokens and weights
    model: str = ""  # name of the model, for people

    @property
    def title(self) -> str:
        return f"{self.model} EP{self.parallel.ep} TP{self.parallel.tp}, {self.num_tokens} tokens"

    @property
    def num_nodes(self) -> int:
        """Nodes of a group; 1 where its layers do not run inside nodes."""
        return self.parallel.world_size // (self.parallel.ranks_with_memory or self.parallel.world_size)

    @property
    def column_blocks(self) -> int:
        tile = TileShape.select(self.dtype, self.moe.hidden_size, self.moe.ffn_size // self.parallel.tp)
        return -(-self.moe.hidden_size // tile.block_n)

    def columns(self) -> dict[str, object]:
        """Values of ``PROBLEM_COLUMNS`` in a table; ``layer`` holds traits other than sizes that decide the time."""
        moe, parallel = self.moe, self.parallel
        traits = {name: getattr(moe, name) for name in ("expert_bias", "capacity_factor", "max_imbalance")}
        named = [f"{name}={value}" for name, value in (moe.activation.parameters | traits).items() if value]
        return dict(
            model=self.model, hidden_size=moe.hidden_size, ffn_size=moe.ffn_size, num_experts=moe.num_experts,
            top_k=moe.top_k, layer=", ".join([moe.activation.name, *named]), ep=parallel.ep, tp=parallel.tp,
            tokens=self.num_tokens, dtype=self.dtype,
        )  # fmt: skip


def default_setting(problem: Problem) -> OverlapConfig:
    """Return the setting without measurements: ``OverlapConfig``'s default, but no more panels than ranks.

    Panels cost time, and few rows leave little to hide: four instead of one take 1 to 6 % of a layer on one rank, four
    instead of two 1 to 6 % on two ranks (``benchmarks/results/tuner.md``).
    """
    default = OverlapConfig()
    return replace(default, num_panels=min(default.num_panels, problem.parallel.world_size))


def effective(setting: OverlapConfig, problem: Problem) -> OverlapConfig:
    """Return the setting within the layer's limits. Settings with the same launches give equal results.

    Example: 8 panels of D=512 in bfloat16, which are 2 column blocks: 2 panels.
    """
    return replace(setting, num_panels=min(setting.num_panels, MAX_PANELS, problem.column_blocks))


def check_setting(setting: OverlapConfig, problem: Problem, machine: Machine) -> None:
    """Raise ``ValueError`` naming the rule if a setting cannot run.

    The defaults of ``OverlapConfig`` always pass: a layer narrows them to its column blocks.
    """
    defaults, columns = OverlapConfig(), problem.column_blocks
    where = "an H200, which a CPU stands in for" if machine.name == "cpu" else machine.name
    require(
        setting.comm_blocks < machine.num_sms,
        f"comm_blocks={setting.comm_blocks} must be below the {machine.num_sms} SMs of {where}: "
        "at least one block computes",
    )
    require(
        setting.num_panels <= max(min(columns, MAX_PANELS), defaults.num_panels),
        f"num_panels={setting.num_panels} must be at most {MAX_PANELS} and at most the {columns} column blocks of "
        f"hidden_size={problem.moe.hidden_size}: a panel is whole column blocks",
    )


def setting_name(setting: OverlapConfig | None) -> str:
    """Short name of a setting: ``plain``, ``4 panels``; with a split ``16 comm blocks, 4 panels``."""
    if setting is None:
        return "plain"
    split = [counted(setting.comm_blocks, "comm block")] if setting.comm_blocks else []
    return ", ".join([*split, counted(setting.num_panels, "panel")])


def counted(num: int, name: str) -> str:
    return f"{num} {name}" if num == 1 else f"{num} {name}s"


class Resolved(NamedTuple):
    """The choice for a problem."""

    setting: OverlapConfig | None  # how the fused kernels share the work; None means that the plain path is faster
    # given by the user; measured for this key (profile) or for another number of tokens (nearest); the default
    source: Literal["user", "profile", "nearest", "default"]


class Resolver:
    """Chooses the setting of layer calls, and logs each choice once."""

    def __init__(self, profile: Profile, machine: Machine, kernels: Kernels, *, logs: bool = True) -> None:
        self.profile = profile
        self.machine = machine
        self.kernels = kernels
        self._logs = logs
        self._logged: set[str] = set()

    def __call__(self, problem: Problem, *, forced: OverlapConfig | None = None) -> Resolved:
        """Choose a setting: the user's, the one measured at these tokens or nearest to them, else the default.

        The user's setting always wins, and an impossible one is refused; an impossible measured one is passed over.
        """
        tokens = token_bucket(problem.num_tokens)
        if forced is not None:
            check_setting(forced, problem, self.machine)
        choice = self._measured(problem) if forced is None else Resolved(forced, "user")
        moe, parallel, dtype = problem.moe, problem.parallel, str(problem.dtype).removeprefix("torch.")
        taken = choice.setting and effective(choice.setting, problem)
        self._log(
            f"split of layers with E={moe.num_experts} K={moe.top_k} D={moe.hidden_size} F={moe.ffn_size} {dtype}, "
            f"EP{parallel.ep} TP{parallel.tp}, about {tokens} tokens: {setting_name(taken)} ({choice.source})"
        )
        return choice

    def _measured(self, problem: Problem) -> Resolved:
        key = key_of(problem.columns() | {"device": self.machine.name, "kernels": self.kernels})
        if found := self.profile.lookup(key):
            setting = found[0].setting
            try:
                if setting is not None:
                    check_setting(setting, problem, self.machine)
                return Resolved(setting, "profile" if found[1] else "nearest")
            except ValueError as error:
                self.warn(f"profile {self.profile.path}: best setting passed over: {error}")
        return Resolved(default_setting(problem), "default")

    def warn(self, message: str) -> None:
        self._log(message, logging.WARNING)

    def _log(self, message: str, level: int = logging.INFO) -> None:
        if self._logs and message not in self._logged:
            logger.log(level, message)
        self._logged.add(message)


def shared_resolver(
    folder: Path | None, device: torch.device, world_size: int, process_group: ProcessGroup | None, *, in_cuda: bool
) -> Resolver:
    """Make the resolver that the layers of a group ask for their setting (collective).

    Files may differ from node to node, so only the first rank reads the profiles of the user's ``folder`` and those
    shipped with Comet, warns of mistakes in them and sends them to the others.
    """
    machine = Machine.of(device)
    is_first = process_group is None or dist.get_rank(process_group) == 0
    found = [Profile.open(folder, machine.name, world_size) if is_first else None]
    if process_group is not None and world_size > 1:
        dist.broadcast_object_list(found, group=process_group, group_src=0)
    assert found[0] is not None, "the first rank has told"
    return Resolver(found[0], machine, "auto" if in_cuda else "triton", logs=is_first)
