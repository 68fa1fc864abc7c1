"""The options that keep experts in a store, and what each of them can be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from comet.config import require
from comet.limits import Positive
from comet.utils.choices import MXType, StoredType

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
        known = get_args(MXType)
        is_known = self.expert_dtype is None or self.expert_dtype in known
        require(is_known, f"expert_dtype={self.expert_dtype!r} must be one of {', '.join(known)}")
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
        """Return the options among the attributes of ``settings``."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    @property
    def in_store(self) -> bool:
        """Whether experts are in a store at all."""
        return self.expert_budget is not None

    @property
    def stored(self) -> StoredType | None:
        """The quantised type of experts in a store; ``None`` where they stay as the model has them."""
        return "fp8" if self.keep_fp8 else self.expert_dtype


def prefetch_wanted(setting: PrefetchSetting) -> bool | None:
    """Whether ``expert_prefetch`` insists on prefetch or excludes it; ``None``: it is ``auto``."""
    words = {"auto": None, "true": True, "false": False}
    word = str(setting).lower() if isinstance(setting, bool) else setting
    require(isinstance(word, str) and word in words, f"expert_prefetch={setting!r} must be one of {', '.join(words)}")
    return words[word]


def check_host_cores(setting: str) -> None:
    """Raise ``ValueError`` unless ``host_cores`` is ``auto``, ``off`` or a number, on whatever machine."""
    word = str(setting)  # a call may give the number itself
    require(
        word in ("auto", "off") or (word.isdecimal() and int(word) >= 1),
        f"host_cores={setting!r} must be auto, off, or a number of cores",
    )
