"""A suite's command line: options that several suites have, and the words in them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from comet.config import ParallelConfig, require
from comet.launch.cli import Parser

from lib.shapes import ROUTINGS


def words(text: str) -> tuple[str, ...]:
    """``comet,plain`` of a command line as ``("comet", "plain")``."""
    return tuple(text.split(","))


def whole_numbers(text: str) -> list[int]:
    """``8,32`` of a command line as ``[8, 32]``."""
    return [int(number) for number in text.split(",")]


def shares(text: str) -> tuple[float, ...]:
    """``0.1,0.5`` of a command line as ``(0.1, 0.5)``."""
    return tuple(map(float, text.split(",")))


POSITIVE = ("batch", "context", "contexts", "layers", "rounds", "steps", "tokens")  # each number of these options
BUDGETS = (0.1, 0.2, 0.3, 0.5, 1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "models": dict(type=words, help="comma-separated names of configs/model; mixtral_8x7b/4: a fourth of the experts"),
    "model": dict(help="a name of configs/model"),
    "layers": dict(type=int),
    "tokens": dict(type=whole_numbers, help="tokens per rank, comma-separated"),
    "budgets": dict(type=shares, help="shares of the experts"),
    "ep": dict(type=int),
    "tp": dict(type=int),
    "routing": dict(help=", ".join(ROUTINGS)),
    "path": dict(help="path of Comet's layers: auto, fused, twin, plain, reference"),
    "rounds": dict(type=int, help="counted calls of each variant"),
    "device": dict(choices=("auto", "cpu")),
    "out": dict(type=Path, help="folder of the results"),
}


def suite_parser(suite: str, doc: str | None, **defaults: Any) -> Parser:
    """A parser of those ``OPTIONS`` that are given a default; ``--help`` shows the suite's docstring."""
    parser = Parser(f"bench.py {suite}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, **OPTIONS[name])
    return parser


def parsed(parser: Parser, command_line: Sequence[str]) -> argparse.Namespace:
    """The options, with the layout of the ranks as ``parallel``, after what several suites refuse."""
    arguments = parser.parse_args(command_line)
    given = vars(arguments)
    arguments.parallel = ParallelConfig(ep=given.get("ep", 1), tp=given.get("tp", 1))
    arguments.device = given.get("device", "auto")
    routing = given.get("routing", ())
    require_known("routing", [routing] if isinstance(routing, str) else routing, ROUTINGS)
    for name in POSITIVE:
        number = given.get(name, 1)
        least, each = (min(number), " each") if isinstance(number, list) else (number, "")
        require(least >= 1, f"{name}={number} must{each} be at least 1")
    return arguments


def require_known(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ``ValueError`` for the first of the names of an option that is not known."""
    for name in names:
        require(name in known, f"{option}={name!r} must be one of {', '.join(known)}")
