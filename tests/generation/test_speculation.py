"""Drafting and verifying keep the distribution of plain sampling, by chi-square against exact probabilities."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from comet.config import SpeculationConfig
from comet.generation.sampling import Sampler, pick, tokens_seen
from comet.generation.speculation import (
    FIRST_ROUNDS,
    PROBE_EVERY,
    Draft,
    DraftLength,
    Speculation,
    SpeculationReport,
    best_draft_length,
    between,
    verdict,
)
from comet.jobs.generate import GenerateConfig

CPU = torch.device("cpu")
VOCABULARY, TOKENS, SEQUENCES, SEED = 4, 4, 20_000, 11
# Everything that changes a distribution, at once; top_k leaves out a token, top_p sometimes another one.
SAMPLING = GenerateConfig(temperature=0.9, top_k=3, top_p=0.95, repetition_penalty=1.4)
CONFIG = SpeculationConfig(draft_tokens=3, tau=0.4)


class TwoTokenModel:
    """A model whose logits depend on the newest two tokens; all sequences start with two zeros."""

    def __init__(self, num_sequences: int, likeness: float = 0.5) -> None:
        drawn = torch.Generator().manual_seed(SEED)
        self.full = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=drawn) * 1.5
        self.few = self.full + torch.randn(self.full.shape, generator=drawn) * likeness
        self.ids = torch.zeros(num_sequences, 64, dtype=torch.int64)
        self.lengths = torch.ones(num_sequences, dtype=torch.int64)

    def rewind(self, lengths: Tensor) -> None:
        self.lengths = lengths.clone()

    def verify(self, ids: Tensor) -> Tensor:
        places = self.lengths[:, None] + torch.arange(ids.shape[1])
        self.ids.scatter_(1, places, ids)
        self.lengths = self.lengths + ids.shape[1]
        return self.full[self.ids.gather(1, places - 1), ids]

    def decode(self, ids: Tensor) -> Tensor:
        return self.verify(ids[:, None])[:, 0]

    def draft(self, ids: Tensor) -> Tensor:
        before = self.ids.gather(1, self.lengths[:, None] - 1)[:, 0]
        self.decode(ids)
        return self.few[before, ids]


def sampler_of(config: GenerateConfig, num_sequences: int) -> Sampler:
    zeros = torch.zeros(num_sequences, 2, dtype=torch.int64)
    seen = tokens_seen(zeros, torch.full((num_sequences,), 2), VOCABULARY)
    return Sampler(config, num_sequences, CPU, seen=seen if config.repetition_penalty != 1 else None)


def exact_distribution(config: GenerateConfig) -> Tensor:
    """``(V ** TOKENS,)``: the probability of every text by plain sampling."""
    model, sampler = TwoTokenModel(1), sampler_of(config, 1)
    found = []
    for text in itertools.product(range(VOCABULARY), repeat=TOKENS):
        before, last, probability, seen = 0, 0, 1.0, {0}
        for token in text:
            row = torch.tensor([[each in seen for each in range(VOCABULARY)]])
            given = row if config.repetition_penalty != 1 else None
            probability *= float(sampler.probabilities(model.full[before, last][None], given)[0][0, token])
            before, last = last, token
            seen.add(token)
        found.append(probability)
    return torch.tensor(found, dtype=torch.float64)


def speculated(config: SpeculationConfig, sampling: GenerateConfig) -> Tensor:
    """``(V ** TOKENS,)``: how many of the sequences became each text."""
    draws = torch.rand(2 * TOKENS, SEQUENCES, 2 * config.draft_tokens + 1, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(SEED))  # fmt: skip
    loop = Speculation(TwoTokenModel(SEQUENCES), sampler_of(sampling, SEQUENCES), config, draws)
    texts: list[list[int]] = [[] for _ in range(SEQUENCES)]
    last = torch.zeros(SEQUENCES, dtype=torch.int64)
    while min(map(len, texts)) < TOKENS:
        last, made = loop(last, [True] * SEQUENCES, 20)
        for text, tokens in zip(texts, made, strict=True):
            text.extend(tokens)
        assert last.tolist() == [text[-1] for text in texts]
    facts = loop.report.facts()
    assert 0 < facts["accepted"] < facts["drafted"]
    assert facts["plain_rounds"] >= 1, "both kinds of rounds are in it"
    counts = torch.zeros(VOCABULARY**TOKENS)
    for text in texts:
        counts[sum(token * VOCABULARY**place for place, token in enumerate(reversed(text[:TOKENS])))] += 1
    return counts


def deviation(counts: Tensor, probabilities: Tensor) -> float:
    """Chi-square of counts, in standard deviations from what chance gives; texts that are too rare count as one."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    pairs = [*zip(counts[~rare].tolist(), expected[~rare].tolist(), strict=True)]
    pairs.append((float(counts[rare].sum()), max(float(expected[rare].sum()), 1e-9)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    return float((statistic - (len(pairs) - 1)) / (2 * (len(pairs) - 1)) ** 0.5)


@pytest.mark.parametrize("sampling", [SAMPLING, GenerateConfig(temperature=1.0)], ids=["all rules", "plain"])
@pytest.mark.parametrize("tau", [0.0, 0.4])
def test_conservative_texts_have_the_distribution_of_plain_sampling(sampling: GenerateConfig, tau: float) -> None:
    found = deviation(speculated(replace(CONFIG, tau=tau), sampling), exact_distribution(sampling))
    print("seed", SEED, "deviation", found)
    assert found < 4


def test_adaptive_texts_have_another_distribution() -> None:
    config = replace(CONFIG, speculate="adaptive", adaptive_tolerance=0.5)
    assert deviation(speculated(config, SAMPLING), exact_distribution(SAMPLING)) > 8


def test_adaptive_drafts_agree_less_the_more_is_tolerated() -> None:
    found = {}
    for mode, tolerance in [("conservative", 1.0), ("adaptive", 0.0), ("adaptive", 0.5), ("adaptive", 1.0)]:
        config = replace(CONFIG, speculate=mode, adaptive_tolerance=tolerance, tau=0.0)
        draws = torch.rand(8, 2000, 7, generator=torch.Generator().manual_seed(SEED)).double()
        sampling = sampler_of(GenerateConfig(temperature=1.0), 2000)
        loop = Speculation(TwoTokenModel(2000), sampling, config, draws)
        loop(torch.zeros(2000, dtype=torch.int64), [True] * 2000, 20)
        found[mode, tolerance] = loop.report.facts()["agreement"]
    assert found["conservative", 1.0] == found["adaptive", 0.0] == 1.0
    assert 1 > found["adaptive", 0.5] > found["adaptive", 1.0] > 0.5


def one_draft(token: int, q: list[float]) -> Draft:
    row = torch.tensor([q], dtype=torch.float64)
    yes = torch.tensor([[True]])
    return Draft(
        ids=torch.tensor([[0, token]]), proposed=yes, confidence=row[:, [token]], q=[row], finite=yes, seen=None
    )


@pytest.mark.parametrize(
    ("changes", "draw", "accepted", "weights"),
    [
        ({}, 0.49, 1, [1.0, 0.0]),
        ({}, 0.5, 0, [0.0, 0.4]),
        ({"speculate": "adaptive", "adaptive_tolerance": 0.6}, 0.99, 1, [1.0, 0.0]),
        ({"speculate": "adaptive", "adaptive_tolerance": 0.5}, 0.0, 0, [0.4, 0.6]),
        ({"speculate": "adaptive", "adaptive_tolerance": 0.6, "tau": 0.8}, 0.0, 0, [0.4, 0.6]),
    ],
)
def test_the_verdict_of_the_docs(changes: dict, draw: float, accepted: int, weights: list[float]) -> None:
    p = torch.tensor([[[0.4, 0.6], [1.0, 0.0]]], dtype=torch.float64)
    config = SpeculationConfig(**{"tau": 0.5, **changes})
    number, left = verdict(config, one_draft(0, [0.8, 0.2]), p, p, torch.tensor([[draw]], dtype=torch.float64))
    assert number.tolist() == [accepted]
    torch.testing.assert_close(left[0], torch.tensor(weights, dtype=torch.float64))


def test_a_refusal_by_rounding_draws_from_p() -> None:
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]], dtype=torch.float64)
    draft = one_draft(0, [0.5 + 1e-16, 0.5])
    draft = replace(draft, q=[torch.tensor([[0.5 * (1 + 4e-16), 0.5]], dtype=torch.float64)])
    number, left = verdict(CONFIG, draft, p, p, torch.tensor([[1 - 1e-16]], dtype=torch.float64))
    assert (number.tolist(), left.tolist()) == ([0], [[0.5, 0.5]])


