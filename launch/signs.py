"""Signs of life between the ranks of a job: which rank is frozen, which is late but alive and in what, and the end.

A thread of each rank renews its sign in the rendezvous store four times a second and looks at that of the next rank. A
stopped process has a stopped thread; a process that computes, compiles or waits in C++ does not. So a rank that is
silent for as long as the deadline is frozen, whatever the others do meanwhile, and a step needs no work of its own for
this. Time counts only while this rank runs itself, so a pause of the whole job is no silence of another rank. A rank
that is asked answers with the place of its main thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import psutil
import torch.distributed as dist

from comet.launch.distributed import ROUND_KEY, SIGN_KEY, LaunchContext, Member, another_connection, round_part

PERIOD_S = 0.25
ANSWER_S = 3 * PERIOD_S
SHORTEST_WATCH_S = 5.0  # a busy machine alone could silence a thread for less; waits still meet the deadline
MOST_NAMED = 4

DONE, ASKED, ANSWER, FAILURE, REPORTED, HEARD = "done", "asked", "answer", "failure", "reported", "heard"


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The answers of the other ranks."""

    places: Mapping[int, str]  # the place of the main thread, of each rank that answered
    # the ranks that did not, in words: rank 1 (pid 12, host) is frozen: no sign of life for 10 s
    silent: Mapping[int, str]


class Signs:
    """This rank's signs of life and its watch over the others'; ``on_silent`` says which ranks are silent."""

    def __init__(
        self,
        context: LaunchContext,
        store: dist.Store,
        members: Mapping[int, Member],
        on_silent: Callable[[Inquiry], None],
    ) -> None:
        self.context = context
        self.store = store
        self.members = members
        self._on_silent = on_silent
        self.deadline_s: float | None = None
        self.place: str | None = None
        self._next = (context.rank + 1) % context.world_size
        self._quiet_s = 0.0
        self._seen = b""
        self._answered = 0
        # A connection of its own: one that waits for a key keeps its lock.
        self._thread = threading.Thread(target=self._run, args=(another_connection(store),), daemon=True)

    def start(self) -> None:
        """Begin to give signs, and to end this process once the failure of another rank was printed."""
        self._thread.start()

    def watch(self, timeout_s: float) -> None:
        """Begin to watch the next rank; when it is silent for so long, say so and end this process."""
        self.deadline_s = max(timeout_s, SHORTEST_WATCH_S)

    def finish(self) -> None:
        """Say that this rank ends well, so that no rank misses its signs."""
        with suppress(RuntimeError):  # the store may have ended before, with the node of rank 0
            self.store.set(f"{DONE}/{self.context.rank}", "")

    def ask(self, store: dist.Store) -> Inquiry:
        """Ask the other ranks what they do, by a connection that no other thread waits on; takes at most a second."""
        number = store.add(ASKED, 1)
        missing, places = set(self.members) - {self.context.rank}, {}
        quiet = {self._next: self._quiet_s}

        def all_answered() -> bool:
            for rank in [rank for rank in missing if store.check([f"{ANSWER}/{number}/{rank}"])]:
                places[rank], quiet_s = json.loads(store.get(f"{ANSWER}/{number}/{rank}"))
                quiet[(rank + 1) % self.context.world_size] = quiet_s
                missing.remove(rank)
            return not missing

        _wait(all_answered)
        silent = [rank for rank in sorted(missing) if not store.check([f"{DONE}/{rank}"])]
        words = {rank: self._describe(rank, quiet.get(rank, 0.0)) for rank in silent}
        return Inquiry(places, {rank: text for rank, text in words.items() if text})

    def claim(self, store: dist.Store) -> bool:
        """Whether this rank is the first to report a failure of the job."""
        mine = f"{self.context.rank} {threading.get_ident()}"
        return bool(store.compare_set(FAILURE, "", mine) == mine.encode())

    def await_claim(self, store: dist.Store) -> None:
        """Give the rank that failed time to claim the report, where this one only heard of it."""
        _wait(lambda: store.check([FAILURE]))

    def tell(self, store: dist.Store, status: int, silent: int = 0) -> None:
        """Let all ranks end with ``status``, now that the reason was printed; ``silent`` ranks will not know.

        Over several nodes this waits until the others know: the store goes when the node of rank 0 ends.
        """
        store.set(REPORTED, str(status))
        if self.context.num_nodes > 1:
            _wait(lambda: store.add(HEARD, 0) >= self.context.world_size - 1 - silent)

    def hear(self, store: dist.Store) -> int:
        """Return the exit status that the reporting rank has set; 1 if it does not come in time."""
        if not _wait(lambda: store.check([REPORTED]), 2 * ANSWER_S):
            return 1
        store.add(HEARD, 1)
        return int(store.get(REPORTED))

    def _run(self, store: dist.Store) -> None:
        beats, before = 0, time.monotonic()
        try:
            while True:
                store.set(f"{SIGN_KEY}/{self.context.rank}", f"beat {beats}")
                if store.check([REPORTED]) and store.get(FAILURE).split()[0] != str(self.context.rank).encode():
                    _end(self.hear(store))
                self._answer(store)
                now = time.monotonic()
                self._look(store, min(now - before, 1.0))
                before, beats = now, beats + 1
                time.sleep(PERIOD_S)
        except RuntimeError:  # the store went with its node: what this rank then waits for fails by itself
            return

    def _answer(self, store: dist.Store) -> None:
        asked = store.add(ASKED, 0)
        if asked > self._answered:
            self._answered = asked
            store.set(f"{ANSWER}/{asked}/{self.context.rank}", json.dumps([self.place or main_place(), self._quiet_s]))

    def _look(self, store: dist.Store, passed_s: float) -> None:
        if self._next == self.context.rank:
            return
        sign = store.get(f"{SIGN_KEY}/{self._next}")
        self._quiet_s = self._quiet_s + passed_s if sign == self._seen else 0.0
        self._seen = sign
        if self.deadline_s is None or self._quiet_s < self.deadline_s:
            return
        found = self.ask(store)
        if self._next not in found.silent:  # it has ended well
            self._quiet_s = 0.0
        elif self.claim(store):
            self._on_silent(found)
            self.tell(store, 1, len(found.silent))
            _end(1)

    def _describe(self, rank: int, quiet_s: float) -> str:
        """Describe a rank that did not answer; empty if it may just be slow."""
        member, here = self.members[rank], self.members[self.context.rank]
        who = f"rank {rank} (pid {member.pid}, {member.host.name})"
        silence = f"no sign of life for {quiet_s:.0f} s"
        if member.host != here.host:
            return f"{who} is gone or frozen: {silence}"
        try:
            state = psutil.Process(member.pid).status()
        except psutil.NoSuchProcess:
            state = psutil.STATUS_ZOMBIE
        if state == psutil.STATUS_ZOMBIE:
            return f"{who} is gone"
        frozen = state == psutil.STATUS_STOPPED or quiet_s >= (self.deadline_s or SHORTEST_WATCH_S) / 2
        return f"{who} is frozen: {silence}" if frozen else ""


