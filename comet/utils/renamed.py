"""Public names that the next release drops: they work, and warn."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)
