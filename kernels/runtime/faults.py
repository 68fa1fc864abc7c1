"""The record of a fault: which wait of a kernel met its deadline, or which call was another one than here.

The first fault of a device writes the record (``primitives.record_fault``, ``symm.cuh``), and all later waits end at
once. Only the number of rows is left by a plan that had no room.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Place(IntEnum):
    """The wait of a kernel that met its deadline, or another reason for a record."""

    BARRIER = 0
    EXCHANGE = 1
    LAYER0 = 2
    PANEL = 3
    LAYER1 = 4
    # A rank called something else. Expected and seen are the calls; where a backward pass began, the index is the call,
    # and they are the epochs of the plans.
    CALL = 5
    GUESTS = 6
    SUMS = 7
    # A rail peer began another pass. The peer is its node plus N times its call; the index is this rank's call;
    # expected and seen are the numbers of the calls whose backward passes began, or 0.
    OTHER_CALL = 8
    ELSEWHERE = 9  # the record of all nodes says what failed
    DECODE = 10
    GATHER = 11
    HOST = 12  # the host's cores; the peer is the layer, the index the number of experts
    ROOM = 13

    @property
    def words(self) -> str:
        """The name of the wait; ``{}`` stands for the node of a rail peer."""
        return WORDS.get(self, self.name.lower())


WORDS = {
    Place.EXCHANGE: "exchange of top-k ids",
    Place.LAYER0: "layer 0 dispatch",
    Place.PANEL: "layer 1 panel",
    Place.LAYER1: "layer 1 combine",
    Place.GUESTS: "guests from node {}",
    Place.SUMS: "sums from node {}",
    Place.ROOM: "room for guests on node {}",
    Place.DECODE: "decode all-reduce",
    Place.GATHER: "decode gather",
}


class Fault(NamedTuple):
    """The fields of a record, each an int64 of the device."""

    is_set: int
    place: Place
    peer: int
    index: int
    expected: int
    seen: int
    is_taken: int
    rows_needed: int  # 0 while the rows that plans reserved have been enough

    @staticmethod
    def allocate(device: torch.device) -> Tensor:
        """Return memory for a record, ``(8,)`` int64 zeroes."""
        return torch.zeros(len(Fault._fields), dtype=torch.int64, device=device)

    @classmethod
    def of(cls, record: Tensor) -> Fault:
        """Read a record; waits for its device."""
        is_set, place, *others = record.tolist()
        return cls(is_set, Place(place), *others)


ROWS_NEEDED = Fault._fields.index("rows_needed")
