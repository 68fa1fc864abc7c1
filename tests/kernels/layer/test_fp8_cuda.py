"""The layers in block FP8 in CUDA C++, as far as it goes without a GPU: what host and source must agree on, and when
they are chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_arguments import in_fp8, make_symm, make_table

from comet.kernels.layer import dispatch_gemm as layer0
from comet.kernels.layer import gemm_combine as layer1
from comet.kernels.layer.triton.dispatch import DispatchLists
from comet.kernels.layer.triton.dispatch_gemm import DispatchGemmConfig
from comet.kernels.layer.triton.gemm_combine import GemmCombineConfig
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.arguments import CombineLists, TileTable
from comet.layer import fused

D, F, MANY = 512, 256, 20_000


FP8_TYPES = dict(weights=torch.float8_e4m3fn, output=torch.bfloat16)


def layer0_bytes(num_experts: int) -> int:
    return layer0.Variant(**FP8_TYPES, world_size=4).shared_bytes(num_experts)


def layer1_bytes(num_experts: int, entries: int) -> int:
    variant = layer1.Variant(**FP8_TYPES, top_k=entries, world_size=1, config=layer1.FP8_CONFIG)
    return variant.shared_bytes(num_experts)


def test_worked_examples() -> None:
    assert layer0_bytes(32) == 1024 + 4 * 49152 + 4 * 2048 + 1024 + 64 + 512 + 4 * 97 == 207812
    assert layer1_bytes(32, 8) == 1024 + 4 * 49152 + 4 * 512 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33 == 224836


def test_an_expert_costs_its_place_in_the_table_of_pieces() -> None:
    assert layer0_bytes(33) - layer0_bytes(32) == 3 * 4
    assert layer1_bytes(33, 8) - layer1_bytes(32, 8) == 4


def test_the_layers_of_large_models_fit() -> None:
    for experts in (1, 8, 64, 128, 256):
        assert layer0_bytes(experts) <= HOPPER.shared_bytes
        for entries in range(1, layer1.MOST_ENTRIES + 1):
            assert layer1_bytes(experts, entries) <= HOPPER.shared_bytes


def layer0_call(**changes: object) -> dict[str, Any]:
    """Arguments of a launch that runs in CUDA C++ where there is a GPU."""
    numbers = torch.zeros(4, dtype=torch.int32)
    sends = DispatchLists(token_ids=numbers, counts=numbers, recv_counts=numbers, pushed=numbers)
    return dict(w1=in_fp8(8, 2 * F, D), symm=make_symm(), sends=sends, table=make_table()) | changes


def make_returns(top_k: int = 2) -> CombineLists:
    numbers = torch.zeros(4, dtype=torch.int32)
    return CombineLists(
        row_slots=torch.zeros(4, top_k, dtype=torch.int32), row_weights=torch.zeros(4, top_k), send_rows=numbers,
        recv_counts=numbers,
    )  # fmt: skip


def layer1_call(**changes: object) -> dict[str, Any]:
    """The same of layer 1."""
    y = torch.empty(1, D, dtype=torch.bfloat16, device="meta")
    call = dict(y=y, b=in_fp8(8, D, F), symm=make_symm(), returns=make_returns(), table=make_table())
    return call | changes


def without_segments() -> TileTable:
    return replace(make_table(), segments=None)


def test_what_layer_1_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer1, "is_available", lambda device: True)
    call = layer1_call()
    assert layer1.can_run(**call)
    for most in (dict(returns=make_returns(top_k=8)), dict(symm=make_symm(world_size=8)), dict(y=call["y"].half())):
        assert layer1.can_run(**layer1_call(**most))
    assert not layer1.can_run(**layer1_call(returns=make_returns(top_k=17)))
    assert not layer1.can_run(**layer1_call(symm=make_symm(world_size=17)))
    assert not layer1.can_run(**layer1_call(y=call["y"].float()))  # a pool in float32
    assert not layer1.can_run(**layer1_call(table=replace(call["table"], block_rows=64)))
    assert not layer1.can_run(**layer1_call(table=without_segments()))
    assert not layer1.can_run(**layer1_call(returns=call["returns"]._replace(row_weights=None)))  # a backward pass
    assert not layer1.can_run(**layer1_call(b=in_fp8(MANY, 128, 128)))  # their table is too large
    monkeypatch.setattr(layer1, "is_available", lambda device: False)
    assert not layer1.can_run(**call)


def test_neither_is_chosen_without_a_gpu() -> None:
    assert not layer0.can_run(in_fp8(8, 2 * F, D), make_table())
    assert not layer1.can_run(**layer1_call(y=torch.empty(1, D, dtype=torch.bfloat16)))


@pytest.mark.parametrize("comm_blocks", [0, 16])
def test_layer_0_hands_on_what_it_gets(monkeypatch: pytest.MonkeyPatch, comm_blocks: int) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(layer0, "is_available", lambda device: True)
    monkeypatch.setattr(layer0, "dispatch_gemm_cuda", lambda *call, **more: given.append((*call, more["comm_blocks"])))
    call, hidden = layer0_call(), in_fp8(1, 128, F)
    tensors = None, call["w1"], hidden, None, call["symm"], call["sends"], call["table"]
    fused.launch_dispatch_gemm(*tensors, DispatchGemmConfig(comm_blocks=comm_blocks))
    [(*found, blocks)] = given
    assert blocks == comm_blocks
    assert all(mine is other for mine, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize("comm_blocks", [0, 16])
def test_layer_1_hands_on_what_it_gets(monkeypatch: pytest.MonkeyPatch, comm_blocks: int) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(layer1, "is_available", lambda device: True)
    monkeypatch.setattr(layer1, "gemm_combine_cuda", lambda *call, **_: given.append(call))
    call, hidden = layer1_call(), in_fp8(1, 128, F)
    tensors = hidden, call["b"], call["y"], call["y"], call["symm"], call["returns"], call["table"]
    config = GemmCombineConfig(num_panels=3, comm_blocks=comm_blocks, reserved_sms=5)
    fused.launch_gemm_combine(*tensors, config)
    [(*found, split)] = given
    assert all(mine is other for mine, other in zip(found, tensors, strict=True))
    assert split == layer1.Split(num_panels=3, reserved_sms=5, comm_blocks=comm_blocks)
