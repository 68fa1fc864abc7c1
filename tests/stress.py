"""Run random cases of the whole layer on real ranks against the reference: ``python tests/stress.py --help``.

Layouts, shapes, routing, splits, delays and the number of epochs on a workspace are drawn from the seed: what kernels
are compiled for once per family of cases, all else per case (``stress_cases.py`` lists both). Outputs and gradients are
compared with ``comet.reference.layer`` within twice the error of plain torch, and bit for bit between calls with the
same inputs. A case that fails is printed with the command that runs it again (with the cases of its family before it,
which share its workspace), the last line is JSON, and the exit status is 1 if any failed. A rank that dies or hangs
ends the run with what it has printed, such a command last.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import get_args

import support  # noqa: F401 - puts the helpers on the import path
from gpus import ON_GPUS
from ranks import run_ranks
from stress_cases import Stress, sizes_of
from stress_ranks import CASE_S, Outcome, run_batch
from tqdm import tqdm

from comet.utils.choices import CommBackend

Batch = Callable[..., Outcome]

START_S, DAY_S = 120.0, 86_400.0
FAMILY_HELP = "1000 on a GPU, 25 on a CPU, where only joining the ranks costs"
TIMEOUT_HELP = "30 s; under the interpreter, whose clock counts polls as 20 us each, 5 s"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="how many cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are divided into")
    parser.add_argument(
        "--backend",
        default="auto",
        choices=get_args(CommBackend),
        help="memory; over nodes kernels send tokens through it",
    )
    parser.add_argument("--path", default="fused", choices=("fused", "twin"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--family", type=int, help=f"cases for which kernels are compiled once ({FAMILY_HELP})")
    parser.add_argument("--batch", type=int, default=1000, help="cases per start of the processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so long, but the first")
    parser.add_argument("--max-failures", type=int, default=10, help="stop after so many failed cases")
    parser.add_argument("--timeout", type=float, dest="timeout_s", help=f"deadline of a wait of ranks ({TIMEOUT_HELP})")
    options = parser.parse_args(argv)
    if options.timeout_s is None:
        options.timeout_s = 5.0 if is_interpreted(options.path, options.device) else 30.0
    if options.family is None:
        options.family = sizes_of(options.path, options.device).family
    least = dict.fromkeys(("cases", "world_size", "nodes", "family", "batch", "max_failures"), 1)
    for name, bound in {**least, "first": 0, "seconds": 0, "timeout_s": 0}.items():
        if getattr(options, name) < bound:
            option = name.removesuffix("_s").replace("_", "-")
            parser.error(f"--{option}={getattr(options, name)} must be at least {bound}")
    if options.world_size % options.nodes:
        parser.error(f"--nodes={options.nodes} must divide --world-size={options.world_size}")
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
            first = reached
            outcome = run_indices(stress, range(first, min(end, first + options.batch)), batch)
            reached = outcome.stop
            bar.update(reached - first)
            if outcome.wrong:
                failed.append(reached - 1)
                lines = [f"FAILED seed {stress.seed}, {stress.case(reached - 1)}", *outcome.wrong]
                bar.write("\n".join([*lines, f"again: {stress.command(first, reached - 1)}"]), file=sys.stdout)
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
    """Run a batch in fresh processes, up to the first case that fails; raises where a rank dies or hangs."""
    outcomes = run_ranks(
        batch,
        stress.world_size,
        stress,
        indices,
        interpret=is_interpreted(stress.path, stress.device),
        timeout=min(START_S + CASE_S * len(indices), DAY_S),
        backend=ON_GPUS if stress.device == "cuda" else "gloo",
    )
    return Outcome([what for outcome in outcomes for what in outcome.wrong], outcomes[0].stop)


if __name__ == "__main__":
    sys.exit(main())
