"""Loss curves of several paths, and two trees in one process: the rules they are judged by, files, whole runs."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from bench_cases import ROOT, report_of
from ranks import run_ranks
from training_cases import Rank, make_job

from comet.training.trainer import train

from suites.compare_paths import EARLY_STEPS, WINDOW_STEPS, WINDOW_TOLERANCE, early_tolerance, judge, main
from suites.compare_trees import Tree

DTYPES = (torch.float32, torch.bfloat16)
FALLING = [5.5 - 0.02 * step for step in range(60)]


def test_example_of_the_docstring() -> None:
    verdict = judge([2.0, 2.0, 1.5], [2.0, 1.0, 1.0], torch.bfloat16)
    assert (verdict["max_difference"], verdict["mean_difference"]) == (1.0, 0.5)
    assert (verdict["early_difference"], verdict["window_difference"]) == (1.0, 0.375)
    assert not verdict["within_tolerance"]


def test_tolerances_of_the_docstring() -> None:
    assert early_tolerance(torch.bfloat16) == 0.25 * 2**-7 == pytest.approx(2.0e-3, rel=0.03)
    assert early_tolerance(torch.float32) == 9.0e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("step", "factor", "expected"), [(7, 0.9, True), (7, 1.1, False), (0, 1.1, False)])
def test_every_early_step_counts(dtype: torch.dtype, sign: int, step: int, factor: float, expected: bool) -> None:
    assert EARLY_STEPS == 8
    losses = FALLING.copy()
    losses[step] *= 1 + sign * factor * early_tolerance(dtype)
    assert judge(losses, FALLING, dtype)["within_tolerance"] is expected


def test_late_steps_may_scatter_but_not_drift() -> None:
    generator = random.Random(3)
    late = range(EARLY_STEPS, len(FALLING))
    scattered = [loss * (1 + 0.01 * generator.uniform(-1, 1) * (step in late)) for step, loss in enumerate(FALLING)]
    assert judge(scattered, FALLING, torch.bfloat16)["within_tolerance"]
    drifted = [loss * (1 + 1.1 * WINDOW_TOLERANCE * (step in late)) for step, loss in enumerate(FALLING)]
    verdict = judge(drifted, FALLING, torch.bfloat16)
    assert verdict["early_difference"] == 0
    assert verdict["window_difference"] == pytest.approx(1.1 * WINDOW_TOLERANCE)
    assert not verdict["within_tolerance"]


def test_the_last_window_may_be_short() -> None:
    losses = FALLING[: 2 * WINDOW_STEPS + 1]
    assert not judge([*losses[:-1], losses[-1] * (1 + 2 * WINDOW_TOLERANCE)], losses, torch.bfloat16)[
        "within_tolerance"
    ]


@pytest.mark.parametrize("step", [0, 5, 40, 59])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_outside(step: int, value: float) -> None:
    losses = FALLING.copy()
    losses[step] = value
    for found, wanted in ((losses, FALLING), (FALLING, losses), (losses, losses)):
        verdict = judge(found, wanted, torch.bfloat16)
        assert not verdict["within_tolerance"]
        json.dumps(verdict, allow_nan=False)


def train_on_rank(rank: int, world_size: int, folder: Path, paths: dict[str, tuple[str, int]]) -> None:
    for name, (path, seed) in paths.items():
        job = make_job(folder, ep=2, moe_path=path, seed=seed, output_dir=str(folder / name), cuda_graph="off")
        train(job, Rank(rank, world_size))


@pytest.mark.slow
def test_runs_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three paths agree, and what has another seed does not."""
    paths = {path: (path, 0) for path in ("twin", "plain", "reference")}
    run_ranks(train_on_rank, 2, tmp_path, paths | {"odd": ("plain", 1)})
    out = tmp_path / "out"
    assert main([*(str(tmp_path / path) for path in paths), "--out", str(out)]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == ["path", *paths]
    result = json.loads(line)
    assert json.loads((out / "compare_paths.json").read_text()) == result
    assert result["within_tolerance"]
    for name, path in result["paths"].items():
        assert (path["moe_path"], path["world_size"], path["dtype"], path["steps"]) == (name, 2, "float32", 6)
        assert path["first_loss"] == pytest.approx(math.log(256))
        assert path["last_loss"] < path["first_loss"] - 1e-3
        assert path["within_tolerance"]
        assert path["max_difference"] < 1e-5
        assert path["tokens_per_second"] > 0
    assert (out / "compare_paths.png").exists()
    assert main([str(tmp_path / "plain"), str(tmp_path / "odd"), "--out", str(out)]) == 1
    within = json.loads((out / "compare_paths.json").read_text())["paths"]
    assert {name: path["within_tolerance"] for name, path in within.items()} == {"plain": True, "odd": False}


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folders=a must be two or more of different names"):
        main(["a"])
    with pytest.raises(ValueError, match="folders=a a must be two or more of different names"):
        main(["x/a", "y/a"])
    with pytest.raises(ValueError, match=r"a must be the folder of a finished run of comet train"):
        main([str(tmp_path / "a"), str(tmp_path / "b")])
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        result = {"steps": steps, "tokens_per_second": 1.0, "dtype": "float32", "world_size": 1}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"steps must be the same in all runs, but is \{'a': 5, 'b': 6\}"):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


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
        "layer", "routed experts", "routed experts, with backward", "decode step",
    ]  # fmt: skip
    assert all(row["host"]["us"] > 0 for row in report["rows"])
    assert ("device" in report["rows"][0]) == torch.cuda.is_available()
