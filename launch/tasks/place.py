"""``comet place``: put the experts of a trained model on ranks so that their loads are about equal.

comet place outputs/book --ep 4                              # says what it would bring
comet place outputs/book --ep 4 --output-dir outputs/placed  # writes the checkpoint, to go on from there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from comet.training.placing import COPIES, find_placement, write_placed


def main(words: Sequence[str]) -> int:
    """Run ``comet place`` with the words behind it; return the exit status."""
    parser = argparse.ArgumentParser("comet place", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="folder of a run of `comet train`, or one of its checkpoints")
    parser.add_argument("--ep", type=int, required=True, help="ranks that will share the experts")
    parser.add_argument("--output-dir", type=Path, help="new folder for the checkpoint with its experts in that order")
    given = parser.parse_args(words)
    place(given.source, given.ep, given.output_dir)
    return 0


def place(source: str, num_ranks: int, output_dir: Path | None) -> None:
    """Print the gain of each layer and of all, and write the checkpoint if asked to."""
    if output_dir is not None and output_dir.exists():
        raise ValueError(f"output_dir={str(output_dir)!r} must not be there yet: name a new folder")
    found, lines = find_placement(source, num_ranks), []
    for layer, gain in enumerate(found.gains):
        copied = ", ".join(f"{value:.2f} with {count}" for count, value in zip(COPIES, gain.copied, strict=True))
        lines += [
            f"MoE layer {layer}: the slowest rank has {gain.now:.2f} times the mean load, {gain.placed:.2f} placed",
            f"  copies on each rank (comet.add_redundant_experts, for inference): {copied}",
        ]
    rows = [(gain.now, gain.placed, *gain.copied) for gain in found.gains]
    columns = [round(sum(column) / len(column), 4) for column in zip(*rows, strict=True)]
    record: dict[str, object] = {"task": "place", "ep": num_ranks, "imbalance": columns[0], "placed": columns[1]}
    record["copied"] = columns[2:]
    if output_dir is not None:
        path = write_placed(found, output_dir)
        lines.append(f"go on from there with: comet train resume={path} parallel.ep={num_ranks} output_dir=NEW_FOLDER")
        record["checkpoint"] = str(path)
    sys.stdout.write("\n".join([*lines, json.dumps(record)]) + "\n")
