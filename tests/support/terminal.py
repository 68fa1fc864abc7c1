"""A terminal to run programs on, and what a person would then see on it."""

import os
import pty
import termios
import threading
from typing import Self

READ_BYTES = 65536


class Terminal:
    """A terminal whose screen is kept; programs write to ``descriptor``. One of 0 columns does not tell its width."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.master, self.descriptor = pty.openpty()
        termios.tcsetwinsize(self.descriptor, (50, columns))
        self.seen = b""
        self.reader = threading.Thread(target=self._read, daemon=True)  # unread output would block the program
        self.reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.lines()
        os.close(self.master)

    def lines(self) -> list[str]:
        """The screen, once every program has left the terminal; also ends this side's use of ``descriptor``."""
        if self.reader.is_alive():
            os.close(self.descriptor)
            self.reader.join()
        return rendered(self.seen.decode(), self.columns)

    def _read(self) -> None:
        try:
            while data := os.read(self.master, READ_BYTES):
                self.seen += data
        except OSError:  # the other end is closed
            return


def rendered(text: str, columns: int) -> list[str]:
    """Lines of a terminal after ``text``, without trailing spaces; a full line is left by the next character only.

    Example: ``rendered("bar\\r\\nb", 2) == ["ba", "r", "b"]``, ``rendered("bar\\rc", 3) == ["car"]``.
    """
    lines, column = [""], 0
    for character in text:
        if character == "\r":
            column = 0
        elif character == "\n":
            lines.append("")  # the driver of the terminal puts a carriage return before it
        elif character >= " ":
            if columns and column == columns:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
        else:
            raise ValueError(f"character {character!r} is not known to this terminal")
    return [line.rstrip() for line in lines]
