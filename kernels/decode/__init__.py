"""Warp decode: experts of a few tokens."""
