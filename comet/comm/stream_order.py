"""Work of several streams that uses the same memory, one after the other."""

from __future__ import annotations

import torch


class StreamOrder:
    """Lets each use of some memory wait for the one before, where that was on another stream.

    Autograd, micro-batches on streams of their own, or a user may call two layers of one group on two streams, with
    nothing between them. The layers share memory and an epoch, so their work has to keep the order of the calls.

    Inside the capture of a CUDA graph a stream waits for streams of that capture only: torch waits for the device
    before a capture begins, and whoever replays the graph joins first.

    Args:
        device: Where the memory lies; on a CPU there is nothing to order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._handle = -1  # of the last stream
        self._is_gpu = device.type == "cuda"

    def join(self) -> None:
        """Let the current stream wait for all that the last stream to come here has been given."""
        # Asked for its handle first: to make an object of a stream takes longer, and most calls are on the last one.
        if self._is_gpu and torch._C._cuda_getCurrentRawStream(self._device.index) != self._handle:
            self._change()

    def _change(self) -> None:
        current, last = torch.cuda.current_stream(self._device), self._last
        if last is not None and (_captures(last) or not _captures(current)):
            current.wait_stream(last)
        self._last, self._handle = current, current.cuda_stream


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether a CUDA graph is being captured on a stream."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
