"""The schema that Hydra checks against, made from frozen dataclasses, and dataclasses made from Hydra's container.

The dataclasses of the core are the only place where a setting is declared, with its limits (``comet.limits``).
OmegaConf knows neither ``Literal`` nor tuples, so the schema holds ``str`` and lists there; ``build`` turns lists back
into tuples.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from typing import Any, Literal, TypeVar, Union

from omegaconf import MISSING as UNSET

Built = TypeVar("Built")
SHORTENED = ("overlap", "sweep", "tune", "generate")  # sections that had more settings once


def schema_of(cls: type, replaced: Mapping[type, type] | None = None) -> type:
    """A dataclass with the fields of ``cls`` that OmegaConf accepts as a structured config.

    Args:
        cls: A dataclass whose fields are plain values, ``Literal``, optional values, tuples or such dataclasses; those
            without a default are mandatory.
        replaced: Dataclasses to use in place of others, for settings a user may leave open.
    """
    if replaced and cls in replaced:
        return replaced[cls]
    hints = typing.get_type_hints(cls)
    members = [(item.name, *_member(hints[item.name], item, replaced or {})) for item in fields(cls)]
    return make_dataclass(f"{cls.__name__}Schema", members, kw_only=True)


def setting_names(tree: Any, prefix: str = "", *, sections: bool = True) -> Iterator[str]:
    """Names of all settings in a schema or a container, with dots, and of the ``sections`` that hold them."""
    for name, value in tree.items():
        is_section = isinstance(value, Mapping)
        if sections or not is_section:
            yield f"{prefix}{name}"
        if is_section:
            yield from setting_names(value, f"{prefix}{name}.", sections=sections)


def build(cls: type[Built], values: Mapping[str, Any], path: str = "") -> Built:
    """A dataclass that validates itself, from a plain container; ``path`` is where that stands, for messages."""
    hints = typing.get_type_hints(cls)
    if unknown := values.keys() - hints.keys():
        where = f" of {path}" if path else ""
        raise ValueError(f"{min(unknown)!r} is no setting{where}; the settings are {', '.join(hints)}")
    arguments = {name: _value(hints[name], value, f"{path}.{name}" if path else name) for name, value in values.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{path}.{error}" if path else str(error)) from error


def _member(hint: Any, item: Field[Any], replaced: Mapping[type, type]) -> tuple[Any, Any]:
    plain = _plain(hint, replaced)
    if is_dataclass(plain):
        return plain, field(default_factory=plain)  # type: ignore[arg-type]
    if item.default is not MISSING:
        value = item.default
        return plain, field(default_factory=lambda: list(value)) if isinstance(value, tuple) else value
    if item.default_factory is not MISSING:
        return plain, field(default_factory=item.default_factory)
    return plain, UNSET


def _plain(hint: Any, replaced: Mapping[type, type]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        if opened := [replaced[argument] for argument in arguments if argument in replaced]:
            return opened[0]  # a setting that may be left out as a whole: each of its fields may be left open
        return Union[tuple(_plain(argument, replaced) for argument in arguments)]  # noqa: UP007
    if origin is tuple:
        return list[_plain(arguments[0], replaced)]  # type: ignore[misc]
    return schema_of(hint, replaced) if isinstance(hint, type) and is_dataclass(hint) else hint


def _value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        nested = next(kind for kind in (hint, *typing.get_args(hint)) if is_dataclass(kind))
        return build(nested, value, path)  # type: ignore[arg-type]
    return _frozen(value)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
