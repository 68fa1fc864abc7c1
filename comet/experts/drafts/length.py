"""How many tokens to draft, from what rounds of speculation took and how many of their drafts were accepted.

A round with g drafts takes g drafting passes and one that verifies g + 1 tokens; g = 0 is a plain decode step. What a
round costs depends on the machine, on the link to the host and on which experts are cached, so nothing is assumed: the
rounds themselves are timed, and a plain step is taken again now and then to see whether it has become the better one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

FIRST_ROUNDS = 2  # of plain steps, and of the longest drafts, before anything is chosen
TIMES_KEPT = 9  # of each length: the median of them ignores a round that waited for something else
PROBE_EVERY = 32  # rounds; so a probe of twice the price costs 3 %
KEPT = 0.98  # share of the counts that a round leaves of those before it
HOPED_FOR = 4.0  # drafts of each place that count as accepted before the first round: two refusals are no proof


class DraftLength:
    """Chooses the draft length of every round."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._rounds = 0
        self._seconds: list[deque[float]] = [deque(maxlen=TIMES_KEPT) for _ in range(longest + 1)]
        self._offered = [HOPED_FOR] * longest
        self._accepted = [HOPED_FOR] * longest

    def choose(self) -> int:
        """Draft length of the next round, 0 to G; 0 is a plain decode step."""
        for length in sorted((self.longest, 0), key=lambda each: len(self._seconds[each])):
            if len(self._seconds[length]) < FIRST_ROUNDS:
                return length
        seconds = between([median(times) if times else None for times in self._seconds])
        best = best_draft_length(seconds, self.acceptance())
        if self._rounds % PROBE_EVERY:
            return best
        return 0 if best else 1 + best_draft_length(seconds[1:], self.acceptance()[1:], 1 + self.acceptance()[0])

    def record(self, length: int, seconds: float, accepted: Sequence[int]) -> None:
        """Count a round: drafts it was allowed to make, its seconds, and drafts accepted of each sequence."""
        self._rounds += 1
        self._seconds[length].append(seconds)
        for place in range(length):
            self._offered[place] = KEPT * self._offered[place] + len(accepted)
            self._accepted[place] = KEPT * self._accepted[place] + sum(number > place for number in accepted)

    def acceptance(self) -> list[float]:
        """Share of rounds that accepted their first, second, ... draft, of those that were allowed to make it."""
        return [each / offered for each, offered in zip(self._accepted, self._offered, strict=True)]


def best_draft_length(seconds: Sequence[float], acceptance: Sequence[float], tokens: float = 1.0) -> int:
    """The draft length with the most tokens per second; of equal ones the shortest.

    A round makes ``tokens`` without a draft, and one more for every accepted draft.

    Example: seconds ``[10, 14, 17, 20]`` and acceptance ``[0.8, 0.4, 0.2]`` make 1, 1.8, 2.2 and 2.4 tokens a round, so
    0.100, 0.129, 0.129 (2.2 / 17 is above 1.8 / 14) and 0.120 tokens a second: 2. With seconds ``[10, 19, 25, 30]``
    speculation loses: 0.
    """
    best, best_rate = 0, 0.0
    for length, time in enumerate(seconds):
        tokens += acceptance[length - 1] if length else 0.0
        if tokens / time > best_rate:
            best, best_rate = length, tokens / time
    return best


def between(seconds: Sequence[float | None]) -> list[float]:
    """What was not measured, on the line between its measured neighbours.

    Example: ``[10, None, None, 16]`` gives ``[10, 12, 14, 16]``.
    """
    filled: list[float] = []
    for length, time in enumerate(seconds):
        if time is None:
            after = next(place for place in range(length, len(seconds)) if seconds[place] is not None)
            target = seconds[after]
            assert target is not None, "the last one is measured"
            time = filled[-1] + (target - filled[-1]) / (after - length + 1)
        filled.append(time)
    return filled
