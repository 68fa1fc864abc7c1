"""Experts beyond GPU memory: the cache's tables, misses, prefetch, and what the host computes."""
