"""What speculation saves of the bytes over the link: experts fetched for a token, by a recorded routing.

A round drafts d tokens with the best r experts of each and verifies d + 1 tokens with all K, from slots that keep what
was used last. What it accepts is drawn: each draft is right by the same chance, until the first one that is wrong.
Tokens are those of the recording, also where a draft is wrong.

Letters: E experts, K experts of a token, S slots of a layer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lib.report import Row
from lib.routing.traces import Trace, UsedLast

MOST_STEPS = 2000  # of a trace that are emulated
DRAFTS = (0, 1, 2, 4)


def drafting_rows(trace: Trace, slots: Sequence[int], draft_experts: int, acceptance: float) -> list[Row]:
    """Experts that a layer fetches for a token it makes, without drafts and with 1, 2 and 4 in a round.

    Args:
        trace: Best experts first.
        slots: S, each at least K.
        draft_experts: r.
        acceptance: Chance that a draft is right, in [0, 1].
    """
    layers = trace.ids[:MOST_STEPS].transpose(0, 1).tolist()
    rows: list[Row] = []
    for size in slots:
        fetched = {
            drafts: sum(fetched_per_token(ids, size, draft_experts, drafts, acceptance) for ids in layers) / len(layers)
            for drafts in DRAFTS
            if drafts < len(trace.ids)
        }
        rows += [
            {"slots": size, "drafts": drafts, "fetched": count, "x_fewer": fetched[0] / count}
            for drafts, count in fetched.items()
        ]
    return rows


def fetched_per_token(ids: Sequence[Sequence[int]], size: int, draft_experts: int, drafts: int, right: float) -> float:
    """Experts of one layer that are fetched, for each token that is made.

    Example (K = 2, r = 1, two slots, one draft in a round, all right): tokens that need ``[0, 1]``, ``[0, 2]``,
    ``[0, 1]`` and ``[0, 2]`` make two rounds. The first draft fetches 0, and its verification 1 and 2 beside it, of
    which 0 is given away for 2; the second one fetches 0 again, in the place of 1, and 1. Five for four tokens.

    Args:
        ids: ``(N, K)``, best first.
        size: S.
        draft_experts: r.
        drafts: d of a round, fewer than N.
        right: Chance that one is right.
    """
    held, drawn = UsedLast(size), random.Random(0)
    at = fetched = 0
    while at + drafts < len(ids):
        for token in ids[at : at + drafts]:
            fetched += held.use(token[:draft_experts])
        fetched += held.use(expert for token in ids[at : at + drafts + 1] for expert in token)
        at += 1
        for _ in range(drafts):
            if drawn.random() >= right:
                break
            at += 1
    return fetched / at
