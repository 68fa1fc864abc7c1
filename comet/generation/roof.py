"""How fast this device reads memory: the roof of a decode step, measured in the same run."""

from __future__ import annotations

import time

import torch

READS = 10
CPU_BYTES = 2**28
GPU_BYTES = 2**30
FREE_SHARE = 4


def read_bytes_per_second(device: torch.device, num_bytes: int | None = None) -> float:
    """The fastest of several reads of one buffer: a sum, which streams all of it and writes next to nothing.

    Args:
        device: Whose memory.
        num_bytes: Of the buffer, well above every cache; ``None``: 256 MiB on a CPU, 1 GiB on a GPU, but at most a
            quarter of the memory that is free there.

    Returns:
        Bytes per second.
    """
    if num_bytes is None:
        num_bytes = CPU_BYTES
        if device.type == "cuda":
            num_bytes = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // FREE_SHARE)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / min(_read_seconds(buffer) for _ in range(READS + 1))


def _read_seconds(buffer: torch.Tensor) -> float:
    if buffer.device.type != "cuda":
        started = time.perf_counter()
        buffer.sum()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    buffer.sum()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
