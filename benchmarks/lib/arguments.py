"""Words of a suite's command line."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """``comet,plain`` of a command line as ``("comet", "plain")``."""
    return tuple(text.split(","))


def whole_numbers(text: str) -> list[int]:
    """``8,32`` of a command line as ``[8, 32]``."""
    return [int(number) for number in text.split(",")]


def shares(text: str) -> tuple[float, ...]:
    """``0.1,0.5`` of a command line as ``(0.1, 0.5)``."""
    return tuple(map(float, text.split(",")))
