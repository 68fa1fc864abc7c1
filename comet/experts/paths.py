"""How layers compute experts from a store: a GPU reads the missing ones itself, or the host brings them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from comet.comm.handshake import largest
from comet.config import require
from comet.decode.runners import Runner
from comet.errors import UnavailableError
from comet.experts.cache import CacheReport, ExpertCache
from comet.experts.cached import CachedExperts, prefetch_between, probable
from comet.experts.host.cores import HostCores, open_cores, started
from comet.experts.host.profile import HostSizes
from comet.experts.options import StoreOptions
from comet.experts.staged import Stage, StagedCache, StagedExperts
from comet.experts.store import ExpertReader, HeldExperts, MemoryFile
from comet.layer.group import ExpertGroup
from comet.layout import ExpertLayout
from comet.router.router import Router
from comet.utils.graphs import first_line
from comet.utils.streams import StreamLock

logger = logging.getLogger(__name__)

CachedPath = CachedExperts | StagedExperts
PAGEABLE = (
    "the host copies every missing expert, first to pinned memory and then to the GPU, and waits for the GPU in every "
    "layer; no expert is prefetched, and decode steps are not replayed from a CUDA graph"
)
TENTHS_TAKEN = 9  # tenths of the slots that fit are taken: attention memory and scratch come later


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The place of the slots of a model's layers, and their reader."""

    options: StoreOptions
    num_slots: int  # S, asked for in each layer; fewer where memory does not hold them
    layout: ExpertLayout  # this rank's place among the experts
    runner: Runner  # of all layers; its decode computes from the slots
    dtype: torch.dtype  # of tokens
    device: torch.device  # of the slots
    group: ExpertGroup | None = None  # the ranks, which all open the same layers; None: this rank alone
    cores: HostCores | None = None  # that compute some of the missing experts; the host's store is in their file

    def over_host(self, layers: Sequence[HeldExperts]) -> Sequence[CachedPath]:
        """The paths of layers whose experts are in host memory (collective).

        Where a rank's device cannot read its own, that is said once, and the host copies on all ranks.

        Raises:
            UnavailableError: If memory cannot be pinned, and there are cores that are to compute.
            ValueError: If the device's memory does not hold a layer's fewest slots.
        """
        if least_of_ranks(all(layer.readable for layer in layers), self.group):
            place = dict(device=self.device, turn=StreamLock(self.device), **self._place)
            caches = self._fitting(
                layers,
                lambda number, layer, slots: ExpertCache(layer, slots, **place),
                least=1 if self.cores is None else self.most_of_a_token,
            )
            cores = started(self.cores, layers)
            if cores is not None:
                for number, cache in enumerate(caches):
                    cache.share_with(cores, number)
            return [CachedExperts(cache, self.runner, self.layout.top_k) for cache in caches]
        self._do_without_pinning(sum(layer.num_bytes for layer in layers if not layer.readable))
        return self.over_readers(layers, self.num_slots)

    @torch.inference_mode(mode=False)  # memory that both modes may write to
    @torch.no_grad()
    def over_readers(
        self, layers: Sequence[ExpertReader], num_places: int, files: ExitStack | None = None
    ) -> Sequence[CachedPath]:
        """The paths of layers whose experts the host brings (collective).

        Args:
            num_places: Experts of all layers together that the memory holds which is copied from.
            files: Open ones that are read, if any; they stay open as long as the paths.
        """
        deadline_s = self.group.comm.timeout_s if self.group is not None and self.layout.world_size > 1 else None
        stage = Stage(num_places, layers[0].specs, self.device, deadline_s=deadline_s)
        stage.files = None if files is None else files.pop_all()
        caches = self._fitting(
            layers,
            lambda number, layer, slots: StagedCache(layer, stage, number, slots, self.device, **self._place),
            least=self.most_of_a_token,
        )
        return [StagedExperts(cache, self.runner, self.layout.top_k) for cache in caches]

    def _fitting(self, layers: Sequence[Any], make: Callable[[int, Any, int], Any], *, least: int) -> list[Any]:
        """The caches of all layers by their numbers, with fewer slots each where memory runs out (collective)."""
        num_slots, refused = self.num_slots, ""
        while True:
            made: list[Any] = []
            try:
                made.extend(make(number, layer, num_slots) for number, layer in enumerate(layers))
            except torch.OutOfMemoryError as error:
                refused = first_line(error)  # the error itself would keep what was made
            fitting = least_of_ranks(len(made), self.group)
            if fitting == len(layers):
                break
            made.clear()
            torch.cuda.empty_cache()
            refused = refused or "another rank is out of memory"
            require(
                num_slots > least,
                f"expert_budget must fit the device's memory: {least} slots in each of {len(layers)} layers, the "
                f"fewest that serve a token, do not ({refused}); free memory there, or share the experts with more "
                "ranks",
            )
            num_slots = fewer_slots(num_slots, fitting, len(layers), least)
        if num_slots < self.num_slots:
            words = "expert_budget: %d slots in each of %d layers in place of %d: the device is out of memory (%s)"
            logger.warning(words, num_slots, len(layers), self.num_slots, refused)
        return made

    @property
    def most_of_a_token(self) -> int:
        return min(self.layout.top_k, self.layout.experts_local)

    @property
    def _place(self) -> dict[str, Any]:
        first, activation = self.layout.first_expert, self.runner.activation
        return {"num_experts": self.layout.num_experts, "first_expert": first, "activation": activation}

    def _do_without_pinning(self, num_bytes: int) -> None:
        """Close the cores, and say what it costs that so many bytes of this rank cannot be pinned."""
        refused = f"{num_bytes:,} bytes of host memory for experts cannot be pinned (ulimit -l, a container's limit)"
        if self.cores is not None:
            self.cores.close()
            if self.cores.insists:
                raise UnavailableError(
                    f"host_cores computes from pinned memory, and {refused}: allow that, or set host_cores=off"
                )
        if num_bytes:
            logger.warning("%s: %s", refused, PAGEABLE)


