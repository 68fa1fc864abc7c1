"""Decode steps with their weights, and what their times say."""
