"""Tables of measured settings: all rows of a sweep, and the fastest settings of a machine, its profile.

Both are CSV files with the same columns. A sweep refuses a file that breaks a rule. A profile that breaks a rule counts
as empty and is named in one warning. The next tuning renames it to ``<name>.ignored``.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal

from comet import limits
from comet.config import OverlapConfig, require
from comet.utils.shared_file import locked, write_whole

logger = logging.getLogger(__name__)

# A time says something about calls that agree in these columns and have a similar number of tokens.
SAME = tuple("hidden_size ffn_size num_experts top_k ep tp dtype device kernels".split())
PROBLEM_COLUMNS = tuple("model hidden_size ffn_size num_experts top_k layer ep tp tokens dtype".split())
KEY_COLUMNS = (*PROBLEM_COLUMNS, *"device world_size backend version kernels rounds".split())
COLUMNS = (*KEY_COLUMNS, "comm_blocks", "num_panels", "ms", "failure")
# A measurement serves token counts up to 8 times away; beyond that, whether overlap pays at all may change.
MAX_DOUBLINGS = 3.0

# Kernels of a row: Triton's alone, or ``auto``, those that a layer takes, in CUDA C++ where it can.
Kernels = Literal["auto", "triton"]
Key = tuple[str, ...]  # values of KEY_COLUMNS
Place = tuple[Key, int]  # values of SAME, and the bucket of the tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(limits.Limited):
    """A measured setting: its median ms, or ``None`` and the reason why it did not run; ``None`` is the plain path."""

    setting: OverlapConfig | None
    ms: limits.Positive | None
    failure: str = ""


def fastest(measured: Iterable[Measured]) -> Measured | None:
    ran = [item for item in measured if item.ms is not None]
    return min(ran, key=lambda item: item.ms or math.inf, default=None)


def key_of(columns: Mapping[str, object]) -> Key:
    return tuple(str(columns.get(name, "")) for name in KEY_COLUMNS)


def place_of(key: Key) -> Place:
    row = dict(zip(KEY_COLUMNS, key, strict=True))
    return tuple(row[name] for name in SAME), token_bucket(int(row["tokens"]))


def token_bucket(num_tokens: int) -> int:
    """The power of two nearest to ``num_tokens`` on a logarithmic scale; 0 -> 1, 2896 -> 2048, 2897 -> 4096."""
    return 2 ** round(math.log2(max(num_tokens, 1)))


@dataclass(slots=True)
class Table:
    """The rows of a CSV file, which need not exist; a killed process leaves complete rows."""

    path: Path
    rows: dict[tuple[Key, OverlapConfig | None], Measured] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read the file if there is one; raises ``ValueError`` if it is no table of measured settings."""
        try:
            lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        except FileNotFoundError:
            return cls(path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} must be a CSV file: {error}") from error
        rule = f"must start with the columns {','.join(COLUMNS)}; take another output_dir, or move this file away"
        require(lines[:1] == [list(COLUMNS)], f"{path} {rule}")
        table = cls(path)
        for number, line in enumerate(lines[1:], 2):
            require(len(line) == len(COLUMNS), f"{path}:{number} must have {len(COLUMNS)} columns, not {len(line)}")
            key, (comm_blocks, num_panels, ms, failure) = tuple(line[:-4]), line[-4:]
            try:
                place_of(key)
                is_plain = not comm_blocks and not num_panels
                setting = None if is_plain else OverlapConfig(comm_blocks=int(comm_blocks), num_panels=int(num_panels))
                table.rows[key, setting] = Measured(setting=setting, ms=float(ms) if ms else None, failure=failure)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
        return table

    def put(self, key: Key, measured: Iterable[Measured]) -> None:
        """Add rows, in memory and in the file, whose folder must exist."""
        self.rows |= {(key, item.setting): item for item in measured}
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (columns, setting), item in self.rows.items():
            split = ("", "") if setting is None else (setting.comm_blocks, setting.num_panels)
            writer.writerow((*columns, *split, "" if item.ms is None else f"{item.ms:.6g}", item.failure))
        write_whole(self.path, text.getvalue())


@dataclass(slots=True)
class Profile:
    """The fastest settings of a machine: those of the user's file ``path``, else those that ship with Comet."""

    path: Path
    best: dict[Place, Measured] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path | None, device: str, world_size: int) -> Profile:
        """Read the settings for a device and a number of ranks: the user's, and those that ship with Comet."""
        name = "".join(letter if letter.isalnum() else "_" for letter in device.lower()) + f"_x{world_size}.csv"
        shipped = Path(str(files("comet.configs"))) / "profiles"
        profile = cls((folder or shipped) / name)
        for path in dict.fromkeys([shipped / name, profile.path]):
            profile._read(path)
        older = profile.path.with_suffix(".json")
        if older.exists() and not profile.path.exists():
            logger.warning("profile %s is ignored, run `comet tune` again: older versions of Comet wrote it", older)
        return profile

    def _read(self, path: Path) -> None:
        try:
            rows = Table.load(path).rows
        except (OSError, ValueError) as error:
            logger.warning("profile %s is ignored, run `comet tune` again: %s", path, error)
            return
        ran = {row: item for row, item in rows.items() if item.ms is not None}
        for (key, _), item in sorted(ran.items(), key=lambda each: -(each[1].ms or 0)):
            self.best[place_of(key)] = item

    def lookup(self, key: Key) -> tuple[Measured, bool] | None:
        """Return the fastest setting for a call and whether it was measured for its number of tokens.

        Otherwise it is the nearest in tokens (on a logarithmic scale, at most a factor of 8 away, the larger of two
        equally near); ``None`` if there is none.

        Example: entries at 512 and 8192 tokens: 8192 is exact, 1024 gives 512, 2048 (equally near) 8192, 32 none.
        """
        same, tokens = place_of(key)
        others = {bucket: item for (columns, bucket), item in self.best.items() if columns == same}
        near = [(abs(math.log2(bucket / tokens)), -bucket) for bucket in others]
        away, bucket = min(near, default=(math.inf, 0))
        return (others[-bucket], away == 0) if away <= MAX_DOUBLINGS else None

    def put(self, key: Key, best: Measured) -> None:
        """Replace a setting, and keep rows that other processes wrote meanwhile."""
        place = place_of(key)
        self.best[place] = best
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            try:
                table = Table.load(self.path)
            except ValueError:
                os.replace(self.path, self.path.with_name(self.path.name + ".ignored"))
                table = Table(self.path)
            table.rows = {row: item for row, item in table.rows.items() if place_of(row[0]) != place}
            table.put(key, [best])
