"""The settings of a run, kept with its checkpoints: a resumed run takes most of them, and some must not differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from comet.config import REMOVED_SETTINGS, OverlapConfig, require
from comet.jobs.config import TrainJob

SETTINGS_FILE, TOKENIZER_FILE = "comet.yaml", "tokenizer.json"
# How a run is started, not what it is.
NOT_KEPT = ("output_dir", "resume", "overwrite", "resume_changes")
# These change no result, or, as for data.path, a fingerprint shows whether they do.
FREE = (
    *NOT_KEPT, "nproc", "parallel", "comm", "tune", "launch", "model.name",
    "model.moe.max_imbalance", "data.path", "data.tokenizer", "data.text_field", "train.checkpoint_every",
    "train.eval_every", "train.sample_bytes", "train.cuda_graph", "train.async_save", "train.fsdp",
    "train.gradient_checkpointing", "train.profile", "train.wandb",
)  # fmt: skip


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their names: ``{"moe": {"top_k": 2}}`` gives ``{"moe.top_k": 2}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return found


def covers(names: Iterable[str], setting: str) -> bool:
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


def settings_of(config: TrainJob, world_size: int) -> dict[str, Any]:
    """Return settings that start the same run again, as plain values; relative paths of data are made absolute."""
    tree: dict[str, Any] = json.loads(json.dumps({**asdict(config), "nproc": world_size}))
    tree["overlap"] = tree["overlap"] or dict.fromkeys(item.name for item in fields(OverlapConfig))
    for name in ("path", "tokenizer"):
        if (value := tree["data"][name]) is not None:
            tree["data"][name] = str(Path(value).absolute())
    return {name: value for name, value in tree.items() if name not in NOT_KEPT[1:]}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """The settings as a file for ``--config``."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(settings)))


def escape(text: str) -> str:
    """The text as Hydra takes it where ``${`` refers to no other setting."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run or checkpoint in ``folder``; ``None`` if it holds none."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return None
    tree = read_yaml(path, str(path))
    overlap = tree.get("overlap") or {}
    if overlap.get("beside"):  # Older versions colocated communication by this setting, whatever comm_blocks was.
        overlap["comm_blocks"] = 0
    return tree


def read_yaml(path: Path, name: str) -> dict[str, Any]:
    """Return the settings in a YAML file, as they are written; messages call it ``name``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"{name} must be a YAML file of settings: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name} must have no alias inside what it names, nor hundreds of levels") from error
    require(isinstance(content, dict), f"{name} must hold settings, name: value, not {content!r:.40}")
    return content  # type: ignore[return-value]


def removed_settings(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a split that an older version had and this run was given, as ``overlap.transport=copy``."""
    splits = flat({"overlap": settings.get("overlap") or {}})
    given = ((name, value) for name, value in splits.items() if value not in (None, []))
    return [f"{name}={value}" for name, value in given if name.partition(".")[2] in REMOVED_SETTINGS]


def require_same(saved: Mapping[str, Any], config: TrainJob, folder: Path, *, same_text: bool) -> None:
    """Raise ``ValueError`` naming each setting in which a resumed run would differ but for its ``resume_changes``."""
    before, now = flat(saved), flat(settings_of(config, 1))
    changes = config.resume_changes
    unknown = [name for name in changes if not any(covers([name], setting) for setting in now)]
    require(not unknown, f"resume_changes={unknown} must name settings, as train.lr, or sections")
    different = {
        name: f"{name}={now[name]!r} differs from {before[name]!r}"
        for name in now
        if name in before
        and now[name] != before[name]
        and not covers((*FREE, *changes), name)
        and (name, before[name]) != ("train.dtype", "auto")  # Older versions did not store their choice.
    }
    if not (same_text or covers(changes, "data.path")):
        different["data.path"] = f"the text of data.path={config.data.path!r} differs from that"
    require(
        not different,
        f"resume: {', '.join(different.values())} of the run that made {folder}; leave out what differs, or go on with "
        f"the new values: resume_changes=[{','.join([*changes, *different])}]",
    )


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value
