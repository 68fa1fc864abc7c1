"""The version and the commit of this Comet."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def comet_version() -> str:
    """Return the installed version, or ``unknown`` for a source tree that is only on the path."""
    try:
        return version("comet-moe")
    except PackageNotFoundError:
        return "unknown"


def comet_commit() -> str:
    """Return the git commit of a checkout, or "" elsewhere. ``-dirty`` says that files differ from the commit."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    if not (ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
