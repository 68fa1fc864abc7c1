"""Helpers that are used everywhere and know nothing of experts."""
