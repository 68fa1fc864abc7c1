"""Training runs through several paths of the MoE layer: do their loss curves agree?

    for path in fused plain reference; do comet train model=tiny moe_path=$path output_dir=outputs/$path; done
    python benchmarks/bench.py compare-paths outputs/fused outputs/plain outputs/reference

The runs have the same settings but for ``moe_path``; one with another ``train.seed`` shows the comparison fail. Every
folder is judged against the first one. The exit status is 1 if a curve is outside of the tolerance.

**Tolerance.** Paths round in different places, and training amplifies a difference from step to step, so the rule has
two parts, both relative to the loss of the first path. In each of the first ``EARLY_STEPS`` steps a loss may differ by
a quarter of the epsilon of the dtype (2.0e-3 for bfloat16), or, if that is more, by 9.0e-5: twice what the plain path
and the reference, both plain torch, differ by in float32 (4.5e-5 on two H200, 4 layers of hidden size 256). Over the
whole run, means of ``WINDOW_STEPS`` steps may differ by 1 %. The first loss says nothing (the head starts at zero:
ln 256 for every path and seed), the second one is the first to tell. ``pairwise`` lists the early difference of every
two paths, so that each run shows how far apart those two are.

For scale, early steps on two CPU ranks. That model, 2 sequences per rank: bfloat16 paths differ by up to 3e-4, another
seed by 2e-1. Two layers of hidden size 64: bfloat16 paths by 2e-4, float32 paths by 1e-7; leaving out one expert of
every hundredth token by 1.4e-4, outputs that are 1 % too small by 2e-5, doubled gradients of w2 by 2e-6. So a curve in
bfloat16 shows gross errors only, one in float32 finer ones; the rest is for layer tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from comet.config import require
from comet.training.report import History

from lib.arguments import suite_parser
from lib.report import table_of, write_json

EARLY_STEPS, EARLY_EPSILONS, EARLY_FLOAT32 = 20, 0.25, 2 * 4.5e-5
WINDOW_STEPS, WINDOW_TOLERANCE = 10, 0.01
COLUMNS = ("path", "first_loss", "last_loss", "max_difference", "mean_difference", "tokens_per_second",
           "within_tolerance")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """What one path did."""

    losses: list[float]  # mean loss over all ranks of every step, in nats per byte
    tokens_per_second: float  # of all ranks together


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one curve differs from the first."""

    max_difference: float  # largest |difference| of a step, in nats
    mean_difference: float  # mean |difference|, in nats
    early_difference: float  # largest |difference| / loss of the first EARLY_STEPS steps
    window_difference: float  # largest |difference| / loss of the means of WINDOW_STEPS steps
    within_tolerance: bool  # whether the last two are small enough


def read_run(folder: Path) -> tuple[Curve, dict[str, Any]]:
    """The curve of a finished run of ``comet train``, and its result.

    Raises:
        ValueError: If the folder holds none.
    """
    require((folder / "result.json").is_file(), f"{folder} must be the folder of a finished run of comet train")
    result = json.loads((folder / "result.json").read_text())
    history = History(None)
    history.start(folder, result["steps"])
    losses = [loss for window in history.windows for loss in window.losses]
    return Curve(losses, result["tokens_per_second"]), result


def early_tolerance(dtype: torch.dtype) -> float:
    """Part of the loss by which one of the first ``EARLY_STEPS`` steps may differ; bfloat16: 0.25 * 2**-7 = 2.0e-3."""
    return max(EARLY_EPSILONS * torch.finfo(dtype).eps, EARLY_FLOAT32)


