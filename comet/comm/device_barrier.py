"""A stream-ordered barrier between GPUs over any symmetric memory: one small kernel, no host in between."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from comet.comm.base import Communicator, SymmTensor, pointer_table, settle
from comet.comm.handshake import gather
from comet.comm.signals import waited
from comet.errors import CommTimeoutError
from comet.kernels.runtime.faults import Fault
from comet.kernels.runtime.primitives import barrier_kernel


class DeviceBarrier:
    """Orders the current stream of every rank; a late rank ends the kernel at the deadline and raises on the host.

    The host never waits for the stream: a kernel that gave up leaves its record in pinned host memory, and the next
    ``arrive`` or ``check`` raises. The epoch lives on the device, so a CUDA graph may contain the barrier.

    Args:
        flags: ``(W,)`` int32 zeroes, symmetric; slot s of a rank is written by rank s.
    """

    def __init__(self, flags: SymmTensor, timeout_s: float, *, interpret: bool = False) -> None:
        self._flags = flags
        self._timeout_s = timeout_s
        self._interpret = interpret
        device = flags.local.device
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._fault = Fault.allocate(device)
        self._record = Fault.allocate(torch.device("cpu"))
        if device.type == "cuda":
            self._record = self._record.pin_memory()

    @property
    def failed(self) -> bool:
        return bool(self._record[0])

    def arrive(self) -> None:
        """Launch the barrier on the current stream; raises ``CommTimeoutError`` if an earlier one is known late."""
        self._raise_if_failed()
        world_size = len(self._flags.peers)
        barrier_kernel[(1,)](
            self._flags.pointers,
            None,
            None,
            self._epoch,
            self._fault,
            self._flags.rank,
            world_size,
            int(self._timeout_s * 1e9),
            0,
            W_BLOCK=triton.next_power_of_2(world_size),
            INTERPRET=self._interpret,
            num_warps=1,
        )
        self._record.copy_(self._fault, non_blocking=True)

    def check(self) -> None:
        """Wait for the device and raise ``CommTimeoutError`` if a barrier met its deadline."""
        self._synchronize()
        self._raise_if_failed()

    def renew(self) -> None:
        """Zero what lies on this rank; no barrier may be under way on any rank."""
        for numbers in (self._flags.local, self._epoch, self._fault, self._record):
            numbers.zero_()

    def _raise_if_failed(self) -> None:
        if not self.failed:
            return
        self._synchronize()  # the first word may have arrived before the others
        fault = Fault.of(self._record)
        late = waited(self._flags.rank, fault.peer, fault.place.words, self._timeout_s, fault.expected, fault.seen)
        raise CommTimeoutError(late)

    def _synchronize(self) -> None:
        settle(self._fault.device)


class GpuCommunicator(Communicator):
    """Ranks are GPUs: the barrier is a kernel; backends add the memory, and make ``_device_barrier`` of it."""

    _device_barrier: DeviceBarrier

    def _make_barrier(self) -> DeviceBarrier:
        return DeviceBarrier(self.alloc(4 * self.world_size).view(0, (self.world_size,), torch.int32), self.timeout_s)

    def _barrier(self) -> None:
        with torch.cuda.device(self.device):
            self._device_barrier.arrive()

    def _renew(self) -> None:
        self._device_barrier.renew()

    def _zeroed(self, peers: tuple[Tensor, ...]) -> SymmTensor:
        """New memory, zeroed before any rank stores into another's (collective)."""
        peers[self.rank].zero_()
        torch.cuda.synchronize(self.device)
        gather(self._group, None)
        return SymmTensor(peers, pointer_table(peers), self.rank)
