"""Limits of settings, declared in their annotations; one check reads them and builds the sentence of a refusal.

    top_k: Annotated[int, at_least(1), at_most("num_experts")]

A name in the place of a number is that of another field of the same dataclass. Choices (``Literal``), whole and finite
numbers and flags are limits by themselves. The help page prints the same words.
"""

from __future__ import annotations

import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal


@dataclass(frozen=True, slots=True)
class Limit:
    """One rule of a value."""

    holds: Callable[[Any, Any], bool]  # called with the value and the bound
    words: str  # follow "must be"
    bound: Any = None  # a number, or the name of the field that has it; None: the words are the whole rule
    advice: str = ""  # why, or what to do

    def bound_in(self, settings: Any) -> Any:
        return operator.attrgetter(self.bound)(settings) if isinstance(self.bound, str) else self.bound

    def rule(self, settings: Any = None) -> str:
        """The rule as it follows "must be", with the value that another field has in ``settings``."""
        bound = f"{self.bound:g}" if isinstance(self.bound, float) else self.bound
        if isinstance(bound, str) and settings is not None and bound is self.bound:
            bound = f"{bound}={self.bound_in(settings)}"
        return self.words if bound is None else f"{self.words} {bound}"


at_least = partial(Limit, operator.ge, "at least")
at_most = partial(Limit, operator.le, "at most")
above = partial(Limit, operator.gt, "above")
below = partial(Limit, operator.lt, "below")
equal_to = partial(Limit, operator.eq, "equal to")
multiple_of = partial(Limit, lambda value, unit: value % unit == 0, "a multiple of")
divisor_of = partial(Limit, lambda value, whole: value >= 1 and whole % value == 0, "a divisor of")


def one_of(*choices: Any) -> Limit:
    return Limit(lambda value, _: value in choices, f"one of {', '.join(map(str, choices))}")


filled = partial(Limit, lambda value, _: bool(value))  # a text that is not empty; the words say what it is
OR_INFINITE = Limit(lambda value, _: True, "")  # lets a float be infinite


def _is(kind: type) -> Callable[[Any, Any], bool]:
    return lambda value, _: isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


KINDS = {
    int: Limit(_is(Integral), "a whole number"),
    float: Limit(lambda value, _: _is(Real)(value, None) and math.isfinite(value), "a finite number"),
    bool: Limit(_is(bool), "True or False"),
    str: Limit(_is(str), "a text", advice="put quotes around it"),
}
Count = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
Positive = Annotated[float, above(0)]
NonNegative = Annotated[float, at_least(0)]
Share = Annotated[float, at_least(0), at_most(1)]


class Limited:
    """Base of dataclasses that check their limits when they are made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class FieldLimits:
    """The limits of one field, or of each item of one that is a tuple."""

    limits: tuple[Limit, ...]
    kind: Any = None  # the type of the field, or of its items
    is_optional: bool = False
    depth: int = 0  # tuples around an item

    def check(self, name: str, value: Any, settings: Any = None) -> None:
        """Raise ``ValueError`` unless the value keeps its limits; the message names field, value, rule and advice.

        Without ``settings`` limits by other fields are not checked.
        """
        if value is None and self.is_optional:
            return
        self._check_depth(name, value)
        items, limits = _items(value, self.depth), self.limits
        kind = Limit(_is(Real), "a number") if OR_INFINITE in limits else KINDS.get(self.kind)
        if kind and not all(kind.holds(item, None) for item in items):
            limits = (kind, *limits)  # the others compare numbers
        elif all(
            limit.holds(item, limit.bound_in(settings))
            for limit in limits
            if settings is not None or not isinstance(limit.bound, str)
            for item in items
        ):
            return
        rules, advice = self.words(limits, settings), "".join(f": {limit.advice}" for limit in limits if limit.advice)
        raise ValueError(f"{name}={list(value) if self.depth else value!r} must {rules}{advice}")

    def words(self, limits: tuple[Limit, ...], settings: Any = None) -> str:
        """The rules in one phrase, as it follows "must"; without values of ``settings`` as the help page prints it."""
        rules = " and ".join(limit.rule(settings) for limit in limits if limit.words)
        return rules and f"{'each ' * bool(self.depth)}be {rules}{', or None' * self.is_optional}"

    def _check_depth(self, name: str, value: Any) -> None:
        missing, items = self.depth, [value]
        while missing and items and all(isinstance(item, list | tuple) for item in items):
            missing, items = missing - 1, [inner for item in items for inner in item]
        if missing and items:
            text = str(value).replace(" ", "")
            way = "" if value is None else f": write {name}={'[' * missing}{text}{']' * missing}"
            raise ValueError(f"{name}={text} must be a list{way}")


def check(settings: Any) -> None:
    """Raise ``ValueError`` unless every field of a dataclass keeps the limits of its annotation."""
    for name, limits in limits_of(settings.__class__).items():
        limits.check(name, getattr(settings, name), settings)


def check_values(*limits: Limit, **values: Any) -> None:
    """Raise ``ValueError`` unless each of the values, given by name, keeps the limits."""
    for name, value in values.items():
        if not all(limit.holds(value, limit.bound) for limit in limits):
            FieldLimits(limits).check(name, value)


def limits_in(hint: Any) -> FieldLimits:
    """The limits in an annotation."""
    limits: list[Limit] = []
    is_optional, depth = False, 0
    while (origin := typing.get_origin(hint)) in (Annotated, typing.Union, types.UnionType, tuple):
        inner, *others = typing.get_args(hint)
        if origin in (typing.Union, types.UnionType) and others != [type(None)]:
            break  # one of several types, whose owner checks it
        limits += others if origin is Annotated else []
        is_optional, depth = is_optional or origin not in (Annotated, tuple), depth + (origin is tuple)
        hint = inner
    if origin is Literal:
        limits.append(one_of(*typing.get_args(hint)))
    return FieldLimits(tuple(limits), str if origin is Literal else hint, is_optional, depth)


@functools.cache
def limits_of(cls: Any) -> dict[str, FieldLimits]:
    """The limits of each field of a dataclass."""
    return {name: limits_in(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}


def _items(value: Any, depth: int) -> list[Any]:
    """The items inside ``depth`` tuples or lists."""
    return [item for inner in value for item in _items(inner, depth - 1)] if depth else [value]
