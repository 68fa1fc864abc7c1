"""Comparison of the paths' loss curves: the rule it judges by, its files, and whole runs on two CPU ranks."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from compare_paths import main, model_config, parse, run, train_config
from curves import (
    EARLY_STEPS,
    WINDOW_STEPS,
    WINDOW_TOLERANCE,
    Curve,
    as_record,
    draw,
    early_tolerance,
    format_table,
    judge,
    pairwise,
    write_csv,
)
from ranks import run_ranks
from training_cases import Rank, make_text

ROOT = Path(__file__).parents[2]
TINY = "--hidden 32 --layers 2 --experts 4 --top-k 2 --ffn 32 --context 32 --batch 2 --steps 6".split()
DTYPES = (torch.float32, torch.bfloat16)
FALLING = [5.5 - 0.02 * step for step in range(60)]


def test_example_of_the_docstring() -> None:
    verdict = judge([2.0, 2.0, 1.5], [2.0, 1.0, 1.0], torch.bfloat16)
    assert (verdict.max_difference, verdict.mean_difference) == (1.0, 0.5)
    assert (verdict.early_difference, verdict.window_difference) == (1.0, 0.375)
    assert not verdict.within_tolerance


def test_tolerances_of_the_docstring() -> None:
    assert early_tolerance(torch.bfloat16) == 0.25 * 2**-7 == pytest.approx(2.0e-3, rel=0.03)
    assert early_tolerance(torch.float32) == 9.0e-5


def test_pairs_of_the_docstring() -> None:
    curves = {"a": Curve([2.0], 1.0), "b": Curve([1.0], 1.0), "c": Curve([3.0], 1.0)}
    assert pairwise(curves, torch.float32) == {"a-b": 0.5, "a-c": 0.5, "b-c": 2.0}
    curves["c"] = Curve([math.nan], 1.0)
    assert pairwise(curves, torch.float32) == {"a-b": 0.5, "a-c": None, "b-c": None}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_curve_agrees_with_itself(dtype: torch.dtype) -> None:
    verdict = judge(FALLING, FALLING, dtype)
    assert verdict.within_tolerance
    assert (verdict.max_difference, verdict.early_difference, verdict.window_difference) == (0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("step", "factor", "expected"), [(19, 0.9, True), (19, 1.1, False), (0, 1.1, False)])
def test_every_early_step_counts(dtype: torch.dtype, sign: int, step: int, factor: float, expected: bool) -> None:
    assert EARLY_STEPS == 20
    losses = FALLING.copy()
    losses[step] *= 1 + sign * factor * early_tolerance(dtype)
    assert judge(losses, FALLING, dtype).within_tolerance is expected


def test_late_steps_may_scatter_but_not_drift() -> None:
    generator = random.Random(3)
    late = range(EARLY_STEPS, len(FALLING))
    scattered = [loss * (1 + 0.01 * generator.uniform(-1, 1) * (step in late)) for step, loss in enumerate(FALLING)]
    assert judge(scattered, FALLING, torch.bfloat16).within_tolerance
    drifted = [loss * (1 + 1.1 * WINDOW_TOLERANCE * (step in late)) for step, loss in enumerate(FALLING)]
    verdict = judge(drifted, FALLING, torch.bfloat16)
    assert verdict.early_difference == 0
    assert verdict.window_difference == pytest.approx(1.1 * WINDOW_TOLERANCE)
    assert not verdict.within_tolerance


def test_the_last_window_may_be_short() -> None:
    losses = FALLING[: 2 * WINDOW_STEPS + 1]
    assert not judge([*losses[:-1], losses[-1] * 1.02], losses, torch.bfloat16).within_tolerance


@pytest.mark.parametrize("step", [0, 5, 40, 59])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_outside(step: int, value: float) -> None:
    losses = FALLING.copy()
    losses[step] = value
    for found, wanted in ((losses, FALLING), (FALLING, losses), (losses, losses)):
        verdict = judge(found, wanted, torch.bfloat16)
        assert not verdict.within_tolerance
        json.dumps(as_record(Curve(found, 1.0), verdict), allow_nan=False)


def test_table_and_files(tmp_path: Path) -> None:
    curves = {"twin": Curve([5.5, 5.0, 4.0], 1234.5), "plain": Curve([5.5, 5.0, 3.0], 7.0)}
    verdicts = {path: judge(curve.losses, curves["twin"].losses, torch.float32) for path, curve in curves.items()}
    header, twin, plain = format_table(curves, verdicts).splitlines()
    assert len(header) == len(twin) == len(plain)  # aligned
    assert twin.split() == ["twin", "5.50000", "4.00000", "0.00e+00", "0.00e+00", "1,234", "yes"]
    assert plain.split() == ["plain", "5.50000", "3.00000", "1.00e+00", "3.33e-01", "7", "NO"]
    write_csv(tmp_path / "curves.csv", curves)
    with (tmp_path / "curves.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["step", "twin", "plain"],
            ["0", "5.5", "5.5"],
            ["1", "5.0", "5.0"],
            ["2", "4.0", "3.0"],
        ]


@pytest.mark.parametrize(("first", "second"), [(4.0, 4.0), (4.0, math.nan), (math.nan, 4.0), (math.inf, math.nan)])
def test_picture_of_equal_and_of_broken_curves(tmp_path: Path, first: float, second: float) -> None:
    """The logarithmic axis has nothing to show where all differences are zero or not finite."""
    curves = {"a": Curve([first, first], 1.0), "b": Curve([first, second], 1.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(tmp_path / "curves.png", curves, torch.bfloat16)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_command_line_reaches_model_and_training() -> None:
    arguments = parse([*TINY, "--seed", "3", "--lr", "0.1", "--dtype", "float32"])
    model, config = model_config(arguments), train_config(arguments)
    assert (model.hidden_size, model.num_layers, model.context) == (32, 2, 32)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.ffn_size) == (4, 2, 32)
    assert (config.steps, config.batch_size, config.seed, config.lr, config.dtype) == (6, 2, 3, 0.1, "float32")
    assert parse([]).paths == ("fused", "plain", "reference")
    default = model_config(parse([]))
    assert (default.num_heads, default.head_width, default.moe.num_experts, default.moe.top_k) == (4, 64, 16, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paths", "fused,odd"], "paths='odd' must be one of fused, twin, plain, reference"),
        (["--paths", "fused"], "paths=fused must be two or more different ones"),
        (["--paths", "plain,twin,plain"], "paths=plain,twin,plain must be two or more different ones"),
        (["--paths", "plain,twin", "--wrong-seed", "fused"], "wrong_seed='fused' must be one of the paths"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_it_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start the comparison with torchrun"):
        main([])


def words_of(tmp_path: Path, *arguments: str) -> list[str]:
    words = ["--device", "cpu", "--paths", "twin,plain,reference", *TINY]
    return [*words, "--data", str(make_text(tmp_path)), "--out", str(tmp_path / "out"), *arguments]


def run_on_rank(rank: int, world_size: int, words: list[str]) -> bool:
    arguments = parse(words)
    arguments.out.mkdir(exist_ok=True)
    return run(arguments, Rank(rank, world_size))


def test_paths_agree_over_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(run_on_rank, 2, words_of(tmp_path, "--ep", "2", "--dtype", "float32")) == [True, True]
    result = json.loads((tmp_path / "out" / "compare_paths.json").read_text())
    about = [result[name] for name in ("task", "world_size", "ep", "tp", "device", "dtype", "steps")]
    assert about == ["compare_paths", 2, 2, 1, "cpu", "float32", 6]
    assert result["within_tolerance"]
    assert result["early_differences"].keys() == {"twin-plain", "twin-reference", "plain-reference"}
    for path in result["paths"].values():
        assert path["first_loss"] == pytest.approx(math.log(256))
        assert path["last_loss"] < path["first_loss"] - 1e-3
        assert path["within_tolerance"]
        assert path["max_difference"] < 1e-5
        assert path["tokens_per_second"] > 0
    with (tmp_path / "out" / "compare_paths.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert [float(step["twin"]) for step in steps][-1] == result["paths"]["twin"]["last_loss"]
    assert len(steps) == 6
    assert (tmp_path / "out" / "compare_paths.png").exists()


@pytest.mark.slow
def test_another_seed_is_detected(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "compare_paths.py"), *words_of(tmp_path, "--tp", "2", "--dtype", "bfloat16")]
    command += ["--lr", "0.01", "--wrong-seed", "plain"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 1, done.stderr[-3000:]
    *table, line = done.stdout.splitlines()  # one rank speaks
    assert [row.split()[0] for row in table] == ["path", "twin", "plain", "reference"]
    result = json.loads(line)
    assert json.loads((tmp_path / "out" / "compare_paths.json").read_text()) == result
    assert not result["within_tolerance"]
    within = {name: path["within_tolerance"] for name, path in result["paths"].items()}
    assert within == {"twin": True, "plain": False, "reference": True}
    assert (tmp_path / "out" / "compare_paths.png").exists()  # the files are complete before torchrun ends the ranks
