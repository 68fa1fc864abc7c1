"""The settings of a run, kept with its checkpoints: a resumed run takes most of them, and some must not differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from comet.config import REMOVED_SETTINGS, OverlapConfig, require
from comet.jobs.config import JobConfig

SETTINGS_FILE = "comet.yaml"
# How a run is started, not what it is.
NOT_KEPT = ("output_dir", "resume", "overwrite", "resume_changes")
# These change no result, or, as for data.path, a fingerprint shows whether they do.
FREE = (
    *NOT_KEPT, "nproc", "parallel", "comm", "tune", "sweep", "generate", "modular", "launch", "model.name",
    "model.moe.max_imbalance", "data.path", "train.checkpoint_every", "train.eval_every", "train.sample_bytes",
    "train.cuda_graph",
)  # fmt: skip


class UniqueLoader(yaml.SafeLoader):
    """YAML without keys that a mapping has twice and without aliases inside themselves, which PyYAML would take."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A whole object; raises ``yaml.YAMLError`` where levels are too many or an alias stands in itself."""
        if node in self.recursive_objects or len(self.recursive_objects) > 20:
            rule = "must not be nested 20 deep, nor be an alias inside of what it names"
            raise yaml.constructor.ConstructorError(problem=f"line {node.start_mark.line + 1} {rule}")
        return super().construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; raises ``yaml.YAMLError`` where a key is there twice."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            lines = " and ".join(str(key.start_mark.line + 1) for key, _ in node.value if key.value == twice)
            raise yaml.constructor.ConstructorError(problem=f"{twice} is given in lines {lines}: keep one of them")
        return super().construct_mapping(node, deep)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their names: ``{"moe": {"top_k": 2}}`` gives ``{"moe.top_k": 2}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def covers(names: Iterable[str], setting: str) -> bool:
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


def settings_of(config: JobConfig, world_size: int) -> dict[str, Any]:
    """Return settings that start the same run again, as plain values; a relative ``data.path`` is made absolute."""
    tree: dict[str, Any] = json.loads(json.dumps({**asdict(config), "nproc": world_size}))
    tree["overlap"] = tree["overlap"] or dict.fromkeys(item.name for item in fields(OverlapConfig))
    if config.data.path is not None:
        tree["data"]["path"] = str(Path(config.data.path).absolute())
    return {name: value for name, value in tree.items() if name not in NOT_KEPT[1:]}


def to_yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run or checkpoint in ``folder``; ``None`` if it holds none."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return None
    try:
        tree = yaml.load(path.read_bytes(), UniqueLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} must hold the settings of a run: {error}") from error
    require(isinstance(tree, dict), f"{path} must hold the settings of a run")
    overlap = tree.get("overlap") or {}
    if overlap.get("beside"):  # Older versions colocated communication by this setting, whatever comm_blocks was.
        overlap["comm_blocks"] = 0
    return dict(tree)


def removed_settings(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a split that an older version had and this run was given, as ``overlap.transport=copy``."""
    splits = flat({name: settings.get(name) or {} for name in ("overlap", "sweep")})
    given = ((name, value) for name, value in splits.items() if value not in (None, []))
    return [f"{name}={value}" for name, value in given if name.partition(".")[2] in REMOVED_SETTINGS]


def require_same(saved: Mapping[str, Any], config: JobConfig, folder: Path, *, same_text: bool) -> None:
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
