"""Messages to the user, their exit statuses, and which process speaks for a job; none of it imports torch."""

from __future__ import annotations

import errno
import os
import signal
import sys

from comet.errors import CapacityError, UnavailableError

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STATUS_FAILED = 1
STATUS_USER = 2
STATUS_SAVED = 128 + signal.SIGTERM
STATUS_UNREAD = 128 + signal.SIGPIPE


def is_user_error(error: BaseException) -> bool:
    """Whether the user can mend it: a bad value, an unknown feature, a missing package, a wrong path, little memory."""
    return (
        isinstance(error, ValueError | CapacityError | UnavailableError)
        or (isinstance(error, NotImplementedError) and bool(str(error)))
        or (isinstance(error, OSError) and error.filename is not None)
        or bool(missing_package(error))
        or is_out_of_memory(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a GPU ran out, as Python, torch, CUDA or the system say it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said


def missing_package(error: BaseException) -> str:
    """The package of others that could not be imported; "" if that is not what went wrong."""
    name = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    return "" if name == "comet" else name


def one_line(error: BaseException) -> str:
    """The message on one line, never empty; what the system adds to it, a number, is left out.

    Example: ``FileNotFoundError(errno.ENOENT, "must be a folder", "nope")`` gives "must be a folder: 'nope'".
    """
    text = str(error)
    if name := missing_package(error):
        text = f"the package {name!r} is not installed: pip install {name}"
    if is_out_of_memory(error):
        said = (text.strip() or type(error).__name__).splitlines()[0]
        text = f"out of memory ({said}): use a smaller model, context or batch, or more ranks (parallel.ep)"
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename!r}"
    return " ".join(text.split()) or type(error).__name__


def say(message: str) -> None:
    """Write one line of diagnosis to standard error, in a single write so that ranks do not mix."""
    say_text(f"comet: {message}\n")


def say_text(text: str) -> None:
    """Write whole lines to standard error; on a terminal they begin on a line of their own."""
    if sys.stderr.isatty():
        text = start_of_line(os.get_terminal_size(sys.stderr.fileno()).columns) + text
    sys.stderr.write(text)
    sys.stderr.flush()


def start_of_line(columns: int) -> str:
    """Return the text that moves a terminal to the start of an empty line.

    The current line may hold the progress bar of a killed rank or the terminal's ``^C``; no process can know. As many
    spaces as a line has columns fill an empty line without leaving it, and run on into the next line from anywhere
    else. A carriage return then goes to the start of either. Without ``columns`` (0) it is the next line.
    """
    return " " * columns + "\r" if columns else "\n"


def started_by_torchrun() -> bool:
    """Whether this process is one rank of a job (otherwise it has to start the ranks itself)."""
    missing = [name for name in OF_TORCHRUN if not os.environ.get(name)]
    there = [name for name in OF_TORCHRUN[:4] if os.environ.get(name)]
    if missing and there:
        raise ValueError(
            f"{', '.join(there)} in the environment must come with {', '.join(missing)}, as torchrun sets them: start "
            f"the ranks with torchrun, or unset {' '.join(there)} to start them here"
        )
    return not missing


def speaks_for_job() -> bool:
    """Whether a message that every rank would print is this process's to print."""
    return os.environ.get("RANK") in (None, "0") or not all(map(os.environ.get, OF_TORCHRUN))
