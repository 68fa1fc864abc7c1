"""Routing of texts, made or recorded, and what follows from it."""
