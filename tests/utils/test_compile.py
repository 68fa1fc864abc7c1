"""Layers in a model that ``torch.compile`` takes: one graph break each, with its reason, and the same numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from layer_cases import LayerCase, rank_inputs
from modular_cases import make_group, rank_weights
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from comet.decode import DecodeWeights, warp_decode
from comet.graphed.moe import GraphedMoE
from comet.layer.paths import make_path
from comet.modular import ModularMoE, ReferenceExperts, SingleRank
from comet.moe import MoE
from comet.utils.uncompiled import REASON

CASE = LayerCase("compiled", 1, 1, (9,))
Layer = Callable[[Tensor], Tensor]


@contextmanager
def opened(name: str) -> Iterator[Layer]:
    """``(T, D) -> (T, D)`` by the layer called so."""
    group, inputs = make_group(CASE), rank_inputs(CASE, 0)
    routing = (inputs.top_k_ids, inputs.top_k_weights)
    w1, w2 = rank_weights(CASE, 0, Tensor)
    weights = DecodeWeights(w1=w1, w2=w2, slots=torch.arange(4, dtype=torch.int32))
    if name in ("twin", "plain", "reference"):
        layer = MoE(CASE.config, group, path=name)
        yield lambda x: layer(x)[0]
    elif name == "graphed":
        graphed = GraphedMoE(MoE(CASE.config, group))
        yield lambda x: graphed(x)[0]
    elif name == "path":
        path = make_path("twin", CASE.config, group)
        yield lambda x: path(x, *routing, w1, w2)
    elif name == "modular":
        modular = ModularMoE(SingleRank(CASE.config, group), ReferenceExperts(CASE.config, group))
        yield lambda x: modular(x, *routing, w1, w2)
    else:
        yield lambda x: warp_decode(x, *routing, weights)
    group.close()


class Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(CASE.hidden_size, CASE.hidden_size), nn.RMSNorm(CASE.hidden_size)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x).relu())).sigmoid()


@pytest.mark.parametrize("name", ["twin", "plain", "reference", "graphed", "path", "modular", "decode"])
def test_a_layer_is_one_break(name: str) -> None:
    trained = name not in ("modular", "decode")
    with opened(name) as layer, torch.set_grad_enabled(trained):
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
