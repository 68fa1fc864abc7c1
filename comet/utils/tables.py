"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns: columns in ``left`` to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (
        [text.ljust(width) if place in left else text.rjust(width) for place, (text, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in rows)
    )
    lines = ["  ".join(line) for line in cells]
    return [line.rstrip() for line in lines] if len(widths) - 1 in left else lines
