"""Self-speculative decoding (SS-MoE): the model drafts with few of its experts and verifies with all K of them.

A round drafts up to g tokens, each drawn from the distribution q of a pass with r < K experts a layer, and verifies all
of them in one pass with K experts, which gives the distribution p of every drafted position and of the one behind.
Drafts are drawn; were they the most probable tokens of q, accepting them with min(1, p / q) would not be lossless.

- ``conservative``: a draft is accepted with probability min(1, p / q). In place of the first one that is not comes a
  draw from max(p - q, 0), normalised; behind drafts that were all accepted, a draw from p. So a text has the
  distribution of plain decoding. At temperature 0 p and q are certain of one token, and the text is that of plain
  decoding.
- ``adaptive``: a draft is accepted where q > tau and p / q > 1 - T; in place of the first one that is not comes a draw
  from p.

A sequence stops drafting behind a token whose q is below tau. That token is verified as the others are: to drop it
would favour tokens that q is sure of, and the text would have another distribution.

Keys and values of drafts come from r experts; the verifying pass starts where the round did and writes them again.

Over ranks every rank holds the same tokens, but the last bits of logits may differ, and each rank's clock goes its own
way. So rank 0 decides and the others follow. A round of g drafts has g + 1 small broadcasts: one of every drafted token
of each sequence and whether the sequence goes on drafting; one of the verdict: accepted drafts, the next token, and the
draft length of the next round.

Letters: B sequences, g drafts, G the longest draft, V vocabulary.

How many tokens to draft follows from what rounds took and how many of their drafts were accepted. A round with g drafts
takes g drafting passes and one that verifies g + 1 tokens; g = 0 is a plain decode step. What a round costs depends on
the machine, on the link to the host and on which experts are cached, so nothing is assumed: the rounds themselves are
timed, and a plain step is taken again now and then to see whether it has become the better one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from comet.comm.collectives import of_first_rank
from comet.config import SpeculationConfig
from comet.generation.engine import Engine
from comet.generation.sampling import Sampler, pick, token_or_none, with_token

# Rounds of plain steps, and as many of the longest drafts, are taken before anything is chosen.
FIRST_ROUNDS = 2
TIMES_KEPT = 9  # The median of a length's last times ignores a round that waited for something else.
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
    for length, taken in enumerate(seconds):
        tokens += acceptance[length - 1] if length else 0.0
        if tokens / taken > best_rate:
            best, best_rate = length, tokens / taken
    return best


def between(seconds: Sequence[float | None]) -> list[float]:
    """Fill in what was not measured, on the line between its measured neighbours.

    Example: ``[10, None, None, 16]`` gives ``[10, 12, 14, 16]``.
    """
    filled: list[float] = []
    for length, taken in enumerate(seconds):
        if taken is None:
            after = next(place for place in range(length, len(seconds)) if seconds[place] is not None)
            target = seconds[after]
            assert target is not None, "the last one is measured"
            taken = filled[-1] + (target - filled[-1]) / (after - length + 1)
        filled.append(taken)
    return filled


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The tokens that a round drafted, and what they were drawn from."""

    ids: Tensor  # (B, g + 1) int64: the newest token of each sequence, and its drafts
    proposed: Tensor  # (B, g) bool: drafted before the sequence stopped; the others are ignored
    confidence: Tensor  # (B, g) float64: probability of each draft, before temperature 0 makes it certain
    # (B, V) float64 for each of the g places: what its drafts were drawn from; zero where none is proposed
    q: Sequence[Tensor]
    finite: Tensor  # (B, g) bool: False where one was drafted from logits that are not
    # (B, g + 1, V) bool: tokens before each place and behind the last; None where no choice depends on them
    seen: Tensor | None


