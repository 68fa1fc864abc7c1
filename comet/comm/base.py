"""The interface to a network: memory that every rank of a group can address, and a barrier.

Kernels never see a communicator. They see a ``SymmTensor``'s pointer table, ``(W,)`` int64 addresses, one per rank.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import DistError, ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError

from comet.comm.failures import Board, is_peer_error
from comet.comm.handshake import abort_nccl, await_device, largest
from comet.config import require
from comet.errors import AgreedError, CommTimeoutError, StepFailedError, UnavailableError
from comet.kernels.runtime.faults import ROWS_NEEDED
from comet.layout import round_up
from comet.utils.graphs import is_capturing
from comet.utils.streams import StreamOrder

ALIGNMENT = 256
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class SymmTensor:
    """The same tensor on every rank of a group, each rank's copy addressable by all."""

    peers: tuple[Tensor, ...]  # W tensors of equal shape and dtype; peers[r] is rank r's copy, mapped into this process
    pointers: Tensor  # (W,) int64 on the communicator's device: the address of each peers[r] as seen from here
    rank: int

    @property
    def local(self) -> Tensor:
        return self.peers[self.rank]

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """A typed window of a byte pool, ``offset`` bytes from its start, a multiple of 256, on every rank."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.local.dtype != torch.uint8:
            raise ValueError(f"dtype={self.local.dtype} of the pool must be torch.uint8 to take a typed view")
        if offset % ALIGNMENT or offset < 0:
            raise ValueError(f"offset={offset} must be a non-negative multiple of {ALIGNMENT}")
        if offset + num_bytes > self.local.numel():
            raise ValueError(f"offset={offset} + {num_bytes} bytes must fit the pool of {self.local.numel()} bytes")
        windows = tuple(peer[offset : offset + num_bytes].view(dtype).view(shape) for peer in self.peers)
        return SymmTensor(windows, self.pointers + offset, self.rank)

    def with_columns(self, columns: int) -> SymmTensor:
        """The same memory as a matrix of as many rows ``(R, columns)``, one after the other from its start."""
        rows, most = self.local.shape
        if not 1 <= columns <= most:
            raise ValueError(f"columns={columns} must be between 1 and the {most} there is memory for")
        if columns == most:
            return self
        narrow = tuple(peer.view(-1)[: rows * columns].view(rows, columns) for peer in self.peers)
        return SymmTensor(narrow, self.pointers, self.rank)


Regions = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of parts of a pool, in their order


def regions_bytes(regions: Regions) -> int:
    """Bytes of regions behind each other, each from a multiple of 256 on."""
    return sum(round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in regions.values())


def pointer_table(peers: Sequence[Tensor]) -> Tensor:
    return torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device=peers[0].device)


def require_memory(comm: Communicator, what: str, instead: str) -> None:
    """Raise ``UnavailableError`` unless a group has symmetric memory, for ``what`` (``path='fused'``)."""
    if comm.memory_obstacle:
        raise UnavailableError(f"{what} needs symmetric memory, but {comm.memory_obstacle}; {instead}")


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Communicator(ABC):
    """A group of ranks that can mostly allocate symmetric memory; as a context manager it closes itself.

    Args:
        group: The ranks; ``None``: this process alone.
        device: Where symmetric memory lives.
        timeout_s: Deadline of every wait in seconds, positive and finite.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device, timeout_s: float) -> None:
        require(
            timeout_s > 0 and math.isfinite(timeout_s), f"timeout_s={timeout_s} must be a positive number of seconds"
        )
        self._group: Any = group
        self.process_groups = [group]  # steps run collectives of these
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        self.device = device
        self.timeout_s = timeout_s
        self.closed = False
        self.num_passes = 0  # that all ranks have begun by collectives of torch.distributed
        # why there is no symmetric memory, or no kernel for it, in words; empty where there is
        self.memory_obstacle = ""
        self.all_left = False  # once closed, whether all ranks have closed it, or none waits for them
        self.turn = threading.RLock()  # of the thread whose step it is; a backward pass may have a forward pass inside
        self.in_flight = InFlight()  # messages of the present step
        # whether a step has run collectives of torch.distributed since the last wait for the device
        self.awaits_collectives = False
        self.board = Board.alone()  # for notes of steps that failed
        self.stream_order = StreamOrder(device)  # lets steps on different streams wait for each other
        self._epochs: list[Tensor] = []
        self._made: dict[Hashable, Any] = {}

    def alloc(self, num_bytes: int) -> SymmTensor:
        """Allocate ``num_bytes`` zeroed bytes on every rank; collective, the same size everywhere.

        Raises:
            ValueError: If the size is not positive, differs between ranks or does not fit.
            UnavailableError: If the ranks cannot map each other's memory, or run on several nodes.
        """
        self.require_open()
        require_memory(self, "symmetric memory", "the paths 'plain' and 'reference' do without")
        require(num_bytes >= 1, f"num_bytes={num_bytes} must be at least 1")
        return self._alloc(num_bytes)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` returned for an equal key before, or call it (collective).

        For users of symmetric memory that come and go, as engines do: ranks forget them at different times, so memory
        cannot be freed before ``close``, and the next user takes the same.
        """
        self.require_open()
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def step(self, what: str, *, collectives: bool = False, refuses: bool = False) -> GroupStep:
        """A context manager for one use of the group's memory, in which all ranks take part.

        Args:
            what: What it is, for the message where it fails: ``forward pass``.
            collectives: Whether it runs collectives of ``torch.distributed``, which no restart brings back into step.
            refuses: Whether a ``ValueError`` in it is raised before anything is sent.
        """
        return GroupStep(self, what, is_final=collectives, refuses=refuses)

    def largest(self, count: int) -> int:
        """The largest count of all ranks (collective), through memory that the ranks' hosts share, if they share some.

        Else it waits for the device, and so it does in the capture of a CUDA graph, where torch refuses it.
        """
        if self.world_size == 1:
            return count
        if self.board.num_ranks < self.world_size or is_capturing(self.device):
            return int(largest([count], self.device, self._group)[0])
        with self.step("count of tokens"), self.in_flight:  # not kept: a step knows its communicator
            return self.board.largest(count, self.timeout_s)

    def take_turn(self, what: str) -> None:
        """Keep other threads out until ``turn`` is released: they wait, or over ranks raise ``RuntimeError``.

        The current stream waits for all that the last one to come here has been given.
        """
        if not self.turn.acquire(blocking=self.world_size == 1):
            raise RuntimeError(
                f"the {what} must wait for a step of another thread of rank {self.rank}: call layers over ranks from "
                "one thread, because two may take turns in another order on each rank"
            )
        self.stream_order.join()

    def settle(self, what: str) -> None:
        """Wait for all streams of the device; for collectives of ``torch.distributed``, until the deadline.

        Kernels of ours have deadlines. A collective of NCCL waits for a rank that failed until NCCL ends the process.

        Args:
            what: What they were, for the message: ``last step``.

        Raises:
            StepFailedError: If a step failed on another rank.
            CommTimeoutError: If a rank did not come; names it.
        """
        if self.awaits_collectives and self.world_size > 1 and self.device.type == "cuda":
            try:
                await_device(self.timeout_s, lambda: bool(self.board.word[0]))
            except DistError as error:
                late = self.board.lost(what, error)
                self.fail(what, late, is_final=True)
                raise late from error
        self.awaits_collectives = False
        settle(self.device)

    def fail(self, what: str, error: BaseException, *, is_final: bool) -> None:
        """Leave a note on all ranks' boards that a step failed here; ``is_final``: nothing brings them back."""
        self.board.note(what, error, is_final=is_final)
        self._break_off()

    def _break_off(self) -> None:
        """End what NCCL still has on this GPU if nothing brings the ranks back: its next user would wait for it."""
        if self.board.is_final and self.awaits_collectives:
            self.awaits_collectives = False
            for group in self.process_groups:
                abort_nccl(group)

    def renew_at_restart(self, epoch: Tensor, fault: Tensor, signals: Sequence[Tensor]) -> None:
        """Name what ``restart`` zeroes: an epoch ``(1,)`` int32, a fault ``(8,)`` int64, and this rank's signals."""
        self._epochs += [epoch, fault[:ROWS_NEEDED], *signals]  # a plan's message is kept until check raises it

    def restart(self) -> None:
        """Bring all ranks back into step (collective): zero all epochs, faults, signals and notes of failures.

        To be called between two steps, on all ranks, after a failure or where an epoch has grown too large. Captured
        graphs stay valid, as they read the epoch on the device. Waits for the device.

        Why it is safe: once all ranks, and all streams of each, have met, no rank waits for a signal and none sends
        one. So each zeroes what lies in its own memory, and when all have met again they expect what they did first.

        Raises:
            StepFailedError: If a collective of ``torch.distributed`` broke off, which stays out of step.
            CommTimeoutError: If a rank did not come within twice the deadline, in which its own step may still end.
        """
        if self.closed or self.board.is_final:
            self.require_open()
        settle(self.device)
        self.board.meet(2 * self.timeout_s)
        for numbers in self._epochs:
            numbers.zero_()
        self._renew()
        self.board.clear()
        settle(self.device)
        self.board.meet(2 * self.timeout_s)

    def barrier(self) -> None:
        """Return (CPU) or order the current stream (GPU) after every rank arrived.

        Raises:
            RuntimeError: After ``close``.
            CommTimeoutError: When ranks are late; on a GPU the call after the late barrier raises.
        """
        self.require_open()
        self._barrier()

    def close(self) -> None:
        """Release everything (collective); idempotent. Tensors of this communicator must not be used afterwards."""
        if not self.closed:
            self.closed = True
            self.all_left = self._close(in_step=True)

    def require_open(self) -> None:
        """Raise ``RuntimeError`` after ``close``, ``StepFailedError`` after a step that failed on any rank."""
        if self.closed:
            raise RuntimeError(f"{type(self).__name__} of rank {self.rank} was used after close()")
        try:
            self.board.check()
        except StepFailedError:
            self._break_off()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.closed:
            self.closed = True
            self._close(in_step=error is None)

    @abstractmethod
    def _alloc(self, num_bytes: int) -> SymmTensor: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    def _renew(self) -> None:  # noqa: B027 (most have nothing to zero)
        """Zero this rank's part of the barrier."""

    @abstractmethod
    def _close(self, in_step: bool) -> bool:
        """Release everything; wait for the others only when ``in_step``, that is when they close too.

        Returns:
            Whether what waits for all ranks without a deadline may follow: they have all come here, or nothing waits.
        """


class InFlight:
    """Messages of a step that other ranks wait for: inside of a ``with`` block, and behind a block that raised.

    Args:
        always: Whether a message may be under way at any time.
    """

    __slots__ = ("_always", "is_open")

    def __init__(self, *, always: bool = False) -> None:
        self.is_open = self._always = always

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.is_open = self._always or error is not None


class GroupStep:
    """One use of a group's memory by all its ranks: refused after a failure, and noted where it fails itself.

    Threads of a rank alone take turns; over ranks a second thread is refused.

    Not noted: an error while nothing is in flight, one that all ranks raise together, and one while a CUDA graph is
    captured, which sends nothing.

    Args:
        is_final: Whether it runs collectives of ``torch.distributed``. No restart brings these back into step, and one
            may be under way at any time.
        refuses: Whether a ``ValueError`` in it is raised before anything is sent.
    """

    __slots__ = ("_around", "_comm", "_is_final", "_refuses", "_what")

    def __init__(self, comm: Communicator, what: str, *, is_final: bool, refuses: bool) -> None:
        self._comm = comm
        self._what = what
        self._is_final = is_final
        self._refuses = refuses
        self._around = comm.in_flight

    def __enter__(self) -> None:
        comm = self._comm
        if comm.closed or comm.board.word[0]:
            comm.require_open()
        comm.take_turn(self._what)
        comm.board.take_back()
        comm.awaits_collectives |= self._is_final
        # A backward pass whose forward pass is run again has that step inside of its own.
        self._around, comm.in_flight = comm.in_flight, InFlight(always=self._is_final)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._leave(error)
        finally:
            self._comm.turn.release()

    def _leave(self, error: BaseException | None) -> None:
        comm = self._comm
        was_in_flight, comm.in_flight = comm.in_flight.is_open, self._around
        if error is None or isinstance(error, _StopRecomputationError) or is_capturing(comm.device):
            return
        in_step = isinstance(error, ValueError) if self._refuses else not was_in_flight
        in_step |= isinstance(error, AgreedError)
        if comm.world_size == 1:
            if not in_step:
                comm.restart()
        elif in_step:
            comm.board.tell(self._what, error)
        elif isinstance(error, CommTimeoutError) or (self._is_final and is_peer_error(error)):
            late = (
                comm.board.explained(str(error))
                if isinstance(error, CommTimeoutError)
                else comm.board.lost(self._what, error)
            )
            comm.fail(self._what, late, is_final=self._is_final)
            raise late from error
        else:
            comm.fail(self._what, error, is_final=self._is_final)


class LocalCommunicator(Communicator):
    """The only rank of its group: plain memory of any device, no process group, no rank to wait for.

    Args:
        obstacle: Why its device runs no kernel of ours, in words; empty where it does.
    """

    def __init__(self, device: torch.device, timeout_s: float = 30.0, obstacle: str = "") -> None:
        super().__init__(None, device, timeout_s)
        self.memory_obstacle = obstacle

    def _alloc(self, num_bytes: int) -> SymmTensor:
        try:
            peers = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device),)
        except RuntimeError as failure:
            reason = str(failure).splitlines()[0]
            needed = f"1 x {num_bytes} bytes needed, {reason}"
            raise ValueError(f"num_bytes={num_bytes} must fit {self.device}: {needed}; lower max_tokens") from failure
        return SymmTensor(peers, pointer_table(peers), self.rank)

    def _barrier(self) -> None:
        """Return at once: there is no other rank."""

    def _close(self, in_step: bool) -> bool:
        return True
