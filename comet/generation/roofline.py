"""How fast this device reads memory: the roofline of a decode step, measured in the same run."""

from __future__ import annotations

import torch

from comet.measure.timing import Variant, time_interleaved

READS = 10
CPU_BYTES = 2**28
GPU_BYTES = 2**30
LINK_BYTES = 2**26
FREE_SHARE = 4


def read_bytes_per_second(device: torch.device, num_bytes: int | None = None) -> float:
    """The median of several reads of one buffer on a warm device: a sum, which streams it and writes next to nothing.

    By the protocol of ``comet.measure.timing``, because a GPU that was idle reads slower than one that decodes.

    Example: reads of 1 MiB in 64, 65, ..., 73 ms: 2**20 bytes in 68.5 ms, 1.53e7.

    Args:
        num_bytes: Of the buffer, well above every cache; ``None``: 256 MiB on a CPU, 1 GiB on a GPU, but at most a
            quarter of the memory that is free there.
    """
    if num_bytes is None:
        num_bytes = CPU_BYTES
        if device.type == "cuda":
            num_bytes = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // FREE_SHARE)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return _rate(lambda _: buffer.sum(), buffer.nbytes, device)


def link_bytes_per_second(device: torch.device) -> float:
    """Bytes per second of copies from pinned host memory to the device; on a CPU from memory to memory."""
    source = torch.ones(LINK_BYTES // 4, dtype=torch.float32, pin_memory=device.type == "cuda")
    target = torch.empty(source.shape, dtype=torch.float32, device=device)
    return _rate(lambda _: target.copy_(source, non_blocking=True), source.nbytes, device)


def _rate(call: Variant, num_bytes: int, device: torch.device) -> float:
    timings = time_interleaved({"call": call}, rounds=READS, device=device)
    return num_bytes / (timings["call"].median_ms / 1e3)
