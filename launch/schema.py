"""Between frozen dataclasses and the plain settings that Hydra composes: defaults and names, and the way back.

The dataclasses of the core are the only place where a setting is declared, with its limits (``comet.limits``). A
dataclass is a section of settings. A section that may be ``None`` is left out if none of its settings is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import MISSING as UNSET

from comet.config import require
from comet.launch.tasks.registry import did_you_mean
from comet.limits import FieldLimits, limits_of

Built = TypeVar("Built")
OPEN = ("parallel.ep", "overlap.comm_blocks", "overlap.num_panels")  # follow from others unless they are given


def defaults_of(cls: type) -> dict[str, Any]:
    """The settings of a dataclass as Hydra takes them: ``"???"`` where one must be given.

    Example: ``MeasureConfig`` gives ``{"models": (), "tokens": (), "rounds": 20}``.
    """
    found: dict[str, Any] = {}
    for item in fields(cls):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        kind = limits_of(cls)[item.name].kind
        if not is_dataclass(kind):
            found[item.name] = UNSET if default is MISSING else default
        elif default is None:
            found[item.name] = dict.fromkeys(each.name for each in fields(kind))
        else:
            found[item.name] = defaults_of(kind) if default is MISSING else asdict(default)  # type: ignore[arg-type]
    return found


def setting_names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of all settings in a tree, with dots, and of the sections that hold them."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from setting_names(value, f"{prefix}{name}.")


def limits_at(cls: Any, name: str) -> FieldLimits:
    """The limits of a setting, which may be a section; none of what is no setting."""
    found = FieldLimits((), cls)
    for part in name.split("."):
        known = limits_of(found.kind) if is_dataclass(found.kind) else {}  # type: ignore[arg-type]
        found = known.get(part, FieldLimits(()))
    return found


def check_settings(cls: type, settings: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ``ValueError`` for what is no setting, and for a value that no other setting can make right."""
    for last, value in settings.items():
        name = f"{prefix}{last}"
        if isinstance(value, Mapping) and is_dataclass(limits_at(cls, name).kind):
            check_settings(cls, value, f"{name}.")
        else:
            _check_setting(cls, name, value)


def check_shape(cls: type, name: str, value: Any) -> None:
    """Raise ``ValueError`` for what Hydra cannot merge: a list in place of a section, or a section in that of one."""
    limits = limits_at(cls, name)
    if isinstance(value, list if is_dataclass(limits.kind) else Mapping if limits.depth else ()):
        _check_setting(cls, name, value)


def _check_setting(cls: type, name: str, value: Any) -> None:
    limits = limits_at(cls, name)
    if is_dataclass(limits.kind):
        inside = next(iter(limits_of(limits.kind)))  # type: ignore[arg-type]
        rule = f"must name one of the settings in {name}, such as {name}.{inside}"
        require(value is None and limits.is_optional, f"{name}={as_text(value)} {rule}")
    elif limits.kind is None:
        raise ValueError(f"{name} is no setting{did_you_mean(name, setting_names(defaults_of(cls)))}")
    elif value is not None or name not in OPEN:
        limits.check(name, value)


def build(cls: type[Built], values: Mapping[str, Any], path: str = "") -> Built:
    """A dataclass that checks itself, from plain settings; ``path`` is where they stand, for messages."""
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        limits = limits_of(cls)[name]  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            given = {each: inner for each, inner in value.items() if inner is not None or not limits.is_optional}
            arguments[name] = build(limits.kind, given, f"{path}.{name}".lstrip(".")) if given else None
        else:
            arguments[name] = float(value) if limits.kind is float and isinstance(value, int) else _frozen(value)
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{path}.{error}" if path else str(error)) from error


def as_text(value: Any) -> str:
    """The value as an override has it."""
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_text, value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
