"""Terminals and logs show messages on lines of their own, wherever a progress bar left the cursor."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from terminal import Terminal, rendered

from comet.launch.messages import say, start_of_line
from comet.training.report import Reporter
from comet.utils.progress import Measuring


def test_the_worked_examples_of_a_screen() -> None:
    assert rendered("bar\r\nb", 2) == ["ba", "r", "b"]
    assert rendered("bar\rc", 3) == ["car"]


@pytest.mark.parametrize("columns", [1, 2, 7, 80])
def test_a_line_is_left_only_if_something_stands_on_it(columns: int) -> None:
    for length in range(columns + 1):
        standing = "x" * length
        text = standing + start_of_line(columns) + "m\r\n"
        assert rendered(text, columns) == [*([standing] if standing else []), "m", ""], length


@contextmanager
def on_terminal(columns: int) -> Iterator[tuple[Terminal, TextIO]]:
    """A terminal of this width, which is standard error, and the file that writes to it."""
    with (
        Terminal(columns) as terminal,
        os.fdopen(os.dup(terminal.descriptor), "w") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stderr", file)
        yield terminal, file


@pytest.mark.parametrize(("columns", "before", "lines"), [
    (40, "", ["comet: stopped", ""]),
    (40, "a line\n", ["a line", "comet: stopped", ""]),
    (40, "\r 50%|#####  | 5/10", [" 50%|#####  | 5/10", "comet: stopped", ""]),
    (40, "\r 50%|##^C", [" 50%|##^C", "comet: stopped", ""]),
    (0, "", ["", "comet: stopped", ""]),  # The width is unknown: a line may stay empty.
])  # fmt: skip
def test_a_message_begins_on_a_line_of_its_own(columns: int, before: str, lines: list[str]) -> None:
    with on_terminal(columns) as (terminal, file):
        file.write(before)
        file.flush()
        say("stopped")
        file.close()
        assert terminal.lines() == lines


def test_in_a_log_every_state_of_the_bar_is_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, enabled=True, first_step=0, total_steps=2, earlier=None)
    reporter.note("beside the bar")
    reporter.bar.mininterval = 0
    reporter.bar.update(1)
    say("error: a rank is gone")
    reporter.bar.close()
    first, note, state, message, last, empty = capfd.readouterr().err.split("\n")
    assert re.match(r"0%\|.*\| 0/2 \[", first)
    assert note == "comet: beside the bar"
    assert re.match(r"50%\|.*\| 1/2 \[", state)
    assert message == "comet: error: a rank is gone"
    assert re.match(r"50%\|.*\| 1/2 \[", last)
    assert empty == ""


def measured(progress: Measuring) -> None:
    progress.begin("tiny, 48 tokens")
    progress.tell("compiling candidate 1 of 2")
    progress.end()
    progress.begin("tiny, 8 tokens")
    progress.end()
    progress.close()


def test_what_is_measured_is_a_line_per_point_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    measured(Measuring(2, "point", enabled=True))
    assert [re.sub(r"\d\d:\d\d", "TIME", line) for line in capfd.readouterr().err.splitlines()] == [
        "comet: 0 of 2 points measured, TIME so far, ? left; tiny, 48 tokens",
        "comet: 1 of 2 points measured, TIME so far, TIME left; tiny, 8 tokens",
        "comet: 2 of 2 points measured, TIME so far, TIME left; tiny, 8 tokens",
    ]
    measured(Measuring(2, "point", enabled=False))
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_what_is_measured_is_a_bar() -> None:
    with on_terminal(100) as (terminal, file):
        measured(Measuring(2, "point", enabled=True))
        file.close()
        assert re.match(r"tiny, 8 tokens: 100%\|.*\| 2/2 \[", terminal.lines()[0])
