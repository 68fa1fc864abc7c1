"""Puts, receives and sums between nodes, under the interpreter in one process, against loops of plain torch."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from leg_cases import COLUMNS, MOST, make_legs
from ranks import in_ranks
from torch import Tensor

from comet.kernels.network.legs import Leg, LegShape, Message
from comet.kernels.network.put import put
from comet.kernels.network.receive import add_nodes, receive
from comet.kernels.runtime.faults import Place
from comet.kernels.runtime.limits import CHUNK_ROWS, LEG_HEADER

FORWARD = torch.zeros(1, dtype=torch.int32)


def message(x: Tensor, tokens: Tensor, words: Tensor, counts: Tensor, **others: Any) -> Message:
    """All that travels, of a forward pass of call 16, unless ``others`` say something else."""
    slots, chunks = range(len(counts)), range(MOST // CHUNK_ROWS)
    given: dict[str, Any] = dict(number=FORWARD, call=16, slots=slots, chunks=chunks, has_words=True)
    return Message(x=x, tokens=tokens, words=words, counts=counts, **given | others)


def draw_sends(num_tokens: int, num_nodes: int, top_k: int, **others: Any) -> Message:
    """Rows of a rank, and of each slot which of them it sends, words, and how many."""
    slots, seed = num_nodes - 1, random.randrange(10**6)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    counts = torch.randint(0, num_tokens + 1, (slots,), dtype=torch.int32)
    tokens = torch.full((slots, MOST), 10**6, dtype=torch.int32)  # no rank has such a token
    for slot, count in enumerate(counts.tolist()):
        tokens[slot, :count] = torch.randperm(num_tokens)[:count].sort().values
    words = torch.randint(-1, 1000, (slots, MOST, 2 * top_k), dtype=torch.int32)
    return message(torch.randn(num_tokens, COLUMNS), tokens, words, counts, **others)


@pytest.mark.parametrize(("num_nodes", "num_tokens", "top_k"), [(2, 150, 1), (3, 256, 3), (4, 20, 8)])
@in_ranks(1, interpret=True)
def test_guests_arrive_as_they_were_sent(
    rank: int, world_size: int, num_nodes: int, num_tokens: int, top_k: int
) -> None:
    legs, number = make_legs(num_nodes, top_k, is_home=False, epoch=4), torch.tensor([3], dtype=torch.int32)
    slots, chunks = range(num_nodes - 1), range(MOST // CHUNK_ROWS)
    sent = [draw_sends(num_tokens, num_nodes, top_k, number=number) for _ in legs]
    for leg, each in zip(legs, sent, strict=True):
        put(leg, each)
    for node, leg in enumerate(legs):
        came = torch.full((num_nodes - 1,), -1, dtype=torch.int32)
        for slot in slots:
            of = sent[(node - 1 - slot) % num_nodes]
            count = int(of.counts[slot])
            assert leg.words[slot, :3].tolist() == [count, 16, 3]
            assert torch.equal(leg.rows[slot, :count], of.x[of.tokens[slot, :count].long()])
            assert leg.rows[slot, count:].isnan().all(), "nothing is written behind the last row"
            raised = [5] + [5 * (count > CHUNK_ROWS * chunk) for chunk in chunks]
            assert leg.flags[slot, :, 0].tolist() == raised
            for chunk in chunks:
                ids = torch.full((CHUNK_ROWS, top_k), -9, dtype=torch.int32)
                weights = torch.empty(CHUNK_ROWS, top_k)
                receive(leg, came, number, 16, range(slot, slot + 1), range(chunk, chunk + 1), (ids, weights))
                here = of.words[slot, CHUNK_ROWS * chunk : min(count, CHUNK_ROWS * (chunk + 1))]
                assert torch.equal(ids[: len(here)], here[:, :top_k])
                assert torch.equal(weights[: len(here)].view(torch.int32), here[:, top_k:])
                assert (ids[len(here) :] == -1).all()
            assert came[slot] == count
        assert not leg.fault.any()
        assert not leg.inner_fault.any()


@in_ranks(1, interpret=True)
def test_sums_go_home_part_by_part_and_words_with_the_last(rank: int, world_size: int) -> None:
    legs = make_legs(2, 1, is_home=True)
    x, grads = torch.randn(MOST, COLUMNS), torch.randint(0, 99, (MOST, 1), dtype=torch.int32)
    count, came = torch.tensor([CHUNK_ROWS + 3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    places = torch.arange(MOST, dtype=torch.int32)
    put(legs[1], message(x[:CHUNK_ROWS], places, grads[:, :0], count, call=0, chunks=range(1), has_words=False))
    assert legs[0].flags[0, :, 0].tolist() == [0, 1, 0]
    rest = places - CHUNK_ROWS
    put(legs[1], message(x[CHUNK_ROWS:], rest, grads, count, call=0, chunks=range(1, 2)))
    receive(legs[0], came, FORWARD, 0, range(1), range(2))
    assert came.tolist() == [CHUNK_ROWS + 3]
    assert torch.equal(legs[0].rows[0, : CHUNK_ROWS + 3], x[: CHUNK_ROWS + 3])
    assert legs[0].rows[0, CHUNK_ROWS + 3 :].isnan().all()
    assert torch.equal(legs[0].words[0, LEG_HEADER : LEG_HEADER + CHUNK_ROWS + 3], grads[: CHUNK_ROWS + 3, 0])
    assert not legs[0].fault.any()


def received(leg: Leg, *, number: int = 0, call: int = 16) -> tuple[int, Tensor]:
    """How many guests a wait found, and their ids."""
    came, ids = torch.full((leg.flags.shape[0],), -1, dtype=torch.int32), torch.zeros(MOST, 1, dtype=torch.int32)
    given = came, torch.tensor([number], dtype=torch.int32), call, range(1), range(MOST // CHUNK_ROWS)
    receive(leg, *given, None if leg.is_home else (ids, torch.empty(MOST, 1)))
    return int(came[0]), ids


@pytest.mark.parametrize("is_home", [False, True])
@in_ranks(1, interpret=True)
def test_what_is_missing_or_of_another_pass_is_recorded_and_is_no_guest(
    rank: int, world_size: int, is_home: bool
) -> None:
    """Three nodes; what comes through slot 0 of node 0 comes from node 2, and sums of slot 0 from node 1."""
    source, place = (1, Place.SUMS) if is_home else (2, Place.GUESTS)
    x, words = torch.randn(MOST, COLUMNS), torch.zeros(2, MOST, 2, dtype=torch.int32)
    tokens = torch.arange(MOST, dtype=torch.int32).expand(2, -1).contiguous()
    counts, number = torch.full((2,), MOST, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    sent = {
        "nothing": ([], {}, [1, place, source, 0, 1, 0, 1]),
        "no words": ([dict(has_words=False)], {}, [1, place, source, 0, 1, 0, 1]),
        "a chunk is missing": ([dict(chunks=range(1))], {"number": 3}, [1, place, source, 2, 1, 0, 1]),
        "another layer": ([{}], {"number": 3, "call": 32}, None),
        "another backward pass": ([{}], {"number": 7}, None),
        "a forward pass here": ([{}], {}, None),
    }
    for what, (puts, expected, record) in sent.items():
        legs = make_legs(3, 1, is_home=is_home)
        for each in puts:
            put(legs[source], message(x, tokens, words, counts, number=number, slots=range(1), **each))
        count, ids = received(legs[0], **expected)
        mine = expected.get("call", 16), expected.get("number", 0)
        record = record or [1, Place.OTHER_CALL, source + 3 * 16, mine[0], mine[1], 3, 1]
        assert legs[0].fault[:7].tolist() == record, what
        assert legs[0].inner_fault[:2].tolist() == [1, Place.ELSEWHERE], what
        guests = CHUNK_ROWS if "chunk" in what else 0
        assert count == (MOST if guests else 0), what
        assert is_home or (ids[guests:] == -1).all(), what


@pytest.mark.parametrize("where", ["fault", "inner_fault"])
@in_ranks(1, interpret=True)
def test_a_rank_that_failed_sends_nothing(rank: int, world_size: int, where: str) -> None:
    legs = make_legs(2, 1, is_home=False)
    getattr(legs[0], where)[0] = 1
    put(legs[0], draw_sends(40, 2, 1))
    assert not legs[1].flags.any()
    assert legs[1].rows.isnan().all()
    assert (legs[1].words == -7).all()


@in_ranks(1, interpret=True)
def test_slots_of_a_ring_take_turns_in_its_memory(rank: int, world_size: int) -> None:
    """Four nodes with memory for two slots: slot 2 takes the place of slot 0, whose flags stay."""
    legs, sent = make_legs(4, 2, is_home=False, ring=2), [draw_sends(200, 4, 2) for _ in range(4)]
    came = torch.zeros(3, dtype=torch.int32)
    for slots in (range(2), range(2, 3)):
        for leg, each in zip(legs, sent, strict=True):
            put(leg, replace(each, slots=slots))
        for (node, leg), slot in product(enumerate(legs), slots):
            of = sent[(node - 1 - slot) % 4]
            count = int(of.counts[slot])
            ids, weights = torch.empty(MOST, 2, dtype=torch.int32), torch.empty(MOST, 2)
            receive(leg, came, FORWARD, 16, range(slot, slot + 1), range(MOST // CHUNK_ROWS), (ids, weights))
            assert came[slot] == count
            assert torch.equal(leg.rows[slot % 2, :count], of.x[of.tokens[slot, :count].long()])
            assert torch.equal(ids[:count], of.words[slot, :count, :2])
            assert leg.flags[:, 0, 0].tolist() == [1, 1, int(slots.start == 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16 is rounded otherwise there
@pytest.mark.parametrize("ring", [None, 2])
@pytest.mark.parametrize(("num_nodes", "num_tokens", "columns"), [(2, 1, 16), (3, 40, 48), (4, 17, 5), (3, 0, 16)])
@in_ranks(1, interpret=True)
def test_nodes_are_added_in_their_order_in_float32(
    rank: int, world_size: int, num_nodes: int, num_tokens: int, columns: int, ring: int | None, dtype: torch.dtype
) -> None:
    """In a ring slot by slot, and own results last."""
    torch.manual_seed(seed := random.randrange(10**6))
    print(f"seed {seed}")
    slots, chunks = num_nodes - 1, MOST // CHUNK_ROWS
    sizes = dict(
        num_chunks=chunks, chunk=CHUNK_ROWS, slot_words=0, header=0, place=Place.SUMS, is_home=True, interpret=True
    )
    shape = LegShape(num_nodes=num_nodes, ring=ring or slots, **sizes)
    for node in range(num_nodes):
        own = torch.randn(num_tokens, columns).to(dtype)
        wide = torch.full((slots, MOST, columns + 3), torch.nan).to(dtype)
        returned, places = wide[..., :columns], torch.full((slots, MOST), 10**6, dtype=torch.int32)
        for slot in range(slots):
            travels = torch.rand(num_tokens) < 0.6
            places[slot, :num_tokens] = torch.where(travels, travels.cumsum(0) - 1, -1)
            returned[slot, : int(travels.sum())] = torch.randn(int(travels.sum()), columns).to(dtype)
        total = torch.zeros(num_tokens, columns)
        for slot in range(num_nodes) if ring else ((each - node - 1) % num_nodes for each in range(num_nodes)):
            if slot == slots:
                total += own.float()
                continue
            travels = places[slot, :num_tokens] >= 0
            total[travels] += returned[slot, : int(travels.sum())].float()
        if ring is None:
            found = add_nodes(own, None, returned, places, shape, node, range(num_nodes))
        else:
            found, ends = torch.zeros(num_tokens, columns), (*range(1, slots), num_nodes)
            for first, end in zip((0, *ends), ends, strict=False):
                mine, of_slot = own if end == num_nodes else None, returned[first].expand(ring, -1, -1)
                found = add_nodes(mine, found, of_slot, places, shape, slots, range(first, end))
        assert torch.equal(found, total.to(dtype))
