"""The GPT: its parts against plain formulas, and rules of its settings."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from training_cases import MODEL, MOE, make_group, make_model, wake

from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT, next_token_loss, rotary_table, rotate
from comet.moe import MoE


def random_ids(rows: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(250, (rows, length), generator=torch.Generator().manual_seed(3))


def test_rotary_scores_depend_on_distance_only():
    table = rotary_table(MODEL).double()
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_q, turned_k = (rotate(vector.expand(32, 16), table) for vector in (query, key))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned_q.norm(dim=-1), query.norm().expand(32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dense_layers", [0, 1, 2])
def test_untrained_model_gives_every_byte_the_same_probability(dense_layers):
    model, _ = make_model(replace(MODEL, dense_layers=dense_layers))
    ids = random_ids()
    output = model(ids)
    assert output.logits.shape == (2, 32, 256)
    assert next_token_loss(output.logits, ids).item() == pytest.approx(math.log(256), abs=1e-5)
    assert output.expert_load.shape == (2 - dense_layers, 4)
    assert output.expert_load.sum(1).tolist() == [2 * 32 * 2] * (2 - dense_layers)
    assert (output.router_loss.item() > 0) == (dense_layers < 2)


def test_seed_decides_the_weights():
    first, same, other = (make_model(seed=seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    drawn = [name for name, weight in first.items() if weight.dim() > 1 and name != "head.weight"]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(first["blocks.0.ffn.w1"], first["blocks.1.ffn.w1"])


BIASED = replace(MOE, balance="bias", expert_bias=True, shared_ffn_size=16)


def new_layer(seed: int) -> MoE:
    return MoE(BIASED, make_group(BIASED), seed=seed)


def new_model(seed: int) -> GPT:
    return make_model(replace(MODEL, dense_layers=1, moe=BIASED), seed=seed)[0]


@pytest.mark.parametrize("make", [new_layer, new_model])
@torch.no_grad()
def test_reset_parameters_makes_new_ones(make: Callable[[int], MoE | GPT]) -> None:
    model, wanted = make(0), make(1).state_dict()
    for each in model.state_dict().values():
        each.fill_(3)
    model.reset_parameters(1)
    assert [name for name, each in model.state_dict().items() if not torch.equal(each, wanted[name])] == []


def test_every_parameter_gets_a_gradient():
    model = wake(make_model(replace(MODEL, dense_layers=1, moe=replace(MOE, shared_ffn_size=16)))[0])
    output = model(random_ids())
    (next_token_loss(output.logits, random_ids()) + output.router_loss).backward()
    silent = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert silent == []


def test_what_does_not_fit_is_refused():
    config = replace(MODEL, context=400)
    model, group = make_model(config, max_tokens=512)
    with pytest.raises(ValueError, match="sequence length 401 must be at most context=400"):
        model(random_ids(1, 401))
    cache = KeyValueCache(config, num_sequences=1, length=300, dtype=torch.float32, device=group.device)
    for shape in ((1, 301), (2, 8)):
        message = f"prompts of shape {shape} must be (1, at most 300), as the cache is"
        with pytest.raises(ValueError, match=re.escape(message)):
            model.prefill(random_ids(*shape), torch.full(shape[:1], shape[1]), cache)
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"routers={count} must be one for each of 2 MoE layers"):
            model.extend(random_ids(1, 1), cache, [model.moe_layers()[0].router] * count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 255}, "vocab_size=255 must be at least 256"),
        ({"hidden_size": 64}, "hidden_size=64 must be equal to moe.hidden_size=32"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must be a divisor of num_heads=2"),
        ({"num_heads": 3, "num_kv_heads": 1}, "num_heads=3 must divide hidden_size=32 into even heads"),
        ({"head_dim": 7}, "head_dim=7 must be at least 2 and a multiple of 2"),
        ({"dense_layers": 3}, "dense_layers=3 must be at least 0 and at most num_layers=2"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"rope_base": 1.0}, r"rope_base=1\.0 must be above 1"),
        ({"name": ""}, "name='' must be at least one character"),
    ],
)
def test_model_config_rules(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **changes)
