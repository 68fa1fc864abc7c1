"""The options that keep experts in a store, and what each of them can be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from comet import limits
from comet.config import require
from comet.limits import Positive
from comet.utils.choices import MXType, StoredType

if TYPE_CHECKING:
    import torch

ExpertStoreKind = Literal["host", "file"]
PrefetchSetting = bool | Literal["auto", "true", "false"]
GRAPH_FALLBACK_REASON = (
    "the host brings missing experts before every layer: they are in files or in memory that cannot be pinned"
)


@dataclass(frozen=True)  # without slots, so that settings of more than these can inherit them
class StoreOptions:
    """Which experts are where, checked together; ``GenerateConfig`` says what each option means.

    Raises:
        ValueError: If one needs another, or excludes it; or ``expert_prefetch`` is not what it can be.
        NotImplementedError: If experts in files are to be prefetched.
    """

    expert_budget: Positive | None = None
    expert_store: ExpertStoreKind = "host"
    host_budget: Positive | None = None
    expert_dtype: MXType | None = None
    keep_fp8: bool = False
    host_cores: str | int = "off"
    expert_prefetch: PrefetchSetting = "auto"

    def __post_init__(self) -> None:
        limits.check(self)
        insists, word = prefetch_wanted(self.expert_prefetch), str(self.host_cores)
        is_number = word.isdecimal() and int(word) >= 1
        require(word in ("auto", "off") or is_number, f"host_cores={word!r} must be auto, off, or a number of cores")
        without_store = {"keep_fp8"} if insists else {"keep_fp8", "expert_prefetch"}
        for each in fields(StoreOptions):
            value = getattr(self, each.name)
            require(
                self.in_store or value == each.default or each.name in without_store,
                f"{each.name}={value} must come with an expert_budget: without one all experts are in GPU memory",
            )
        in_files, store = self.expert_store == "file", f"with expert_store={self.expert_store}"
        has_budget, budget = self.host_budget is not None, "the share of all experts (up to 1) or the bytes"
        for name, is_wrong, rule in (
            ("expert_dtype", self.keep_fp8 and self.expert_dtype is not None, "None with keep_fp8=True"),
            ("host_budget", has_budget and not in_files, f"None {store}, which holds all experts"),
            ("host_budget", in_files and not has_budget, f"given {store}: {budget} that host memory holds"),
            ("host_cores", in_files and word != "off", f"off {store}: experts in files are not computed on the host"),
        ):
            require(not is_wrong, f"{name}={getattr(self, name)} must be {rule}")
        if in_files and insists:
            rule = f"must be auto or false {store}: {GRAPH_FALLBACK_REASON}"
            raise NotImplementedError(f"expert_prefetch={self.expert_prefetch} {rule}")

    @classmethod
    def of(cls, settings: Any) -> StoreOptions:
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    @property
    def in_store(self) -> bool:
        return self.expert_budget is not None

    @property
    def stored(self) -> StoredType | None:
        """The quantised type of experts in a store; ``None`` where they stay as the model has them."""
        return "fp8" if self.keep_fp8 else self.expert_dtype

    def prefetches(self, device: torch.device, *, useful: bool = True) -> bool:
        """Whether experts of a host store are to travel before their step.

        Example: ``auto`` says yes on a GPU that reads the store itself, and no on a CPU or where the host brings
        experts.
        """
        wanted = prefetch_wanted(self.expert_prefetch)
        return useful and device.type == "cuda" if wanted is None else wanted


def prefetch_wanted(setting: PrefetchSetting) -> bool | None:
    """Whether ``expert_prefetch`` insists on prefetch or excludes it; ``None``: it is ``auto``."""
    words = {"auto": None, "true": True, "false": False}
    word = str(setting).lower() if isinstance(setting, bool) else setting
    require(isinstance(word, str) and word in words, f"expert_prefetch={setting!r} must be one of {', '.join(words)}")
    return words[word]
