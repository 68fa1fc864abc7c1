"""Run random cases of the whole layer on real ranks against the reference: ``python tests/stress.py --help``.

Layouts, shapes, routing, splits, delays and the number of epochs on a workspace are drawn from the seed: what kernels
are compiled for once per family of cases, all else per case (``stress_cases.py`` lists both). Outputs and gradients are
compared with ``comet.reference.layer`` within twice the error of plain torch, and bit for bit between calls with the
same inputs. A case that fails is printed with the command that runs it again (with the cases of its family before it,
which share its workspace), the last line is JSON, and the exit status is 1 if any failed.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import support  # noqa: F401 - puts the helpers on the import path
from gpus import ON_GPUS
from ranks import run_ranks
from stress_cases import Stress, sizes_of
from stress_ranks import Outcome, run_batch
from tqdm import tqdm

Batch = Callable[..., Outcome]

START_S = 120.0
DAY_S = 86_400.0
FAMILY_HELP = "1000 on a GPU, 25 on a CPU, where only joining the ranks costs"
TIMEOUT_HELP = "30 s; under the interpreter, whose clock counts polls as 20 us each, 5 s"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="how many cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--path", default="fused", choices=("fused", "twin"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    for layer, gradients in enumerate(("hidden's gradient", "the gradients of tokens and weights")):
        parser.add_argument(
            f"--layer{layer}",
            default="cuda",
            choices=("cuda", "triton"),
            help=f"layer {layer} and {gradients} in CUDA C++, where it can run, or Triton (default: %(default)s)",
        )
    parser.add_argument("--family", type=int, help=f"cases for which kernels are compiled once ({FAMILY_HELP})")
    parser.add_argument(
        "--batch",
        type=int,
        default=1000,
        help="cases per start of the processes, which also start anew after a failure",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long, but the first")
    parser.add_argument("--max-failures", type=int, default=10, help="stop after so many failed cases")
    parser.add_argument(
        "--timeout", type=float, dest="timeout_s", help=f"deadline of a wait between ranks ({TIMEOUT_HELP})"
    )
    parser.add_argument(
        "--case-limit",
        type=float,
        dest="case_limit_s",
        default=1800.0,
        help="seconds after which a case counts as hung",
    )
    options = parser.parse_args(argv)
    if options.timeout_s is None:
        options.timeout_s = 5.0 if is_interpreted(options.path, options.device) else 30.0
    if options.family is None:
        options.family = sizes_of(options.path, options.device).family
    least = dict.fromkeys(("cases", "world_size", "family", "batch", "max_failures"), 1)
    for name, bound in {**least, "first": 0, "seconds": 0, "timeout_s": 0, "case_limit_s": 0}.items():
        if getattr(options, name) < bound:
            option = name.removesuffix("_s").replace("_", "-")
            parser.error(f"--{option}={getattr(options, name)} must be at least {bound}")
    return options


def is_interpreted(path: str, device: str) -> bool:
    """Whether kernels run under Triton's interpreter."""
    return path == "fused" and device == "cpu"


def main(argv: list[str] | None = None, batch: Batch = run_batch) -> int:
    """Run the cases the command line asks for; ``batch`` is what each rank does with a range of them."""
    options = parse(argv)
    given = {field.name: getattr(options, field.name) for field in fields(Stress) if hasattr(options, field.name)}
    stress = Stress(**given, until=time.time() + options.seconds)
    reached, end, start = options.first, options.first + options.cases, time.monotonic()
    failed: list[int] = []
    with tqdm(total=options.cases, unit="case", mininterval=1.0) as bar:
        while reached < end and len(failed) < options.max_failures:
            outcome = run_indices(stress, range(reached, min(end, reached + options.batch)), batch)
            bar.update(outcome.stop - reached)
            reached = outcome.stop
            if outcome.wrong:
                failed.append(reached - 1)
                bar.write(report(stress, options.first, reached - 1, outcome.wrong), file=sys.stdout)
            if time.time() > stress.until:
                break
    cases, seconds = reached - options.first, time.monotonic() - start
    summary = {
        "cases": cases,
        "mismatches": len(failed),
        "seconds": round(seconds, 1),
        "cases_per_s": round(cases / seconds, 2),
        "seed": options.seed,
        "failed_cases": failed,
    }
    print(json.dumps(summary))
    return 1 if failed else 0


def run_indices(stress: Stress, indices: range, batch: Batch) -> Outcome:
    """Run a batch in fresh processes, up to the first case that fails: also the one at which a rank dies or hangs."""
    on_gpu = stress.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="comet-stress-") as name:
        journal = Path(name) / "case"
        try:
            outcomes = run_ranks(
                batch,
                stress.world_size,
                stress,
                indices,
                journal,
                interpret=is_interpreted(stress.path, stress.device),
                timeout=min(START_S + stress.case_limit_s * len(indices), DAY_S),
                backend=ON_GPUS if on_gpu else "gloo",
            )
        except AssertionError as error:
            last = min(case_at_work(journal.with_suffix(f".{rank}"), indices) for rank in range(stress.world_size))
            return Outcome([str(error)], last + 1)
    return Outcome([what for outcome in outcomes for what in outcome.wrong], outcomes[0].stop)


def case_at_work(journal: Path, indices: range) -> int:
    """The case a rank noted last; the first one if it had not come so far."""
    text = journal.read_text().strip() if journal.exists() else ""
    return int(text) if text else indices.start


def command(stress: Stress, first: int, index: int) -> str:
    """What runs case ``index`` again, after the cases of its family that came before it.

    Example: case 12 of seed 3, families of 5: ``--seed 3 --first 10 --cases 3 --family 5``.
    """
    first = max(first, stress.family_of(index) * stress.family)
    kinds = {"layer0": stress.layer0, "layer1": stress.layer1}
    return (
        f"python tests/stress.py --seed {stress.seed} --first {first} --cases {index + 1 - first} "
        f"--family {stress.family} --world-size {stress.world_size} --path {stress.path} --device {stress.device}"
        + "".join(f" --{layer} {kind}" for layer, kind in kinds.items() if kind != "cuda")
    )


def report(stress: Stress, first: int, index: int, wrong: list[str]) -> str:
    """A failed case in words."""
    lines = [f"FAILED seed {stress.seed}, {stress.case(index)}", *wrong, f"again: {command(stress, first, index)}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
