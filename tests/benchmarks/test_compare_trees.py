"""Two trees in one process: each has its own modules, and a whole run."""

import sys
from pathlib import Path

import torch
from bench_cases import ROOT, report_of

from suites.compare_trees import Tree


def test_each_tree_has_its_own_modules(tmp_path: Path) -> None:
    for name in ("comet", "kernels", "launch", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "comet" / "__init__.py").write_text("")
    (tmp_path / "comet" / "errors.py").write_text("WHOSE = 'other'\n")
    other, own = Tree(tmp_path), Tree(ROOT)
    import comet.errors as installed

    with other.active():
        from comet.errors import WHOSE  # type: ignore[attr-defined]
    with own.active():
        from comet.errors import CommTimeoutError
    with other.active():
        import comet.errors

        assert not hasattr(comet.errors, "CommTimeoutError")
    assert WHOSE == "other"
    assert issubclass(CommTimeoutError, RuntimeError)
    assert CommTimeoutError is not installed.CommTimeoutError
    assert sys.modules["comet.errors"] is installed, "outside everything is as before"


def test_a_tree_against_itself() -> None:
    report, _ = report_of("compare-trees", "--base", str(ROOT), "--rounds", "1")
    assert [row["call"].partition(": ")[2] for row in report["rows"]] == [
        "layer", "routed experts", "routed experts, with backward", "decode step", "decode step of own tokens",
        "the same, told how many",
    ]  # fmt: skip
    assert all(row["host"]["us"] > 0 for row in report["rows"])
    assert ("device" in report["rows"][0]) == torch.cuda.is_available()
