"""What an exception in a rank becomes: one message from one rank, and an exit status.

=============================================  ======  ==========================================
cause                                          status  printed
=============================================  ======  ==========================================
configuration, input, something unavailable    2       one line, by the first rank that noticed
a peer died or fell silent                     1       one line that names the silent ranks
nothing that was to be measured ran            1       one line, by the first rank that noticed
anything else                                  1       the traceback of the first rank that failed
=============================================  ======  ==========================================

The first rank to fail claims the report in the rendezvous store. A rank that lost a peer first waits ``PEER_GRACE_S``:
the others leave a sign of life within that time, unless they are dead; a local launcher ends the rank before that.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback

import torch.distributed as dist

from comet.errors import CapacityError, CommTimeoutError, NothingMeasuredError, UnavailableError
from comet.launch.distributed import LaunchContext

STATUS_FAILED = 1
STATUS_USER = 2
PEER_GRACE_S = 3.0
POLL_S = 0.05
SAID_IN_A_LINE = (CommTimeoutError, NothingMeasuredError)
PEER_WORDS = ("connection closed by peer", "connection reset by peer", "timed out waiting", "broken pipe", "gloo")


def is_user_error(error: BaseException) -> bool:
    """Whether the user can mend it: a bad value, a capacity too small, a missing package, a path of no use."""
    return (
        isinstance(error, ValueError | CapacityError | UnavailableError)
        or (isinstance(error, OSError) and error.filename is not None)
        or bool(missing_package(error))
    )


def missing_package(error: BaseException) -> str:
    """The package of others that could not be imported; "" if that is not what went wrong."""
    name = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    return "" if name == "comet" else name


def is_peer_error(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in PEER_WORDS)


def one_line(error: BaseException) -> str:
    """The message on one line, never empty; what the system adds to it, a number, is left out.

    Example: ``FileNotFoundError(errno.ENOENT, "must be a folder", "nope")`` gives "must be a folder: 'nope'".
    """
    text = str(error)
    if name := missing_package(error):
        text = f"the package {name!r} is not installed: pip install {name}"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
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


def say_logged(name: str) -> None:
    """Let this process ``say`` what a logger is told, from informative messages on."""
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def start_of_line(columns: int) -> str:
    """What moves a terminal to the start of a line, to that of the next one only if something stands on this one.

    That may be the progress bar of a rank that was killed, or the ``^C`` the terminal shows: nobody here knows. As many
    spaces as a line has columns fill an empty one, whose end the terminal leaves only for a further character, and from
    anywhere else they run on into the next line. A carriage return goes to the start of either.

    Args:
        columns: Width of the terminal; 0 if it does not tell.
    """
    return " " * columns + "\r" if columns else "\n"


def report(error: BaseException, context: LaunchContext, store: dist.Store, with_traceback: bool = False) -> int:
    """Print what has to be printed about ``error`` on this rank.

    Args:
        error: What ended the task on this rank.
        context: This rank.
        store: The job's rendezvous store.
        with_traceback: Print the traceback of errors of the user as well.

    Returns:
        The exit status of this rank.
    """
    status = STATUS_USER if is_user_error(error) else STATUS_FAILED
    if not _claim(context, store):
        return status
    if is_peer_error(error):
        say(f"error: rank {context.rank} lost {_silent_ranks(context, store)}: {one_line(error)}")
    elif status == STATUS_USER or isinstance(error, SAID_IN_A_LINE):
        say(f"error: {one_line(error)}")
    if with_traceback or not (status == STATUS_USER or is_peer_error(error) or isinstance(error, SAID_IN_A_LINE)):
        text = "".join(traceback.format_exception(error))
        say_text(f"{text}comet: error: rank {context.rank} failed with {type(error).__name__}\n")
    return status


def _claim(context: LaunchContext, store: dist.Store) -> bool:
    """Leave a sign of life and return whether this rank is the first to fail."""
    try:
        store.set(f"comet/alive/{context.rank}", "1")
        return store.compare_set("comet/first_failure", "", str(context.rank)) == str(context.rank).encode()
    except RuntimeError:  # the store went down with its node: nobody else can report for this rank
        return True


def _silent_ranks(context: LaunchContext, store: dist.Store) -> str:
    """Watch for signs of life until the grace is over, or until the store goes down with the node that held it."""
    if context.num_nodes > 1:  # this node's agent would end the rank before it can name the other node's
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    silent, end = set(range(context.world_size)), f"within {PEER_GRACE_S:.0f} s"
    deadline = time.monotonic() + PEER_GRACE_S
    try:
        while time.monotonic() < deadline:
            silent -= {rank for rank in silent if store.check([f"comet/alive/{rank}"])}
            time.sleep(POLL_S)
    except RuntimeError:
        end = "before the rendezvous store closed"
    if not silent:
        return "a peer that has since reported"
    return f"rank {', '.join(map(str, sorted(silent)))} (no sign of life {end})"
