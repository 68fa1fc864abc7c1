"""Experts beyond GPU memory: all of them in host memory, some of them in slots on the GPU."""

from comet.experts.cache import CACHED_DECODE_TOKENS, CachedExperts, CacheReport, ExpertCache, slots_of_budget
from comet.experts.drafts.router import CachedOnRanks, DraftRouter, DraftRouters
from comet.experts.drafts.speculation import Speculation

__all__ = [
    "CACHED_DECODE_TOKENS",
    "CacheReport",
    "CachedExperts",
    "CachedOnRanks",
    "DraftRouter",
    "DraftRouters",
    "ExpertCache",
    "Speculation",
    "slots_of_budget",
]
