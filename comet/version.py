"""Which Comet this is."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def comet_version() -> str:
    """The installed version, ``unknown`` of a source tree on the path."""
    try:
        return version("comet-moe")
    except PackageNotFoundError:
        return "unknown"


def comet_commit() -> str:
    """The git commit of a checkout, with ``-dirty`` where files differ from it; "" elsewhere, and without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    if not (ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
