"""What stands on a terminal and in a log: messages on lines of their own, wherever a progress bar left the cursor."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from terminal import Terminal, rendered

from comet.launch.failures import say, start_of_line
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


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", ["comet: stopped", ""]),
        ("a line\n", ["a line", "comet: stopped", ""]),
        ("\r 50%|#####  | 5/10", [" 50%|#####  | 5/10", "comet: stopped", ""]),
        ("\r 50%|##^C", [" 50%|##^C", "comet: stopped", ""]),
    ],
)
def test_a_message_begins_on_a_line_of_its_own(before: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(40) as terminal:
        with os.fdopen(os.dup(terminal.descriptor), "w") as file:
            monkeypatch.setattr(sys, "stderr", file)
            file.write(before)
            file.flush()
            say("stopped")
            monkeypatch.undo()
        assert terminal.lines() == lines


def test_on_a_terminal_of_unknown_width_a_line_may_stay_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(0) as terminal:
        with os.fdopen(os.dup(terminal.descriptor), "w") as file:
            monkeypatch.setattr(sys, "stderr", file)
            say("stopped")
            monkeypatch.undo()
        assert terminal.lines() == ["", "comet: stopped", ""]


def test_a_message_in_a_log_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    say("stopped")
    assert capfd.readouterr().err == "comet: stopped\n"


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
    progress.end("a table")
    progress.begin("tiny, 8 tokens")
    progress.end()
    progress.close()


def test_what_is_measured_is_a_line_per_point_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    measured(Measuring(2, "point", enabled=True))
    out, err = capfd.readouterr()
    assert out == "a table\n"
    assert [re.sub(r"\d\d:\d\d", "TIME", line) for line in err.splitlines()] == [
        "comet: 0 of 2 points measured, TIME so far, ? left; tiny, 48 tokens",
        "comet: 1 of 2 points measured, TIME so far, TIME left; tiny, 8 tokens",
        "comet: 2 of 2 points measured, TIME so far, TIME left; tiny, 8 tokens",
    ]
    measured(Measuring(2, "point", enabled=False))
    assert capfd.readouterr() == ("", "")


def test_what_a_point_is_at_is_told_in_between(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comet.utils.progress.LOG_INTERVAL_S", 0.0)
    measured(Measuring(2, "point", enabled=True))
    assert "left; tiny, 48 tokens, compiling candidate 1 of 2\n" in capfd.readouterr().err


def test_on_a_terminal_what_is_measured_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(100) as terminal:
        with os.fdopen(os.dup(terminal.descriptor), "w") as file:
            monkeypatch.setattr(sys, "stderr", file)
            measured(Measuring(2, "point", enabled=True))
            monkeypatch.undo()
        assert re.match(r"tiny, 8 tokens: 100%\|.*\| 2/2 \[", terminal.lines()[0])
