"""Ranks of several nodes: no symmetric memory, and what they tell each other goes through their process group's store.

Their layers exchange rows by collectives of ``torch.distributed`` (``comet.reference.plain``), which have deadlines of
their own.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from comet.comm.base import Communicator, SymmTensor, settle
from comet.comm.cpu_shm import shared_board
from comet.comm.failures import Board, board_bytes, ranks_text
from comet.comm.handshake import gather, this_host
from comet.comm.signals import poll
from comet.errors import CommTimeoutError

logger = logging.getLogger(__name__)

NOTE = "note"


class StoreBoard(Board):
    """Notes of all ranks in a store: a rank sees its own note at once, and the notes of others when it calls ``check``.

    So a step costs no message. No failure is missed: a failed rank joins no further collective, so steps of the other
    ranks cannot end.
    """

    def __init__(self, group: ProcessGroup) -> None:
        own = torch.zeros(board_bytes(group.size()), dtype=torch.uint8, device="cpu")
        super().__init__((own,) * group.size(), group.rank())
        self.num_ranks = 1
        name = gather(group, uuid.uuid4().hex)[0]  # a group may get several boards, one after the other
        self._store = dist.PrefixStore(f"comet/board/{name}", group.get_group_store())

    def check(self) -> None:
        """Look into the store, then check as any board does."""
        if not self.word[0] and self._has(NOTE):
            self.word[0] = int(self._store.get(NOTE))
        super().check()

    def note(self, what: str, error: BaseException, *, is_final: bool = False) -> None:
        """Leave a note in the store that a step failed here, unless there is one."""
        if not self.word[0]:
            super().note(what, error, is_final=is_final)
            self._set(NOTE, str(self.word[0]))

    def clear(self) -> None:
        """Take the notes off; the first rank's counts."""
        self.word[0] = 0
        self._write("")
        if self.rank == 0:
            self._store.delete_key(NOTE)

    def absent(self, timeout_s: float) -> str:
        """Come to the next meeting; "rank 1, 3" of those that have not come there in time."""
        keys = [f"met/{self._num_met + 1}/{rank}" for rank in range(len(self._rows))]
        self._set(keys[self.rank], "")
        poll(lambda: self._has(*keys), timeout_s)
        return ranks_text(rank for rank, key in enumerate(keys) if not self._has(key))

    def _write(self, text: str) -> None:
        self._set(f"text/{self.rank}", text)

    def _text(self, rank: int) -> str:
        return self._store.get(f"text/{rank}").decode() if self._has(f"text/{rank}") else ""

    def _set(self, key: str, value: str) -> None:
        with suppress(dist.DistError):  # the store may have gone with its host
            self._store.set(key, value)

    def _has(self, *keys: str) -> bool:
        with suppress(dist.DistError):
            return bool(self._store.check(list(keys)))
        return False


def board_of(group: ProcessGroup) -> Board:
    """The board of ranks that reach each other's memory: in memory of their host, over several in the store."""
    is_one = len({host.boot_id for host in gather(group, this_host())}) == 1
    return shared_board(group) if is_one else StoreBoard(group)


class CollectiveCommunicator(Communicator):
    """Ranks of several nodes, or of GPUs that run no kernel of ours; there is no memory to allocate.

    Args:
        obstacle: Why, in words.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float, obstacle: str) -> None:
        super().__init__(group, device, timeout_s)
        self.memory_obstacle = obstacle
        self.board = StoreBoard(group)

    def _alloc(self, num_bytes: int) -> SymmTensor:
        raise AssertionError("a group with an obstacle to memory allocates none")

    def _barrier(self) -> None:
        settle(self.device)
        self.board.meet(self.timeout_s)

    def _close(self, in_step: bool) -> bool:
        if self.device.type == "cpu":
            return True  # gloo leaves without the others
        if not in_step or self.board.word[0]:
            return False
        try:
            with suppress(dist.DistError):  # the store goes with the first rank, which leaves when all have met
                self._barrier()
        except CommTimeoutError as late:
            logger.warning("process groups are kept, because a rank did not close: %s", late)
            return False
        return True
