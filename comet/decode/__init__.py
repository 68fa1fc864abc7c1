"""Decode: experts for a few tokens at a time, close to the speed of memory.

A step goes downwards only: ``GPTEngine.decode`` -> ``GPT.extend`` -> ``MoE`` -> ``FrozenExperts`` (the shared expert
joins) -> ``ReplicatedRunner`` (few tokens or many) -> ``RankDecode`` (over the ranks) -> ``run_kernels`` -> kernels.
"""

from typing import Any

from comet.decode.local import warp_decode
from comet.decode.ranks import RankDecode, rank_slots
from comet.decode.runners import DataParallelDecode, LocalRunner, ReplicatedRunner
from comet.decode.shared import (
    FrozenExperts,
    SequenceClock,
    SharedMatrices,
    SharedSlots,
    before_replay,
    held_pieces,
    matrices_of,
    shared_columns,
)
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights
from comet.layer.shared_expert import joins_step
from comet.utils.renamed import warn_renamed


def __getattr__(name: str) -> Any:
    if name == "OwnTokensRunner":
        warn_renamed("comet.decode.OwnTokensRunner", "comet.decode.DataParallelDecode")
        return DataParallelDecode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
