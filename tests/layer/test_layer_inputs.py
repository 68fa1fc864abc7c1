"""Tokens a layer must not run on: kernels read as many rows as there are ids, of the pool's width and type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fp8_cases import fp8_shard
from layer_cases import LayerCase
from torch import Tensor
from training_cases import make_group

from comet.layer.routed_experts import SymmetricPath
from comet.layout import Biases
from comet.modular import FusedPrepareFinalize
from comet.modular.interfaces import RoutedTokens
from comet.moe import MoE

CASE = LayerCase("one rank", 1, 1, (40,), hidden_size=128, ffn_size=128)
MISFITS = [
    (torch.zeros(40, 128), r"shape=\(40, 128\) of tokens must be \(T, hidden_size=128\), with the T of .*\(100, 2\)"),
    (torch.zeros(100, 64), r"shape=\(100, 64\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(100, 256), r"shape=\(100, 256\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(4, 25, 128), r"shape=\(4, 25, 128\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(12_800), r"shape=\(12800,\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(100, 128).half(), r"dtype=torch\.float16 of tokens must be the group's torch\.float32"),
    (torch.zeros(100, 128, device="meta"), r"device=meta of tokens must be the group's cpu"),
]


ROUTING = torch.zeros(100, 2, dtype=torch.int32), torch.ones(100, 2)


def make_layer(path: str) -> MoE:
    return MoE(CASE.config, make_group(CASE.config, max_tokens=128), path=path, overlap=CASE.overlap)


def by_layer(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    layer.routed_experts(tokens, ids, weights)


def by_experts_in_fp8(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    assert isinstance(layer.experts, SymmetricPath)
    with torch.no_grad():
        layer.experts.fp8(tokens, ids, weights, *fp8_shard(CASE, 0))


def by_the_modular_layer(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    modular = FusedPrepareFinalize(CASE.config, layer.group, overlap=CASE.overlap, use_kernels=False)
    modular.prepare(RoutedTokens(tokens=tokens, top_k_ids=ids, top_k_weights=weights), quantize=False)


@pytest.mark.parametrize("path", ["twin", "fused"])
@pytest.mark.parametrize("call", [by_layer, by_experts_in_fp8, by_the_modular_layer])
@pytest.mark.parametrize(("tokens", "message"), MISFITS)
def test_tokens_that_do_not_fit_pool_and_ids_are_named(
    path: str, call: Callable[..., None], tokens: Tensor, message: str
) -> None:
    layer = make_layer(path)
    with pytest.raises(ValueError, match=message):
        call(layer, tokens, *ROUTING)
    assert not layer.group.workspace.epoch, "no rank waits for ids of this call"


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        (None, "biases=False of the call must be the layer's expert_bias=True"),
        (Biases(torch.zeros(4, 128), torch.zeros(4, 128)), r"b1 of shape \(4, 128\) must be \(e, 2F\) = \(4, 256\)"),
        (Biases(torch.zeros(4, 256), torch.zeros(4, 256)[:, ::2]), r"b2 of shape \(4, 128\) must be contiguous"),
        (Biases(torch.zeros(4, 256), torch.zeros(4, 128).half()), r"b2 of dtype torch\.float16 must be torch\.float32"),
    ],
)
def test_so_are_biases_beside_experts_in_fp8(biases: Biases | None, message: str) -> None:
    config = replace(CASE.config, expert_bias=True)
    layer = MoE(config, make_group(config, max_tokens=128), path="twin", overlap=CASE.overlap)
    assert isinstance(layer.experts, SymmetricPath)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        layer.experts.fp8(torch.zeros(100, 128), *ROUTING, *fp8_shard(CASE, 0), biases)
    assert not layer.group.workspace.epoch


def test_ids_without_an_axis_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape=\(100, 128\) of tokens .* with the T of top_k_ids of shape=\(\)"):
        make_layer("twin").routed_experts(torch.zeros(100, 128), torch.tensor(0), torch.tensor(1.0))


def test_a_number_is_no_token() -> None:
    with pytest.raises(ValueError, match=r"shape=\(\) of the input must be \(\.\.\., hidden_size\)"):
        make_layer("twin")(torch.tensor(1.0))
