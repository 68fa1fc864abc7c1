"""Which setting a layer call uses: the user's, else a measured one, else the default, on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.config import OverlapConfig, require
from comet.kernels.runtime.limits import MAX_PANELS
from comet.tuner.problem import Machine, Problem, candidate_name, default_setting
from comet.tuner.profile import ProfileKey, ProfileStore

logger = logging.getLogger(__name__)

Source = Literal["user", "profile", "nearest", "default"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The choice for a problem."""

    setting: OverlapConfig | None  # how the fused kernels share the work; None means that the plain path is faster
    source: Source  # given by the user; measured for this key (profile) or for another number of tokens; the default
    passed_over: str = ""  # the rule that the best measured setting breaks here, "" where it breaks none


def resolve(
    problem: Problem, store: ProfileStore, machine: Machine, *, forced: OverlapConfig | None = None
) -> Resolved:
    """Choose a setting: the user's, the one measured at these tokens or nearest to them, else the default.

    One that the user gave always wins, and is refused where it is impossible; a measured one is passed over then.
    """
    if forced is not None:
        check_setting(forced, problem, machine)
        return Resolved(setting=forced, source="user")
    found, passed_over = store.lookup(problem), ""
    if found is not None:
        entry, exact = found
        setting = entry.winner.setting
        try:
            if setting is not None:
                check_setting(setting, problem, machine)
            return Resolved(setting=setting, source="profile" if exact else "nearest")
        except ValueError as error:
            passed_over = str(error)
    return Resolved(setting=default_setting(problem), source="default", passed_over=passed_over)


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


class Resolver:
    """``resolve`` for the life of a process: remembers each choice per shape and ``logs`` it once.

    Calls whose tokens fall into one bucket (a power of two) share a choice, so a growing batch is answered about once
    per doubling, and a steady one costs a dictionary lookup.
    """

    def __init__(self, store: ProfileStore, machine: Machine, *, logs: bool = True) -> None:
        self.store = store
        self.machine = machine
        self.logs = logs
        self._choices: dict[tuple[ProfileKey, OverlapConfig | None], Resolved] = {}
        self._warned: set[str] = set()

    def __call__(self, problem: Problem, *, forced: OverlapConfig | None = None) -> Resolved:
        """The choice for ``problem``; raises as ``resolve`` does."""
        key = ProfileKey.create(problem, self.machine.name)
        if (key, forced) not in self._choices:
            bucket = replace(problem, num_tokens=key.tokens)
            choice = resolve(bucket, self.store, self.machine, forced=forced)
            self._choices[key, forced] = choice
            if self.logs:
                self._log(key, choice, bucket)
        return self._choices[key, forced]

    def warn(self, message: str) -> None:
        """Log a warning about all choices, once."""
        if self.logs and message not in self._warned:
            logger.warning(message)
        self._warned.add(message)

    def _log(self, key: ProfileKey, choice: Resolved, bucket: Problem) -> None:
        if choice.passed_over and (found := self.store.lookup(bucket)):
            profile = self.store.source(found[0])
            logger.warning("profile %s: best setting passed over: %s", profile, choice.passed_over)
        logger.info(
            "split of layers with E=%d K=%d D=%d F=%d %s, EP%d TP%d, about %d tokens: %s (%s)",
            key.num_experts, key.top_k, key.hidden_size, key.ffn_size, key.dtype, key.ep, key.tp, key.tokens,
            candidate_name(choice.setting, bucket), choice.source,
        )  # fmt: skip


def shared_resolver(
    folder: Path | None, device: torch.device, world_size: int, process_group: ProcessGroup | None, *, in_cuda: bool
) -> Resolver:
    """Make the resolver that the layers of a group ask for their setting (collective).

    The first rank alone reads the profiles, of the user's ``folder`` and those shipped with Comet, warns of what is
    wrong with them and sends them to the others: files may differ from node to node.
    """
    machine = Machine.of(device)
    is_first = process_group is None or dist.get_rank(process_group) == 0
    found = [ProfileStore.open(folder, machine.name, world_size, in_cuda=in_cuda) if is_first else None]
    if process_group is not None and world_size > 1:
        dist.broadcast_object_list(found, group=process_group, group_src=0)
    assert found[0] is not None, "the first rank has told"
    return Resolver(found[0], machine, logs=is_first)
