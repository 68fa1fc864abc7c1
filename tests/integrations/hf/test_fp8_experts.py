"""Experts that a model keeps in block FP8: which tokens they compute without being dequantised."""

from __future__ import annotations

import pytest
import torch
from fp8_cases import compare, float32_products, fp8_shard, layer_of
from layer_cases import LayerCase, RankInputs, rank_inputs
from ranks import run_ranks
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from comet.decode.runners import LocalRunner, ReplicatedRunner, computes_fp8, fp8_path
from comet.integrations.hf.fp8.experts import FP8Experts
from comet.layer.group import make_expert_group
from comet.layer.paths import make_path
from comet.quantization.formats import FP8

DECODE_TOKENS = 4
CASES = [
    LayerCase("ep2", 2, 1, (30, 30), hidden_size=256, ffn_size=128),
    LayerCase("tp2", 1, 2, (25, 25), hidden_size=128, ffn_size=256),
]


def make_experts(case: LayerCase, rank: int, path: str) -> FP8Experts:
    """Of one rank, whose tokens beyond a decode step take ``path``."""
    most = max(case.num_tokens)
    group = make_expert_group(case.config, case.parallel, max_tokens=most, dtype=case.dtype, device="cpu")
    runner = ReplicatedRunner(case.config, group, DECODE_TOKENS)
    assert not runner.takes_fp8, "on a CPU weights are dequantised"
    runner.path = make_path(path, case.config, group, case.overlap)
    runner.takes_fp8 = computes_fp8(runner.path, case.config)
    layout = group.layout(case.config)
    experts = FP8Experts(case.hidden_size, case.ffn_size // case.tp, layout, runner, group.device)
    w1, w2 = fp8_shard(case, rank)
    with torch.no_grad():
        for name, weight in (("gate_up_proj", w1), ("down_proj", w2)):
            experts.get_parameter(name).copy_(weight.elements)
            experts.get_parameter(f"{name}_scale_inv").copy_(weight.scales)
    return experts


def on_rank(rank: int, world_size: int, case: LayerCase, path: str, tokens: int) -> Tensor:
    """The same tokens on every rank, checked; ``tokens`` of them may need several rounds."""
    experts = make_experts(case, rank, path)
    inputs = rank_inputs(LayerCase(**(vars(case) | dict(num_tokens=(tokens,)))), 0)
    dequantised = []
    whole = FP8.dequantize

    def noted(self: FP8, *arguments: torch.dtype, out: Tensor | None = None) -> Tensor:
        dequantised.append(self.elements.shape)
        return whole(self, *arguments, out=out)

    FP8.dequantize = noted  # type: ignore[method-assign]
    with torch.no_grad():
        output = experts(inputs.tokens, inputs.top_k_ids.long(), inputs.top_k_weights)
    FP8.dequantize = whole  # type: ignore[method-assign]
    experts.runner.check()
    if path == "fused":
        assert not dequantised, "the layer was dequantised"
        shards = [fp8_shard(case, holder) for holder in range(world_size)]
        products = float32_products(max(case.hidden_size, case.ffn_size))
        compare(output, layer_of(case, inputs, inputs.top_k_ids, shards, products), f"{case.name}, rank {rank}")
    else:
        assert len(dequantised) == 2
        compare_plain(case, inputs, output, world_size)
    return output


def compare_plain(case: LayerCase, inputs: RankInputs, output: Tensor, world_size: int) -> None:
    """Tokens and hidden are not quantised where weights are dequantised."""
    wanted = torch.zeros_like(output, dtype=torch.float64)
    for holder in range(world_size):
        w1, w2 = (weight.dequantize().double() for weight in fp8_shard(case, holder))
        for local in range(w1.shape[0]):
            rows, slots = (inputs.top_k_ids == holder // case.tp * w1.shape[0] + local).nonzero(as_tuple=True)
            gate, up = (inputs.tokens[rows].double() @ w1[local].T).chunk(2, dim=1)
            y = (torch.nn.functional.silu(gate) * up) @ w2[local].T
            wanted.index_add_(0, rows, inputs.top_k_weights[rows, slots, None].double() * y)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", ["fused", "twin", "plain"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_more_tokens_than_a_decode_step(case: LayerCase, path: str) -> None:
    first, second = run_ranks(on_rank, 2, case, path, 75, interpret=path == "fused", timeout=300)
    assert torch.equal(first, second), "ranks differ"


def test_what_computes_in_fp8() -> None:
    case = LayerCase("one rank", 1, 1, (8,), hidden_size=128, ffn_size=128)
    narrow = LayerCase("one rank", 1, 1, (8,), hidden_size=144, ffn_size=128)
    for each, expected in ((case, True), (narrow, False)):
        group = make_expert_group(each.config, each.parallel, max_tokens=8, dtype=torch.float32, device="cpu")
        assert computes_fp8(make_path("fused", each.config, group, each.overlap), each.config) == expected
        assert not computes_fp8(make_path("twin", each.config, group, each.overlap), each.config)
        plain = make_path("plain", each.config, group)
        assert not computes_fp8(plain, each.config)
        with pytest.raises(ValueError, match="path=CollectivePath must be fused for experts in block FP8"):
            fp8_path(plain)
        group.close()
    assert not LocalRunner(2).takes_fp8
