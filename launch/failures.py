"""Reports of exceptions in ranks: one message from one rank, and an exit status.

=============================================  ======  ==========================================
cause                                          status  printed
=============================================  ======  ==========================================
configuration, input, unavailable, out of memory 2       one line, by the first rank that noticed
a peer died, froze or is late                  1       one line that names those ranks
nothing that was to be measured ran            1       one line, by the first rank that noticed
anything else                                  1       the traceback of the first rank that failed
SIGTERM, after a checkpoint                    143     as at any other end; if saving failed, as that failure
standard output closed, as by `head`           141     nothing
=============================================  ======  ==========================================

The first rank to fail claims the report in the rendezvous store, and the others end with its status once it is printed.
A rank that met a deadline or lost a peer first asks the others what they do (see ``signs``). A rank
that only heard of a failure leaves the report to the rank that had it.
"""

from __future__ import annotations

import logging
import signal
import traceback

from comet.comm.failures import is_peer_error
from comet.errors import CommTimeoutError, NothingMeasuredError, StepFailedError
from comet.launch.distributed import another_connection
from comet.launch.messages import (
    STATUS_FAILED,
    STATUS_UNREAD,
    STATUS_USER,
    is_out_of_memory,
    is_user_error,
    one_line,
    say,
    say_text,
)
from comet.launch.signs import Inquiry, Signs, describe_places, place_of


def say_logged(name: str) -> None:
    """Let this process ``say`` the messages of a logger, from informative ones on."""
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def report(error: BaseException, signs: Signs | None, with_traceback: bool = False) -> int:
    """Print what has to be printed about what ended the task on this rank; its exit status.

    Args:
        signs: How this rank talks with the others; ``None`` if it did not meet them.
        with_traceback: Print the traceback of errors of the user as well.
    """
    if signs is None:
        _print(error, "a rank that met no other", f"error: {one_line(error)}", with_traceback)
        return _status(error)
    context, where = signs.context, place_of(list(traceback.walk_tb(error.__traceback__))[::-1])
    signs.place = where
    if context.num_nodes > 1:  # this node's agent would end the rank before it can name the other node's
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found = Inquiry({}, {})
    try:
        store = another_connection(signs.store)
        if isinstance(error, StepFailedError):
            signs.await_claim(store)
        if is_peer_error(error):
            found = signs.ask(store)
        if not signs.claim(store):
            return signs.hear(store)
        _print(error, f"rank {context.rank}", _line(error, context.rank, where, found), with_traceback)
        signs.tell(store, _status(error), len(found.silent))
    except RuntimeError:  # the store went down with its node: no other rank can report for this one
        line = f"error: rank {context.rank} lost the node of rank 0, which has the rendezvous store, in {where}"
        _print(error, f"rank {context.rank}", line, with_traceback)
    return _status(error)


def say_silent(found: Inquiry) -> None:
    """Name the ranks that are silent."""
    say(f"error: {'; '.join(found.silent.values())}; the other ranks were ended")


def _status(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError):
        return STATUS_UNREAD
    return STATUS_USER if is_user_error(error) else STATUS_FAILED


def _line(error: BaseException, rank: int, where: str, found: Inquiry) -> str:
    """The line about an error: who is to blame for it comes first, then what the error itself says."""
    if not is_peer_error(error):
        return f"error: rank {rank}: {one_line(error)}" if is_out_of_memory(error) else f"error: {one_line(error)}"
    if found.silent:
        return f"error: {'; '.join(found.silent.values())}; rank {rank} waited in {where}"
    said = one_line(error) if isinstance(error, CommTimeoutError) else f"rank {rank} waited too long in {where}"
    return f"error: {said}; {describe_places(found, where) or 'no other rank answers'}"


def _print(error: BaseException, who: str, line: str, with_traceback: bool) -> None:
    if _status(error) == STATUS_UNREAD:
        return
    short = _status(error) == STATUS_USER or is_peer_error(error) or isinstance(error, NothingMeasuredError)
    text = "" if short and not with_traceback else "".join(traceback.format_exception(error))
    last = line if short else f"error: {who} failed with {type(error).__name__}"
    say_text(f"{text}comet: {last}\n")
