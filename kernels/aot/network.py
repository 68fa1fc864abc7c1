"""Cases of the kernels that send tokens to other nodes and receive their sums (``comet.kernels.network``)."""

import torch

from ..network.legs import Leg, SendLists, Sent
from ..network.listing import list_tokens
from ..network.put import put
from ..network.receive import add_nodes, receive
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, recorded
from ..runtime.limits import LEG_HEADER

TOKENS, HIDDEN = 8192, 7168


def aot_cases() -> list[KernelCase]:
    """Two nodes and top-2, eight and top-8: both legs forward and backward."""
    cases: list[KernelCase] = []
    for nodes, top_k in ((2, 2), (8, 8)):
        name = f"{nodes} nodes, top-{top_k}"
        out, home = (_leg(nodes, top_k, is_home=is_home) for is_home in (False, True))
        slots, chunks, number = range(nodes - 1), range(TOKENS // 128), meta(1)
        lists = SendLists(
            *(meta(nodes - 1, TOKENS) for _ in range(2)), meta(nodes - 1), meta(nodes - 1, TOKENS, 2 * top_k)
        )
        x, ids, weights = (
            meta(TOKENS, HIDDEN, dtype=torch.bfloat16),
            meta(TOKENS, top_k),
            meta(TOKENS, top_k, dtype=torch.float32),
        )
        sends = (x, lists.tokens, lists.words, lists.counts, number, 16, Sent(slots, chunks, True))
        returns = (
            x,
            lists.tokens[0],
            weights.view(torch.int32),
            lists.counts,
            number,
            16,
            Sent(range(1), chunks, True),
        )
        cases += recorded(name, (), list_tokens, ids, weights, lists, 0, 64, out.shape)
        cases += recorded(f"out, {name}", WIDE_ACCESS, put, out, *sends)
        cases += recorded(f"home, {name}", WIDE_ACCESS, put, home, *returns)
        cases += recorded(
            f"guests, {name}", (), receive, out, lists.counts, number, 16, range(1), chunks, (ids, weights)
        )
        cases += recorded(f"sums, {name}", (), receive, home, lists.counts, number, 16, slots, chunks)
        cases += recorded(f"rows, {name}", WIDE_ACCESS, add_nodes, x, home.rows, lists.places, home.shape, 0)
    return cases


def _leg(nodes: int, top_k: int, *, is_home: bool) -> Leg:
    targets = [meta(nodes, dtype=torch.int64) for _ in range(3)]
    return Leg(
        words=meta(nodes - 1, LEG_HEADER + TOKENS * 2 * top_k),
        rows=meta(nodes - 1, TOKENS, HIDDEN, dtype=torch.bfloat16),
        flags=meta(nodes - 1, 1 + TOKENS // 128, 2),
        word_targets=targets[0],
        row_targets=targets[1],
        flag_targets=targets[2],
        epoch=meta(1),
        fault=meta(8, dtype=torch.int64),
        inner_fault=meta(8, dtype=torch.int64),
        node=0,
        is_home=is_home,
        timeout_ns=10**9,
    )
