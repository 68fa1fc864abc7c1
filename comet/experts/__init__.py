"""Experts beyond GPU memory: all of them in host memory, some of them in slots on the GPU."""

from comet.experts.cache import CACHED_DECODE_TOKENS, CachedExperts, CacheReport, ExpertCache, slots_of_budget
