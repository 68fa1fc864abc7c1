"""Which paths there are, and what they need."""

from __future__ import annotations

import pytest
import torch
import training_cases
from layer_cases import LayerCase
from modular_cases import make_group
from ranks import run_ranks

from comet import MoE, MoEConfig
from comet.decode import DecodeWeights, RankDecode
from comet.decode.ranks import rank_slots
from comet.layer.paths import make_path


def test_unknown_path_and_capacity_where_it_cannot_work() -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, capacity_factor=1.0)
    with pytest.raises(ValueError, match="path='fast' must be 'auto' or one of"):
        MoE(config, training_cases.make_group(config), path="fast")
    with pytest.raises(ValueError, match=r"capacity_factor=1\.0 needs path 'fused' or 'twin'; 'plain' is dropless"):
        MoE(config, training_cases.make_group(config), path="plain")


def run_past_float16(rank: int, world_size: int) -> dict[str, list[float]]:
    """Two tokens whose experts give 29696, weighted: 4 and -2 on ranks 0 and 1, then 2 and -1."""
    case = LayerCase("float16", 2, 1, (2, 2), num_experts=2, hidden_size=16, ffn_size=16, dtype=torch.float16)
    group = make_group(case)
    tokens, ids = torch.zeros(2, 16).half(), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    tokens[:, 0] = 1
    weights = torch.tensor([[4.0, -2.0], [-1.0, 2.0]])
    w1, w2 = torch.zeros(1, 32, 16).half(), torch.full((1, 16, 16), 58.0).half()
    w1[:, :16, 0], w1[:, 16:, 0] = 32, 1  # hidden is 32, an output 16 * 32 * 58
    outcome = {}
    for path in ("reference", "plain", "twin", "fused"):
        y = make_path(path, case.config, group, case.overlap)(tokens, ids, weights, w1, w2)
        assert torch.equal(y, y[:, :1].expand(2, 16))
        outcome[path] = y[:, 0].tolist()
    decode = RankDecode(group.comm, hidden_size=16)
    held = DecodeWeights(w1=w1, w2=w2, slots=rank_slots(group.layout(case.config), "cpu"))
    outcome["decode"] = decode(tokens, ids, weights, held)[:, 0].tolist()
    group.close()
    return outcome


@pytest.mark.slow
def test_partial_sums_past_float16_are_infinite_or_added_first() -> None:
    """118784 - 59392 = 59392 is a float16, a partial sum of 118784 is none: where it is rounded the result says so."""
    for outcome in run_ranks(run_past_float16, 2, interpret=True):
        rounds_partial_sums = [float("inf"), 29696.0]
        assert [outcome[path] for path in ("reference", "twin", "fused")] == [rounds_partial_sums] * 3
        assert outcome["plain"] == outcome["decode"] == [59392.0, 29696.0]
