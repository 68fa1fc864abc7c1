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
        self._is_gpu = device.type == "cuda"

    def join(self) -> None:
        """Let the current stream wait for all that the last stream to come here has been given."""
        if not self._is_gpu:
            return
        last = self._last
        # Asked for its number first: to make an object of a stream takes longer, and most calls are on the last one.
        if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(self._device.index):
            return
        current = torch.cuda.current_stream(self._device)
        if last is not None and (_captures(last) or not _captures(current)):
            current.wait_stream(last)
        self._last = current


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether a CUDA graph is being captured on a stream."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
