"""Experts of a transformers model in a store, some of them in slots on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.decode.runners import Runner
from comet.experts.budget import ExpertBudget
from comet.experts.cache import CacheReport
from comet.experts.host.cores import HostCores
from comet.experts.paths import CachedPath, Slots, cores_of_paths, host_paths, report_of_paths
from comet.experts.store import HeldExperts, QuantisedReader, Specs
from comet.integrations.hf.modules import CometExperts, routers_beside
from comet.integrations.hf.stored import BIASES, FUSED, SCALES, LazyShard
from comet.layer.group import ExpertGroup
from comet.layout import ExpertLayout, RoutedTokens
from comet.utils.autocast import in_dtype

NOT_SAVED = "experts are in a store and no parameters; load the model without expert_budget to save it"


class StoredExperts(CometExperts):
    """Has no parameters, so that transformers neither makes nor loads the experts; for inference.

    A shared expert of the block runs by itself.
    """

    path: CachedPath  # set by ``open_stores``, before the model is used
    model: weakref.ref[Any]  # set with it: the model that these experts are of

    def __init__(self, layout: ExpertLayout, runner: Runner) -> None:
        super().__init__(None, None, layout, runner)  # type: ignore[arg-type]

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``(T, D)`` of ``(T, D)``, ``(T, K)`` and ``(T, K)``, from the slots."""
        slots = self.path.cache.weights
        tokens = hidden_states if slots.w1_scales is not None else in_dtype(hidden_states, slots.w1.dtype)
        routed = RoutedTokens(tokens, top_k_index.int(), top_k_weights.float())
        return self.path(routed, slots.w1, slots.w2).to(hidden_states.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Refused, for nothing in the state would say what it lacks; transformers asks for it while it loads.

        peft asks a model with adapters for its state to find these. Its experts are in there as what no file takes.
        """
        if hasattr(self, "path"):
            require(hasattr(self.model(), "peft_config"), f"state_dict: {NOT_SAVED}")
            destination[f"{prefix}in_store"] = Unsaved()

    def __deepcopy__(self, memo: dict[int, object]) -> StoredExperts:
        return self


class Unsaved:
    """Experts in a store, in the place of their tensors in a state; saving that raises ``ValueError``."""

    def __reduce__(self) -> Any:
        raise ValueError(f"state_dict: {NOT_SAVED}; of a model with adapters, peft's save_pretrained saves these")


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """Reads the experts of one layer from a checkpoint; an ``ExpertReader``."""

    shards: Mapping[str, LazyShard]  # part -> what all experts hold of it
    dtypes: Mapping[str, torch.dtype]

    @property
    def specs(self) -> Specs:
        return {name: (shard.shape, self.dtypes[name]) for name, shard in self.shards.items()}

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        for name, shard in self.shards.items():
            shard.read_expert(expert, into[name])


def take_files(
    state: dict[str, Any], modules: Sequence[str], dtype: torch.dtype, layout: ExpertLayout, *, keep_fp8: bool
) -> dict[str, LayerFiles]:
    """Take the expert tensors out of what transformers is to load; b2 is read by the first TP rank of a shard alone."""
    names = {"w1": FUSED[0], "w2": FUSED[1], "w1_scales": FUSED[0] + SCALES, "w2_scales": FUSED[1] + SCALES}
    names |= dict(zip(("b1", "b2"), BIASES, strict=True))
    found = {}
    for module in modules:
        taken = {part: state.pop(f"{module}.{name}", None) for part, name in names.items()}
        if layout.tp_rank:
            del taken["b2"]
        shards = {part: shard for part, shard in taken.items() if shard is not None}
        dtypes = {part: shard.dtype if keep_fp8 else dtype for part, shard in shards.items()}
        found[module] = LayerFiles(shards, dtypes)
    return found


def open_stores(
    model: Any,
    layers: Mapping[str, LayerFiles],
    budget: ExpertBudget,
    moe: MoEConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: ExpertGroup | None,
    files: ExitStack,
) -> None:
    """Give every ``StoredExperts`` of a model its store and slots; a host store is read here (collective).

    ``layers`` says where the experts of each module are read; the model keeps ``files`` where experts stay in them.
    """
    modules, options = [model.get_submodule(name) for name in layers], budget.options
    slots = Slots(
        options=options, num_slots=budget.num_slots, layout=modules[0].layout, runner=modules[0].runner, dtype=dtype,
        device=device, group=group,
    )  # fmt: skip
    to = options.expert_dtype
    readers = [reader if to is None else QuantisedReader(reader, to) for reader in layers.values()]
    if options.expert_store == "host":
        paths = host_paths(
            slots,
            lambda file: [HeldExperts.fill(reader, device, file) for reader in readers],
            partial(routers_beside, model, list(layers), moe, options.expert_prefetch),
            model.config.hidden_size,
        )
    else:
        paths = slots.over_readers(readers, budget.num_places, files)
    for module, path in zip(modules, paths, strict=True):
        module.path, module.model = path, weakref.ref(model)
    names = {name[:place] for name in layers for place, letter in enumerate(f"{name}.") if letter == "."}
    for module in (model, *map(model.get_submodule, names)):  # a bound method is copied with its module
        module._apply = MethodType(partial(_apply_in_place, torch.empty(0, dtype=dtype, device=device)), module)


def _apply_in_place(like: Tensor, module: Any, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``Module._apply``, refused where it would leave a store's slots behind, before it changes anything."""
    changed = change(like)
    for name in ("dtype", "device"):
        kept, wanted = getattr(like, name), getattr(changed, name)
        rule = f"experts are in a store for it; load the model with {name}={wanted}"
        require(kept == wanted, f"{name}={wanted} of a model with an expert_budget must stay {kept}: {rule}")
    return type(module)._apply(module, change, recurse)


def cache_report(model: Any) -> CacheReport | None:
    """Add up what a model's expert caches did; ``None`` where all experts are on the device. Waits for it."""
    return report_of_paths(stored_paths(model))


def cores_of(model: Any) -> HostCores | None:
    return cores_of_paths(stored_paths(model))


def stored_paths(model: Any) -> list[CachedPath]:
    """How its layers compute experts from a store; none where all experts are on the device."""
    return [each.path for each in model.modules() if isinstance(each, StoredExperts)]
