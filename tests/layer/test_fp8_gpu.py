"""The layer in block FP8 on one GPU through the compiled kernels, against float64 on the quantised operands."""

import pytest
import torch
from fp8_cases import QuantisedSwiglu, check_pack, fp8_shard
from gpus import captured
from layer_cases import LayerCase, assert_as_close, rank_inputs
from layer_ranks import build_layer

from comet.layout import RoutedTokens
from comet.quantization.formats import quantize_rows

pytestmark = pytest.mark.gpu

BF16 = dict(dtype=torch.bfloat16, fp8=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_that_packs_gives_the_bits_of_the_quantiser(dtype: torch.dtype) -> None:
    for seed, (rows, columns) in enumerate([(1, 128), (67, 384), (500, 7168)]):
        generator = torch.Generator("cuda").manual_seed(seed)
        exponents = torch.randint(-20, 20, (rows, columns // 128, 1), generator=generator, device="cuda")
        values = torch.randn(rows, columns // 128, 128, generator=generator, device="cuda") * 2.0**exponents
        check_pack(values.flatten(1).to(dtype).nan_to_num())


def test_hidden_is_quantised_as_plain_torch_does_it() -> None:
    """Layer 0 alone."""
    case = LayerCase("layer 0", 1, 1, (600,), 8, 2, 512, 384, **BF16)
    moe, (w1, _), inputs = build_layer(case, 0, "fused", "cuda"), fp8_shard(case, 0, "cuda"), rank_inputs(case, 0)
    tokens = inputs.tokens.cuda()
    plan = moe.experts.backend.plan(inputs.top_k_ids.cuda(), inputs.top_k_weights.cuda())
    hidden = moe.experts.backend.dispatch_gemm(tokens, w1, plan, save_pre_activation=False)[0].dequantize()
    rows, weights = quantize_rows(tokens).dequantize().double(), w1.dequantize().double()
    counts = plan.segment_counts.tolist()
    for expert, (start, count) in enumerate(zip(plan.segment_starts.tolist(), counts, strict=False)):
        gate, up = (rows[plan.routed_row_ids[start : start + count].long()] @ weights[expert].T).chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        plain = QuantisedSwiglu.forward(gate.float(), up.float())
        assert_as_close(hidden[start : start + count], exact, plain, torch.float32, f"expert {expert}")
    moe.group.close()


def test_a_cuda_graph_replays_with_other_routing() -> None:
    case = LayerCase("graph", 1, 1, (400,), 16, 4, 256, 256, **BF16, calls=4)
    moe, weights = build_layer(case, 0, "fused", "cuda"), fp8_shard(case, 0, "cuda")
    given = [rank_inputs(case, 0, call).to("cuda").routed for call in range(case.calls)]
    expected = [moe.experts.fp8(batch, *weights) for batch in given]
    held = RoutedTokens(*(tensor.clone() for tensor in given[0]))
    graph, output = captured(lambda: moe.experts.fp8(held, *weights))
    for batch, wanted in zip(given, expected, strict=True):
        for target, source in zip(held, batch, strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(output, wanted)
    moe.group.workspace.check()
    moe.group.close()
