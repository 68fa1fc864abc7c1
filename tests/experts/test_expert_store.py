"""Memory of the host that holds all experts, and budgets for those on the device."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cache_cases import cache_of
from decode_cases import DecodeCase, stored_parts
from training_cases import MODEL, MOE

from comet.config import MoEConfig, ParallelConfig
from comet.experts import store
from comet.experts.budget import ALONE, ExpertBudget, bytes_of_expert, plan_budget
from comet.experts.cache import ExpertCache
from comet.experts.options import StoreOptions
from comet.experts.store import HeldExperts, host_memory
from comet.models.config import dense_elements, expert_elements
from comet.quantization.formats import StoredType

CPU = torch.device("cpu")


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
    held = HeldExperts(**stored_parts(stored or "", *(each.bfloat16() for each in weights)), readable=True)
    cache = ExpertCache(held, 1, CPU)
    assert cache.expert_bytes == bytes_of_expert(256, 128, torch.bfloat16, stored) == num_bytes


def test_a_store_with_a_scale_that_is_no_number_is_refused() -> None:
    case = DecodeCase(name="bad", T=1, K=1, E=2, D=32, F=32, quantised="mxfp8")
    held = HeldExperts(**cache_of(case, 1).host.named_parts, readable=True)
    held.w2_scales[1, 0, 0] = 255
    with pytest.raises(ValueError, match=r"w2_scales\[1, 0, 0\]=255 must be at most 254"):
        ExpertCache(held, 1, CPU)


EXAMPLE = MoEConfig(hidden_size=128, ffn_size=64, num_experts=64, top_k=6)


def budget_of(budget: float = 0.25, parallel: ParallelConfig = ALONE, **options) -> ExpertBudget:
    return plan_budget(StoreOptions(expert_budget=budget, **options), EXAMPLE, 4, torch.float32, parallel)


def test_a_budget_in_experts_and_bytes() -> None:
    held, files = budget_of(), budget_of(expert_store="file", host_budget=0.5)
    assert (held.num_slots, held.num_places, held.device_bytes) == (16, 256, 6_291_456)
    assert held.host_bytes == held.store_bytes == 256 * 98_304
    assert (files.num_slots, files.num_places, files.host_bytes) == (16, 128, 128 * 98_304)
    assert budget_of(expert_store="file", host_budget=20 * 98_304 + 1).num_places == 20
    assert budget_of(expert_store="file", host_budget=1e12).num_places == 256
    assert [budget_of(each).num_slots for each in (0.1, 10_000_000, 1.0, 1e12)] == [6, 25, 64, 64]
    ranks = budget_of(0.25, parallel=ParallelConfig(ep=2, tp=2))
    assert (ranks.num_held, ranks.num_slots, ranks.expert_bytes) == (32, 8, 49_152)
    assert ranks.store_bytes == held.store_bytes // 4
    small = budget_of(1_000_000, expert_dtype="mxfp4")
    assert (small.num_slots, small.expert_bytes, small.options.stored) == (19, 13_056, "mxfp4"), "of 2 in float32"
    few = budget_of(1.0, parallel=ParallelConfig(ep=16))
    assert (few.num_held, few.num_slots) == (4, 4), "fewer than top_k experts all have slots"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": float("nan")}, "expert_budget=nan must be a finite number"),
        ({"budget": float("inf")}, "expert_budget=inf must be a finite number"),
        ({"budget": 0.0}, "expert_budget=0.0 must be above 0"),
        ({"budget": -3.0}, "expert_budget=-3.0 must be above 0"),
        ({"budget": 0.01}, "expert_budget=0.01 holds 0 experts of each of 4 layers, and must hold 1: 393,216 bytes"),
        (
            {"budget": 0.09, "expert_store": "file", "host_budget": 1.0},
            "expert_budget=0.09 holds 5 experts .* must hold 6: 2,359,296 bytes, or a share of 0.09375",
        ),
        ({"expert_store": "disk"}, "expert_store='disk' must be one of host, file"),
        ({"host_budget": 0.5}, "host_budget=0.5 must be None with expert_store=host, which holds all experts"),
        ({"expert_store": "file"}, "host_budget=None must be given with expert_store=file"),
        ({"expert_store": "file", "host_budget": float("nan")}, "host_budget=nan must be a finite number and above 0"),
        ({"expert_store": "file", "host_budget": -1.0}, "host_budget=-1.0 must be above 0"),
        ({"expert_dtype": "fp8"}, "expert_dtype='fp8' must be one of mxfp8, mxfp4"),
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


@pytest.mark.parametrize("num_experts", [7, 50, 60, 64, 96, 100, 128, 160, 512])
def test_shares_are_the_numbers_that_were_written_and_that_errors_advise(num_experts: int) -> None:
    def planned(top_k: int = 1, **options) -> ExpertBudget:
        moe = replace(EXAMPLE, num_experts=num_experts, top_k=top_k)
        return plan_budget(StoreOptions(expert_store="file", **options), moe, 3, torch.float32)

    def advised(**settings) -> float:
        with pytest.raises(ValueError, match="must hold") as caught:
            planned(**settings)
        return float(re.search(r"or a share of (\S+)$", str(caught.value))[1])

    for written in range(1, 101):  # 0.58 of 50 experts, 0.29 of 100: products in floats are a little less
        least, most = written * num_experts // 100, written * 3 * num_experts // 100
        if least:
            found = planned(expert_budget=written / 100, host_budget=written / 100)
            assert (found.num_slots, found.num_places) == (least, most)
    for least in range(1, num_experts + 1):
        assert planned(expert_budget=least / num_experts, host_budget=1.0).num_slots == least
    for least in range(1, min(num_experts, 32) + 1):
        share = advised(top_k=least, expert_budget=1e-9, host_budget=1.0)
        assert planned(least, expert_budget=share, host_budget=1.0).num_slots == least
        share = advised(top_k=least, expert_budget=share, host_budget=1e-9)
        assert planned(least, expert_budget=least / num_experts, host_budget=share).num_places == least


def test_the_sizes_of_a_model() -> None:
    moe = replace(MOE, hidden_size=128, ffn_size=128, num_experts=8)
    model = replace(MODEL, hidden_size=128, num_heads=4, num_kv_heads=4, num_layers=4, moe=moe)
    assert (dense_elements(model), expert_elements(model)) == (300_160, 1_572_864)
