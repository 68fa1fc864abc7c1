"""The figures of the README: ``results/current.csv``, measured at one commit, and the tables written from it.

    python benchmarks/bench.py readme --collect outputs/forward,outputs/backward,outputs/decode
    python benchmarks/bench.py readme

The first command makes ``current.csv`` of the JSON that ``bench.py moe`` and ``bench.py decode`` left in these folders,
all of one commit; either one then writes the tables of the README, between its comments
``<!-- current.csv: forward -->`` and ``<!-- end -->``. ``--commit`` names the commit where the runs could not, on a
machine without git.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet.config import require
from comet.utils.shared_file import write_whole

from lib.moe import BASELINES
from lib.report import Row
from lib.suite import CommandLine, option
from lib.timing import NO_COMMIT

ROOT = Path(__file__).parents[2]
CURRENT = ROOT / "benchmarks" / "results" / "current.csv"
COLUMNS = (
    "commit", "date", "device", "ranks", "table", "model", "tokens", "comet", "plain", "best_rival", "of_roofline",
)  # fmt: skip
NAMES = {
    "mixtral_8x7b": "Mixtral-8x7B", "phi35_moe": "Phi-3.5-MoE", "qwen2_moe": "Qwen2-MoE",
    "qwen3_30b_a3b": "Qwen3-30B-A3B", "deepseek_v3": "DeepSeek-V3",
}  # fmt: skip
OF_POINT = ("model", "tokens", "routing", "ep", "tp")
OURS = ("comet_ms", "comet_graph_ms")
DECODE_RIVALS = ("triton", "torch", "transformers")  # the last one has several implementations
Table = list[list[str]]  # its head first


@dataclass(frozen=True, kw_only=True)
class Run(CommandLine):
    collect: tuple[str, ...] = option((), "folders of results, comma-separated")
    commit: str | None = option(None, "commit of the runs")

    @classmethod
    def main(cls, command_line: Sequence[str]) -> None:
        options = cls.parse(command_line)
        if options.collect:
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(collect([Path(folder) for folder in options.collect], options.commit))
            write_whole(CURRENT, text.getvalue())
        readme = ROOT / "README.md"
        readme.write_text(with_tables(readme.read_text(), read_current()))


def read_current() -> list[Row]:
    """The rows of ``current.csv``, numbers as numbers, ``None`` where nothing stands."""
    with CURRENT.open(newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> str | int | float | None:
    if name in COLUMNS[COLUMNS.index("comet") :]:
        return float(text) if text else None
    return int(text) if name in ("ranks", "tokens") else text


def collect(folders: Iterable[Path], commit: str | None = None) -> list[Row]:
    """Make the rows of ``current.csv`` from the suites' JSON in folders; ``commit`` is for runs that know none."""
    rows: list[Row] = []
    for folder in folders:
        figures = {folder / "bench_moe.json": _figures_of_layer, folder / "bench_decode.json": _figures_of_decode}
        paths = [path for path in figures if path.exists()]
        require(bool(paths), f"collect={folder} must hold one of {', '.join(path.name for path in figures)}")
        for path in paths:
            run = json.loads(path.read_text())
            facts = {name: run["facts"][name] for name in ("commit", "date", "device", "ranks")}
            known = commit if commit and facts["commit"] == NO_COMMIT else facts["commit"]
            facts |= {"date": facts["date"][:10], "commit": known}
            rows += [facts | {name: row.get(name) for name in OF_POINT} | figures[path](row) for row in run["rows"]]
    commits = sorted({row["commit"] for row in rows})
    require(len(commits) == 1, f"commit={', '.join(commits)} of the results must be one")
    for table in _distinct(rows, "table"):
        mine = [row for row in rows if row["table"] == table]
        kinds = {f"{row['routing']} at EP{row['ep']} x TP{row['tp']}" for row in mine}
        require(len(kinds) == 1, f"results of {table} must be of one routing and layout, but are {', '.join(kinds)}")
        machines = {f"{row['ranks']} x {row['device']}" for row in mine}
        require(len(machines) == 1, f"results of {table} must be of one machine, but are of {', '.join(machines)}")
        points = Counter(f"{row['model']} with {row['tokens']} tokens" for row in mine)
        twice = [point for point, count in points.items() if count > 1]
        require(not twice, f"results of {table} must be one for each point, unlike {twice}")
    return rows