def call_off(store: dist.Store) -> None:
    """Let the ranks of the present round end, once a failure was reported, by the launcher or by a rank."""
    part = round_part(store, store.add(ROUND_KEY, 0))
    if part.compare_set(FAILURE, "", "launcher") == b"launcher":
        part.set(REPORTED, "1")
    _wait(lambda: part.check([REPORTED]))


def describe_places(found: Inquiry, mine: str) -> str:
    """Describe where ranks are that are not in ``mine``: ``rank 1 is alive, in save (comet/moe.py:68)``."""
    elsewhere = {rank: place for rank, place in sorted(found.places.items()) if place != mine} or found.places
    named = [f"rank {rank} is alive, in {place}" for rank, place in list(elsewhere.items())[:MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(elsewhere) > MOST_NAMED else [])])


def main_place() -> str:
    """Return the innermost function of Comet in the main thread: ``save (comet/training/checkpoint.py:68)``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return place_of([] if frame is None else list(traceback.walk_stack(frame)))


def place_of(frames: list[tuple[FrameType, int]]) -> str:
    """Return the first of frames, innermost first, in a function of Comet but not of its launcher, else the first."""
    if not frames:
        return "its end"
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("comet.") and not module.startswith("comet.launch."):
            return f"{frame.f_code.co_name} ({module.replace('.', '/')}.py:{line})"
    frame, line = frames[0]
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{line})"


def _wait(condition: Callable[[], bool], seconds: float = ANSWER_S) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(PERIOD_S / 10)
    return True


def _end(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)