def judge(losses: Sequence[float], wanted: Sequence[float], dtype: torch.dtype) -> Verdict:
    """Compare two curves; one that is not finite is outside of the tolerance.

    Example: ``[2.0, 2.0, 1.5]`` against ``[2.0, 1.0, 1.0]``: largest difference 1.0, mean 0.5, early 1.0 (all of the
    loss), and the only window differs by 1.5 / 4 = 0.375.

    Args:
        losses: Of the path to judge.
        wanted: Of the first path; as many, positive.
        dtype: Of the activations.

    Returns:
        The differences and the judgement.
    """
    found, expected = (torch.tensor(curve, dtype=torch.float64) for curve in (losses, wanted))
    difference = found - expected
    early = (difference / expected)[:EARLY_STEPS].abs().max().item()  # torch keeps a NaN, Python's max may lose it
    windows = zip(difference.split(WINDOW_STEPS), expected.split(WINDOW_STEPS), strict=True)
    window = torch.stack([part.sum() / whole.sum() for part, whole in windows]).abs().max().item()
    return Verdict(
        max_difference=difference.abs().max().item(),
        mean_difference=difference.abs().mean().item(),
        early_difference=early,
        window_difference=window,
        within_tolerance=early <= early_tolerance(dtype) and window <= WINDOW_TOLERANCE,
    )


def pairwise(curves: Mapping[str, Curve], dtype: torch.dtype) -> dict[str, float | None]:
    """Early difference of every two paths, relative to the earlier one's loss; ``None`` where it is not finite.

    Example: paths a, b, c with one loss each, 2.0, 1.0 and 3.0: ``{"a-b": 0.5, "a-c": 0.5, "b-c": 2.0}``.
    """
    return {
        f"{first}-{second}": _finite(judge(curves[second].losses, curves[first].losses, dtype).early_difference)
        for first, second in combinations(curves, 2)
    }


def as_record(curve: Curve, verdict: Verdict) -> dict[str, Any]:
    """One path in the JSON; ``null`` where a number is not finite."""
    ends = {"first_loss": curve.losses[0], "last_loss": curve.losses[-1]}
    numbers = {**ends, "tokens_per_second": curve.tokens_per_second, **asdict(verdict)}
    return {name: _finite(number) for name, number in numbers.items()}


def draw(path: Path, curves: Mapping[str, Curve], dtype: torch.dtype) -> None:
    """The curves as a PNG; below them the differences to the first one, with the tolerance of the early steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    first = next(iter(curves))
    wanted = curves[first].losses
    for number, (name, curve) in enumerate(curves.items()):
        above.plot(curve.losses, label=name, linestyle=("-", "--", ":", "-.")[number % 4])
        if name != first:
            differences = [abs(loss - other) for loss, other in zip(curve.losses, wanted, strict=True)]
            below.plot(differences, ".-", color=f"C{number}", linewidth=0.8, label=name)
    limits = [early_tolerance(dtype) * loss for loss in wanted[:EARLY_STEPS]]
    below.plot(limits, color="black", linewidth=0.8, label="tolerance of the early steps")
    above.set(ylabel="loss, nats per byte", title=f"One model, one seed, the same batches ({dtype})")
    below.set(yscale="log", xlabel="optimizer step", ylabel=f"|difference to {first}|, nats")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)


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
    curves, results = {name: run[0] for name, run in runs.items()}, {name: run[1] for name, run in runs.items()}
    for name in ("dtype", "steps", "world_size"):
        values = {folder: result[name] for folder, result in results.items()}
        require(len(set(values.values())) == 1, f"{name} must be the same in all runs, but is {values}")
    dtype = getattr(torch, results[names[0]]["dtype"])
    verdicts = {name: judge(curve.losses, curves[names[0]].losses, dtype) for name, curve in curves.items()}
    records = {name: as_record(curve, verdicts[name]) for name, curve in curves.items()}
    agree = all(verdict.within_tolerance for verdict in verdicts.values())
    found = {
        "task": "compare_paths",
        "early_tolerance": early_tolerance(dtype),
        "early_differences": pairwise(curves, dtype),
        "paths": {name: results[name] | record for name, record in records.items()},
        "within_tolerance": agree,
    }
    line = write_json(arguments.out, "compare_paths", found)
    draw(arguments.out / "compare_paths.png", curves, dtype)
    print(table_of([{"path": name} | record for name, record in records.items()], COLUMNS, _cell), line, sep="\n")
    return 0 if agree else 1