@torch.inference_mode(mode=False)  # memory that both modes may write to
@torch.no_grad()
def host_paths(
    slots: Slots,
    hold: Callable[[MemoryFile | None], Sequence[HeldExperts]],
    routers: Callable[[], Sequence[Router]],
    hidden_size: int,
) -> Sequence[CachedPath]:
    """The paths of layers whose experts go to host memory, and what is to help them there (collective).

    Args:
        hold: Brings the experts of all layers to host memory, into a file of it where there is one.
        routers: Called where experts may travel before their step: the routers of all layers, which say which experts
            are probable; none: no expert travels.
    """
    runner, layout, options, setting = slots.runner, slots.layout, slots.options, str(slots.options.host_cores)
    sizes = HostSizes(
        num_experts=layout.num_experts, first_expert=layout.first_expert, hidden_size=hidden_size, top_k=layout.top_k,
        max_tokens=runner.decode.max_tokens, dtype=slots.dtype, activation=runner.activation,
    )  # fmt: skip
    if slots.num_slots < slots.most_of_a_token and setting != "off":
        words = f"host_cores={setting} is of no use with {slots.num_slots} slots, fewer than a token may need"
        require(setting == "auto", f"{words}: its steps run in waves, which leave the cores out; set it to off")
        logger.info(words)
        setting = "off"
    cores = open_cores(setting, sizes, slots.device, runner=runner)
    some_missing = slots.num_slots < layout.experts_local
    guides = routers() if options.prefetches(slots.device, useful=some_missing) else ()
    paths = replace(slots, cores=cores).over_host(hold(None if cores is None else cores.file))
    if guides and options.prefetches(slots.device, useful=not paths[0].graph_obstacle):
        prefetch_between(paths, [partial(probable, router) for router in guides])
    return paths


def report_of_paths(paths: Sequence[Any]) -> CacheReport | None:
    """Report on the caches of all layers so far; ``None`` without a layer. Waits for their device."""
    return paths[0].report(paths) if paths else None


def cores_of_paths(paths: Sequence[CachedPath]) -> HostCores | None:
    return paths[0].cache.cores if paths else None


def fewer_slots(num_slots: int, fitting: int, num_layers: int, least: int) -> int:
    """Return how many slots a layer to try next if S slots fitted only ``fitting`` layers.

    Example: 16 slots, 3 of 4 layers: 12 a layer would fit, of which nine tenths are taken: 10. Not one layer: at most
    4 a layer would, of which 3 are tried.
    """
    return max(least, min(num_slots - 1, num_slots * max(fitting, 1) * TENTHS_TAKEN // (10 * num_layers)))


def least_of_ranks(value: int, group: ExpertGroup | None) -> int:
    """The smallest value of all ranks (collective)."""
    return value if group is None else -int(largest([-value], group.device, group.process_group)[0])
