"""Experts beyond GPU memory: all of them in host memory, some of them in slots on the GPU."""

from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, report_of, slots_of_budget

__all__ = ["CacheReport", "CachedExperts", "ExpertCache", "report_of", "slots_of_budget"]
