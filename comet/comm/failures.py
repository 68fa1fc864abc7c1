"""Failures of a rank in the middle of a step: no rank of its group goes on as if nothing had happened.

A rank that fails may have sent ids and no rows, or waited for one signal of two. A call after that would take what was
sent for one step as parts of another. So every step runs inside ``GroupStep``, which leaves a note in the host memory
of all ranks when an exception comes through it, be it ``CommTimeoutError``, out of memory or ``KeyboardInterrupt``.
Each rank looks there before each step, and where it waits on a CPU, and refuses to go on if it finds a note.
``Communicator.restart`` brings all ranks back into step and clears the notes.

An error leaves no note if the ranks stay in step: before a step sends anything (``Communicator.in_flight``), when it
has received everything, when all ranks raise it together (``AgreedError``), and when a checkpoint ends the
forward pass that it runs again. Until the rank begins its next step, it says why it left this one to the ranks that
wait for it in vain. A rank alone restarts by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import DistError

from comet.comm.signals import fence, poll
from comet.errors import CommTimeoutError, StepFailedError

RESTART = "call group.workspace.restart() on all of them between two calls, or make a new group"
NEW_GROUP = "end the job, or make new process groups and a new group: a collective of torch.distributed broke off"
FEWER_CALLS = (
    "a rank that makes fewer calls than others looks like this: call each layer equally often on all ranks, with no "
    "tokens (0 rows) where a rank has none"
)
PEER_WORDS = (
    "connection closed by peer", "connection reset by peer", "timed out waiting", "broken pipe", "pair closure", "gloo",
)  # fmt: skip
ABSENT_S = 0.5  # a collective that breaks on one rank breaks on all others at about that time
TEXT_BYTES = 480
ROW_BYTES = TEXT_BYTES + 32  # behind the number of meetings, the length of the text and two counts


def is_peer_error(error: BaseException) -> bool:
    """Whether a wait for another rank failed: it is gone, frozen or late."""
    if isinstance(error, DistError | CommTimeoutError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in PEER_WORDS)


def board_bytes(world_size: int) -> int:
    """Bytes of one rank's board: a word, padded to 64 bytes, and a row of 512 bytes of each rank; W=4: 2112."""
    return 64 + world_size * ROW_BYTES


