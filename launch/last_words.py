"""What a rank still says when it is told to stop, wherever it is at that moment."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comet.launch.failures import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def last_words(text: Callable[[], str]) -> Iterator[None]:
    """While the body runs, SIGINT and SIGTERM make this process say ``text()`` and then end it, as they do by default.

    Python runs handlers between two instructions of the main thread, which may be waiting for a device or another rank.
    So a thread of its own speaks: the signal wakes it through a pipe. Signals that were ignored stay so.

    Args:
        text: One line.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    woken_before = signal.set_wakeup_fd(writer)
    speaker = threading.Thread(target=_speak, args=(reader, text), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)  # which ends the thread
        speaker.join()
        os.close(reader)


def _speak(reader: int, text: Callable[[], str]) -> None:
    while byte := os.read(reader, 1):
        if byte[0] in SIGNALS:
            try:
                say(text())
            finally:
                ctypes.CDLL(None).signal(byte[0], None)  # the default; Python's own function is for the main thread
                os.kill(os.getpid(), byte[0])
