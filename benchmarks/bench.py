"""All benchmarks by one command, alone or as the ranks of torchrun:

    python benchmarks/bench.py decode --tokens 1,8,64
    torchrun --nproc-per-node 4 benchmarks/bench.py moe --ep 4

Rank 0 prints a table and, as the last line, the run as JSON, and writes it to ``--out``. Protocol,
columns: ``results/protocol.md``. ``bench.py SUITE --help`` says what a suite measures, and its options. Suites:
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = Path(__file__).parent / "suites"


def overview() -> str:
    """The page of ``--help``: a line for each suite, from its file, which is not imported: that would take seconds."""
    lines = {name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
             for name, path in suite_files().items()}  # fmt: skip
    width = max(map(len, lines))
    return "\n".join([(__doc__ or "").rstrip(), "", *(f"    {name:{width}}  {line}" for name, line in lines.items())])


def suite_files() -> dict[str, Path]:
    """Files by the names that a command line has for them: ``suites/compare_trees.py`` is ``compare-trees``."""
    return {path.stem.replace("_", "-"): path for path in sorted(SUITES.glob("[!_]*.py"))}


def main(words: Sequence[str]) -> int | None:
    from comet.config import require

    name, *options = words
    require(name in suite_files(), f"suite={name!r} must be one of {', '.join(suite_files())}")
    status: int | None = importlib.import_module(f"suites.{suite_files()[name].stem}").Run.main(options)
    return status


if __name__ == "__main__":
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(overview())
    else:
        from lib.ranks import run_and_leave

        run_and_leave(main)
