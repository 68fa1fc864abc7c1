"""The table of expected times over nodes."""

import json

from suites.nodes import Run


def test_rows_are_the_layers_that_divide_over_the_ranks(capsys) -> None:
    Run.main(["--models", "mixtral_8x7b,qwen3_30b_a3b", "--nodes", "2,16", "--tokens", "8192"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["model"], row["nodes"], row["bound"]) for row in rows] == [
        ("qwen3_30b_a3b", 2, "network"),
        ("qwen3_30b_a3b", 16, "network"),
    ]
    assert all(row["x_bound"] >= 1 - 1e-9 for row in rows)