def test_drawing_by_weights() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0]], dtype=torch.float64).expand(3, -1)
    assert pick(weights, torch.tensor([0.2, 0.25, 0.9], dtype=torch.float64)).tolist() == [0, 2, 2]
    ends = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64).expand(2, -1)
    assert pick(ends, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1]


def test_a_sequence_that_has_ended_proposes_nothing_and_is_not_counted() -> None:
    draws = torch.rand(8, 2, 7, generator=torch.Generator().manual_seed(1)).double()
    loop = Speculation(TwoTokenModel(2, 0.0), sampler_of(SAMPLING, 2), replace(CONFIG, tau=0.0), draws)
    _, made = loop(torch.tensor([0, 0]), [True, False], 20)
    assert [len(tokens) for tokens in made] == [4, 1]
    assert loop.report.facts()["drafted"] == 3


def test_drafting_stops_behind_an_unsure_token() -> None:
    model = TwoTokenModel(2)
    model.few = torch.zeros_like(model.few)  # each token has probability 1 / 4, which is below tau
    model.few[:, 1, 2] = 50.0  # but behind token 1 comes token 2
    loop = Speculation(model, sampler_of(GenerateConfig(temperature=1.0), 2), CONFIG, torch.rand(1, 2, 7).double())
    draws = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)).double()
    draft = loop.draft(torch.tensor([0, 1]), torch.tensor([True, True]), 3, draws)
    assert draft.proposed.tolist() == [[True, False], [True, True]], "the unsure token itself is verified"
    assert draft.confidence[1].tolist() == pytest.approx([1.0, 0.25])
    assert draft.ids.shape == (2, 3), "the third pass is not taken"
    assert [each.sum(dim=1).tolist() for each in draft.q] == [[1.0, 1.0], [0.0, 1.0]]


