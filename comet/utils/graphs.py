"""Functions as CUDA graphs: captured, run on a stream of their own before, replayed wherever that works."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from comet.utils.choices import GraphMode
from comet.utils.streams import SideStream

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
WARM_CALLS = 1
TOO_FEW = "no step came after the warm-up"


class Replayed(Generic[Result]):
    """A function over memory that stays where it is: run as it stands, or replayed from a CUDA graph.

    A GPU may take less time for many small kernels than the host takes to launch them. Captured once, all of them are
    one launch. The first call is a real one; it runs on a stream of its own and is what torch calls the warm-up of a
    capture (kernels are compiled and memory is allocated). The next call captures the function, which computes nothing,
    and replays it. So ranks run every kernel equally often, whether they replay it or not.

    Args:
        run: Reads what it is given from buffers. All that it changes, it changes in place and on the device, and it
            never asks the host.
        calls: What a call is, in the plural, for messages.
        reads: Tensors that the function reads besides its buffers, and other values it follows, for ``renew``.
    """

    def __init__(
        self,
        run: Callable[[], Result],
        device: torch.device,
        calls: str,
        *,
        cuda_graph: GraphMode = "auto",
        obstacle: str = "",
        reads: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._run = run
        self._reads = reads
        self._addresses: list[Any] = []  # addresses that the graph reads
        self._device = device
        self._calls = calls
        self._insists = cuda_graph == "on"
        self._warm_calls = 0
        self._replay: tuple[Callable[[], None], Result] | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._reason = "cuda_graph='off'" if cuda_graph == "off" else ""
        obstacle = obstacle or device_obstacle(device)
        if obstacle and not self._reason:
            self._give_up(obstacle)
        self._side = SideStream(None) if self._reason else SideStream.create(device)

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why the last call was launched kernel by kernel; empty if it was replayed from a graph."""
        return "" if self._replay is not None else self._reason or TOO_FEW

    def __call__(self) -> Result:
        """Return the function's result. The next call overwrites a replayed result."""
        if self._replay is None and not self._reason and self._warm_calls >= WARM_CALLS:
            self._capture()
        if self._replay is not None:
            replay, result = self._replay
            replay()
            return result
        with self._side.inserted():
            result = self._run()
        self._warm_calls += 1
        return result

    def renew(self) -> None:
        """Let the next calls capture the function again if a tensor that the graph reads was replaced or moved."""
        if self._replay is not None and self._addresses != self._read_addresses():
            self._replay, self._warm_calls = None, 0
            self._graphs.clear()

    def _read_addresses(self) -> list[Any]:
        return [each.data_ptr() if isinstance(each, Tensor) else each for each in self._reads()]

    def _capture(self) -> None:
        try:
            self._replay = capture(self._run, self._side.stream, self._graphs)
            self._addresses = self._read_addresses()
        except RuntimeError as error:  # torch raises it for a call that a capture does not permit
            if isinstance(mistake_of(error), torch.OutOfMemoryError):
                error.add_note(f"a CUDA graph of {self._calls} does not fit the memory; cuda_graph='off' needs less")
                raise
            self._give_up(f"the step cannot be captured: {first_line(error)}", error)

    def _give_up(self, reason: str, error: RuntimeError | None = None) -> None:
        if self._insists:
            raise ValueError(f"cuda_graph='on' must be 'auto' or 'off' here: {reason}") from error
        self._reason = reason
        level = logging.WARNING if self._device.type == "cuda" else logging.INFO
        logger.log(level, "%s are launched kernel by kernel, without a CUDA graph: %s", self._calls, reason)


def device_obstacle(device: torch.device) -> str:
    return "" if device.type == "cuda" else f"the model is on the device {device.type!r}"


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hold_if_captured(owner: Tensor, *memory: Tensor) -> None:
    """Let ``owner`` keep memory alive that a graph under capture uses.

    A graph knows only addresses, and any object may replay the graph. But its user has to keep the tensors that the
    graph computes with, so one of these tensors keeps the rest. Memory allocated during a capture belongs to the graph.

    Args:
        owner: What the caller keeps, such as weights; all tensors over the same memory count as it.
    """
    if not is_capturing(owner.device):
        return
    storage = owner.untyped_storage()
    for held in memory:
        if held.untyped_storage().data_ptr() != storage.data_ptr():  # A storage would never let go of itself.
            weakref.finalize(storage, id, held).atexit = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Stop Python's garbage collector: it may destroy a graph, which would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture(
    run: Callable[[], Result],
    stream: torch.cuda.Stream | None,
    keep: list[torch.cuda.CUDAGraph],
    pool: Any = None,
) -> tuple[Callable[[], None], Result]:
    """Capture a function as a CUDA graph without computing; return the replay and the memory of its result.

    Args:
        keep: Gets the graph. torch's allocator may ask it for as long as it allocates, also where the capture failed.
        pool: Memory of other graphs that this one may use as well (``torch.cuda.graph_pool_handle``); ``None`` is its
            own.
    """
    graph = torch.cuda.CUDAGraph()
    keep.append(graph)
    # The outer context restores the stream even where the inner one fails as it ends. Other threads (a watchdog of
    # NCCL) may go on asking the device: the capture is this thread's.
    capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    handled = sys.exception()
    try:
        with torch.cuda.stream(stream), no_collection(), capturing:
            result = run()
    except BaseException as error:
        release_random_numbers(torch.device("cuda", torch.cuda.current_device()))
        interrupt = error.__context__
        if isinstance(interrupt, KeyboardInterrupt) and interrupt is not handled:  # The capture could not end after it.
            raise interrupt from None
        raise
    return graph.replay, result


def mistake_of(error: RuntimeError) -> RuntimeError:
    """Return the error that broke a capture, not the later one that the capture could not end."""
    return error.__context__ if isinstance(error.__context__, RuntimeError) else error


def first_line(error: RuntimeError) -> str:
    mistake = mistake_of(error)
    return (str(mistake).strip() or type(mistake).__name__).splitlines()[0]


def release_random_numbers(device: torch.device) -> None:
    """Let a GPU draw random numbers again: after a failed capture torch's generator still waits for its end."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
