"""Caches that the device fills and that the host does: steps, and many tokens, whose experts stream through slots."""

import logging
import re
import threading
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, draw_biases
from decode_cases import stored_parts
from ranks import in_ranks
from torch import Tensor
from training_cases import make_group

from comet.config import MoEConfig
from comet.decode import DecodeWeights
from comet.decode.runners import Decoder, LocalRunner, ReplicatedRunner
from comet.decode.twin import warp_decode_torch
from comet.errors import CommTimeoutError, StepFailedError
from comet.experts import streaming
from comet.experts.budget import CACHED_DECODE_TOKENS
from comet.experts.cache import ExpertCache
from comet.experts.cached import CachedExperts
from comet.experts.paths import report_of_paths
from comet.experts.staged import Stage, StagedCache, StagedExperts
from comet.experts.store import HeldExperts
from comet.experts.streaming import Visit, group_visits, plan_visits
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.reference.plain import plain_experts
from comet.utils.streams import StreamOrder

E, K, D, F = 12, 3, 32, 16
LAYOUT = ExpertLayout(num_experts=E, top_k=K, ep=1, tp=1, rank=0)
CPU = torch.device("cpu")
of_both_caches = pytest.mark.parametrize("staged", [False, True], ids=["pinned", "staged"])


class ReadExperts(HeldExperts):
    """Host memory that notes what was asked for, and of which the expert ``broken`` is read in part, if any is."""

    broken = -1

    @cached_property
    def asked(self) -> list[int]:
        return []

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        self.asked.append(expert)
        into["w1"].copy_(self.w1[expert])
        if expert == self.broken:
            raise OSError(f"expert {expert} is cut off")
        super().read(expert, into)


def made_experts(seed: int, biases: Biases | None = None) -> tuple[ReadExperts, torch.Generator]:
    print("seed", seed)
    made = torch.Generator().manual_seed(seed)
    w1, w2 = torch.randn(E, 2 * F, D, generator=made) / 4, torch.randn(E, D, F, generator=made) / 4
    return ReadExperts(w1, w2, True, **biases._asdict() if biases else {}), made


def path_of(
    held: HeldExperts, num_slots: int, *, staged: bool, num_places: int = E, activation: Activation = SWIGLU
) -> CachedExperts | StagedExperts:
    runner = LocalRunner(K, CACHED_DECODE_TOKENS, activation=activation)
    if staged:
        stage = Stage(num_places, held.specs, CPU)
        return StagedExperts(StagedCache(held, stage, 0, num_slots, CPU, activation=activation), runner, K)
    return CachedExperts(ExpertCache(held, num_slots, CPU, activation=activation), runner, K)


def routed(made: torch.Generator, num_tokens: int, num_used: int = E) -> RoutedTokens:
    tokens = torch.randn(num_tokens, D, generator=made)
    ids = torch.stack([torch.randperm(num_used, generator=made)[:K] for _ in range(num_tokens)]).int()
    ids[0, 0] = -1
    return RoutedTokens(tokens, ids, torch.rand(num_tokens, K, generator=made))


def check_slots(cache: ExpertCache | StagedCache, held: HeldExperts) -> set[int]:
    """Tables agree with each other, and every slot holds what they say; returns the experts that are there."""
    owners = cache.owners()
    slots = {expert: slot for slot, expert in enumerate(owners) if expert >= 0}
    assert cache.weights.slots.tolist() == [slots.get(expert, -1) for expert in range(E)]
    for expert, slot in slots.items():
        assert torch.equal(cache.weights.w1[slot], held.w1[expert])
        assert torch.equal(cache.weights.w2[slot], held.w2[expert])
    return set(slots)


def test_the_example_of_the_docs() -> None:
    assert plan_visits([2, 0, 1, 3], [1, 3]) == [Visit(3, 1, False), Visit(2, 0, True), Visit(0, 1, True)]


@pytest.mark.parametrize("seed", range(5))
def test_every_needed_expert_is_visited_once_and_no_slot_is_taken_before_its_expert_was(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (20,), generator=made).tolist()
    owners = [*torch.randperm(20, generator=made)[:5].tolist(), -1]
    held, computed = dict(enumerate(owners)), set()
    for visit in plan_visits(counts, owners):
        if visit.is_missing:
            replaced = held[visit.slot]
            assert replaced < 0 or not counts[replaced] or replaced in computed
            held[visit.slot] = visit.expert
        assert held[visit.slot] == visit.expert
        computed.add(visit.expert)
    assert computed == {expert for expert, count in enumerate(counts) if count}


