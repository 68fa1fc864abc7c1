"""The options of ``load_pretrained`` that keep experts in a store, checked together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comet.config import MoEConfig, ParallelConfig, require
from comet.decode.runners import DECODE_TOKENS
from comet.experts import CACHED_DECODE_TOKENS
from comet.experts.budget import ExpertBudget, ExpertStoreKind
from comet.group import ExpertGroup
from comet.kernels.expert_tables import Policy
from comet.quantize import MXType, StoredType


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """See ``load_pretrained``.

    Raises:
        ValueError: If one needs another, or excludes it.
        NotImplementedError: If the file store is to hold quantised experts.
    """

    expert_budget: float | None = None
    expert_store: ExpertStoreKind = "host"
    host_budget: float | None = None
    expert_dtype: MXType | None = None
    keep_fp8: bool = False
    expert_policy: Policy = "lru"

    def __post_init__(self) -> None:
        alone = self.expert_store == "host" and self.host_budget is None
        require(
            alone or self.in_store,
            "expert_budget=None must be a share or bytes with an expert_store='file' or a host_budget",
        )
        require(
            self.in_store or self.expert_policy == "lru",
            f"expert_policy={self.expert_policy!r} must come with an expert_budget",
        )
        named = f"expert_dtype={self.expert_dtype} must"
        require(self.in_store or self.expert_dtype is None, f"{named} come with an expert_budget")
        require(not self.keep_fp8 or self.expert_dtype is None, f"{named} be None with keep_fp8=True")
        if self.in_store and self.expert_store == "file" and self.stored is not None:
            raise NotImplementedError(f"expert_store='file' does not bring experts in {self.stored} yet: use 'host'")

    @property
    def in_store(self) -> bool:
        """Whether experts are in a store at all."""
        return self.expert_budget is not None

    @property
    def stored(self) -> StoredType | None:
        """What experts in a store are quantised to."""
        return "fp8" if self.keep_fp8 else self.expert_dtype

    def most_tokens(self, decode_tokens: int | None, group: ExpertGroup | None) -> int:
        """Most tokens of a decode step.

        Raises:
            ValueError: If there is a store, which only decode steps read.
            NotImplementedError: If the ranks of the group take none.
        """
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
        self, moe: MoEConfig, num_layers: int, dtype: torch.dtype, group: ExpertGroup | None
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
            parallel=ParallelConfig() if group is None else group.parallel,
            stored=self.stored,
            policy=self.expert_policy,
        )