class Speculation:
    """Rounds of drafting and verifying over one batch of sequences.

    Args:
        draws: ``(N, B, 2G + 1)`` float64 in [0, 1) that nothing else uses, for N rounds: what a round compares and
            draws with.
        clock: In seconds; draft lengths follow what rounds take by that of rank 0.
    """

    def __init__(
        self,
        model: Engine,
        sampling: Sampler,
        config: SpeculationConfig,
        draws: Tensor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.config = config
        self.report = SpeculationReport(config.speculate, config.draft_tokens)
        self._length = DraftLength(config.draft_tokens)
        self._next_length = self._length.choose()  # before anything was measured: the same on all ranks
        self._ended = [False] * draws.shape[1]
        self._draws = iter(draws)
        self._clock = clock

    @property
    def passes(self) -> int:
        return self.report.passes

    def __call__(self, last: Tensor, active: Sequence[bool], most_tokens: int) -> tuple[Tensor, list[list[int]]]:
        """One round (collective).

        Args:
            last: ``(B,)`` int64, the newest token of each sequence.
            active: Which sequences go on; what the others are given back means nothing.
            most_tokens: That any of them may still make, at least 1.

        Returns:
            The newest tokens ``(B,)`` after the round, and all new tokens of each sequence, 1 to G + 1.
        """
        started, longest = self._clock(), self.config.draft_tokens
        drafting = torch.tensor(active).to(last.device, non_blocking=True)
        self._leave(drafting, [not goes_on for goes_on in active])
        for_drafts, for_verdict, for_next = next(self._draws).split([longest, longest, 1], dim=1)
        length, before = min(self._next_length, most_tokens - 1), self.model.lengths.clone()
        draft = self.draft(last, drafting, length, for_drafts)
        if length:
            self.model.rewind(before)
        decided = self._verified(draft, before, for_verdict, for_next[:, 0])
        rows = torch.cat([decided, draft.ids[:, 1:]], dim=1).tolist()  # waits for the round
        going = [row[:2] for row, goes_on in zip(rows, active, strict=True) if goes_on]
        self.report.add(draft.ids.shape[1], going, agreed=sum(row[3] for row in rows))
        self._next_length = rows[0][4]
        self._length.record(length, self._clock() - started, [number for _, number in going])
        return decided[:, 2], [[*drafts[:number], token] for _, number, token, _, _, *drafts in rows]

    def _leave(self, active: Tensor, ended: list[bool]) -> None:
        """Keep sequences that ended no longer than those that go on: a cache has places for these to reach their end.

        Example: of lengths ``[9, 4, 6]`` the first ended: ``[4, 4, 6]``.
        """
        if ended != self._ended:
            self._ended, lengths = ended, self.model.lengths
            shortest = lengths.where(active, lengths.max()).min()
            self.model.rewind(lengths.where(active, lengths.minimum(shortest)))

    def _verified(self, draft: Draft, before: Tensor, for_verdict: Tensor, for_next: Tensor) -> Tensor:
        """``(B, 5)`` int64: proposed and accepted drafts, the next token or ``NO_TOKEN``, ``agreement``, the length of
        the next round.

        That length follows from the rounds before: this one's time is not known yet, so no rank waits for its host.
        """
        logits = self.model.verify(draft.ids)
        likely, is_finite = self.sampling.probabilities(logits, draft.seen)
        p = self.sampling.certain(likely)
        accepted, weights = verdict(self.config, draft, likely, p, for_verdict)
        agreed = accepted
        if self.config.speculate == "adaptive":
            agreed = agreement(draft, p, accepted, for_verdict)
        length = torch.full_like(accepted, self._length.choose())
        places = torch.arange(logits.shape[1], device=logits.device)
        is_finite[:, :-1] &= draft.finite
        decides = places <= accepted[:, None]
        following = token_or_none(pick(weights, for_next), (is_finite | ~decides).all(1))
        decided = torch.stack([draft.proposed.sum(1), accepted, following, agreed, length], dim=1)
        decided = of_first_rank(decided)
        accepted, following = decided[:, 1], decided[:, 2]
        if draft.q:
            self.model.rewind(before + 1 + accepted)
        if draft.seen is not None:
            self.sampling.seen = with_token(at(draft.seen, accepted), following)
        return decided

    def draft(self, last: Tensor, drafting: Tensor, length: int, draws: Tensor) -> Draft:
        """Draw up to ``length`` tokens of each sequence that is ``drafting (B,)`` in passes with few experts."""
        ids, seen = [last], [self.sampling.seen]
        proposed, confidence, finite, q = [], [], [], []
        for place in range(length):
            likely, is_finite = self.sampling.probabilities(self.model.draft(ids[-1]), seen[-1])
            distribution = self.sampling.certain(likely)
            drawn = pick(distribution, draws[:, place])
            sure = of_tokens(likely, drawn) >= self.config.tau
            token, goes_on = of_first_rank(torch.stack([drawn, drafting & sure]))
            ids.append(token)
            seen.append(with_token(seen[-1], token))
            proposed.append(drafting)
            confidence.append(of_tokens(likely, token))
            finite.append(is_finite | ~drafting)
            q.append(distribution * drafting[:, None])
            drafting = goes_on.bool()
            if self.config.tau > 0 and place + 1 < length and not bool(drafting.any()):
                break
        return Draft(
            ids=torch.stack(ids, dim=1),
            proposed=columns(proposed, drafting),
            confidence=columns(confidence, last.double()),
            finite=columns(finite, drafting),
            q=q,
            seen=None if seen[0] is None else torch.stack([each for each in seen if each is not None], dim=1),
        )


def verdict(config: SpeculationConfig, draft: Draft, likely: Tensor, p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts of each sequence are accepted, and what its next token is drawn from.

    Example (B = g = 1, V = 2): q = ``[0.8, 0.2]`` drafted token 0, p = ``[0.4, 0.6]`` there and ``[1, 0]`` behind it.
    ``conservative`` accepts where the draw is below 0.5, and then draws from ``[1, 0]``, else from ``[0, 0.4]``, which
    is token 1: token 0 comes with 0.8 * 0.5 = 0.4, as p says. ``adaptive`` with T = 0.6 and tau = 0.5 always accepts.

    Args:
        likely: ``(B, g + 1, V)`` float64: the distribution with all experts, as ``draft.confidence`` is with few.
        p: ``(B, g + 1, V)`` float64: ``likely`` as it is drawn from.
        draws: ``(B, at least g)`` float64 in [0, 1).
    """
    drafted = draft.ids[:, 1:]
    if config.speculate == "adaptive":
        enough = of_tokens(likely[:, :-1], drafted) > (1 - config.adaptive_tolerance) * draft.confidence
        accepts = enough & (draft.confidence > config.tau)
    else:
        accepts = draws[:, : drafted.shape[1]] < lossless(draft, p)
    accepted = (accepts & draft.proposed).cumprod(dim=1).sum(dim=1)
    target = at(p, accepted)
    if config.speculate == "adaptive":
        return accepted, target
    q = torch.stack([*draft.q, torch.zeros_like(target)], dim=1)
    corrected = (target - at(q, accepted)).clamp(min=0)  # q is zero where nothing was refused: p itself
    return accepted, corrected.where(corrected.sum(dim=1, keepdim=True) > 0, target)  # else p is q but for rounding


def lossless(draft: Draft, p: Tensor) -> Tensor:
    """``(B, g)`` float64: min(1, p / q) of every draft, what ``conservative`` accepts it with; 0 if not proposed."""
    ratios = [
        of_tokens(p[:, place], token) / of_tokens(q, token)
        for place, (token, q) in enumerate(zip(draft.ids[:, 1:].unbind(1), draft.q, strict=True))
    ]
    return columns(ratios, p[:, 0, 0]).clamp(max=1).where(draft.proposed, 0.0)


def agreement(draft: Draft, p: Tensor, accepted: Tensor, draws: Tensor) -> Tensor:
    """``(B,)`` int64: of the first ``accepted (B,)`` drafts, how many ``conservative`` accepts by the same draws."""
    places = torch.arange(draft.proposed.shape[1], device=p.device)
    return ((draws[:, : len(places)] < lossless(draft, p)) & (places < accepted[:, None])).sum(dim=1)


def of_tokens(probabilities: Tensor, tokens: Tensor) -> Tensor:
    return probabilities.gather(-1, tokens[..., None])[..., 0]


def at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(1, places[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def columns(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """``(B,)`` tensors side by side, ``(B, g)``; of none, of the type of ``like (B,)``."""
    return torch.stack(list(values), dim=1) if values else like[:, None][:, :0]


class SpeculationReport:
    """Counts of what was drafted and accepted."""

    def __init__(self, mode: str, longest: int) -> None:
        self.mode = mode
        self.passes = self._plain_rounds = self._rounds = self._drafts = self._sequences = self._agreed = 0
        self._proposed, self._accepted = [0] * longest, [0] * longest

    def add(self, passes: int, counts: Sequence[Sequence[int]], *, agreed: int) -> None:
        """Count a round of so many passes, (proposed, accepted) drafts of each sequence, and how many accepted ones
        ``conservative`` accepts.
        """
        self.passes += passes
        self._agreed += agreed
        self._rounds += 1
        self._plain_rounds += passes == 1
        self._sequences += len(counts)
        self._drafts += len(counts) * (passes > 1)
        for proposed, accepted in counts:
            for place in range(proposed):
                self._proposed[place] += 1
                self._accepted[place] += place < accepted

    def facts(self) -> dict[str, Any]:
        """Return what ``comet generate`` reports; ``None`` is a share of nothing.

        ``acceptance_by_position``: of the proposed first, second, ... drafts. ``agreement``: of the accepted drafts,
        those that ``conservative`` accepts; at temperature 0 they are the tokens of a plain step. What is below 1 is
        the cost of ``adaptive``. ``mean_draft_length``: of the rounds of a sequence that drafted.
        ``tokens_per_round``: of one sequence.
        """
        drafted, accepted = sum(self._proposed), sum(self._accepted)
        return {
            "mode": self.mode,
            "rounds": self._rounds,
            "plain_rounds": self._plain_rounds,
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": share(accepted, drafted),
            "acceptance_by_position": [share(*pair) for pair in zip(self._accepted, self._proposed, strict=True)],
            "agreement": share(self._agreed, accepted),
            "mean_draft_length": share(drafted, self._drafts),
            "tokens_per_round": share(self._sequences + accepted, self._sequences),
        }


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
