"""Measured winners, one JSON file per machine: written atomically, read with distrust, looked up exact then nearest.

The file is ``{"version": 3, "device": ..., "entries": [...]}``. A file that cannot be used (damaged, of another device,
of another version) counts as empty, an entry that cannot be used as absent; a store says so in one warning, and the
next ``put`` rebuilds the file, keeping the unusable one as ``<name>.ignored``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from comet.config import OverlapConfig, check_removed, require
from comet.utils.shared_file import locked, write_whole

if TYPE_CHECKING:
    from comet.tuner.problem import Problem

logger = logging.getLogger(__name__)

VERSION = 3
# Kernels that were measured: Triton's alone, or ``auto``, those a layer takes, in CUDA C++ where it can.
Kernels = Literal["auto", "triton"]
IN_CUDA = ("bfloat16", "float16")  # types of layers that take those in CUDA C++
# A measurement serves token counts up to 8 times away; beyond that, whether overlap pays at all may change.
MAX_DOUBLINGS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileKey:
    """The device, shape and tokens that a measurement is valid for."""

    device: str  # device name as the driver gives it
    ep: int  # EP
    tp: int  # TP
    num_experts: int  # E
    top_k: int  # K
    hidden_size: int  # D
    ffn_size: int  # F
    tokens: int  # T per rank, rounded to a power of two (token_bucket)
    dtype: str  # name of the element type without torch.

    @classmethod
    def create(cls, problem: Problem, device: str) -> ProfileKey:
        """The key of a problem on a device."""
        moe, parallel = problem.moe, problem.parallel
        return cls(
            device=device,
            ep=parallel.ep,
            tp=parallel.tp,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            hidden_size=moe.hidden_size,
            ffn_size=moe.ffn_size,
            tokens=token_bucket(problem.num_tokens),
            dtype=str(problem.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One candidate: its median ms, or ``None`` and why it did not run; setting ``None`` is the plain path."""

    setting: OverlapConfig | None
    ms: float | None
    failure: str = ""

    def __post_init__(self) -> None:
        valid = self.ms is None or 0 < self.ms <= sys.float_info.max
        require(valid, f"ms={self.ms} must be positive and finite, or None for a candidate that failed")

    @property
    def time(self) -> float:
        """``ms``; infinite where it did not run."""
        return math.inf if self.ms is None else self.ms


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEntry:
    """The measurements of one key."""

    key: ProfileKey  # they are valid for this
    measured: tuple[Measured, ...]  # at least one candidate that ran
    commit: str  # version of the code that was measured
    date: str  # day of the measurement
    kernels: Kernels = "auto"  # auto, or triton, which an entry of a file is that does not say

    def __post_init__(self) -> None:
        known = get_args(Kernels)
        require(self.kernels in known, f"kernels={self.kernels!r} must be one of {known}")
        ran = any(item.ms is not None for item in self.measured)
        require(ran, f"measured must hold a candidate that ran for {self.key}")

    @property
    def winner(self) -> Measured:
        """The fastest candidate; the first of equals."""
        return min(self.measured, key=lambda item: item.time)


