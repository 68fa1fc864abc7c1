"""Draw ``plan.svg``, the worked example of the plan, from what ``comet`` plans for it.

python docs/explanation/plan_picture.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from comet.config import MoEConfig, ParallelConfig
from comet.layer.plan import PlanRules
from comet.layer.twin.plan import plan_tensors
from comet.layout import ExpertLayout

PICTURE = Path(__file__).with_name("plan.svg")
# Two ranks of three tokens, which choose two of four experts; a rank has room for four tokens.
IDS = [[[0, 2], [2, 3], [1, 0], [-1, -1]], [[0, 1], [3, 2], [2, 1], [-1, -1]]]
MAX_TOKENS, BLOCK_ROWS, MAX_ROUTED_ROWS = 4, 2, 8
COLORS = ("#cfe3f7", "#fde3b8")  # tokens of rank 0, tokens of rank 1
ROW, TOP, WIDTH = 30, 70, 170
COLUMNS = (20, 300, 620)  # tokens, received rows, routed rows


def plan_of(rank: int) -> dict[str, list[int]]:
    """The tensors of a rank's plan, as lists."""
    moe = MoEConfig(hidden_size=16, ffn_size=16, num_experts=4, top_k=2)
    layout = ExpertLayout.create(moe, ParallelConfig(ep=2), rank)
    ids = torch.tensor(IDS, dtype=torch.int32)
    rules = PlanRules.create(BLOCK_ROWS, None, MAX_ROUTED_ROWS)
    return {name: each.tolist() for name, each in plan_tensors(ids, torch.ones(ids.shape), layout, rules).items()}


def received_rows() -> dict[int, tuple[int, int]]:
    """Source rank and token of each received row of rank 0: its own tokens stay in their places, others are sent."""
    own = {token: (0, token) for token, chosen in enumerate(IDS[0]) if any(0 <= expert < 2 for expert in chosen)}
    sent = plan_of(1)["send_token_ids"][0]
    return own | {MAX_TOKENS + index: (1, token) for index, token in enumerate(sent) if token >= 0}


def text(x: int, y: int, words: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{words}</text>'


def box(x: int, row: int, words: str, color: str) -> Iterator[str]:
    y = TOP + row * ROW
    yield f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{ROW - 6}" fill="{color}" stroke="#444"/>'
    yield text(x + 8, y + 16, words)


def line(start: int, row: int, end: int, to: int) -> str:
    y, below = (TOP + each * ROW + (ROW - 6) // 2 for each in (row, to))
    return f'<line x1="{start + WIDTH}" y1="{y}" x2="{end}" y2="{below}" stroke="#888"/>'


def picture() -> str:
    """The SVG."""
    plan, received = plan_of(0), received_rows()
    parts = [text(x, 40, words, "bold") for x, words in zip(COLUMNS, (
        "tokens, with their experts", "received rows of rank 0", "routed rows of rank 0, in tiles of 2",
    ), strict=True)]  # fmt: skip
    place = {}
    for rank in range(2):
        for token in range(3):
            place[rank, token] = row = rank * MAX_TOKENS + token
            chosen = ", ".join(map(str, IDS[rank][token]))
            parts += box(COLUMNS[0], row, f"rank {rank}, token {token}: {chosen}", COLORS[rank])
    for row in range(2 * MAX_TOKENS):
        source = received.get(row)
        words = f"{row}: rank {source[0]}, token {source[1]}" if source else f"{row}: empty"
        parts += box(COLUMNS[1], row, words, COLORS[source[0]] if source else "white")
        parts += [line(COLUMNS[0], place[source], COLUMNS[1], row)] if source else []
    for index, (row, slot) in enumerate(zip(plan["routed_row_ids"], plan["routed_slots"], strict=True)):
        source = received.get(row)
        words = f"{index}: row {row}, choice {slot}" if source else f"{index}: padding"
        parts += box(COLUMNS[2], index, words, COLORS[source[0]] if source else "white")
        parts += [line(COLUMNS[1], row, COLUMNS[2], index)] if source else []
    for number, (expert, first, rows, phase) in enumerate(plan["tiles"][: plan["tile_starts"][-1]]):
        y = TOP + first * ROW + 22
        words = f"tile {number}: expert {expert}, {rows} row{'s' * (rows > 1)}, phase {phase}"
        parts.append(text(COLUMNS[2] + WIDTH + 12, y + 8, words))
    style = 'font-family="sans-serif" font-size="12"'
    size = f'viewBox="0 0 1040 {TOP + 2 * MAX_TOKENS * ROW + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
