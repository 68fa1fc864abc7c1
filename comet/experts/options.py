"""The options that keep experts in a store, checked together, by the names of ``load_pretrained`` and ``generate``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from comet.config import MoEConfig, ParallelConfig, require
from comet.decode.runners import DECODE_TOKENS
from comet.experts.budget import ExpertBudget, ExpertStoreKind
from comet.experts.cache import CACHED_DECODE_TOKENS
from comet.experts.prefetch import PrefetchSetting, prefetch_wanted
from comet.experts.staged import GRAPH_FALLBACK_REASON
from comet.kernels.experts.tables import Policy
from comet.layer.group import ExpertGroup
from comet.quantization.formats import MXType, StoredType


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Which experts are where, checked together; ``GenerateConfig`` says what each option means.

    Raises:
        ValueError: If one needs another, or excludes it; or ``expert_prefetch`` is not what it can be.
        NotImplementedError: If experts in files are to be prefetched.
    """

    expert_budget: float | None = None
    expert_store: ExpertStoreKind = "host"
    host_budget: float | None = None
    expert_dtype: MXType | None = None
    keep_fp8: bool = False
    expert_policy: Policy = "lru"
    host_cores: str = "off"
    expert_prefetch: PrefetchSetting = "auto"

    def __post_init__(self) -> None:
        insists = prefetch_wanted(self.expert_prefetch)
        without_store = {"keep_fp8"} if insists else {"keep_fp8", "expert_prefetch"}
        for each in fields(self):
            value = getattr(self, each.name)
            require(
                self.in_store or value == each.default or each.name in without_store,
                f"{each.name}={value} must come with an expert_budget: without one all experts are in GPU memory",
            )
        require(
            not self.keep_fp8 or self.expert_dtype is None,
            f"expert_dtype={self.expert_dtype} must be None with keep_fp8=True",
        )
        if self.expert_store == "host":
            return
        require(
            self.host_cores == "off",
            f"host_cores={self.host_cores} must be off with expert_store={self.expert_store}: experts in files are not "
            "computed on the host",
        )
        if insists:
            raise NotImplementedError(
                f"expert_prefetch={self.expert_prefetch} must be auto or false with expert_store={self.expert_store}: "
                f"{GRAPH_FALLBACK_REASON}"
            )

    @classmethod
    def of(cls, settings: Any) -> StoreOptions:
        """Those among the attributes of ``settings``."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    @property
    def in_store(self) -> bool:
        """Whether experts are in a store at all."""
        return self.expert_budget is not None

    @property
    def stored(self) -> StoredType | None:
        """What experts in a store are quantised to."""
        return "fp8" if self.keep_fp8 else self.expert_dtype

    def most_tokens(self, decode_tokens: int | None, group: ExpertGroup | None) -> int:
        """Most tokens of a decode step."""
        if not self.in_store:
            return DECODE_TOKENS if decode_tokens is None else decode_tokens
        if group is not None and group.comm.memory_obstacle:
            raise NotImplementedError(f"expert_budget needs warp decode on all ranks: {group.comm.memory_obstacle}")
        require(
            decode_tokens is None or decode_tokens >= 1,
            f"decode_tokens={decode_tokens} must be at least 1 with an expert_budget",
        )
        return decode_tokens or CACHED_DECODE_TOKENS

    def budget(
        self, moe: MoEConfig, num_layers: int, dtype: torch.dtype, parallel: ParallelConfig
    ) -> ExpertBudget | None:
        """What each rank has where; ``None`` where all experts are on the device."""
        if self.expert_budget is None:
            return None
        return ExpertBudget.create(
            self.expert_budget,
            moe,
            num_layers,
            dtype,
            store=self.expert_store,
            host_budget=self.host_budget,
            parallel=parallel,
            stored=self.stored,
            policy=self.expert_policy,
        )
