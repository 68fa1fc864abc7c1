"""Fewer slots than a budget asks for, where the device's memory does not hold them; alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from comet.comm.handshake import largest
from comet.config import require
from comet.layer.group import ExpertGroup
from comet.utils.graphs import first_line

logger = logging.getLogger(__name__)

Cache = TypeVar("Cache")
TENTHS_TAKEN = 9  # of what was found to fit: attention memory and scratch come behind the slots


def fit_slots(
    makers: Sequence[Callable[[int], Cache]], num_slots: int, least: int, group: ExpertGroup | None = None
) -> list[Cache]:
    """Make the caches of all layers, with fewer slots each where memory runs out, down to ``least`` (collective)."""
    asked, refused = num_slots, ""
    while True:
        made: list[Cache] = []
        try:
            made.extend(make(num_slots) for make in makers)
        except torch.OutOfMemoryError as error:
            refused = first_line(error)  # the error itself would keep what was made
        fitting = least_of_ranks(len(made), group)
        if fitting == len(makers):
            break
        made.clear()
        torch.cuda.empty_cache()
        refused = refused or "another rank is out of memory"
        require(
            num_slots > least,
            f"expert_budget must fit the device's memory: {least} slots in each of {len(makers)} layers, the fewest "
            f"that serve a token, do not ({refused}); free memory there, or share the experts with more ranks",
        )
        num_slots = fewer_slots(num_slots, fitting, len(makers), least)
    if num_slots < asked:
        words = "expert_budget: %d slots in each of %d layers in place of %d: the device is out of memory (%s)"
        logger.warning(words, num_slots, len(makers), asked, refused)
    return made


def fewer_slots(num_slots: int, fitting: int, num_layers: int, least: int) -> int:
    """What to try next, where of S slots a layer those of ``fitting`` layers were there.

    Example: 16 slots, 3 of 4 layers: 12 a layer would fit, of which nine tenths are taken: 10.
    """
    return max(least, min(num_slots - 1, num_slots * fitting * TENTHS_TAKEN // (10 * num_layers)))


def least_of_ranks(value: int, group: ExpertGroup | None) -> int:
    """The smallest value of all ranks (collective)."""
    return value if group is None else -int(largest([-value], group.device, group.process_group)[0])