class Board:
    """Notes of all ranks to all ranks, in memory that their hosts share; reading it costs one load.

    Args:
        peers: W tensors of ``board_bytes(W)`` uint8 zeroes; ``peers[r]`` is read by rank r and written by all.
    """

    def __init__(self, peers: Sequence[Tensor], rank: int) -> None:
        self.rank, self.num_ranks = rank, len(peers)  # ranks that share the memory
        # Not tensors or arrays: a memoryview's word is read in a fifth of the time.
        self._words = [peer[:8].numpy().data.cast("q") for peer in peers]
        self._rows = [peer[64:].view(len(peers), ROW_BYTES) for peer in peers]
        self._meetings = [rows[:, :8].view(torch.int64).numpy() for rows in self._rows]
        self._counts = [[row[16:32].numpy().data.cast("q") for row in rows] for rows in self._rows]
        self.word = self._words[rank]  # zero while there is no note
        self._num_met = self._num_asked = 0
        self._has_told = False

    @classmethod
    def alone(cls) -> Board:
        return cls((torch.zeros(board_bytes(1), dtype=torch.uint8, device="cpu"),), 0)

    def check(self) -> None:
        """Raise ``StepFailedError`` if a rank left a note."""
        if self.word[0]:
            raise StepFailedError(self._text(abs(int(self.word[0])) - 1))

    @property
    def is_final(self) -> bool:
        """Whether a note says that nothing brings the ranks back."""
        return bool(self.word[0] < 0)

    def note(self, what: str, error: BaseException, *, is_final: bool = False) -> None:
        """Leave a note on the boards of all ranks that a step failed here, unless there is one.

        Args:
            is_final: Whether no restart brings the ranks back.
        """
        if self.word[0]:
            return
        self._write(
            f"the {what} failed on rank {self.rank} ({_reason(error)}), so the ranks of its group are out of step: "
            f"{NEW_GROUP if is_final else RESTART}"
        )
        fence()
        for word in self._words:
            word[0] = -1 - self.rank if is_final else 1 + self.rank

    def tell(self, what: str, error: BaseException) -> None:
        """Write to all ranks why this rank left a step before it sent anything; ``explained`` reads the text."""
        self._write(f"rank {self.rank} left the {what} before it sent anything ({_reason(error)})")
        self._has_told = True

    def take_back(self) -> None:
        """Clear the text of ``tell``, because a step begins."""
        if self._has_told:
            self._write("")
            self._has_told = False

    def explained(self, late: str) -> CommTimeoutError:
        """Return the error for a deadline that passed, with the message ``late`` and the texts of other ranks."""
        others = [self._text(rank) for rank in range(len(self._rows)) if rank != self.rank]
        return CommTimeoutError("; ".join([late, *(text for text in others if text and text not in late)]))

    def lost(self, what: str, error: BaseException) -> CommTimeoutError | StepFailedError:
        """Return the error for a collective that waited in vain: a rank's note, or the ranks that did not come."""
        absent = "" if self.word[0] else self.absent(ABSENT_S)
        try:
            self.check()
        except StepFailedError as noted:
            return noted
        who = absent or "an unknown rank"
        return self.explained(f"rank {self.rank} waited in vain for {who} ({what}, {_reason(error)}); {FEWER_CALLS}")

    def clear(self) -> None:
        """Take the notes off this rank's own board."""
        self.word[0] = self._num_asked = 0
        self._rows[self.rank][:, 8:32] = 0

    def largest(self, count: int, timeout_s: float) -> int:
        """The largest of the ranks' counts, each 0 to 2^31 - 1 (collective).

        A count carries the number of the question above it. Answers to two questions have room: a rank that answers the
        second next one has seen that all others have read the last.
        """
        self._num_asked += 1
        asked, place = self._num_asked, self._num_asked % 2
        for counts in self._counts:
            counts[self.rank][place] = asked << 32 | count
        own = self._counts[self.rank]

        def all_came() -> bool:
            self.check()
            return all(each[place] >> 32 == asked for each in own)

        if not poll(all_came, timeout_s):
            late = ranks_text(rank for rank, each in enumerate(own) if each[place] >> 32 != asked)
            raise CommTimeoutError(f"rank {self.rank} waited {timeout_s:.1f} s for {late} (count of tokens)")
        return max(each[place] & (2**32 - 1) for each in own)

    def meet(self, timeout_s: float) -> None:
        """Return when every rank has come here as often as this one did; a meeting that failed may be tried again."""
        if late := self.absent(timeout_s):
            raise CommTimeoutError(f"rank {self.rank} waited {timeout_s:.1f} s for {late} (meeting of all ranks)")
        self._num_met += 1

    def absent(self, timeout_s: float) -> str:
        """Come to the next meeting; "rank 1, 3" of those that have not come there in time, empty if all have."""
        wanted = self._num_met + 1
        fence()
        for meetings in self._meetings:
            meetings[self.rank, 0] = wanted
        own = self._meetings[self.rank][:, 0]
        poll(lambda: bool((own >= wanted).all()), timeout_s)
        fence()
        return ranks_text(rank for rank, count in enumerate(own.tolist()) if count < wanted)

    def _write(self, text: str) -> None:
        """Write into this rank's row on all boards; the row reads as empty meanwhile."""
        encoded = text.encode()[:TEXT_BYTES]
        for rows in self._rows:
            length = rows[self.rank][8:16].view(torch.int64)
            length[0] = 0
            fence()
            rows[self.rank][32 : 32 + len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
            fence()
            length[0] = len(encoded)

    def _text(self, rank: int) -> str:
        row = self._rows[self.rank][rank]
        length = int(row[8:16].view(torch.int64)[0])
        return bytes(row[32 : 32 + length].tolist()).decode(errors="replace")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 1, 3`` of 1 and 3; empty of none."""
    found = ", ".join(map(str, ranks))
    return f"rank {found}" if found else ""


def _reason(error: BaseException) -> str:
    reason = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {reason[:200]}"
