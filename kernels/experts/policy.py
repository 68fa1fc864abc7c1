"""Which expert of a cache loses its slot to a missing one."""

from typing import Literal

Policy = Literal["lru", "lfu"]  # the least recently used, or the least frequently used
POLICIES = ("lru", "lfu")
