"""Decode: experts for a few tokens at a time, close to the speed of memory."""

from comet.decode.local import warp_decode
from comet.decode.ranks import RankDecode, rank_slots
from comet.decode.scratch import DecodeScratch
from comet.decode.twin import warp_decode_torch
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeWeights

__all__ = [
    "MAX_DECODE_TOKENS",
    "DecodeScratch",
    "DecodeWeights",
    "RankDecode",
    "rank_slots",
    "warp_decode",
    "warp_decode_torch",
]
