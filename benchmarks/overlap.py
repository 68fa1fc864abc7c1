"""Settings of the overlap as they are written on a command line."""

from __future__ import annotations

from typing import Any

from comet.config import OverlapConfig, require

NUMBERS = ("comm_blocks", "num_panels", "num_phases", "beside")
RULE = "must be comm_blocks=N, num_panels=N, num_phases=N, beside=0 or transport=copy"


def parse_overlap(text: str, option: str) -> OverlapConfig:
    """Read ``comm_blocks=16,beside=0``: 16 comm blocks, not beside compute blocks, and the defaults of all else.

    Args:
        text: Pairs of name and value between commas.
        option: Name of the command line's option, for the message.

    Raises:
        ValueError: If a pair is none, its name is unknown or its value impossible.
    """
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        known = value.isalpha() if name == "transport" else name in NUMBERS and value.isdigit()
        require(known, f"{option}={pair!r} {RULE}")
        values[name] = value if name == "transport" else bool(int(value)) if name == "beside" else int(value)
    return OverlapConfig(**values)