class ProfileStore:
    """The entries of one machine: those of its file ``path``, which need not exist, and of other ``sources``."""

    def __init__(
        self,
        path: Path,
        device: str,
        entries: Mapping[ProfileKey, ProfileEntry],
        sources: Mapping[ProfileKey, Path] | None = None,
    ) -> None:
        self.path = path
        self.device = device
        self.entries = dict(entries)
        self.sources = dict(sources or {})

    @classmethod
    def load(cls, path: Path, device: str, shipped: Path | None = None, *, in_cuda: bool = False) -> ProfileStore:
        """Read a store; a file that cannot be used whole, as one of another device, is named in one warning.

        ``shipped``, the file of the package, is used for keys that the user's file ``path`` does not have. Where layers
        run in CUDA C++ (``in_cuda``), what Triton's kernels took says nothing, nor that the plain path was faster.
        """
        entries: dict[ProfileKey, ProfileEntry] = {}
        sources: dict[ProfileKey, Path] = {}
        for source in (shipped, path):
            if source is not None:
                try:
                    found, trouble = read_entries(source, device)
                except OSError as error:
                    found, trouble = {}, f"cannot be read ({type(error).__name__}: {error})"
                other = [key for key, entry in found.items() if entry.kernels == "triton" and key.dtype in IN_CUDA]
                if in_cuda and other:
                    found = {key: entry for key, entry in found.items() if key not in other}
                    trouble = trouble or f"has {len(other)} entries of Triton's kernels, where CUDA C++ runs"
                entries |= found
                sources |= dict.fromkeys(found, source)
                if trouble:
                    logger.warning("profile %s: %s; ignored, to be measured again", source, trouble)
        return cls(path, device, entries, sources)

    @classmethod
    def open(cls, folder: Path | None, device: str, world_size: int, *, in_cuda: bool = False) -> ProfileStore:
        """The store of a machine: its file in ``folder``, and under it the one shipped with Comet, if any.

        Without a folder there is nothing but the shipped file, and ``put`` must not be called.
        """
        shipped = Path(str(files("comet.configs"))) / "profiles"
        name = profile_path(Path(), device, world_size)
        if folder is None:
            return cls.load(shipped / name, device, in_cuda=in_cuda)
        return cls.load(folder / name, device, shipped / name, in_cuda=in_cuda)

    def lookup(self, problem: Problem) -> tuple[ProfileEntry, bool] | None:
        """The entry for a problem and whether it is exact.

        Without an exact one it is the nearest in tokens (on a logarithmic scale, at most a factor of 8 away, the larger
        of two equally near) of the same shape, layout, type and device; ``None`` if there is none.

        Example: entries at 512 and 8192 tokens: 8192 is exact, 1024 gives 512, 2048 (equally near) 8192, 32 none.
        """
        key = ProfileKey.create(problem, self.device)
        if key in self.entries:
            return self.entries[key], True
        wanted = math.log2(key.tokens)
        near = [
            (abs(math.log2(other.tokens) - wanted), -other.tokens, entry)
            for other, entry in self.entries.items()
            if replace(other, tokens=key.tokens) == key
        ]
        near = [item for item in near if item[0] <= MAX_DOUBLINGS]
        return (min(near, key=lambda item: item[:2])[2], False) if near else None

    def source(self, entry: ProfileEntry) -> Path:
        """The file an entry of this store was read from or written to."""
        return self.sources.get(entry.key, self.path)

    def put(self, entry: ProfileEntry) -> None:
        """Keep an entry's winner, in memory and in the file; entries other processes wrote meanwhile are kept."""
        require(
            entry.key.device == self.device, f"device={entry.key.device!r} must be the store's device {self.device!r}"
        )
        entry = replace(entry, measured=(entry.winner,))
        self.entries[entry.key] = entry
        self.sources[entry.key] = self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            found, trouble = read_entries(self.path, self.device)
            if trouble:
                os.replace(self.path, self.path.with_name(self.path.name + ".ignored"))
            found[entry.key] = entry
            # In a stable order, so that a file in version control changes only where measurements do.
            ordered = sorted(found.values(), key=lambda each: tuple(asdict(each.key).values()))
            content = {"version": VERSION, "device": self.device, "entries": [asdict(each) for each in ordered]}
            write_whole(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def profile_path(folder: Path, device: str, world_size: int) -> Path:
    """The file of a machine; ``NVIDIA H200`` and 4 ranks: ``nvidia_h200_x4.json``."""
    name = "".join(letter if letter.isalnum() else "_" for letter in device.lower())
    return folder / f"{name}_x{world_size}.json"


def token_bucket(num_tokens: int) -> int:
    """The power of two nearest to ``num_tokens`` on a logarithmic scale; 0 -> 1, 2896 -> 2048, 2897 -> 4096."""
    return 2 ** round(math.log2(max(num_tokens, 1)))


def read_entries(path: Path, device: str) -> tuple[dict[ProfileKey, ProfileEntry], str]:
    """The usable entries of a file and what is wrong with the rest, or ""; a missing file is an empty one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        return {}, f"cannot be parsed ({type(error).__name__}: {str(error).splitlines()[0]})"
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else None
        return {}, f"has version {found!r}, not {VERSION}"
    if content.get("device") != device:
        return {}, f"is of device {content.get('device')!r}, not {device!r}"
    raw = content.get("entries")
    if not isinstance(raw, list):
        return {}, "has no list of entries"
    entries, reasons = {}, []
    for item in raw:
        try:
            entry = _read(ProfileEntry, {"kernels": "triton", **item} if isinstance(item, dict) else item)
            key = entry.key
            require(key.tokens == token_bucket(key.tokens), f"tokens={key.tokens} must be a power of two")
            require(key.device == device, f"device={key.device!r} must be {device!r}")
            entries[key] = entry
        except (ValueError, TypeError) as error:
            reasons.append(str(error))
    return entries, f"has {len(reasons)} bad entries of {len(raw)} (first: {reasons[0]})" if reasons else ""


def _read(cls: Any, raw: Any) -> Any:
    """A dataclass from JSON, which has exactly its fields, each of its type."""
    hints = get_type_hints(cls)
    require(isinstance(raw, dict), f"{cls.__name__} must be a mapping, not {type(raw).__name__}")
    check_removed(raw if cls is OverlapConfig else [])
    require(raw.keys() == hints.keys(), f"{cls.__name__} must have the fields {sorted(hints)}, not {sorted(raw)}")
    return cls(**{name: _value(name, hints[name], value) for name, value in raw.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is tuple:
        require(isinstance(value, list), f"{name} must be a list")
        return tuple(_value(name, get_args(hint)[0], item) for item in value)
    if get_origin(hint) is UnionType:  # with None
        return None if value is None else _value(name, get_args(hint)[0], value)
    if is_dataclass(hint):
        return _read(hint, value)
    kinds = {float: (int, float), Kernels: (str,)}.get(hint, (hint,))
    require(type(value) in kinds, f"{name}={value!r} must be of type {kinds[-1].__name__}")
    return value
