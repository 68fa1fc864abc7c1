"""The configurations of barriers between ranks, and of kernels that send tokens to other nodes and get their sums."""

from functools import partial

import torch

from ..network.legs import Leg, Message, SendLists
from ..network.listing import list_tokens
from ..network.put import put
from ..network.receive import add_nodes, receive
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, recorded
from ..runtime.faults import Place
from ..runtime.limits import LEG_HEADER
from ..runtime.primitives import barrier_kernel
from ..runtime.recorder import align

TOKENS, HIDDEN, RING = 8192, 7168, 3


def aot_cases() -> list[KernelCase]:
    """Two nodes and top-2, eight and top-8, where slots share memory: both legs forward and backward."""
    cases = _barriers()
    for nodes, top_k in ((2, 2), (8, 8)):
        name, all_chunks, wide = f"{nodes} nodes, top-{top_k}", range(TOKENS // 128), dict(dtype=torch.float32)
        ring = range(min(nodes - 1, RING))
        out, home = (_leg(nodes, len(ring), top_k, place) for place in (Place.GUESTS, Place.SUMS))
        lists = SendLists(
            *(meta(nodes - 1, TOKENS) for _ in range(2)), meta(nodes - 1), meta(nodes - 1, TOKENS, 2 * top_k)
        )
        x, ids = meta(TOKENS, HIDDEN, dtype=torch.bfloat16), meta(TOKENS, top_k)
        weights, number = meta(TOKENS, top_k, **wide), meta(1)
        message = partial(Message, counts=lists.counts, number=number, call=16, has_words=True)
        sends = message(x=x, tokens=lists.tokens, words=lists.words, slots=ring, chunks=all_chunks)
        returns = message(
            x=x, tokens=lists.tokens[0], words=weights.view(torch.int32), slots=range(1), chunks=all_chunks
        )
        waits = lists.counts, number, 16
        cases += recorded(name, (), list_tokens, ids, weights, lists, 0, 64, out.shape)
        cases += recorded(f"out, {name}", WIDE_ACCESS, put, out, sends)
        cases += recorded(f"home, {name}", WIDE_ACCESS, put, home, returns)
        cases += recorded(f"guests, {name}", (), receive, out, *waits, range(1), all_chunks, (ids, weights))
        cases += recorded(f"sums, {name}", (), receive, home, *waits, ring, all_chunks)
        add = partial(recorded, f"rows, {name}", WIDE_ACCESS, add_nodes)
        came = home.rows, lists.places, home.shape
        if len(ring) == nodes - 1:
            cases += add(x, None, *came, 0, range(nodes))
            continue
        total, room = meta(TOKENS, HIDDEN, **wide), _leg(nodes, nodes - 1, 0, Place.ROOM)
        cases += add(None, total, *came, nodes - 1, range(1))
        cases += recorded(f"last rows, {name}", WIDE_ACCESS, add_nodes, x, total, *came, nodes - 1, range(6, 8))
        told = message(x=room.words, tokens=ids[:, 0], words=ids[:, :0], slots=range(1), chunks=range(1))
        cases += recorded(f"room, {name}", (), put, room, told)
        cases += recorded(f"room, {name}", (), receive, room, *waits, range(1), range(1))
    return cases


def _leg(nodes: int, ring: int, top_k: int, place: Place) -> Leg:
    targets = [meta(nodes, dtype=torch.int64) for _ in range(3)]
    num_tokens = 0 if place is Place.ROOM else TOKENS
    return Leg(
        words=meta(ring, LEG_HEADER + num_tokens * 2 * top_k),
        rows=meta(ring, num_tokens, HIDDEN, dtype=torch.bfloat16),
        flags=meta(nodes - 1, 1 + max(1, num_tokens // 128), 2), word_targets=targets[0], row_targets=targets[1],
        flag_targets=targets[2], epoch=meta(1), fault=meta(8, dtype=torch.int64),
        inner_fault=meta(8, dtype=torch.int64), node=0, place=place, timeout_ns=10**9,
    )  # fmt: skip


def _barriers() -> list[KernelCase]:
    """The barriers for one rank and for the widest group of one host."""
    epoch, fault, cases = meta(1), meta(8, dtype=torch.int64), []
    for ranks in (1, 8):
        flags, name = meta(ranks, dtype=torch.int64), f"up to {ranks} ranks"
        cases += recorded(name, (), align, flags, epoch, fault, 0, 10**10)
        for words, calls, status in ((name, flags, epoch), ("without calls", None, None))[: 1 + ranks // 8]:
            cases += recorded(
                words, (), barrier_kernel[1,], flags, calls, status, epoch, fault, 0, ranks, 10**10, 0,
                W_BLOCK=ranks, INTERPRET=False,
            )  # fmt: skip
    return cases
