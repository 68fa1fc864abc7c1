"""Every pair of dispatch and experts that fits, with every activation and with biases, on ranks."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS
from activation_layers import draw, expected, make_config
from ranks import run_ranks
from torch import Tensor

from comet.config import ParallelConfig
from comet.layer.group import make_expert_group
from comet.layout import Biases
from comet.modular import EXPERTS, PREPARE_FINALIZE, ModularMoE
from comet.reference.layer import shard_biases, shard_experts


def pairs(world_size: int) -> list[tuple[type, type]]:
    fitting = []
    for transport in PREPARE_FINALIZE:
        for experts in EXPERTS:
            alone = transport.__name__ == "SingleRank" and world_size > 1
            given = transport.activation_format
            if given in experts.formats and not alone:
                fitting.append((transport, experts))
    return [pair for pair in fitting if not pair[1].takes_fp8]


def run_pairs(rank: int, world_size: int, ep: int, tp: int) -> list[Tensor]:
    parallel, outputs = ParallelConfig(ep=ep, tp=tp), []
    for number, (transport, experts) in enumerate(pairs(world_size)):
        config = make_config(number % len(ACTIVATIONS), 48 if number % 2 else 32)
        group = make_expert_group(config, parallel, max_tokens=64, dtype=torch.float32, device=torch.device("cpu"))
        layer = ModularMoE(transport(config, group), experts(config, group))
        w1, w2, b1, b2 = draw(config, torch.float32)
        layout = group.layout(config)
        mine = shard_biases(Biases(b1, b2), layout)
        assert mine is not None
        held = slice(layout.first_expert, layout.first_expert + layout.experts_local)
        weights = shard_experts(w1, w2, layout)
        outputs.append(layer(*draw(config, torch.float32, rank), *weights, mine._replace(b2=b2[held])))
        group.close()
    return outputs


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_every_pair(ep: int, tp: int) -> None:
    found = run_ranks(run_pairs, ep * tp, ep, tp)
    assert len(found[0]) >= 6
    for number, (transport, experts) in enumerate(pairs(ep * tp)):
        index, ffn_size = number % len(ACTIVATIONS), 48 if number % 2 else 32
        wanted = expected(index, ffn_size, ep, tp)
        for rank in range(ep * tp):
            said = f"{transport.__name__} + {experts.__name__}, {ACTIVATIONS[index].name}, rank {rank}: "
            torch.testing.assert_close(
                found[rank][number].double(), wanted[rank][0], rtol=2e-4, atol=2e-5, msg=said.__add__
            )
