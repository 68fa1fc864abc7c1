"""The history of a run in ``metrics.jsonl``, a progress bar on standard error, pictures, and the result line.

Only rank 0 shows and writes anything; on the other ranks every method does nothing.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from comet.utils.progress import bar_options
from comet.utils.shared_file import naming, write_whole

HISTORY_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A few consecutive steps."""

    step: int
    losses: list[float]  # training loss of each step, nats per byte or token
    grad_norms: list[float]  # global gradient norm of each step, before clipping
    learning_rate: float
    expert_load: list[list[float]]  # routed rows per MoE layer and expert, summed over the steps
    tokens_per_second: float  # of all ranks
    dropped_rows: float = 0.0  # routed rows beyond the experts' capacity, summed over layers and steps

    @property
    def imbalance(self) -> float:
        """Largest over mean load of an expert, averaged over the MoE layers; 1 is even, or there are no layers."""
        ratios = [max(load) * len(load) / max(sum(load), 1.0) for load in self.expert_load]
        return sum(ratios) / len(ratios) if ratios else 1.0

    @property
    def dropped_share(self) -> float:
        return self.dropped_rows / max(sum(map(sum, self.expert_load)), 1.0)


class History:
    """All windows and evaluations of a run, in memory and, on the rank that writes, in a folder's ``metrics.jsonl``.

    It begins with what the folder of a run, ``earlier``, recorded up to ``last_step``.
    """

    def __init__(self, folder: Path | None, earlier: Path | None = None, last_step: int = 0) -> None:
        self.folder = folder
        kept: list[dict[str, Any]] = []
        if earlier is not None and (earlier / HISTORY_FILE).exists():
            with suppress(json.JSONDecodeError):  # a killed job may have left the last line unfinished
                for line in map(json.loads, (earlier / HISTORY_FILE).read_text().splitlines()):
                    if line["step"] <= last_step:
                        kept.append(line)
        self.windows = [Window(**line) for line in kept if "losses" in line]
        self.heldout = [(line["step"], line["heldout"]) for line in kept if "heldout" in line]  # nats per byte or token
        if self.folder is not None:
            write_whole(self.folder / HISTORY_FILE, "".join(json.dumps(line) + "\n" for line in kept))

    def add_window(self, window: Window) -> None:
        self.windows.append(window)
        self._append(asdict(window))

    def add_heldout(self, step: int, loss: float) -> None:
        """Record an evaluation, unless a run that is over was resumed: then it is the last one again."""
        if self.heldout[-1:] != [(step, loss)]:
            self.heldout.append((step, loss))
            self._append({"step": step, "heldout": loss})

    def _append(self, line: dict[str, object]) -> None:
        if self.folder is not None:
            path = self.folder / HISTORY_FILE
            with naming(path), path.open("a") as file:
                file.write(json.dumps(line) + "\n")


SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120
UNTRAINED_NATS = 5.545


