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
        insists = prefetch_wanted(self.expert_prefetch)
        word = str(self.host_cores)
        require(
            word in ("auto", "off") or (word.isdecimal() and int(word) >= 1),
            f"host_cores={word!r} must be auto, off, or a number of cores",
        )
        without_store = {"keep_fp8"} if insists else {"keep_fp8", "expert_prefetch"}
        for each in fields(StoreOptions):
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
            given = self.host_budget
            require(given is None, f"host_budget={given} must be None with expert_store=host, which holds all experts")
            return
        require(
            self.host_budget is not None,
            f"host_budget=None must be given with expert_store={self.expert_store}: the share of all experts (up to 1) "
            "or the bytes that host memory holds",
        )
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
