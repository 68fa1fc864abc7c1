"""Settings from files: a user's own YAML (``--config my.yaml``), and those of the run that ``resume`` goes on with.

Defaults < file < overrides. A file has the names of the command line, nested or with dots; a group's name may choose a
file of that group. What a run writes, or ``--dry-run`` prints, is such a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from comet.config import check_removed, require
from comet.generation.source import nested
from comet.launch.help import config_groups
from comet.launch.schema import SHORTENED, setting_names
from comet.launch.tasks.registry import did_you_mean
from comet.training.checkpoint_folder import NOT_KEPT, covers, names_checkpoint, read_settings


def with_saved_settings(job: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The container with the settings of the run that ``resume`` names.

    Args:
        job: The root of the configuration, composed of defaults and of what the user named. ``output_dir`` becomes the
            folder of the run, unless that is named, or ``resume`` names a checkpoint.
        named: Settings and groups that the user named: these stay, and ``require_same`` of ``checkpoint_folder`` tells
            which of them must not differ.
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


TEXTS = ("prompt", "prompts", "stop")  # of ``generate``: text of any kind, in which nothing is looked up
INT_TAG = "tag:yaml.org,2002:int"
KINDS = {INT_TAG, *(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "timestamp"))}


class Loader(yaml.SafeLoader):
    """YAML whose scalars stay as they are written, but for null: the schema says what is a number or a truth value.

    So ``output_dir: 2026_11_26`` is no number, and ``cuda_graph: off`` a word, as they are in an override. Integers
    that are written as Python does are some: no schema makes them of what is in a list of lists.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - so PyYAML keeps them
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver(INT_TAG, re.compile("(0|-?[1-9][0-9]*)$"), list("-0123456789"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a file holds."""

    values: dict[str, Any] = field(default_factory=dict)  # settings, nested
    choices: list[str] = field(default_factory=list)  # overrides that choose files of groups, such as model=tiny
    texts: dict[str, Any] = field(default_factory=dict)  # what generate is given word by word

    @classmethod
    def read(cls, path: str | None, schema: DictConfig) -> Settings:
        """Read a file; ``None`` holds nothing."""
        if path is None:
            return cls()
        try:
            content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader) or {}
        except OSError as error:
            raise ValueError(f"--config={path} must be a file that can be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"--config={path} must be a YAML file: {error}") from error
        require(isinstance(content, dict), f"--config={path} must hold settings, name: value, not {content!r:.40}")
        chosen = {name: content.pop(name) for name in config_groups() if isinstance(content.get(name), str)}
        for name, choice in chosen.items():
            known = config_groups()[name]
            require(choice in known, f"--config={path}: {name}={choice!r} must be one of {', '.join(known)}")
        values = nested(content)
        for name, value in values.items():
            whole = isinstance(value, dict) or not OmegaConf.is_dict(schema.get(name))
            require(whole, f"--config={path}: {name} must hold settings, name: value, not {value!r:.40}")
        generate = values.get("generate", {})
        texts = {name: _text(generate.pop(name)) for name in TEXTS if generate.get(name) is not None}
        blank = {name: [""] * len(text) if isinstance(text, list) else "" for name, text in texts.items()}
        try:
            OmegaConf.merge(schema, values, {"generate": blank})
        except ConfigKeyError as error:
            section, _, name = str(error.full_key).rpartition(".")
            check_removed([name] if section in SHORTENED else [], f"--config={path}: {section}.")
            hint = did_you_mean(str(error.full_key), setting_names(OmegaConf.to_container(schema)))
            raise ValueError(f"--config={path}: {error.full_key} is no setting{hint}") from error
        except OmegaConfBaseException as error:
            raise ValueError(f"--config={path}: {error.full_key}: {str(error).splitlines()[0]}") from error
        return cls(values=values, choices=[f"{name}={choice}" for name, choice in chosen.items()], texts=texts)

    def names(self) -> list[str]:
        """Of all that the file sets: settings, and groups that it chooses from."""
        settings = setting_names(self.values, sections=False)
        return [
            *settings,
            *(choice.partition("=")[0] for choice in self.choices),
            *(f"generate.{name}" for name in self.texts),
        ]

    def without(self, names: Sequence[str]) -> Settings:
        """What is left beside overrides of these names: a group's choice replaces all that the file says of it."""
        chosen = [name for name in names if name in config_groups()]
        return Settings(
            values={name: value for name, value in self.values.items() if name not in chosen},
            choices=[choice for choice in self.choices if choice.partition("=")[0] not in chosen],
            texts={name: text for name, text in self.texts.items() if f"generate.{name}" not in names},
        )


def _text(value: Any) -> Any:
    """A text, or a list of them; YAML reads ``prompt: 3`` as a number."""
    return [str(item) for item in value] if isinstance(value, list) else str(value)
