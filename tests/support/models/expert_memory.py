"""A process whose memory is capped: it loads a folder with a budget and continues a text."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import torch
from hf_cases import greedy, prompt

from comet.integrations import hf

MB = 2**20


def data_bytes() -> int:
    """Private writable memory of this process, which is what ``RLIMIT_DATA`` limits."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    return int(found.split()[1]) * 1024


def load_capped(rank: int, world_size: int, small: str, large: str, room: int, settings: dict) -> list[int]:
    """Load ``small`` to start all threads, then ``large`` with ``room`` more bytes than now; returns its tokens."""
    torch.set_num_threads(1)
    threading.stack_size(MB // 4)  # of the threads that watch reads, which counts whole
    greedy(hf.load_pretrained(small, expert_budget=0.5), prompt(1, 3))
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + room, resource.RLIM_INFINITY))
    try:
        tokens = greedy(hf.load_pretrained(large, **settings), prompt(1, 3))[0].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(f"{data_bytes() - before:,} bytes more, {room:,} allowed")
    return tokens