def test_the_example_of_groups() -> None:
    visits = [Visit(3, 1, False), Visit(2, 2, True), Visit(0, 0, True), Visit(1, 1, True)]
    assert group_visits(visits, [1, 1, 1, 1], 3, 2) == [[visits[0]], [visits[2], visits[1]], [visits[3]]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_follow_each_other_copy_to_different_slots(seed: int) -> None:
    """One group travels while the other is computed."""
    made = torch.Generator().manual_seed(seed)
    num_slots = 3 + seed
    counts = torch.randint(0, 4000, (30,), generator=made).tolist()
    owners = torch.randperm(30, generator=made)[:num_slots].tolist()
    visits = plan_visits(counts, owners)
    groups = group_visits(visits, counts, num_slots, num_slots // 2)
    assert [sorted(group, key=visits.index) for group in groups] == [
        [visit for visit in visits if visit in group] for group in groups
    ]
    assert sorted((visit for group in groups for visit in group), key=visits.index) == visits
    for group, following in pairwise(groups):
        assert len({visit.is_missing for visit in group}) == 1
        assert len(group) == 1 or sum(counts[visit.expert] for visit in group) <= streaming.MOST_ROWS
        if group[0].is_missing:
            assert not {visit.slot for visit in group} & {visit.slot for visit in following}


@of_both_caches
@pytest.mark.parametrize(("num_slots", "num_places"), [(K, K), (5, 8), (E, E)])
@pytest.mark.parametrize("num_rows", [9, streaming.MOST_ROWS])
def test_streamed_experts_equal_the_plain_path_bit_for_bit_between_decode_steps(
    num_rows: int, num_slots: int, num_places: int, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing experts are fetched once; the stage does not read an expert again that it holds."""
    monkeypatch.setattr(streaming, "MOST_ROWS", num_rows)
    held, made = made_experts(num_slots)
    path = path_of(held, num_slots, staged=staged, num_places=num_places)
    there, fetched = set[int](), 0
    for num_tokens in (1, 40, 2, 70, 1, 17):
        given = routed(made, num_tokens, num_used=E if num_tokens > 17 else 5)
        found, wanted = path(given, held.w1, held.w2), plain_experts(given, held.w1, held.w2, LAYOUT, None)
        report = report_of_paths([path])
        if num_tokens > CACHED_DECODE_TOKENS:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted)
        if num_tokens != 2:  # Parts of two tokens may need more experts than there are slots.
            assert report.fetched - fetched == len(set(given[1].flatten().tolist()) - {-1} - there)
        there, fetched = check_slots(path.cache, held), report.fetched
    assert report.needed >= report.fetched
    assert (report.fetched == E) == (num_slots == E), "what has a slot is not copied again"
    assert not staged or E <= path.cache.stage.num_reads <= (E if num_places == E else report.fetched)
    assert path(given.part(slice(0)), held.w1, held.w2).shape == (0, D)


@of_both_caches
@pytest.mark.parametrize("activation", ACTIVATIONS[1:], ids=NAMES[1:])
def test_streamed_experts_have_the_layers_activation_and_biases(activation: Activation, staged: bool) -> None:
    biases = draw_biases(E, F, D, torch.float32) if activation.parameters else None
    held, made = made_experts(5, biases)
    path = path_of(held, 5, staged=staged, num_places=8, activation=activation)
    for num_tokens in (1, 40, 2, CACHED_DECODE_TOKENS + 1, 1):
        inputs = routed(made, num_tokens), held.w1, held.w2
        torch.testing.assert_close(path(*inputs, biases), plain_experts(*inputs, LAYOUT, None, activation, biases))
    given = routed(made, CACHED_DECODE_TOKENS + 1)
    found = path(given._replace(top_k_ids=torch.full_like(given.top_k_ids, -1)), held.w1, held.w2, biases)
    assert torch.equal(found, torch.zeros_like(given.tokens)), "as where all tokens go to experts of other ranks"


@of_both_caches
@pytest.mark.parametrize("num_tokens", [1, CACHED_DECODE_TOKENS + 1])
def test_routing_weights_that_learn_are_refused(num_tokens: int, staged: bool) -> None:
    """A path with a cache refuses tokens of a router in training; a runner that has all experts takes them."""
    held, made = made_experts(3)
    given = routed(made, num_tokens)
    given.top_k_weights.requires_grad_()
    with pytest.raises(ValueError, match="requires_grad=True of tokens or top_k_weights must be False: a model with"):
        path_of(held, 5, staged=staged)(given, held.w1, held.w2)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("num_bytes", [1, 2 * 3 * D * 2 * F * 4, streaming.FLOATING_BYTES])
def test_quantised_experts_stream_as_they_decode(num_bytes: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FLOATING_BYTES", num_bytes)
    held, made = made_experts(11)
    parts = stored_parts(kind, held.w1, held.w2.repeat(1, 1, 2))
    parts |= {name: parts[name].repeat(1, 2, 1) for name in ("w1", "w1_scales")}
    path = path_of(HeldExperts(**parts, readable=True), 4, staged=False)
    given = routed(made, 20)
    wanted = warp_decode_torch(*given, DecodeWeights(**parts, slots=torch.arange(E, dtype=torch.int32)))
    torch.testing.assert_close(path(given, held.w1, held.w2), wanted)


@of_both_caches
def test_a_copy_that_fails_leaves_no_slot_that_is_taken_for_what_it_does_not_hold(
    staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, made = made_experts(9)
    path = path_of(held, 4, staged=staged, num_places=4)
    path(routed(made, 1), held.w1, held.w2)
    original, inputs = path.cache.copy, (routed(made, 30), held.w1, held.w2)

    def copy(visits: list[Visit]) -> None:
        if any(visit.expert == ReadExperts.broken for visit in visits):
            raise OSError("expert 5 is cut off")
        original(visits)

    monkeypatch.setattr(ReadExperts, "broken", 5)
    if not staged:
        monkeypatch.setattr(path.cache, "copy", copy)
    with pytest.raises(OSError, match="expert 5 is cut off"):
        path(*inputs)
    path(routed(made, 1, num_used=5), held.w1, held.w2)
    assert 5 not in check_slots(path.cache, held)
    monkeypatch.undo()
    assert torch.equal(path(*inputs), plain_experts(*inputs, LAYOUT, None))


def test_a_cache_holds_experts_that_there_are() -> None:
    held, _ = made_experts(1)
    with pytest.raises(ValueError, match="first_expert=1 and the 12 of w1 must be among num_experts=12"):
        ExpertCache(held, K, CPU, num_experts=E, first_expert=1)


@of_both_caches
def test_threads_take_turns(staged: bool) -> None:
    """A second thread would give away slots that the first thread's step is about to read."""
    held, made = made_experts(21)
    path, found, begun, may_go_on = path_of(held, K, staged=staged), {}, threading.Event(), threading.Event()
    decode = path.runner.decode

    class Waiting(Decoder):
        def __call__(self, *step: object) -> Tensor:
            begun.set()
            may_go_on.wait()
            return decode(*step)

    path.runner.decode = Waiting(K, decode.max_tokens)
    given = [routed(made, 1) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: path(given[n], held.w1, held.w2)})) for n in range(2)
    ]
    threads[0].start()
    begun.wait()
    path.runner.decode = decode
    threads[1].start()
    threads[1].join(0.3)
    assert not found, "the other thread's step is under way"
    may_go_on.set()
    for number, thread in enumerate(threads):
        thread.join()
        torch.testing.assert_close(found[number], plain_experts(given[number], held.w1, held.w2, LAYOUT, None))


