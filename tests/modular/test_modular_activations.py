"""Every pair of dispatch and experts that fits, with every activation and with biases, on ranks."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS
from layer_cases import LayerCase, assert_as_close, full_biases, full_weights, oracle, rank_inputs, shard
from modular_cases import make_group
from ranks import run_ranks

from comet.layout import Biases
from comet.modular import EXPERTS, PREPARE_FINALIZE, ModularMoE


def pairs(world_size: int) -> list[tuple[type, type]]:
    fitting = []
    for transport in PREPARE_FINALIZE:
        for experts in EXPERTS:
            alone = transport.__name__ == "SingleRank" and world_size > 1
            given = transport.activation_format
            if given in experts.formats and not alone:
                fitting.append((transport, experts))
    return [pair for pair in fitting if not pair[1].takes_fp8]


def run_pairs(rank: int, world_size: int, ep: int, tp: int) -> None:
    for number, (transport, experts) in enumerate(pairs(world_size)):
        case = LayerCase(
            f"{transport.__name__} + {experts.__name__}", ep, tp, (11, 20, 29, 38)[:world_size], routing="masked",
            ffn_size=48 if number % 2 else 32, activation=ACTIVATIONS[number % len(ACTIVATIONS)], expert_bias=True,
        )  # fmt: skip
        group, inputs = make_group(case), rank_inputs(case, rank)
        w1, w2, b1, b2 = shard(case, rank, *full_weights(case), *full_biases(case))
        layer = ModularMoE(transport(case.config, group), experts(case.config, group))
        given = inputs.tokens, inputs.top_k_ids, inputs.top_k_weights, w1.flatten(1, 2), w2
        y = layer(*given, Biases(b1.flatten(1), b2))
        exact, same = (oracle(case, rank, dtype).output for dtype in (torch.float64, case.dtype))
        assert_as_close(y, exact, same, case.dtype, f"{case}, rank {rank}")
        group.close()


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_every_pair(ep: int, tp: int) -> None:
    assert len(pairs(ep * tp)) >= 6
    run_ranks(run_pairs, ep * tp, ep, tp)
