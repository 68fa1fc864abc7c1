"""Ahead-of-time compilation of every configuration that ships."""
