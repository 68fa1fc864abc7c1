"""Rivals: what other libraries, or a careful user of torch, would do."""
