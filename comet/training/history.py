"""What a run measured, one JSON object per line of ``metrics.jsonl``; a resumed run goes on in the same list."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comet.tuner.shared_file import naming, write_whole

HISTORY_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A few consecutive steps.

    Args:
        step: Optimizer steps taken at its end.
        losses: Training loss of each step, nats per byte.
        grad_norms: Global gradient norm of each step, before clipping.
        learning_rate: Of the last step.
        expert_load: Routed rows per MoE layer and expert, summed over the steps.
        tokens_per_second: Of all ranks.
        dropped_rows: Routed rows beyond the experts' capacity, summed over layers and steps.
    """

    step: int
    losses: list[float]
    grad_norms: list[float]
    learning_rate: float
    expert_load: list[list[float]]
    tokens_per_second: float
    dropped_rows: float = 0.0

    @property
    def imbalance(self) -> float:
        """Largest over mean load of an expert, averaged over the MoE layers; 1 is even, and the value without layers.

        Example: ``expert_load=[[6, 2], [4, 4]]`` gives ``(6 / 4 + 4 / 4) / 2 = 1.25``.
        """
        ratios = [max(load) * len(load) / max(sum(load), 1.0) for load in self.expert_load]
        return sum(ratios) / len(ratios) if ratios else 1.0

    @property
    def dropped_share(self) -> float:
        """Dropped over all routed rows.

        Example: ``dropped_rows=2`` of ``expert_load=[[6, 2], [4, 4]]`` gives ``2 / 16 = 0.125``.
        """
        return self.dropped_rows / max(sum(map(sum, self.expert_load)), 1.0)


@dataclass(slots=True)
class History:
    """All windows and evaluations of a run, on disk and in memory.

    Args:
        folder: Where ``metrics.jsonl`` goes; ``None`` keeps everything in memory (ranks that write nothing).
        windows: In order of steps.
        heldout: ``(optimizer steps taken, nats per byte)``.
    """

    folder: Path | None
    windows: list[Window] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)

    def start(self, earlier: Path | None, last_step: int) -> None:
        """Begin a new file with what ``earlier`` (another run's folder, or this one) recorded up to ``last_step``."""
        lines = _read_lines(earlier / HISTORY_FILE) if earlier else []
        kept = [line for line in lines if line["step"] <= last_step]
        self.windows = [Window(**line) for line in kept if "losses" in line]
        self.heldout = [(line["step"], line["heldout"]) for line in kept if "heldout" in line]
        if self.folder is not None:
            write_whole(self.folder / HISTORY_FILE, "".join(json.dumps(line) + "\n" for line in kept))

    def add_window(self, window: Window) -> None:
        """Record a window."""
        self.windows.append(window)
        self._append(asdict(window))

    def add_heldout(self, step: int, loss: float) -> None:
        """Record an evaluation."""
        self.heldout.append((step, loss))
        self._append({"step": step, "heldout": loss})

    def _append(self, line: dict[str, object]) -> None:
        if self.folder is not None:
            path = self.folder / HISTORY_FILE
            with naming(path), path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a history; a killed job may have left the last one unfinished."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
