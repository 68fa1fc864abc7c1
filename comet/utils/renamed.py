"""Public names that the next release drops: they work, and warn."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str) -> None:
    """Tell the caller of the caller that a name has changed."""
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)
