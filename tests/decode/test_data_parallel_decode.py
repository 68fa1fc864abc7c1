"""Decode steps of ranks with tokens of their own: warp decode for few, the layer's path for more, on real ranks."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from data_parallel_cases import CountedDecode, check_own_tokens
from decode_cases import DecodeCase
from ranks import run_ranks
from torch import Tensor
from training_cases import make_group

from comet import MoE, MoEConfig
from comet.decode import DataParallelDecode, DecodeWeights, RankDecode
from comet.decode.runners import Decoder, ReplicatedRunner
from comet.layout import RoutedTokens

CASE = DecodeCase(name="own tokens", T=0, K=2, E=8, D=32, F=64, routing="masked", seed=3)
CONFIG = MoEConfig(hidden_size=32, ffn_size=64, num_experts=8, top_k=2, shared_ffn_size=48)


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_ranks_against_all_experts(world_size: int, tp: int) -> None:
    run_ranks(check_own_tokens, world_size, CASE, tp, torch.float32)


def test_a_layer_decodes_few_tokens_without_a_gradient() -> None:
    group = make_group(CONFIG, max_tokens=64)
    layer, runner = MoE(CONFIG, group, seed=4), DataParallelDecode(CONFIG, group, 5)
    decoding, steps = copy.copy(layer), CountedDecode(runner).steps
    decoding.experts = runner
    for count in (3, 6):
        tokens = torch.randn(count, CONFIG.hidden_size, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            torch.testing.assert_close(decoding(tokens)[0], layer(tokens)[0])
    decoding(tokens[:2])[0].sum().backward()
    assert layer.w1.grad is not None
    assert steps == [3]


def test_sizes() -> None:
    group = make_group(CONFIG, max_tokens=64)
    runner = DataParallelDecode(CONFIG, group)
    assert runner.decode_tokens == 64
    assert isinstance(runner.decode_on_ranks, RankDecode)
    assert copy.deepcopy(runner) is runner
    assert DataParallelDecode(CONFIG, group, 0).decode_on_ranks is None
    for wrong in (-1, 65):
        with pytest.raises(
            ValueError, match=rf"decode_tokens={wrong} must be at least 0 and at most 64: 64 tokens .* W=1"
        ):
            DataParallelDecode(CONFIG, group, wrong)
    layer = MoE(CONFIG, group)
    tokens, ids = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="T=3 tokens must be at most most_tokens=2"):
        runner(RoutedTokens(tokens, ids, torch.ones(3, 2)), layer.w1.flatten(1, 2), layer.w2, most_tokens=2)


def test_wrong_tensors_are_refused_after_right_ones_and_again() -> None:
    group = make_group(CONFIG, max_tokens=64)
    runner, (w1, w2) = DataParallelDecode(CONFIG, group), MoE(CONFIG, group).expert_weights()
    right = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    strided, wide = w2.transpose(1, 2).contiguous().transpose(1, 2), (right[0], right[1].repeat(1, 17), right[2])
    short, longs = (right[0][:2], *right[1:]), (right[0], right[1].short(), right[2])
    for routed, weights, message in (
        (right, strided, "w2 of shape .* must be contiguous"), (wide, w2, "K=34 must be"), (short, w2, "T=2 of tokens"),
        (longs, w2, "top_k_ids of dtype torch.int16"),
        ((right[0].double(), *right[1:]), w2, "the weights' torch.float32"),
    ):  # fmt: skip
        runner(RoutedTokens(*right), w1.flatten(1, 2), w2)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                runner(RoutedTokens(*routed), w1.flatten(1, 2), weights)
    assert runner.decode_on_ranks is not None
    with pytest.raises(ValueError, match="requires_grad=True must be left out in warp decode"):
        runner.decode_on_ranks(right[0].requires_grad_(), *right[1:], runner.held(w1.flatten(1, 2), w2, None))


def test_experts_that_drop_rows_do_not_decode() -> None:
    config = replace(CONFIG, capacity_factor=0.5)
    group = make_group(config, max_tokens=16)
    for kind in (DataParallelDecode, ReplicatedRunner):
        with pytest.raises(ValueError, match=r"capacity_factor=0\.5 must be left out in warp .* decode_tokens=0"):
            kind(config, group, 12)
    layer, tokens = MoE(config, group, seed=4), torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = layer(tokens)[0]
        layer.experts = DataParallelDecode(config, group, 0)
        torch.testing.assert_close(layer(tokens)[0], wanted)


def test_threads_have_scratch_memory_of_their_own() -> None:
    """Two threads generate with one model: one's launches may come between the two launches of the other's step."""
    decoder, weights = (
        Decoder(2, 8),
        DecodeWeights(w1=torch.zeros(4, 64, 32), w2=torch.zeros(4, 32, 32), slots=torch.arange(4, dtype=torch.int32)),
    )
    tokens = cast(Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cpu"), dtype=torch.float32))
    with ThreadPoolExecutor(1) as other:
        theirs = [other.submit(decoder.scratch, tokens, weights).result() for _ in range(2)]
    mine = [decoder.scratch(tokens, weights) for _ in range(2)]
    assert mine[0] is mine[1]
    assert theirs[0] is theirs[1]
    assert theirs[0] is not mine[0]
