"""The README's tables are those of ``results/current.csv``, and that is of one commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suites.readme import COLUMNS, ROOT, collect, read_current, with_tables


def run(folder: Path, suite: str, rows: list[dict[str, Any]], commit: str = "abc1234") -> Path:
    folder.mkdir()
    facts = {"commit": commit, "date": "2026-11-26T01:00:00+00:00", "device": "NVIDIA X", "ranks": 2, "torch": "2"}
    (folder / f"bench_{suite}.json").write_text(json.dumps({"facts": facts, "rows": rows}))
    return folder


def layer_row(tokens: int, comet: float) -> dict[str, Any]:
    times = {"comet_ms": comet, "comet_graph_ms": None, "plain_ms": 3.0, "pipelined_ms": 2.0}
    return {"model": "qwen2_moe", "tokens": tokens, "direction": "forward", "efficiency": 0.8} | times


def test_times_and_ratios_stand_side_by_side(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "moe", [layer_row(2048, 1.0), layer_row(8192, 4.0)])
    table = with_tables("<!-- current.csv: forward -->\n<!-- end -->", collect([folder]))
    assert "2 x NVIDIA X, commit abc1234, 2026-11-26:" in table
    assert "| Qwen2-MoE | 1.00 / 4.00 | 3.00 / 3.00 | 3.00 / 0.75 | 2.00 / 0.50 | 0.80 / 0.80 |" in table


def test_runs_of_two_commits_are_refused(tmp_path: Path) -> None:
    folders = [run(tmp_path / commit, "moe", [layer_row(8, 1.0)], commit) for commit in ("abc1234", "def5678")]
    with pytest.raises(ValueError, match="commit=abc1234, def5678 of the results must be one"):
        collect(folders)
    assert {row["commit"] for row in collect(folders, "abc9999")} == {"abc9999"}


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"collect=.* must hold one of bench_moe.json, bench_decode.json"):
        collect([tmp_path])


def test_the_readme_has_the_figures_of_the_file() -> None:
    rows, text = read_current(), (ROOT / "README.md").read_text()
    assert set(rows[0]) == set(COLUMNS)
    assert len({row["commit"] for row in rows}) == 1
    assert with_tables(text, rows) == text
