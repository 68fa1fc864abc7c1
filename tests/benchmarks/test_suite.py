"""The skeleton of all suites: options from words, points that fail or are measured again, files and the last line."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench_cases import ALONE

from lib.ranks import Ranks
from lib.report import Row, cell
from lib.suite import Checked, Point, Suite, option


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    """Squares of numbers, the second of which is measured twice."""

    COLUMNS = ("number", "square")

    numbers: tuple[int, ...] = option((2, 3), "to be squared", least=-1)
    kind: str = option("exact", of=("exact", "rough"))
    path: Path | None = None
    twice: bool = False

    def facts(self, ranks: Ranks) -> Row:
        return {"kind": self.kind}

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        for number in self.numbers:
            yield Point({"number": number}, lambda number=number: {"square": float(number**2) or [][0]})
        if self.twice:
            yield Point({"number": 3}, lambda: [{"square": 8.0}, {"square": 9.0}])
        yield Point({"number": 7}, "no room")

    def summary(self, rows: list[Row]) -> Row:
        return {"geometric_mean": {"square": sum(row.get("square", 0.0) for row in rows)}}


def test_words_become_fields_by_their_types() -> None:
    found = Run.parse("--numbers 4,5 --kind rough --path a/b --twice --ep 2".split())
    assert (found.numbers, found.kind, found.path, found.twice) == ((4, 5), "rough", Path("a/b"), True)
    assert found.parallel.world_size == 2
    assert (Run.parse([]).path, Run.parse([]).twice) == (None, False)
    for words, message in {
        "--kind odd": "kind='odd' must be one of exact, rough",
        "--numbers 3,-2": "numbers=-2 must be at least -1",
        "--rounds 0": "rounds=0 must be at least 1",
        "--device tpu": "device='tpu' must be one of auto, cpu",
    }.items():
        with pytest.raises(ValueError, match=message):
            Run.parse(words.split())


def test_a_point_that_fails_is_a_row_and_one_measured_again_replaces_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(numbers=(2, 3, 0), twice=True, out=tmp_path, device="cpu").run(ALONE)
    output = capsys.readouterr()
    *table, line = output.out.splitlines()
    found = json.loads(line)
    stem = found["task"]
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == found
    assert (found["facts"], found["geometric_mean"]) == ({"kind": "exact"}, {"square": 21.0})
    rows = [(row["number"], row.get("square"), row.get("failures", {}).get("point")) for row in found["rows"]]
    assert [row[:2] for row in rows] == [(2, 4.0), (0, None), (3, 8.0), (3, 9.0), (7, None)]
    assert (rows[1][2], rows[-1][2]) == ("IndexError: list index out of range", "no room")
    assert [row.split() for row in table[:2]] == [["number", "square"], ["2", "4"]]
    assert table[6].split() == ["geometric", "mean", "21"]
    assert table[7:] == [f"failures: point: {rows[1][2]} (at 0)", "failures: point: no room (at 7)"]
    assert re.search(r"^7: done in \S+ s; point: no room$", output.err, re.MULTILINE)


def test_only_what_succeeds_and_is_right_is_kept() -> None:
    checked = Checked(ALONE, failures={"built": "never"})
    assert checked.value("good", lambda: 3) == 3
    assert checked.value("wrong", lambda: 4, lambda value: f"{value} is not 3") is None
    assert checked.value("broken", lambda: [][1]) is None
    assert checked.failures == {
        "built": "never", "wrong": "4 is not 3", "broken": "IndexError: list index out of range"
    }  # fmt: skip


def test_cells_show_digits_where_they_count() -> None:
    assert [cell(value) for value in (None, 0.9987123, 0.12345, 123.4, "a", 5)] == [
        "-", "0.998712", "0.123", "123", "a", "5",
    ]  # fmt: skip
