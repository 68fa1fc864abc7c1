"""The whole routed-experts layer on one GPU through the compiled kernels, against the single-process oracle."""

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES
from fp8_cases import QuantisedSwiglu, check_pack, fp8_shard
from gpus import captured
from kinds import layer0_in, layer1_in
from layer_cases import GPT_OSS, LayerCase, assert_as_close, rank_inputs
from layer_ranks import build_layer, run_case

from comet.kernels.runtime.activation import Activation
from comet.layout import RoutedTokens
from comet.quantization.formats import quantize_rows

pytestmark = pytest.mark.gpu

FP8 = dict(dtype=torch.bfloat16, fp8=True)
CASES = [
    LayerCase("bf16", 1, 1, (700,), 8, 2, 256, 512, dtype=torch.bfloat16, calls=3),
    LayerCase("fp16", 1, 1, (700,), 8, 4, 256, 512, dtype=torch.float16),
    LayerCase("fp32", 1, 1, (300,), 8, 2, 128, 64),
    LayerCase("odd widths", 1, 1, (333,), 6, 3, 336, 208, dtype=torch.bfloat16),
    LayerCase("no tokens", 1, 1, (0,), 4, 2, 64, 64, dtype=torch.bfloat16),
    LayerCase("one expert", 1, 1, (300,), 4, 2, 64, 64, routing="one", dtype=torch.bfloat16),
    LayerCase("masked", 1, 1, (500,), 64, 8, 256, 128, routing="masked", dtype=torch.bfloat16),
    LayerCase("all", 1, 1, (200,), 32, 32, 128, 128, dtype=torch.bfloat16, num_panels=1),
    LayerCase("panels in parts", 1, 1, (200,), 8, 4, 1040, 128, dtype=torch.bfloat16),
    LayerCase("fp8", 1, 1, (700,), 8, 2, 256, 512, **FP8, calls=3),
    LayerCase("fp8 fp16", 1, 1, (700,), 8, 4, 512, 256, dtype=torch.float16, fp8=True),
    LayerCase("fp8 fp32", 1, 1, (300,), 8, 2, 128, 128, fp8=True),
    LayerCase("fp8 odd number of blocks", 1, 1, (333,), 6, 3, 384, 640, **FP8, strided=True),
    LayerCase("fp8 no tokens", 1, 1, (0,), 4, 2, 128, 128, **FP8),
    LayerCase("fp8 one expert", 1, 1, (300,), 4, 2, 128, 128, routing="one", **FP8),
    LayerCase("fp8 masked", 1, 1, (500,), 64, 8, 256, 128, routing="masked", **FP8),
    LayerCase("fp8 two panels", 1, 1, (200,), 8, 2, 512, 256, **FP8, num_panels=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: LayerCase) -> None:
    run_case(0, 1, case, "fused", "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [*ACTIVATIONS[:-1], GPT_OSS], ids=NAMES)
def test_activations_and_biases(activation: Activation, dtype: torch.dtype) -> None:
    """In 16 bits both layers and tokens' gradients run in CUDA C++; in 32 bits the plain path runs, too."""
    case = LayerCase(activation.name, 1, 1, (60,), ffn_size=48, dtype=dtype, activation=activation, expert_bias=True)
    with layer0_in("cuda") as layer0, layer1_in("cuda") as layer1:
        run_case(0, 1, case, "fused", "cuda")
    assert (layer0.call_count, layer1.call_count) == ((0, 0) if dtype == torch.float32 else (1, 2))
    if dtype == torch.float32:
        run_case(0, 1, case, "plain", "cuda")


@pytest.mark.parametrize("fp8", [False, True])
def test_outputs_are_bitwise_equal_from_run_to_run(fp8: bool) -> None:
    case = LayerCase("bf16", 1, 1, (900,), 16, 4, 512, 256, dtype=torch.bfloat16, fp8=fp8)
    first, second = (run_case(0, 1, case, "fused", "cuda")[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_that_packs_gives_the_bits_of_the_quantiser(dtype: torch.dtype) -> None:
    for seed, (rows, columns) in enumerate([(1, 128), (67, 384), (500, 7168)]):
        generator = torch.Generator("cuda").manual_seed(seed)
        exponents = torch.randint(-20, 20, (rows, columns // 128, 1), generator=generator, device="cuda")
        values = torch.randn(rows, columns // 128, 128, generator=generator, device="cuda") * 2.0**exponents
        check_pack(values.flatten(1).to(dtype).nan_to_num())


def test_hidden_is_quantised_as_plain_torch_does_it() -> None:
    """Only layer 0 runs."""
    case = LayerCase("layer 0", 1, 1, (600,), 8, 2, 512, 384, **FP8)
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
    case = LayerCase("graph", 1, 1, (400,), 16, 4, 256, 256, **FP8, calls=4)
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