def test_what_is_reported() -> None:
    report = SpeculationReport("conservative", 3)
    report.add(4, [(3, 3), (2, 0)], agreed=2)
    report.add(1, [(0, 0), (0, 0)], agreed=0)
    assert report.facts() == {
        "mode": "conservative", "rounds": 2, "plain_rounds": 1, "drafted": 5, "accepted": 3, "acceptance": 0.6,
        "acceptance_by_position": [0.5, 0.5, 1.0], "agreement": 2 / 3, "mean_draft_length": 2.5,
        "tokens_per_round": 1.75,
    }  # fmt: skip
    empty = SpeculationReport("adaptive", 1).facts()
    assert (empty["acceptance"], empty["acceptance_by_position"], empty["mean_draft_length"]) == (None, [None], None)


def test_the_draft_length_of_the_docs() -> None:
    assert best_draft_length([10, 14, 17, 20], [0.8, 0.4, 0.2]) == 2
    assert best_draft_length([10, 19, 25, 30], [0.8, 0.4, 0.2]) == 0
    assert best_draft_length([10, 20], [1.0]) == 0, "of equal ones the shortest"
    assert between([10, None, None, 16]) == [10, 12, 14, 16]


def run_lengths(seconds: list[float], accepted: int, rounds: int = 400) -> list[int]:
    """Lengths chosen where rounds of each length take so long and accept so many drafts."""
    length, chosen = DraftLength(len(seconds) - 1), []
    for _ in range(rounds):
        chosen.append(length.choose())
        length.record(chosen[-1], seconds[chosen[-1]], [min(accepted, chosen[-1])])
    return chosen


def test_draft_lengths_follow_cost_and_acceptance() -> None:
    assert run_lengths([10, 12, 14, 16, 18], accepted=4).count(4) > 380
    assert run_lengths([10, 12, 14, 16, 18], accepted=1).count(1) > 370
    losing = run_lengths([10, 25, 40, 55, 70], accepted=1)
    assert losing[: 2 * FIRST_ROUNDS] == [4, 0, 4, 0]
    assert losing.count(0) > 370, "plain decode where speculation loses"
    assert 400 // PROBE_EVERY - 1 <= 400 - losing.count(0) - FIRST_ROUNDS <= 400 // PROBE_EVERY + 1
    assert set(losing[2 * FIRST_ROUNDS :]) == {0, 1}, "tried again now and then, where it loses least"


def test_two_refusals_are_no_proof() -> None:
    length = DraftLength(2)
    for _ in range(FIRST_ROUNDS):
        length.record(2, 14.0, [0])
        length.record(0, 10.0, [0])
    assert length.choose() == 2
    for _ in range(16):
        length.record(2, 14.0, [0])
    assert length.choose() == 0, "eighteen are"


def test_a_round_that_waited_for_something_else_changes_nothing() -> None:
    length = DraftLength(1)
    for turn in range(40):
        length.record(turn % 2, 100.0 if turn == 31 else [1.0, 1.5][turn % 2], [1] if turn % 2 else [0])
    assert length.choose() == 1
    for _ in range(60):
        length.record(1, 1.5, [0])
    assert length.choose() == 0, "drafts are refused now"


def test_experts_of_every_layer() -> None:
    assert SpeculationConfig().experts_per_layer(6, 3) == (3, 3, 3)
    assert SpeculationConfig(draft_experts=(2,)).experts_per_layer(6, 3) == (2, 2, 2)
    assert SpeculationConfig(draft_experts=(1, 2, 5)).experts_per_layer(6, 3) == (1, 2, 5)
    for chosen, top_k, layers, message in [
        ((6,), 6, 3, r"draft_experts=\[6\] must be below top_k=6"),
        ((1, 2), 6, 3, "must be one number, or one for each of the 3 MoE layers"),
        ((), 1, 3, "top_k=1 leaves no fewer experts"),
        ((), 6, 0, "the model has no MoE layer"),
    ]:
        with pytest.raises(ValueError, match=message):
            SpeculationConfig(draft_experts=chosen).experts_per_layer(top_k, layers)
