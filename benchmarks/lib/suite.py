"""The skeleton of a suite: options, points, variants that are checked, and a report that grows with every row."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from comet.config import MoEConfig, ParallelConfig, require
from comet.launch.cli import Parser
from comet.layer.workspace import Workspace
from comet.limits import limits_of
from comet.tuner.timing import Timing, Variant

from lib.ranks import Ranks, attempt, release, start_ranks, tell
from lib.report import Row, set_aside, table_of, write_json
from lib.shapes import swiglu_model
from lib.timing import gather_facts, time_by_protocol

T = TypeVar("T")


HELP = {
    "models": "comma-separated names of configs/model; mixtral_8x7b/4: a fourth of the experts",
    "model": "a name of configs/model",
    "base": "folder with the other tree",
    "source": "an output folder of comet train, whose model continues texts",
    "trace": "routing.pt of a run with --source, to be replayed",
    "tokens": "tokens per rank",
    "budgets": "shares of the experts",
    "path": "path of Comet's layers: auto, fused, twin, plain, reference",
    "rounds": "counted calls of each variant",
    "out": "folder of the results",
    "overlap": "split of Comet's kernels, such as comm_blocks=16,num_panels=4",
}  # fmt: skip


def several(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def read(text: str) -> tuple[T, ...]:
        return tuple(map(kind, text.split(",")))

    read.__name__ = f"list of {kind.__name__}"  # for argparse's message
    return read


def option(default: Any = MISSING, text: str = "", **rules: Any) -> Any:
    """A field of a suite with a line of help, and rules beyond its type.

    Args:
        rules: ``of``: the values that it can have; ``least``: of a number, 1 by default.
    """
    return field(default=default, metadata={"help": text} | rules)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A suite: its fields are the options, and their types say how words are read."""

    @classmethod
    def name(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def parse(cls, command_line: Sequence[str]) -> Self:
        title, doc = cls.name().replace("_", "-"), sys.modules[cls.__module__].__doc__
        parser = Parser(f"bench.py {title}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        for each in fields(cls):
            known = each.metadata.get("of")
            listed = f"of {', '.join(known)}" if known else ""
            text = "; ".join(filter(None, (each.metadata.get("help") or HELP.get(each.name), listed)))
            limits = limits_of(cls)[each.name]  # type: ignore[arg-type]
            read = several(limits.kind) if limits.depth else limits.kind
            how: dict[str, Any] = {"action": "store_true"} if read is bool else {"type": read}
            parser.add_argument(
                f"--{each.name.replace('_', '-')}", default=None if each.default is MISSING else each.default,
                required=each.default is MISSING, help=text, **how,
            )  # fmt: skip
        return cls(**vars(parser.parse_args(command_line)))

    def __post_init__(self) -> None:
        for each in fields(self):
            value, known = getattr(self, each.name), each.metadata.get("of")
            for one in value if isinstance(value, tuple) else (value,):
                require(known is None or one in known, f"{each.name}={one!r} must be one of {', '.join(known or ())}")
                if isinstance(one, int):
                    least = each.metadata.get("least", 1 - isinstance(one, bool))
                    require(one >= least, f"{each.name}={one} must be at least {least}")
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` for options that do not go together."""


class Point(NamedTuple):
    """A row, or several, that all ranks measure at once."""

    keys: Row  # that name it
    measure: Callable[[], Row | list[Row]] | str  # or why it cannot be measured
    pool: Workspace | None = None  # a failure may leave something in it


@dataclass(frozen=True, kw_only=True)
class Suite(CommandLine):
    """A suite that measures points over ranks and reports their rows."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()  # the table has these; without any, all that rows hold

    ep: int = 1
    tp: int = 1
    node_size: int | None = option(None, "consecutive ranks that are a node; without it those of a host")
    rounds: int = 10
    device: str = option("auto", of=("auto", "cpu"))
    out: Path | None = None

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(ep=self.ep, tp=self.tp, node_size=self.node_size)

    def facts(self, ranks: Ranks) -> Row:
        return gather_facts(ranks) | {"rounds": self.rounds}

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        """One point after the other; what goes wrong at one touches no other (collective)."""
        raise NotImplementedError

    def summary(self, rows: Sequence[Row]) -> Row:
        """Figures of all rows together; a ``geometric_mean`` is the last line of the table."""
        return {}

    def check_models(self, names: Sequence[str], layer: Callable[[str], MoEConfig] = swiglu_model) -> None:
        for name in names:
            self.parallel.check(layer(name))

    @classmethod
    def main(cls, command_line: Sequence[str]) -> int:
        suite = cls.parse(command_line)
        start_ranks(suite.parallel, suite.device, suite.run)
        return 0

    def run(self, ranks: Ranks) -> None:
        """Measure all points; rank 0 writes JSON after each, so that an interruption loses none.

        At the end or after an exception it prints the table and, as the last line, the JSON. Files of an earlier run
        are set aside.
        """
        stem, files, rows = f"bench_{self.name()}", self.out if ranks.rank == 0 else None, list[Row]()

        def found() -> Row:
            return {"task": stem, "facts": facts} | self.summary(rows) | {"rows": rows}

        for old, new in set_aside(files, stem) if files else []:
            tell(ranks, f"{old.name} of an earlier run is now {new.name}")
        facts = self.facts(ranks)
        try:
            begun = time.perf_counter()
            for keys, measure, pool in self.points(ranks, facts):
                made, failure = (None, measure) if isinstance(measure, str) else attempt(measure, ranks, pool)
                del measure, pool  # they hold a layer, which must make room for the next
                release(ranks)
                seconds = {"seconds": time.perf_counter() - begun}
                made = {"failures": {"point": failure}} if made is None else made
                new_rows = made if isinstance(made, list) else [made]
                rows[:] = [row for row in rows if not keys.items() <= row.items()]  # a point may be measured again
                rows += [keys | row | seconds for row in new_rows]
                if files:
                    write_json(files, stem, found())
                said = [f"{' '.join(map(str, keys.values()))}: done in {seconds['seconds']:.1f} s"]
                said += [": ".join(each) for row in new_rows for each in row.get("failures", {}).items()]
                tell(ranks, "; ".join(said))
                begun = time.perf_counter()
        finally:
            if rows and ranks.rank == 0:
                table = table_of(rows, list(keys), self.COLUMNS, found().get("geometric_mean"))
                print(table, write_json(None, stem, found()), sep="\n", flush=True)


class Checked:
    """The variants of a point: those that run and are right are timed, the others stand under ``failures``."""

    def __init__(self, ranks: Ranks, pool: Workspace | None = None, failures: dict[str, str] | None = None) -> None:
        self.ranks, self.pool, self.failures = ranks, pool, dict(failures or {})
        self.variants: dict[str, Variant] = {}

    def value(self, name: str, action: Callable[[], T], judge: Callable[[T], str] = lambda _: "") -> T | None:
        """The value of an action that succeeds on all ranks and in which ``judge`` finds nothing wrong (collective)."""
        value, failure = attempt(action, self.ranks, self.pool)
        failure = failure or judge(value)  # type: ignore[arg-type]
        if failure:
            self.failures[name] = failure
        return None if failure else value

    def time(self, **protocol: Any) -> dict[str, Timing]:
        return time_by_protocol(self.variants, self.ranks, **protocol)

    def row(self, timings: dict[str, Timing]) -> Row:
        times = {f"{name}_ms": timing.median_ms for name, timing in timings.items()}
        quantiles = {name: asdict(timing) for name, timing in timings.items()}
        return times | {"failures": self.failures, "quantiles": quantiles}
