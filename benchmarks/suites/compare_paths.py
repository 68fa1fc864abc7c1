"""Training runs through several paths of the MoE layer: do their loss curves agree?

    for path in fused plain reference; do comet train model=tiny moe_path=$path output_dir=outputs/$path; done
    python benchmarks/bench.py compare-paths outputs/fused outputs/plain outputs/reference

The runs have the same settings but for ``moe_path``; one with another ``train.seed`` shows the comparison fail. Every
folder is judged against the first one. The exit status is 1 if a curve is outside of the tolerance.

**Tolerance.** Paths round in different places, and training amplifies a difference from step to step, so the rule has
two parts, both relative to the loss of the first path. In each of the first ``EARLY_STEPS`` steps a loss may differ by
a quarter of the epsilon of the dtype (2.0e-3 for bfloat16), or, if that is more, by 9.0e-5: twice what the plain path
and the reference, both plain torch, differ by in float32 (4.5e-5 on two H200, 4 layers of hidden size 256). In later
steps a token that goes to another expert parts two curves, also those of plain torch (by .8 % in means of ten steps on
four H100): over the whole run, means of ``WINDOW_STEPS`` steps may differ by 2 %. The first loss says nothing (the head
starts at zero: ln 256 for every path and seed), the second one is the first to tell. A curve in bfloat16 shows gross
errors only, one in float32 finer ones (of 4 layers, paths differ by 1e-7, an expert left out of every hundredth token
makes 1.4e-4); the rest is for layer tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from comet.config import require
from comet.training.report import History

from lib.arguments import suite_parser
from lib.report import Row, draw_lines, set_aside, table_of, write_json

EARLY_STEPS, EARLY_EPSILONS, EARLY_FLOAT32 = 8, 0.25, 2 * 4.5e-5
WINDOW_STEPS, WINDOW_TOLERANCE = 10, 0.02
COLUMNS = ("path", "first_loss", "last_loss", "max_difference", "mean_difference", "early_difference",
           "window_difference", "tokens_per_second", "within_tolerance")  # fmt: skip


def read_run(folder: Path) -> tuple[list[float], Row]:
    """Mean loss of every step, in nats per byte, of a finished run of ``comet train``, and its result."""
    require((folder / "result.json").is_file(), f"{folder} must be the folder of a finished run of comet train")
    result = json.loads((folder / "result.json").read_text())
    history = History(None)
    history.start(folder, result["steps"])
    return [loss for window in history.windows for loss in window.losses], result


def early_tolerance(dtype: torch.dtype) -> float:
    """Part of the loss by which one of the first ``EARLY_STEPS`` steps may differ; bfloat16: 0.25 * 2**-7 = 2.0e-3."""
    return max(EARLY_EPSILONS * torch.finfo(dtype).eps, EARLY_FLOAT32)


def judge(losses: Sequence[float], wanted: Sequence[float], dtype: torch.dtype) -> Row:
    """How a curve differs from that of the first path, and whether it may; one that is not finite may not.

    ``max_difference`` and ``mean_difference`` of a step are in nats, ``early_difference`` of the first ``EARLY_STEPS``
    steps and ``window_difference`` of means of ``WINDOW_STEPS`` steps shares of the loss.

    Example: ``[2.0, 2.0, 1.5]`` against ``[2.0, 1.0, 1.0]``: largest difference 1.0, mean 0.5, early 1.0 (all of the
    loss), and the only window differs by 1.5 / 4 = 0.375.
    """
    found, expected = (torch.tensor(curve, dtype=torch.float64) for curve in (losses, wanted))
    difference = found - expected
    early = (difference / expected)[:EARLY_STEPS].abs().max().item()  # torch keeps a NaN, Python's max may lose it
    windows = zip(difference.split(WINDOW_STEPS), expected.split(WINDOW_STEPS), strict=True)
    window = torch.stack([part.sum() / whole.sum() for part, whole in windows]).abs().max().item()
    figures = {
        "max_difference": difference.abs().max().item(),
        "mean_difference": difference.abs().mean().item(),
        "early_difference": early,
        "window_difference": window,
    }
    within = early <= early_tolerance(dtype) and window <= WINDOW_TOLERANCE
    return {name: _finite(value) for name, value in figures.items()} | {"within_tolerance": within}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main(command_line: Sequence[str]) -> int:
    """Compare the runs; the exit status."""
    parser = suite_parser("compare-paths", __doc__, out=Path("outputs/compare_paths"))
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of comet train, two or more")
    arguments = parser.parse_args(command_line)
    names = [folder.name for folder in arguments.folders]
    require(len(set(names)) == len(names) >= 2, f"folders={' '.join(names)} must be two or more of different names")
    runs = {folder.name: read_run(folder) for folder in arguments.folders}
    for name in ("dtype", "steps", "world_size"):
        values = {folder: result[name] for folder, (_, result) in runs.items()}
        require(len(set(values.values())) == 1, f"{name} must be the same in all runs, but is {values}")
    wanted, result = runs[names[0]]
    dtype = getattr(torch, result["dtype"])
    paths = {
        name: result
        | {"first_loss": _finite(losses[0]), "last_loss": _finite(losses[-1])}
        | judge(losses, wanted, dtype)
        for name, (losses, result) in runs.items()
    }
    agree = all(path["within_tolerance"] for path in paths.values())
    found = {"task": "compare_paths", "early_tolerance": early_tolerance(dtype), "paths": paths}
    set_aside(arguments.out, "compare_paths")
    line = write_json(arguments.out, "compare_paths", found | {"within_tolerance": agree})
    curves = {name: [(step + 1.0, loss) for step, loss in enumerate(losses)] for name, (losses, _) in runs.items()}
    draw_lines(arguments.out / "compare_paths.png", {"": curves}, x="optimizer step", y="loss, nats per byte")
    print(table_of([{"path": name} | path for name, path in paths.items()], COLUMNS, _cell), line, sep="\n")
    return 0 if agree else 1
