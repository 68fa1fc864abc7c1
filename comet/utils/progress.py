"""Progress on standard error: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.5, 10.0
LOG_FORMAT = "comet: {n_fmt} of {total_fmt} {unit}s measured, {elapsed} so far, {remaining} left; {desc}"


class LogLines:
    """Standard error where it is no terminal: each state of a progress bar becomes a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def bar_options() -> dict[str, Any]:
    if sys.stderr.isatty():
        return {"file": sys.stderr, "mininterval": TERMINAL_INTERVAL_S, "dynamic_ncols": True}
    return {"file": LogLines(), "mininterval": LOG_INTERVAL_S}


class Measuring:
    """The progress of a measuring task: number and state of the current point, and the remaining time.

    A log gets a line for each point, and one every ten seconds.
    """

    def __init__(self, total: int, unit: str, *, enabled: bool) -> None:
        options = bar_options()
        if not sys.stderr.isatty():
            options["bar_format"] = LOG_FORMAT
        self._bar = tqdm(total=total, unit=unit, disable=not enabled, delay=1e-9, **options)
        self._enabled = enabled
        self._title = ""
        self._shown_s = 0.0

    def begin(self, title: str) -> None:
        self._title, self._shown_s = title, 0.0
        self.tell("")

    def tell(self, text: str) -> None:
        """Show the state of the point, such as ``compiling 3 of 12``, if the last state is old enough."""
        if self._enabled and time.monotonic() - self._shown_s >= self._bar.mininterval:
            self._bar.set_description_str(f"{self._title}, {text}" if text else self._title, refresh=False)
            self._bar.refresh()
            self._shown_s = time.monotonic()

    def end(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
