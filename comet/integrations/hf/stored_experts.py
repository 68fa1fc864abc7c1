"""Experts of a transformers model in a store, some of them in slots on the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet.collectives import wants_grad
from comet.config import require
from comet.decode.runners import Runner
from comet.experts.budget import ExpertBudget
from comet.experts.cache import CacheReport
from comet.experts.host_cores import HostCores, open_cores
from comet.experts.host_profile import HostSizes
from comet.experts.paths import CachedPath, Slots, cores_of_paths, report_of_paths
from comet.experts.staged import StagedExperts
from comet.experts.store import HeldExperts, MemoryFile
from comet.group import ExpertGroup
from comet.integrations.hf.checkpoint import LazyShard
from comet.integrations.hf.experts import CometExperts
from comet.integrations.hf.stored import SCALES
from comet.layout import ExpertLayout
from comet.quantize import StoredType


class StoredExperts(CometExperts):
    """Has no parameters, so that transformers neither makes nor loads the experts; for inference.

    A shared expert of the block runs by itself.

    Args:
        layout: Of one rank.
        runner: Of all layers; its ``decode`` computes from the slots.
    """

    def __init__(self, layout: ExpertLayout, runner: Runner) -> None:
        super().__init__(None, None, layout, runner)  # type: ignore[arg-type]
        self.path: CachedPath | None = None

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See ``CometExperts``."""
        assert self.path is not None, "the loader opens a store before the model is used"
        require(
            not wants_grad(hidden_states),
            "requires_grad=True of the tokens must be False: a model with an expert_budget is for inference, run it "
            "under torch.no_grad()",
        )
        slots = self.path.cache.weights
        return self.path(hidden_states, top_k_index.to(torch.int32), top_k_weights.float(), slots.w1, slots.w2)

    @property
    def expert_bytes(self) -> int:
        """See ``CometExperts``."""
        assert self.path is not None, "the loader opens a store before the model is used"
        return self.path.cache.expert_bytes

    @property
    def slots(self) -> Tensor:
        """``(E,)`` int32: the slot of every expert, -1: none, or another rank's."""
        assert self.path is not None, "the loader opens a store before the model is used"
        return self.path.cache.weights.slots

    @property
    def host_driven(self) -> bool:
        """Whether the host brings what a step misses, which no CUDA graph can."""
        return isinstance(self.path, StagedExperts)

    def __deepcopy__(self, memo: dict[int, object]) -> StoredExperts:
        """A copied model reads the same store and slots."""
        return self


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """Reads the experts of one layer from a checkpoint; an ``ExpertReader``, with scales a ``ScaledReader``.

    Args:
        gate_up: Of all experts.
        down: Likewise.
        scales: Of both, where experts are kept in block FP8.
    """

    gate_up: LazyShard
    down: LazyShard
    scales: tuple[LazyShard, LazyShard] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``ExpertReader``."""
        return self.gate_up.shape, self.down.shape

    def read(self, expert: int, w1: Tensor, w2: Tensor) -> None:
        """See ``ExpertReader``."""
        self.gate_up.read_expert(expert, w1)
        self.down.read_expert(expert, w2)

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``ScaledReader``."""
        assert self.scales is not None, "shards of scales come with keep_fp8"
        return self.scales[0].shape, self.scales[1].shape

    def read_scales(self, expert: int, w1_scales: Tensor, w2_scales: Tensor) -> None:
        """See ``ScaledReader``."""
        assert self.scales is not None, "shards of scales come with keep_fp8"
        for shard, into in zip(self.scales, (w1_scales, w2_scales), strict=True):
            shard.read_expert(expert, into)


def take_files(state: dict[str, Any], modules: Mapping[int, str], *, keep_fp8: bool) -> dict[str, LayerFiles]:
    """Take the expert tensors out of what transformers is to load; returns each layer's by the name of its module."""
    found = {}
    for module in modules.values():
        names = [f"{module}.gate_up_proj", f"{module}.down_proj"]
        scales = (state.pop(names[0] + SCALES), state.pop(names[1] + SCALES)) if keep_fp8 else None
        found[module] = LayerFiles(state.pop(names[0]), state.pop(names[1]), scales)
    return found


def open_stores(
    model: Any,
    layers: Mapping[str, LayerFiles],
    budget: ExpertBudget,
    dtype: torch.dtype,
    device: torch.device,
    group: ExpertGroup | None,
    files: ExitStack,
    host_cores: str = "off",
) -> None:
    """Give every ``StoredExperts`` of a model its store and slots; a host store is read here (collective).

    Args:
        model: On ``device``, its other weights loaded.
        layers: Where each layer's experts are read, by the name of its module.
        budget: For the model.
        dtype: Of the experts.
        device: Of the slots.
        group: The model's ranks, or ``None``.
        files: Open ones; the model keeps them where experts stay in files.
        host_cores: Which cores compute some of the missing experts of a host store (``cores_of``).
    """
    modules = [model.get_submodule(name) for name in layers]
    layout, runner = modules[0].layout, modules[0].runner
    where: dict[str, Any] = dict(dtype=dtype, device=device, group=group, policy=budget.policy)
    if budget.store == "host":
        sizes = HostSizes.of(next(iter(layers.values())).shapes[1][1], layout, runner.decode.max_tokens, dtype)
        cores = open_cores(host_cores, sizes, device, runner=runner)
        file = None if cores is None else cores.file
        slots = Slots(num_slots=budget.slots, layout=layout, runner=runner, cores=cores, **where)
        paths = slots.over_host([_held(reader, budget.stored, dtype, device, file) for reader in layers.values()])
    else:
        slots = Slots(num_slots=budget.slots, layout=layout, runner=runner, **where)
        paths = slots.over_readers(list(layers.values()), budget.places, files)
    for module, path in zip(modules, paths, strict=True):
        module.path = path


def _held(
    reader: LayerFiles,
    stored: StoredType | None,
    dtype: torch.dtype,
    device: torch.device,
    file: MemoryFile | None,
) -> HeldExperts:
    """A layer's experts in host memory, as they are to be stored."""
    if stored is None:
        return HeldExperts.fill(reader, dtype, device, file)
    if stored == "fp8":
        return HeldExperts.keep_fp8(reader, device, file)
    return HeldExperts.quantise(reader, dtype, device, stored, file)


def cache_report(model: Any) -> CacheReport | None:
    """What the expert caches of a model did so far; ``None`` where all experts are on the device. Waits for it."""
    return report_of_paths(_paths(model))


def cores_of(model: Any) -> HostCores | None:
    """The host's cores that compute some of a model's experts, if there are any."""
    return cores_of_paths(_paths(model))


def _paths(model: Any) -> list[CachedPath]:
    return [each.path for each in model.modules() if isinstance(each, StoredExperts) and each.path]
