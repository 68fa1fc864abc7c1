"""Grouped GEMMs and what stands beside them."""