@of_both_caches
def test_a_call_waits_for_what_the_one_before_was_given(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call before may have run on another stream, as another thread's call does."""
    held, made = made_experts(22)
    path, joined = path_of(held, K, staged=staged), []
    monkeypatch.setattr(StreamOrder, "join", lambda _: joined.append(num_tokens))
    for num_tokens in (1, 30):
        path(routed(made, num_tokens), held.w1, held.w2)
    assert joined == [1, 30]


# ---- what the host reads ---------------------------------------------------------------------------------------------


def test_prompts_and_steps_of_a_rank_find_an_expert_in_the_stage_by_one_number() -> None:
    reader, _ = made_experts(9)
    cache = StagedCache(reader, Stage(8, reader.specs, CPU), 0, 2, CPU, num_experts=24, first_expert=10)
    cache.copy([Visit(4, 0, True)])
    cache.bring(torch.tensor([[14]]))
    assert reader.asked == [4]


def test_the_slot_used_longest_ago_is_given_away() -> None:
    """This is the example of the docstring."""
    reader, _ = made_experts(3)
    cache = StagedCache(reader, Stage(8, reader.specs, CPU), 0, 2, CPU)
    for ids in ([[3]], [[0]], [[3, 2]]):
        slots = cache.bring(torch.tensor(ids, dtype=torch.int32)).slots
    assert check_slots(cache, reader) == {2, 3}
    assert slots[2] == 1 - slots[3]
    assert (cache.needed, cache.fetched) == (4, 3)


def test_a_read_that_takes_long_is_named_with_its_layer(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    (reader, _), named, read = made_experts(6), threading.Event(), ReadExperts.read
    handler = logging.Handler()
    handler.emit = lambda record: named.set()
    stage = Stage(2, reader.specs, CPU, patience_s=0.01)
    cache = StagedCache(reader, stage, 3, 2, CPU, num_experts=24, first_expert=10)
    monkeypatch.setattr(ReadExperts, "read", lambda *given: named.wait(60) and read(*given))  # ends once it is named
    logging.getLogger().addHandler(handler)  # behind caplog's
    try:
        with caplog.at_level(logging.WARNING, "comet"):
            slots = cache.bring(torch.tensor([[14, 9]]))
    finally:
        logging.getLogger().removeHandler(handler)
    assert caplog.messages[0].startswith("still reading expert 14 of MoE layer 3 after 0.0 s")
    assert torch.equal(slots.w1[int(slots.slots[14])], reader.w1[4])
    assert (slots.slots >= 0).sum() == 1, "expert 9 is another rank's"


def test_a_read_that_other_ranks_do_not_wait_for_ends_the_step_by_its_name() -> None:
    reader, _ = made_experts(6)
    cache = StagedCache(reader, Stage(2, reader.specs, CPU, deadline_s=0.0), 3, 2, CPU)
    for _ in range(2):
        with pytest.raises(CommTimeoutError, match=r"^expert 4 of MoE layer 3 took .* other ranks wait for 0\.0 s"):
            cache.bring(torch.tensor([[4]]))
    assert reader.asked == [4, 4], "it is not taken for read"


@pytest.mark.parametrize("num_tokens", [1, 17])
@in_ranks(2)
def test_a_rank_that_cannot_read_an_expert_is_named_and_no_rank_goes_on_without_it(
    rank: int, world_size: int, num_tokens: int
) -> None:
    """Rank 1 fails to read an expert in the second call; then both ranks call the layer with other tokens."""
    config = MoEConfig(hidden_size=D, ffn_size=F, num_experts=E, top_k=K)
    half, group = E // world_size, make_group(config, ep=world_size, max_tokens=64)
    held, made = made_experts(7)
    own = slice(rank * half, rank * half + half)
    reader = ReadExperts(held.w1[own], held.w2[own], True)
    stage, place = Stage(K, reader.specs, CPU), dict(num_experts=E, first_expert=own.start)
    cache = StagedCache(reader, stage, 0, K, CPU, **place)
    path, met = StagedExperts(cache, ReplicatedRunner(config, group, 4), K), []
    for call in range(3):
        given = routed(made, num_tokens, num_used=9)
        if call == 1:
            given[1][:] = torch.arange(9, 12)  # none of which has been read
        ReadExperts.broken = 9 - own.start
        try:
            found = path(given, held.w1, held.w2)
            torch.testing.assert_close(found, plain_experts(given, held.w1, held.w2, LAYOUT, None))
            met.append("")
        except (OSError, StepFailedError) as error:
            met.append(str(error))
    first, reason, later = met
    assert not first
    assert reason.endswith("is cut off") or rank == 0
    told = r"of experts failed on rank 1 \(OSError: expert \d+ is cut off"
    assert all(re.search(told, each) for each in ((later,) if rank else (reason, later)))