def _figures_of_layer(row: Row) -> Row:
    """Milliseconds of a layer, *plain* and the fastest baseline, if all were timed that there are."""
    is_forward = row["direction"] == "forward"
    rivals = [f"{name}_ms" for name in (BASELINES if is_forward else BASELINES[:1])]  # plain alone has a backward pass
    return {
        "table": "forward" if is_forward else "training",
        "comet": _least(row, OURS),
        "plain": row.get("plain_ms"),
        "best_rival": None if any(row.get(name) is None for name in rivals) else _least(row, rivals),
        "of_roofline": row.get("efficiency"),
    }


def _figures_of_decode(row: Row) -> Row:
    """Microseconds of a step; the rival is the fastest that is not ours, if all of ``DECODE_RIVALS`` were timed."""
    times = {name: [each for each in row if each.startswith(name) and each.endswith("_us")] for name in DECODE_RIVALS}
    fastest = {name: _least(row, columns) for name, columns in times.items()}
    best_rival = None if None in fastest.values() else _least(fastest, fastest)
    found = {"comet": row.get("best_us"), "best_rival": best_rival, "of_roofline": row.get("of_roofline")}
    return {"table": f"decode {row['weights']}"} | found


def _least(row: Row, names: Iterable[str]) -> float | None:
    return min((row[name] for name in names if row.get(name) is not None), default=None)


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """A README's text with the tables of these rows in the place of what stood between its comments."""

    def written(match: re.Match[str]) -> str:
        name = match["name"]
        require(name in TABLES, f"current.csv={name!r} in the README must be one of {', '.join(TABLES)}")
        make, of = TABLES[name]
        mine = [row for row in rows if row["table"] == of]
        caption = "{ranks} x {device}, commit {commit}, {date}:".format(**mine[0])
        head, *body = make(mine)
        lines = [head, ["---"] * len(head), *body]
        table = "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)
        return f"<!-- current.csv: {name} -->\n{caption}\n\n{table}\n<!-- end -->"

    return re.sub(r"<!-- current\.csv: (?P<name>[^\n]+?) -->\n.*?<!-- end -->", written, text, flags=re.DOTALL)


def layer_table(rows: Sequence[Row]) -> Table:
    """A line for each model, figures of several numbers of tokens side by side."""
    tokens = _distinct(rows, "tokens")
    lines = [
        [f"model, {' / '.join(map(str, tokens))} tokens", "Comet, ms", "plain, ms", "x plain", "x best", "of roofline"]
    ]
    for model in _distinct(rows, "model"):
        found = {row["tokens"]: row for row in rows if row["model"] == model}
        of_model = [found.get(count, dict.fromkeys(COLUMNS)) for count in tokens]
        ratios = [
            [row[rival] and row["comet"] and row[rival] / row["comet"] for row in of_model]
            for rival in ("plain", "best_rival")
        ]
        times = [[row[name] for row in of_model] for name in ("comet", "plain", "of_roofline")]
        columns = [*times[:2], *ratios, times[2]]
        lines.append([_title(model), *(" / ".join(map(_cell, column)) for column in columns)])
    return lines


def decode_table(rows: Sequence[Row]) -> Table:
    """Two lines for each model: Comet with its share of the roofline, and the fastest rival."""
    tokens = _distinct(rows, "tokens")
    lines = [["microseconds (of roofline), tokens", *map(str, tokens)]]
    for model in _distinct(rows, "model"):
        found = {row["tokens"]: row for row in rows if row["model"] == model}
        steps = [found.get(count, {}) for count in tokens]
        ours = [f"{_cell(step['comet'])} ({_cell(step['of_roofline'])})" if step else "-" for step in steps]
        lines.append([_title(model), *ours])
        lines.append(["fastest other", *(_cell(step.get("best_rival")) for step in steps)])
    return lines


# From names in the README to what makes a table of which rows.
TABLES: Mapping[str, tuple[Callable[[Sequence[Row]], Table], str]] = {
    "forward": (layer_table, "forward"), "training": (layer_table, "training"), "decode": (decode_table, "decode bf16")
}  # fmt: skip


def _title(model: str) -> str:
    """``mixtral_8x7b/2``, with half of the experts, is Mixtral-8x7B, too."""
    name = model.partition("/")[0]
    return NAMES.get(name, name)


def _distinct(rows: Iterable[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _cell(value: float | None) -> str:
    """Three digits.

    Example: 0.4567, 12.34, 345.6 and nothing: ``0.46``, ``12.3``, ``346`` and ``-``.
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
