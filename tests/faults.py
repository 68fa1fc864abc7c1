"""Run the fault matrix, fault x phase x path, on real ranks: ``python tests/faults.py --help``.

A row passes when every survivor ends or raises within the deadline and ``--slack`` after the fault (the start of
processes is not counted), the culprit is named, with the reason where one can be known, nothing computed after the
fault is taken for a result, and no checkpoint is lost or half-written: what is resumed has the undisturbed run's bits.
``--list`` shows the rows, and which combinations are left out and why. The last line is JSON, and the exit status is 1
if a row fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import support  # noqa: F401 - puts the helpers on the import path
import torch
from fault_jobs import Jobs
from fault_ranks import run_calls
from fault_rows import FAULTS, PATHS, PHASES, Finding, Order, Row, all_rows, left_out
from gpus import SHARING


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("path", PATHS), ("fault", FAULTS), ("phase", PHASES)):
        parser.add_argument(f"--{name}", action="append", choices=choices, help="only these rows; may be repeated")
    parser.add_argument("--kind", choices=("call", "job"), help="only calls in a program, or only jobs of the command")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds ranks wait for each other (%(default)s)")
    parser.add_argument("--slack", type=float, default=2.0, help="seconds beyond the deadline (default: %(default)s)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--culprit", type=int, default=1, help="rank that meets the fault (default: %(default)s)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="rows at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="show the rows and what is left out")
    options = parser.parse_args(argv)
    if not 2 <= options.world_size <= 4:
        parser.error(f"--world-size={options.world_size} must be 2, 3 or 4")
    if not 0 <= options.culprit < options.world_size:
        parser.error(f"--culprit={options.culprit} must be a rank below --world-size={options.world_size}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda needs a GPU")
    return options


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows the command line asks for."""
    return [
        row
        for row in all_rows(options.device)
        if row.path in (options.path or PATHS)
        and row.fault in (options.fault or FAULTS)
        and row.phase in (options.phase or PHASES)
        and options.kind in (None, "job" if row.job else "call")
    ]


def run_rows(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[Finding]:
    """Findings as they come, ``options.jobs`` rows at a time."""
    with tempfile.TemporaryDirectory(prefix="comet-faults-") as name, ThreadPoolExecutor(options.jobs) as pool:
        jobs = Jobs(Path(name))
        for future in as_completed([pool.submit(run_row, row, options, jobs) for row in rows]):
            yield future.result()


def run_row(row: Row, options: argparse.Namespace, jobs: Jobs) -> Finding:
    """One row, in a folder beside what it shares with the others."""
    order = Order(
        row=row,
        world_size=options.world_size,
        culprit=options.culprit,
        device=options.device,
        deadline_s=options.deadline,
        slack_s=options.slack,
        folder=Path(tempfile.mkdtemp(prefix="row-", dir=jobs.folder)),
    )
    return jobs.run(order) if row.job else run_calls(order)


def table(findings: Sequence[Finding], culprit: int) -> str:
    """All rows, in columns."""
    head = ("fault", "phase", "path", "named by the survivors", "seconds", "outcome", "verdict")
    cells: list[tuple[str, ...]] = [head]
    for each in sorted(findings, key=lambda found: found.row.place):
        row = each.row
        verdict = "FAILED" if each.wrong else "passed"
        place = f"{row.path}{' (job)' if row.job else ''}"
        cells.append((row.fault, row.phase, place, each.named(culprit), f"{each.seconds:.1f}", each.outcome, verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def listing(rows: Sequence[Row], device: str) -> str:
    """The rows, and what is left out."""
    reasons = [f"  {count:3} combinations: {why}" for why, count in left_out(device).items()]
    return "\n".join([*(row.name for row in rows), f"{len(rows)} rows; left out on {device}:", *reasons])


def main(argv: list[str] | None = None) -> int:
    """Run the rows the command line asks for."""
    options = parse(argv)
    if options.device == "cuda" and options.world_size > torch.cuda.device_count():
        os.environ[SHARING] = "1"
    rows, start = chosen(options), time.monotonic()
    if options.list:
        print(listing(rows, options.device))
        return 0
    findings = []
    for found in run_rows(rows, options):
        findings.append(found)
        verdict = "FAILED" if found.wrong else "passed"
        lines = [f"[{len(findings)}/{len(rows)}] {verdict} {found.row.name}: {found.seconds:.1f} s"]
        print("\n    ".join(lines + found.wrong), flush=True)
    failed = [found for found in findings if found.wrong]
    print(f"\n{table(findings, options.culprit)}\n")
    summary = {
        "rows": len(findings),
        "failed": len(failed),
        "seconds": round(time.monotonic() - start, 1),
        "slowest_end_s": round(max((end for found in findings if math.isfinite(end := found.seconds)), default=0.0), 2),
        "device": options.device,
        "deadline_s": options.deadline,
        "failed_rows": [found.row.name for found in failed],
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
