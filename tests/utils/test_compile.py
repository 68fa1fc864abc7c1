"""Layers that ``torch.compile`` takes with one graph break, which says its reason, and with the same numbers."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from every_path import decode_weights, every_path, rank_inputs
from layer_cases import LayerCase
from layer_ranks import open_group
from modular_cases import rank_weights
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from comet.decode import warp_decode
from comet.graphed.moe import GraphedMoE
from comet.moe import MoE
from comet.utils.uncompiled import REASON

CASE = LayerCase("compiled", 1, 1, (9,))
Layer = Callable[[Tensor], Tensor]


def layer_of(name: str) -> Layer:
    """``(T, D) -> (T, D)`` by the layer called so."""
    if name == "graphed":
        graphed = GraphedMoE(MoE(CASE.config, open_group(CASE)))
        return lambda x: graphed(x)[0]
    weights = rank_weights(CASE, 0, Tensor)
    if name == "warp_decode":  # its weights are put together before a model is compiled
        inputs, held = rank_inputs(CASE, 0), decode_weights(*weights, CASE.num_experts)
        return lambda x: warp_decode(x, inputs.top_k_ids, inputs.top_k_weights, held)
    run = every_path(CASE)[name]
    return lambda x: run(x, *weights)


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(CASE.hidden_size, CASE.hidden_size), nn.RMSNorm(CASE.hidden_size)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x).relu())).sigmoid()


@pytest.mark.parametrize("name", ["graphed", "symmetric path", "grouped", "warp_decode"])
def test_a_layer_is_one_break(name: str) -> None:
    trained, layer = name not in ("grouped", "warp_decode"), layer_of(name)
    with torch.set_grad_enabled(trained):
        torch.manual_seed(0)
        model, x = Model(layer), torch.randn(9, CASE.hidden_size)
        torch._dynamo.reset()
        found = torch._dynamo.explain(model)(x)
        assert found.graph_break_count == 1, found
        assert REASON in found.break_reasons[0].reason
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled, results = torch.compile(model, backend=counter), []
        for run in (model, compiled, compiled):
            tokens = x.clone().requires_grad_(trained)
            y = run(tokens)
            grads = torch.autograd.grad(y.square().sum(), [tokens, *model.parameters()]) if trained else ()
            results.append([y, *grads])
        assert counter.frame_count == 2  # none again in the second call
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))
    torch._dynamo.reset()


def test_the_compiler_is_not_imported_before_it_is_used() -> None:
    used = (
        "import sys, torch, comet; from comet import *; layers = comet.MoE, comet.GraphedMoE;"
        "import comet.modular, comet.decode, comet.utils.uncompiled;"
        "config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2);"
        "group = make_expert_group(config, ParallelConfig(), max_tokens=8, dtype=torch.float32, device='cpu');"
        "y, stats = MoE(config, group)(torch.ones(8, 32)); y.sum().backward(); group.close();"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", used], check=True, timeout=120)
