"""The layer with every activation and with biases on every path: output and gradients, on ranks, padded widths."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, draw_biases
from activation_layers import NAMES, draw, expected, make_config, run_layer
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from training_cases import make_group

import comet
from comet.kernels.runtime.activation import DEFINITIONS, Activation, Definition
from comet.layout import Biases
from comet.moe import MoE

PATHS = ("reference", "plain", "twin")
# F = 32: whole tiles; F = 24 and, over TP = 2, F = 16: padded.
ALL = [(index, ffn_size) for index in range(len(ACTIVATIONS)) for ffn_size in (32, 16)]


# Of kernels under the interpreter, which are slow: each activation once, two of them padded over TP = 2.
SOME = [(0, 32), (1, 16), (2, 32), (3, 16)]


@pytest.mark.parametrize("path", [*PATHS, "fused"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_output_and_gradients(path: str, ep: int, tp: int) -> None:
    cases = SOME if path == "fused" else ALL
    found = run_ranks(run_layer, ep * tp, path, ep, tp, cases, interpret=path == "fused", timeout=300)
    for case, (index, ffn_size) in enumerate(cases):
        wanted = expected(index, ffn_size, ep, tp)
        for rank, ranks_found in enumerate(found):
            for name, got, want in zip(NAMES, ranks_found[case], wanted[rank], strict=True):
                said = f"{ACTIVATIONS[index].name}, F={ffn_size}, rank {rank}, {name}: "
                torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5, msg=said.__add__)


def cosine(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return gate.cos() + up


def cosine_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    return gate.cos() + up, -grad * gate.sin(), grad


def run_cosine(rank: int, world_size: int, path: str, index: int) -> list[list[Tensor]]:
    DEFINITIONS["reglu"] = Definition(cosine, cosine_backward, {})  # of this rank, which ends with the test
    return run_layer(rank, world_size, path, 1, 2, [(index, 16)])


@pytest.mark.parametrize("path", PATHS)
def test_an_activation_that_is_not_0_at_0_may_be_padded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cos(gate) + up: each padded column of hidden is 1, meets zeros of w2, and its gradients are dropped."""
    monkeypatch.setitem(DEFINITIONS, "reglu", Definition(cosine, cosine_backward, {}))
    index = [activation.name for activation in ACTIVATIONS].index("reglu")
    found = run_ranks(run_cosine, 2, path, index)
    for rank, wanted in enumerate(expected(index, 16, 1, 2)):
        for name, got, want in zip(NAMES, found[rank][0], wanted, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-5, msg=f"rank {rank}, {name}: ".__add__)


def test_a_call_with_biases_must_fit_the_layer() -> None:
    config = make_config(1, 32, expert_bias=False)
    group = make_group(config, max_tokens=16)
    layer = MoE(config, group, path="plain")
    assert layer.b1 is None
    tokens, ids = torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int32)
    weights = layer.w1.flatten(1, 2), layer.w2
    with pytest.raises(ValueError, match="biases=True of the call must be the layer's expert_bias=False"):
        layer.experts(tokens, ids, torch.ones(2, 2), *weights, Biases(torch.zeros(4, 64), torch.zeros(4, 32)))


def whole_biases(rank: int, world_size: int, ep: int, tp: int) -> list[Tensor]:
    """b1, b2 and their gradients as all ranks hold them together, and the norm of both gradients."""
    config = make_config(3, 32)
    group = make_group(config, ep=ep, tp=tp, max_tokens=64)
    layer = MoE(config, group, path="twin")
    biases = draw_biases(config.num_experts, config.ffn_size, config.hidden_size, torch.float32)
    state = {"b1": biases.b1.view(-1, 2, config.ffn_size), "b2": biases.b2}
    for name, value in state.items():
        whole = distribute_tensor(value, getattr(layer, name).device_mesh, getattr(layer, name).placements)
        layer.load_state_dict({name: whole}, strict=False)
    layer.routed_experts(*draw(config, torch.float32, 0)).square().sum().backward()
    found = [layer.b1, layer.b2, layer.b1.grad, layer.b2.grad]
    results = [each.full_tensor().detach() for each in found]
    norm = comet.clip_grad_norm_([layer.b1, layer.b2], 1e9)
    group.close()
    return [*results, norm.full_tensor() if isinstance(norm, DTensor) else norm]


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_biases_are_sharded_as_the_weights_are(ep: int, tp: int) -> None:
    ranks = run_ranks(whole_biases, ep * tp, ep, tp)
    config = make_config(3, 32)
    b1, b2 = draw_biases(config.num_experts, config.ffn_size, config.hidden_size, torch.float32)
    for found in ranks:
        assert torch.equal(found[0].flatten(1), b1)
        assert torch.equal(found[1], b2)
        assert all(torch.equal(mine, first) for mine, first in zip(found, ranks[0], strict=True))
        norm = torch.cat([grad.flatten() for grad in found[2:4]]).norm()
        torch.testing.assert_close(found[4], norm, msg="a bias that TP ranks hold alike counts once: ".__add__)
