"""Capturing a function as a CUDA graph, and running it on a stream of its own before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def device_obstacle(device: torch.device) -> str:
    """Why nothing can be captured on a device; empty for a GPU."""
    return "" if device.type == "cuda" else f"the model is on the device {device.type!r}"


def capture(
    run: Callable[[], Result],
    stream: torch.cuda.Stream | None,
    keep: list[torch.cuda.CUDAGraph],
    pool: Any = None,
) -> tuple[Callable[[], None], Result]:
    """Capture a function as a CUDA graph; it is not computed.

    Args:
        run: What to capture.
        stream: Where.
        keep: Gets the graph. torch's allocator may ask it for as long as it allocates, also where the capture failed.
        pool: Memory of other graphs that this one may use as well (``torch.cuda.graph_pool_handle``); ``None`` is its
            own.

    Returns:
        What replays the graph on the caller's stream, and what each replay leaves ``run``'s result in.

    Raises:
        RuntimeError: If ``run`` does what a capture does not permit, such as waiting for the device.
    """
    graph = torch.cuda.CUDAGraph()
    keep.append(graph)
    # The outer context restores the stream even where the inner one fails on its way out. Other threads (a watchdog of
    # NCCL) may go on asking the device: the capture is this thread's.
    capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.stream(stream), capturing:
        result = run()
    return graph.replay, result


def first_line(error: RuntimeError) -> str:
    """What went wrong in a capture: the mistake itself, not that the capture could not end after it."""
    mistake = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return (str(mistake).strip() or type(mistake).__name__).splitlines()[0]


def release_random_numbers(device: torch.device) -> None:
    """Let a GPU draw again after a failed capture: torch leaves its generator waiting for the end of it."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def run_beside(run: Callable[[], Result], stream: torch.cuda.Stream) -> Result:
    """Run a function on another stream, behind all that was launched here and before all that follows."""
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        result = run()
    here.wait_stream(stream)
    return result
