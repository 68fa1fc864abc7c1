"""Comet inside other frameworks; each integration is imported on use and needs its own optional package."""
