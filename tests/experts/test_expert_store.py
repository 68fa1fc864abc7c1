"""Experts in host memory and in files, brought by the host; budgets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_cases import cache_of
from decode_cases import DecodeCase, stored_parts
from torch import Tensor
from training_cases import MODEL, MOE

from comet.config import MoEConfig, ParallelConfig
from comet.errors import CommTimeoutError
from comet.experts import ExpertCache, store
from comet.experts.budget import ALONE, ExpertBudget, StoreOptions
from comet.experts.cache import bytes_of_expert
from comet.experts.staged import Stage, StagedCache
from comet.experts.store import HeldExperts, Specs, host_memory
from comet.experts.streaming import Visit
from comet.models.config import dense_elements, expert_elements
from comet.quantization.formats import StoredType

CPU = torch.device("cpu")
NUM_EXPERTS, WIDTH, DEPTH = 8, 32, 16


class Recorded:
    """A reader of random experts that notes what was asked for, and fails on the expert ``broken``."""

    def __init__(self, seed: int) -> None:
        print("seed", seed)
        made = torch.Generator().manual_seed(seed)
        self.w1 = torch.randn(NUM_EXPERTS, 2 * DEPTH, WIDTH, generator=made)
        self.w2 = torch.randn(NUM_EXPERTS, WIDTH, DEPTH, generator=made)
        self.asked: list[int] = []
        self.broken = -1

    @property
    def specs(self) -> Specs:
        return {"w1": (tuple(self.w1.shape), torch.float32), "w2": (tuple(self.w2.shape), torch.float32)}

    def read(self, expert: int, into: Mapping[str, Tensor]) -> None:
        self.asked.append(expert)
        into["w1"].copy_(self.w1[expert])
        if expert == self.broken:
            raise ValueError(f"expert {expert} is cut off")
        into["w2"].copy_(self.w2[expert])


def staged(reader: Recorded, num_slots: int, num_places: int) -> StagedCache:
    return StagedCache(reader, Stage(num_places, reader.specs, CPU), 0, num_slots, CPU)


def check_slots(cache: StagedCache, reader: Recorded) -> None:
    held = [expert for expert in range(NUM_EXPERTS) if cache.weights.slots[expert] >= 0]
    assert len(held) <= cache.num_slots
    for expert in held:
        assert torch.equal(cache.weights.w1[cache.weights.slots[expert]], reader.w1[expert])
        assert torch.equal(cache.weights.w2[cache.weights.slots[expert]], reader.w2[expert])


def test_a_host_store_is_read_expert_by_expert_into_its_place() -> None:
    reader = Recorded(1)
    held = HeldExperts.fill(reader, CPU)
    assert held.readable
    assert reader.asked == list(range(NUM_EXPERTS))
    assert torch.equal(held.w1, reader.w1)
    assert torch.equal(held.w2, reader.w2)


def test_prompts_and_steps_of_a_rank_find_an_expert_in_the_stage_by_one_number() -> None:
    reader = Recorded(9)
    cache = StagedCache(reader, Stage(8, reader.specs, CPU), 0, 2, CPU, num_experts=20, first_expert=10)
    cache.copy([Visit(4, 0, True)])
    cache.bring(torch.tensor([[14]]))
    assert reader.asked == [4]


def test_the_slot_used_longest_ago_is_given_away() -> None:
    reader = Recorded(3)
    cache = staged(reader, 2, 8)
    for ids in ([[3]], [[0]], [[3, 2]]):
        slots = cache.bring(torch.tensor(ids, dtype=torch.int32)).slots
    assert (slots[0] < 0, slots[2] == 1 - slots[3]) == (True, True), "as in the docstring"
    assert (cache.needed, cache.fetched) == (4, 3)


def test_an_expert_that_was_read_in_part_is_never_used() -> None:
    reader = Recorded(5)
    cache = staged(reader, 2, 2)
    cache.bring(torch.tensor([[0, 1]]))
    reader.broken = 4
    with pytest.raises(ValueError, match="expert 4 is cut off"):
        cache.bring(torch.tensor([[1, 4]]))
    with pytest.raises(ValueError, match="expert 4 is cut off"):
        cache.bring(torch.tensor([[4]]))  # not taken for read
    reader.broken = -1
    for ids in ([0, 1], [4, 0], [1, 4]):
        assert (cache.bring(torch.tensor([ids])).slots[ids] >= 0).all()
        check_slots(cache, reader)


def test_a_read_that_takes_long_is_named_with_its_layer(caplog) -> None:
    reader, named = Recorded(6), threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: named.set()
    stage = Stage(2, reader.specs, CPU, patience_s=0.01)
    cache = StagedCache(reader, stage, 3, 2, CPU, num_experts=20, first_expert=10)
    read = reader.read
    reader.read = lambda *given: named.wait(60) and read(*given)  # ends once it is named
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
    reader = Recorded(6)
    stage = Stage(2, reader.specs, CPU, deadline_s=0.0)
    cache = StagedCache(reader, stage, 3, 2, CPU)
    for _ in range(2):
        with pytest.raises(CommTimeoutError, match=r"^expert 4 of MoE layer 3 took .* other ranks wait for 0\.0 s"):
            cache.bring(torch.tensor([[4]]))
    assert reader.asked == [4, 4], "it is not taken for read"


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_registered_with_cuda_until_nobody_refers_to_it(status: int, monkeypatch) -> None:
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(given) or status,
        cudaHostUnregister=lambda *given: calls.append(given),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(store, "exchange_of_capture_mode", lambda: lambda: calls.append("exchange"))
    memory, readable = host_memory((3, 5), torch.float32, torch.device("meta"))  # any device but the CPU
    assert readable == (status == 0)
    address = memory.data_ptr()
    part = memory[1:].fill_(2)
    del memory
    assert calls == [(address, 60, 0)]
    assert part.sum() == 20
    del part
    assert calls[1:] == ["exchange", (address,), "exchange"] * readable


@pytest.mark.parametrize(
    ("stored", "num_bytes"), [(None, 196_608), ("mxfp8", 101_376), ("fp8", 98_328), ("mxfp4", 52_224)]
)
def test_bytes_of_an_expert_are_those_of_its_parts(stored: StoredType | None, num_bytes: int) -> None:
    weights = torch.randn(2, 256, 256), torch.randn(2, 256, 128)
    cache = ExpertCache(**stored_parts(stored or "", *(each.bfloat16() for each in weights)), num_slots=1, device=CPU)
    assert cache.expert_bytes == bytes_of_expert(256, 128, torch.bfloat16, stored) == num_bytes


def test_a_store_with_a_scale_that_is_no_number_is_refused() -> None:
    case = DecodeCase(name="bad", T=1, K=1, E=2, D=32, F=32, quantised="mxfp8")
    host = cache_of(case, 1).host
    assert host.w2_scales is not None
    host.w2_scales[1, 0, 0] = 255
    with pytest.raises(ValueError, match=r"w2_scales\[1, 0, 0\]=255 must be at most 254"):
        ExpertCache(host.w1, host.w2, 1, torch.device("cpu"), w1_scales=host.w1_scales, w2_scales=host.w2_scales)


EXAMPLE = MoEConfig(hidden_size=128, ffn_size=64, num_experts=64, top_k=6)


def budget_of(budget: float = 0.25, parallel: ParallelConfig = ALONE, **options) -> ExpertBudget:
    return StoreOptions(expert_budget=budget, **options).budget(EXAMPLE, 4, torch.float32, parallel)


def test_a_budget_in_experts_and_bytes() -> None:
    held, files = budget_of(), budget_of(expert_store="file", host_budget=0.5)
    assert (held.slots, held.places, held.device_bytes) == (16, 256, 6_291_456)
    assert held.host_bytes == held.store_bytes == 256 * 98_304
    assert (files.slots, files.places, files.host_bytes) == (16, 128, 128 * 98_304)
    assert budget_of(expert_store="file", host_budget=20 * 98_304 + 1).places == 20
    assert budget_of(expert_store="file", host_budget=1e12).places == 256
    assert [budget_of(each).slots for each in (0.1, 10_000_000, 1.0, 1e12)] == [6, 25, 64, 64]
    ranks = budget_of(0.25, parallel=ParallelConfig(ep=2, tp=2))
    assert (ranks.held, ranks.slots, ranks.expert_bytes) == (32, 8, 49_152)
    assert ranks.store_bytes == held.store_bytes // 4
    small = budget_of(1_000_000, expert_dtype="mxfp4")
    assert (small.slots, small.expert_bytes, small.stored) == (19, 13_056, "mxfp4"), "of 2 in float32"
    few = budget_of(1.0, parallel=ParallelConfig(ep=16))
    assert (few.held, few.slots) == (4, 4), "fewer than top_k experts all have slots"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": float("nan")}, "expert_budget=nan must be finite"),
        ({"budget": float("inf")}, "expert_budget=inf must be finite"),
        ({"budget": 0.0}, "expert_budget=0.0 must be above 0"),
        ({"budget": -3.0}, "expert_budget=-3.0 must be above 0"),
        ({"budget": 0.09}, "expert_budget=0.09 holds 5 experts of each of 4 layers, and must hold top_k=6"),
        ({"budget": 5.0}, "expert_budget=5.0 holds 0 experts .* must hold top_k=6: 2,359,296 bytes"),
        ({"expert_store": "disk"}, "expert_store='disk' must be one of host, file"),
        ({"host_budget": 0.5}, "host_budget=0.5 must be None where host memory holds all experts"),
        ({"expert_store": "file"}, "host_budget=None must be given with expert_store='file'"),
        ({"expert_store": "file", "host_budget": float("nan")}, "host_budget=nan must be given .* finite and above 0"),
        ({"expert_store": "file", "host_budget": -1.0}, "host_budget=-1.0 must be given .* finite and above 0"),
        (
            {"expert_dtype": "mxfp4", "parallel": ParallelConfig(tp=4)},
            "expert_dtype=mxfp4 takes a ffn_size / tp that is a multiple of 32, not 16",
        ),
        (
            {"expert_store": "file", "host_budget": 0.05},
            "host_budget=0.05 holds 12 experts, and must hold the 16 .* 1,572,864",
        ),
    ],
)
def test_a_budget_that_cannot_be_says_why(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget_of(**settings)


def test_the_sizes_of_a_model() -> None:
    moe = replace(MOE, hidden_size=128, ffn_size=128, num_experts=8)
    model = replace(MODEL, hidden_size=128, num_heads=4, num_kv_heads=4, num_layers=4, moe=moe)
    assert (dense_elements(model), expert_elements(model)) == (300_160, 1_572_864)
