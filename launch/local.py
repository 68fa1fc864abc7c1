"""Start the ranks of a job on this machine, watch over them, and restart them after a failure if asked to.

Whatever they say to each other goes over the loopback interface: the rendezvous store is here, bound to 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from comet.launch.distributed import POLL_S, SETTINGS_KEY, START_S, rank_environment
from comet.launch.memory import oom_kills
from comet.launch.messages import STATUS_FAILED, STATUS_SAVED, STATUS_UNREAD, STATUS_USER, say
from comet.launch.signs import call_off

SIGNAL_STATUS = 128
END_GRACE_S = 2.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Ranks = Sequence[subprocess.Popen[bytes]]


def run_local_ranks(command: Sequence[str], num_ranks: int, settings: Mapping[str, Any]) -> int:
    """Run ``command`` once per rank and wait until all have ended; the first failure ends the others.

    Ranks inherit standard output and standard error. Each rank says itself why it failed; only a rank that was killed
    cannot, so that is said here.

    Args:
        command: Arguments for this Python interpreter.
        settings: The composed configuration, which every attempt gets; ``launch.max_restarts`` says how often ranks
            start again after a failure that is no mistake of the user.

    Returns:
        0, the status of the rank that failed first, 1 when a rank was killed, 128 + signal when this process got one
        (130 for Ctrl-C).
    """
    store = _loopback_store()
    store.set(SETTINGS_KEY, json.dumps(settings))
    environment = rank_environment(num_ranks, store.port)
    most = settings["launch"]["max_restarts"]
    with _signals() as heard:
        for attempt in range(most + 1):
            status = _run_once([sys.executable, *command], num_ranks, environment, heard, store)
            if status in (0, STATUS_USER, STATUS_SAVED, STATUS_UNREAD) or heard:
                break
            if attempt < most:
                say(f"all ranks start anew, restart {attempt + 1} of {most}")
    return status


def _loopback_store() -> dist.TCPStore:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], os.dup(listening.fileno())
    timeout = timedelta(seconds=START_S)
    return dist.TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """While the body runs, collect the numbers of signals that would end this process; ignored ones stay so."""
    heard: list[int] = []
    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: heard.append(got)) for number in handled}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_once(
    words: Sequence[str], num_ranks: int, environment: Mapping[str, str], heard: Sequence[int], store: dist.Store
) -> int:
    ranks: list[subprocess.Popen[bytes]] = []
    killed_before = oom_kills()
    try:
        for rank in range(num_ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(words, env=own, start_new_session=True))
        return _wait(ranks, heard, store, killed_before)
    finally:
        _send(signal.SIGKILL, *ranks)
        for each in ranks:
            each.wait()


def _wait(ranks: Ranks, heard: Sequence[int], store: dist.Store, killed_before: int) -> int:
    while not heard:
        codes = [rank.poll() for rank in ranks]
        if failed := _failed(codes):
            return _end_after(failed, ranks, store, killed_before)
        if None not in codes:
            return STATUS_SAVED if STATUS_SAVED in codes else 0
        time.sleep(POLL_S)
    return _stop(ranks, heard, store, killed_before)


def _failed(codes: Sequence[int | None], *stopped: int) -> dict[int, int]:
    known = {rank: code for rank, code in enumerate(codes) if code is not None}
    return {rank: code for rank, code in known.items() if code not in (0, STATUS_SAVED, *stopped)}


def _end_after(exits: Mapping[int, int], ranks: Ranks, store: dist.Store, killed_before: int) -> int:
    """End the other ranks and name those that a signal killed; the kernel counts its kills for lack of memory."""
    call_off(store)
    _end(ranks, signal.SIGTERM)
    killed = {rank: signal.Signals(-code).name for rank, code in exits.items() if code < 0}
    for rank, name in killed.items():
        is_oom = name == "SIGKILL" and oom_kills() > killed_before
        why = ", probably out of memory: use a smaller model, context or batch" if is_oom else ""
        say(f"error: rank {rank} (pid {ranks[rank].pid}) was killed by {name}{why}; the other ranks were ended")
    return STATUS_FAILED if killed else max(exits.values())


def _stop(ranks: Ranks, heard: Sequence[int], store: dist.Store, killed_before: int) -> int:
    """Hand a signal on; ranks that train save, until a second signal or a failure, but for SIGQUIT."""
    number, asked = heard[0], signal.SIGTERM
    if number != signal.SIGQUIT:
        # Ranks always get SIGTERM: an interpreter that still imports would answer SIGINT with a traceback.
        _send(asked, *ranks)
        if number == signal.SIGINT:
            say("stopping: a rank that trains saves a checkpoint first, a second Ctrl-C ends it at once")
        while None in (codes := [rank.poll() for rank in ranks]) and len(heard) == 1 and not _failed(codes, -asked):
            _kill_stopped(ranks)
            time.sleep(POLL_S)
        if failed := _failed(codes, -asked):
            return _end_after(failed, ranks, store, killed_before)
        if set(codes) == {0}:
            return 0
    _end(ranks, number if len(heard) == 1 else signal.SIGKILL)
    say(f"stopped by {signal.Signals(number).name}; all ranks were ended")
    return SIGNAL_STATUS + number


def _end(ranks: Ranks, number: int) -> None:
    """Tell the ranks to end, and kill those that do not: nothing depends on a rank leaving in order."""
    _send(number, *ranks)
    deadline = time.monotonic() + END_GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        _kill_stopped(ranks)
        time.sleep(POLL_S)
    _send(signal.SIGKILL, *ranks)


def _kill_stopped(ranks: Ranks) -> None:
    """A process that was stopped reacts to nothing else."""
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            if rank.poll() is None and psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED:
                _send(signal.SIGKILL, rank)


def _send(number: int, *ranks: subprocess.Popen[bytes]) -> None:
    """Also to what a rank has started; it leads a process group of its own."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            if rank.poll() is None:
                os.killpg(rank.pid, number)
