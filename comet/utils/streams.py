"""Work that runs while the rest of a layer does: on a CUDA stream of its own on a GPU, nothing special on a CPU.

Where a layer leaves SMs idle: while ids travel and the plan is made (small kernels that wait for each
other, tens of microseconds), behind the last blocks of the persistent kernels, and, backward, while gradients travel.
Work on a stream of its own is there to fill these holes; elsewhere it costs what it would cost in line, as the fused
kernels take every SM. Replayed layers are up to 7 % faster for it. To switch streams costs the host time, up to 9 % of
small launched layers (``benchmarks/results/layer.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class SideStream:
    """Launches work that runs along with the caller's next launches; one for all layers of a group, which share memory.

    Autograd runs the backward pass of the work on the stream of its forward pass, too, and
    makes the two wait for each other's gradients. Inside the capture of a CUDA graph the work becomes a branch of it.

    Why no memory is reused too early: the allocator gives memory back to the stream it was taken on, once the host has
    let go of it. The caller keeps the inputs until it has joined. What the work made is reused only by later work,
    which waits first for all that the caller has launched, and so for its last use; callers on several streams wait
    for each other first (``Workspace.join_stream``). A backward pass waits only for the
    gradients it needs; so where gradients are recorded, the allocator gets to know both streams.

    Args:
        stream: ``None`` runs the work at once, on the caller's stream.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    @classmethod
    def create(cls, device: torch.device) -> SideStream:
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    def start(self, work: Callable[..., Result], *inputs: Tensor) -> Callable[[], Result]:
        """Launch ``work(*inputs)`` behind all that the caller has launched; what it returns joins and gives the result.

        Args:
            work: May return anything; what is differentiable must be a tensor, or a member of a tuple.
        """
        side = self.stream
        if side is None:
            result = work(*inputs)
            return lambda: result
        caller = torch.cuda.current_stream(side.device)
        side.wait_stream(caller)
        with torch.cuda.stream(side):
            result = work(*inputs)
            done = side.record_event()
        if torch.is_grad_enabled():
            _share(inputs, side)
            _share(result if isinstance(result, tuple) else (result,), caller)

        def join() -> Result:
            caller.wait_event(done)
            return result

        return join

    @contextmanager
    def inserted(self) -> Iterator[None]:
        """Put what is launched inside between what the caller launched before and what the caller launches next."""
        if self.stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # Ctrl-C, too, leaves work on the stream.
            caller.wait_stream(self.stream)


def _share(values: tuple[object, ...], stream: torch.cuda.Stream) -> None:
    for value in values:
        if isinstance(value, Tensor):
            value.record_stream(stream)


class StreamOrder:
    """Lets each use of some memory wait for the one before, where that was on another stream.

    Autograd, micro-batches on streams of their own, or a user may call two layers of one group on two streams, with
    nothing between them. The layers share memory and an epoch, so their work has to keep the order of the calls.

    Inside the capture of a CUDA graph a stream waits for streams of that capture only: torch waits for the device
    before a capture begins, and a replay of the graph joins first. A capture uses nothing, so the last stream stays
    the same.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None
        self._handle = -1  # the last stream's; -1 after a capture
        self._is_gpu = device.type == "cuda"

    def join(self) -> None:
        """Let the current stream wait for all that the last stream to come here has been given."""
        # Asked for its handle first: to make an object of a stream takes longer, and most calls are on the last one.
        if self._is_gpu and torch._C._cuda_getCurrentRawStream(self._device.index) != self._handle:
            self._change()

    def _change(self) -> None:
        current, last = torch.cuda.current_stream(self._device), self._last
        if _captures(current):
            for other in (last, self._last_captured):
                if other is not None and _captures(other):
                    current.wait_stream(other)
            self._last_captured, self._handle = current, -1
            return
        if last is not None:
            current.wait_stream(last)
        self._last, self._handle = current, current.cuda_stream


class StreamLock:
    """One thread at a time on the host, and on the device behind all that the last one was given."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._order = StreamOrder(device)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._order.join()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
