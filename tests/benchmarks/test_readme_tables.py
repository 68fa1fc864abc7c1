"""The README's tables are those of ``results/current.csv``, and that is of one commit."""

import json
from pathlib import Path
from typing import Any

import pytest

from lib.timing import NO_COMMIT
from suites.readme import COLUMNS, ROOT, collect, read_current, with_tables


def run(folder: Path, suite: str, rows: list[dict[str, Any]], commit: str = "abc1234") -> Path:
    folder.mkdir()
    facts = {"commit": commit, "date": "2026-11-26T01:00:00+00:00", "device": "NVIDIA X", "ranks": 2, "torch": "2"}
    (folder / f"bench_{suite}.json").write_text(json.dumps({"facts": facts, "rows": rows}))
    return folder


def layer_row(tokens: int, comet: float) -> dict[str, Any]:
    times = {
        "comet_ms": comet,
        "comet_graph_ms": None,
        "plain_ms": 3.0,
        "pipelined_ms": 2.0,
        "all_gather_ms": 2.5,
        "ep": 2,
        "tp": 1,
    }
    return {"model": "qwen2_moe", "tokens": tokens, "direction": "forward", "efficiency": 0.8} | times


def test_times_and_ratios_stand_side_by_side(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "moe", [layer_row(2048, 1.0), layer_row(8192, 4.0)])
    table = with_tables("<!-- current.csv: forward -->\n<!-- end -->", collect([folder]))
    assert "2 x NVIDIA X, commit abc1234, 2026-11-26:" in table
    assert "| Qwen2-MoE | 1.00 / 4.00 | 3.00 / 3.00 | 3.00 / 0.75 | 2.00 / 0.50 | 0.80 / 0.80 |" in table


def test_runs_of_two_commits_are_refused(tmp_path: Path) -> None:
    commits = ("abc1234", "def5678")
    folders = [run(tmp_path / commit, "moe", [layer_row(len(commit) + index, 1.0)], commit)
               for index, commit in enumerate(commits)]  # fmt: skip
    with pytest.raises(ValueError, match="commit=abc1234, def5678 of the results must be one"):
        collect(folders)
    with pytest.raises(ValueError, match="commit=abc1234, def5678 of the results must be one"):
        collect(folders, "abc9999")
    folders = [folders[0], run(tmp_path / "elsewhere", "moe", [layer_row(1, 1.0)], NO_COMMIT)]
    with pytest.raises(ValueError, match=f"commit=abc1234, {NO_COMMIT} of the results must be one"):
        collect(folders)
    assert {row["commit"] for row in collect(folders, "abc1234")} == {"abc1234"}


def test_points_stand_below_their_tokens_and_come_once(tmp_path: Path) -> None:
    others = [{**layer_row(tokens, 1.0), "model": "tiny"} for tokens in (8, 16)]
    rows = [layer_row(16, 2.0), *others, {**layer_row(8, 1.0), "direction": "forward+backward"}]
    table = with_tables("<!-- current.csv: forward -->\n<!-- end -->", collect([run(tmp_path / "a", "moe", rows)]))
    assert "| model, 16 / 8 tokens |" in table
    assert "| Qwen2-MoE | 2.00 / - |" in table
    assert "| tiny | 1.00 / 1.00 |" in table
    twice = run(tmp_path / "b", "moe", [layer_row(8, 1.0)] * 2)
    with pytest.raises(ValueError, match=r"forward must be one for each point, unlike .*qwen2_moe with 8 tokens"):
        collect([twice])
    other = run(tmp_path / "c", "moe", [layer_row(8, 1.0)])
    (other / "bench_moe.json").write_text((other / "bench_moe.json").read_text().replace('"ranks": 2', '"ranks": 4'))
    with pytest.raises(ValueError, match=r"forward must be of one machine, but are of .*4 x NVIDIA X"):
        collect([tmp_path / "a", other])


@pytest.mark.parametrize("other", [{"routing": "hot"}, {"ep": 1, "tp": 2}])
def test_a_table_is_of_one_routing_and_layout(other: dict[str, Any], tmp_path: Path) -> None:
    rows = [layer_row(8, 1.0) | {"routing": "uniform"}, layer_row(16, 1.0) | {"routing": "uniform"} | other]
    with pytest.raises(ValueError, match=r"forward must be of one routing and layout, but are .*uniform at EP2 x TP1"):
        collect([run(tmp_path / "a", "moe", rows)])


def test_the_best_baseline_is_of_all_there_are(tmp_path: Path) -> None:
    rows = [layer_row(8, 1.0) | {"all_gather_ms": None}, layer_row(8, 1.0) | {"direction": "forward+backward"}]
    assert [row["best_rival"] for row in collect([run(tmp_path / "a", "moe", rows)])] == [None, 3.0]
    step = {"model": "tiny", "weights": "bf16", "triton_us": 3.0, "torch_us": 2.0, "fused_us": 1.0}
    with_library = step | {"transformers_eager_us": 9.0, "transformers_grouped_mm_us": None}
    rows = [with_library, step, with_library | {"torch_us": None}]
    rows = [row | {"tokens": tokens} for tokens, row in enumerate(rows, 1)]
    assert [row["best_rival"] for row in collect([run(tmp_path / "b", "decode", rows)])] == [2.0, None, None]


def test_a_point_that_failed_has_no_figures(tmp_path: Path) -> None:
    failed = {"model": "tiny", "weights": "bf16", "tokens": 1, "failures": {"point": "out of memory"}}
    assert collect([run(tmp_path / "a", "decode", [failed])])[0]["comet"] is None


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"collect=.* must hold one of bench_moe.json, bench_decode.json"):
        collect([tmp_path])


def test_the_readme_has_the_figures_of_the_file() -> None:
    rows, text = read_current(), (ROOT / "README.md").read_text()
    assert set(rows[0]) == set(COLUMNS)
    assert len({row["commit"] for row in rows}) == 1
    assert with_tables(text, rows) == text
