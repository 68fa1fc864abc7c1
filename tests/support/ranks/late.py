"""Ranks that come late: when the others are where they must not be yet, or after as long as a test can spare."""

import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from comet.comm import Communicator

POLL_S = 0.005


def passed(place: str) -> None:
    distributed_c10d._get_default_store().set(f"passed {place}", "1")


def come_late(place: str, most_s: float) -> None:
    """Return as soon as another rank is past ``place``, which it should not be without this one.

    Args:
        place: What that rank gives to ``passed``.
        most_s: Where all ranks wait as they should, none passes; then this one comes after so many seconds.
    """
    store, end = distributed_c10d._get_default_store(), time.monotonic() + most_s
    while time.monotonic() < end and not store.check([f"passed {place}"]):
        time.sleep(POLL_S)


def hurry(comm: Communicator, timeout_s: float) -> None:
    """Wait for all ranks (collective), then shorten the communicator's deadline to ``timeout_s``."""
    if dist.is_initialized():
        dist.barrier()
    comm.timeout_s = timeout_s
