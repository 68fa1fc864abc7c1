"""The history of a run in ``metrics.jsonl`` and for trackers, a progress bar on standard error, pictures, the result.

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

from comet.models.config import ModelConfig, dense_elements, expert_elements
from comet.utils.progress import bar_options
from comet.utils.shared_file import naming, write_whole

PROFILE = "profile"  # folder of the profiler's traces
TENSORBOARD = "tensorboard"  # folder of the event files
EVENT_FILES = f"{TENSORBOARD}/events.out.tfevents.*"
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


# Dense bfloat16 FLOP/s from the makers' data sheets, by a part of the device's name; the first that fits counts.
PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2250e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
}  # fmt: skip


def flops_per_token(model: ModelConfig) -> int:
    """Floating-point operations of a training step per token, as the PaLM paper counts them.

    Each weight that a token meets counts 6, and each channel of attention 12 for each position of the context. The
    embedding, recomputed activations and dropped rows do not change the number.

    Example: D=128, 4 layers of 4 heads, context 128, 2 of 8 experts of F=128, vocabulary 256: 6 * (300160 + 393216)
    + 12 * 4 * 128 * 128 = 4946688.
    """
    active = dense_elements(model) + expert_elements(model) * model.moe.top_k // model.moe.num_experts
    return 6 * active + 12 * model.num_layers * model.num_heads * model.head_width * model.context


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of all ranks and of each, and the share of the peak rate, if one is known."""

    tokens_per_second: float
    tokens_per_second_per_rank: float
    model_flops_utilization: float | None

    def scalars(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        share = "" if self.model_flops_utilization is None else f", MFU {self.model_flops_utilization:.1%}"
        return f"{self.tokens_per_second:,.0f} tokens/s ({self.tokens_per_second_per_rank:,.0f} a rank{share})"


def speed_of(model: ModelConfig, tokens_per_second: float, ranks: int, device: str, dtype: torch.dtype) -> Speed:
    """Return the speed of a run on devices of that name; no peak is known of a CPU, nor of products in float32.

    Example: 2e6 tokens/s of the model above on two H200: 4946688e6 / 989e12 = 0.005 of the peak.
    """
    per_rank = tokens_per_second / ranks
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    share = None if peak is None or dtype != torch.bfloat16 else per_rank * flops_per_token(model) / peak
    return Speed(tokens_per_second, per_rank, share)


class Trackers:
    """Writes scalars to TensorBoard, if it is installed, and to a project of Weights & Biases.

    Args:
        folder: Output folder of the run.
        first_step: Step that the run goes on from; TensorBoard drops what an earlier end recorded after it.
        project: A project of Weights & Biases, or ``None``.
        settings: Settings of the run, kept in the project.
    """

    def __init__(self, folder: Path, first_step: int, project: str | None, settings: Mapping[str, Any]) -> None:
        self._board: Any = None
        self._run: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=first_step + 1)
        if project is not None:
            import wandb

            self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(settings))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write scalars of a step, by name."""
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Write what is not on the disk yet, and end the run in Weights & Biases."""
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


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
        trackers: Trackers | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.unit = unit
        self.enabled, self.trackers = enabled, trackers
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

    def window(self, window: Window, memory_bytes: int, speed: Speed) -> None:
        """Record a window and move the bar."""
        self.history.add_window(window)
        loss = sum(window.losses) / len(window.losses)
        scalars = {
            "loss": loss, "grad_norm": window.grad_norms[-1], "learning_rate": window.learning_rate,
            "expert_imbalance": window.imbalance, **speed.scalars(),
        }  # fmt: skip
        self._track(window.step, {f"train/{name}": value for name, value in scalars.items()})
        text = f"loss {loss:.3f}, {speed}, busiest expert {window.imbalance:.2f}x, {memory_bytes / GIB:.2f} GiB"
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
        self._track(step, {"heldout/loss": loss})
        self.note(f"step {step}: held-out loss {loss:.4f} nats per {self.unit}")

    def _track(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.trackers is not None:
            self.trackers.log(step, scalars)

    def end(self, result: Mapping[str, Any], prompt: bytes = b"", sample: bytes = b"") -> None:
        """Print the result as the last line of standard output; draw the pictures unless the run was stopped."""
        self.bar.close()
        if not self.enabled:
            return
        if self.trackers is not None:
            self.trackers.close()
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