def plot_loss(history: History, path: Path, unit: str) -> None:
    """Training loss of every step and held-out loss of every evaluation, as a PNG."""
    figure = _figure()
    axes = figure.subplots()
    losses = [loss for window in history.windows for loss in window.losses]
    steps = [step for each in history.windows for step in range(each.step - len(each.losses) + 1, each.step + 1)]
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8, label="training, each step")
    means = [sum(window.losses) / len(window.losses) for window in history.windows]
    axes.plot([window.step for window in history.windows], means, color="tab:blue", label="training, mean of a window")
    if history.heldout:
        axes.plot(*zip(*history.heldout, strict=True), "o-", color="tab:red", markersize=4, label="held-out")
    if unit == "byte":
        axes.axhline(UNTRAINED_NATS, color="grey", linewidth=0.8, linestyle=":", label="untrained: ln 256")
    axes.set(xlabel="optimizer step", ylabel=f"nats per {unit}", title="Loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def plot_expert_load(history: History, path: Path) -> None:
    """Share of every expert in the last tenth of the run, and largest over mean load over time, as a PNG."""
    figure = _figure()
    shares, balance = figure.subplots(1, 2)
    recent = history.windows[-max(len(history.windows) // 10, 1) :]
    totals = torch.tensor([window.expert_load for window in recent], dtype=torch.float64).sum(0)
    if totals.dim() == 2:  # layers, experts; there may be none
        relative = totals / totals.mean(1, keepdim=True).clamp(min=1)
        image = shares.imshow(relative.numpy(), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
        figure.colorbar(image, ax=shares, label="load / even load")
    for axis in (shares.xaxis, shares.yaxis):
        axis.get_major_locator().set_params(integer=True)
    shares.set(xlabel="expert", ylabel="MoE layer", title="Expert load, end of training")
    balance.plot([window.step for window in history.windows], [window.imbalance for window in history.windows])
    balance.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    balance.set(xlabel="optimizer step", ylabel="largest / mean load", title="Balance, mean of layers")
    balance.set_ylim(bottom=0)
    figure.savefig(path)


def _figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")


GIB = 2**30
RSS_UNIT = 1024  # ru_maxrss is in KiB on Linux


class Reporter:
    """Shows the progress of a run and writes its files."""

    def __init__(
        self,
        output_dir: Path,
        *,
        enabled: bool,
        first_step: int,
        total_steps: int,
        earlier: Path | None,
        unit: str = "byte",
    ) -> None:
        self.output_dir = output_dir
        self.unit = unit
        self.enabled = enabled
        if enabled:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / RESULT_FILE).unlink(missing_ok=True)  # An earlier end wrote it; this run goes on.
        self.history = History(output_dir if enabled else None, earlier, first_step)
        self._shown_s = 0.0
        begun = min(first_step, total_steps)
        self.bar = tqdm(total=total_steps, initial=begun, disable=not enabled, unit="step", **bar_options())

    def note(self, message: str) -> None:
        if self.enabled:
            self.bar.write(f"comet: {message}", file=sys.stderr)

    def window(self, window: Window, memory_bytes: int) -> None:
        """Record a window and move the bar."""
        self.history.add_window(window)
        loss = sum(window.losses) / len(window.losses)
        text = (
            f"loss {loss:.3f}, {window.tokens_per_second:,.0f} tokens/s, "
            f"busiest expert {window.imbalance:.2f}x, {memory_bytes / GIB:.2f} GiB"
        )
        if window.dropped_rows:
            text += f", {window.dropped_share:.1%} of routed rows dropped"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(len(window.losses))

    def tell(self, text: str) -> None:
        """Show work other than steps, as ``evaluating, batch 3 of 8``, if what is shown is old enough."""
        if self.enabled and time.monotonic() - self._shown_s >= self.bar.mininterval:
            self.bar.set_postfix_str(text)
            self._shown_s = time.monotonic()

    def heldout(self, step: int, loss: float) -> None:
        self.history.add_heldout(step, loss)
        self.note(f"step {step}: held-out loss {loss:.4f} nats per {self.unit}")

    def end(self, result: Mapping[str, Any], prompt: bytes = b"", sample: bytes = b"") -> None:
        """Print the result as the last line of standard output; draw the pictures unless the run was stopped."""
        self.bar.close()
        if not self.enabled:
            return
        words, saved = f"stopped by {result.get('stopped')} after step {result['steps']}", result["checkpoint"]
        words += f", checkpoint {saved}; comet train resume={result['output_dir']} continues"
        if "stopped" not in result:
            words = f"held-out loss {result[f'heldout_nats_per_{self.unit}']:.4f} nats per {self.unit}"
            words += f", {result['tokens_per_second']:,.0f} tokens/s, checkpoint {saved}"
            with naming(self.output_dir):
                plot_loss(self.history, self.output_dir / "loss.png", self.unit)
                plot_expert_load(self.history, self.output_dir / "expert_load.png")
                if sample:
                    (self.output_dir / "sample.txt").write_bytes(prompt + sample)
        if sample:
            sys.stdout.write(f"---- sample ----\n{printable(prompt)}|{printable(sample)}\n----------------\n")
        line = json.dumps(result)
        write_whole(self.output_dir / RESULT_FILE, line + "\n")
        sys.stdout.write(f"{words}\n{line}\n")
        sys.stdout.flush()


def printable(text: bytes) -> str:
    """Bytes as ASCII for a terminal: ``printable(b"a\\x1b\\n") == "a\\\\x1b\\n"``."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte in b"\t\n" else f"\\x{byte:02x}" for byte in text)


def peak_memory_bytes(device: torch.device, symmetric_bytes: int) -> int:
    """The most memory this rank has used: on a GPU torch's allocations and the symmetric pool, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + symmetric_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
