"""What a resumed run takes from the folder it goes on from: every setting that the user does not name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comet.training.checkpoint_folder import names_checkpoint
from comet.training.settings import NOT_KEPT, covers, read_settings


def with_saved_settings(job: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The container with the settings of the run that ``resume`` names.

    Args:
        job: The root of the configuration, composed of defaults and of what the user named.
        named: Settings and groups that the user named: these stay, and ``comet.training.settings.require_same`` tells
            which of them must not differ.

    Returns:
        The container; ``output_dir`` is the folder of the run, unless that is named, or ``resume`` names a checkpoint.

    Raises:
        ValueError: If the settings in the folder are damaged.
    """
    if job["resume"] is None:
        return dict(job)
    folder, named = Path(job["output_dir"] if job["resume"] == "auto" else job["resume"]), list(named)
    layout = ["nproc", "parallel"]  # one says nothing without the other
    keep = [*named, *NOT_KEPT, *(layout if any(covers(layout, name) for name in named) else [])]
    found = _filled(job, read_settings(folder) or {}, keep)
    if "output_dir" not in named and not names_checkpoint(folder):
        found["output_dir"] = str(folder)
    return found


def _filled(
    tree: Mapping[str, Any], saved: Mapping[str, Any], named: Iterable[str], prefix: str = ""
) -> dict[str, Any]:
    found = dict(tree)
    for name, value in tree.items():
        if name not in saved or covers(named, prefix + name):
            continue
        is_section = isinstance(value, dict) and isinstance(saved[name], dict)
        found[name] = _filled(value, saved[name], named, f"{prefix}{name}.") if is_section else saved[name]
    return found
