"""Pictures of a finished run, drawn from its history only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comet.training.history import History, Window

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120
UNTRAINED_NATS = 5.545


def plot_loss(history: History, path: Path) -> None:
    """Training loss of every step and held-out loss of every evaluation, as a PNG."""
    figure = _figure()
    axes = figure.subplots()
    steps = [step for window in history.windows for step in _steps(window)]
    losses = [loss for window in history.windows for loss in window.losses]
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8, label="training, each step")
    means = [sum(window.losses) / len(window.losses) for window in history.windows]
    axes.plot([window.step for window in history.windows], means, color="tab:blue", label="training, mean of a window")
    if history.heldout:
        axes.plot(*zip(*history.heldout, strict=True), "o-", color="tab:red", markersize=4, label="held-out")
    axes.axhline(UNTRAINED_NATS, color="grey", linewidth=0.8, linestyle=":", label="untrained: ln 256")
    axes.set(xlabel="optimizer step", ylabel="nats per byte", title="Loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def plot_expert_load(history: History, path: Path) -> None:
    """Share of every expert in the last tenth of the run, and largest over mean load over time, as a PNG."""
    figure = _figure()
    shares, balance = figure.subplots(1, 2)
    recent = history.windows[-max(len(history.windows) // 10, 1) :]
    totals = [
        [sum(column) for column in zip(*rows, strict=True)]
        for rows in zip(*(window.expert_load for window in recent), strict=True)
    ]
    if totals:
        image = shares.imshow([_relative(layer) for layer in totals], aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
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
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _steps(window: Window) -> range:
    return range(window.step - len(window.losses) + 1, window.step + 1)


def _relative(load: list[float]) -> list[float]:
    mean = max(sum(load) / len(load), 1.0)
    return [value / mean for value in load]
