"""Warp decode of MXFP8, MXFP4 and block FP8 weights on a GPU: all shapes of blocks against the twin, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import (
    DecodeCase,
    check_decode,
    check_every_code,
    check_every_e2m1_code,
    check_graph,
    make_inputs,
    random_case,
)

from comet.decode import DecodeWeights, warp_decode
from comet.kernels.decode.blocks import BlockShape, DecodeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", ["mxfp8", "fp8", "mxfp4"])]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QWEN3 = dict(K=8, E=32, D=2048, F=768)
DEEPSEEK = dict(K=4, E=8, D=7168, F=2048)
GEMMA4 = dict(K=8, E=16, D=2816, F=704)

VECTOR = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=64), down=BlockShape(rows=16, depth=64))
FOLD = replace(VECTOR, fold=True)
WIDE = DecodeConfig(
    form="vector", fold=True, gate_up=BlockShape(rows=1, depth=512, num_warps=1),
    down=BlockShape(rows=8, depth=2048, num_warps=4),
)  # fmt: skip
MATRIX = DecodeConfig(form="matrix", gate_up=BlockShape(rows=32, depth=64), down=BlockShape(rows=64, depth=128))
LONG = replace(MATRIX, gate_up=BlockShape(rows=32, depth=256), down=BlockShape(rows=64, depth=256), tile=8)
LIMITED = replace(LONG, down=BlockShape(rows=64, depth=128, num_stages=4, max_registers=80))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype: torch.dtype, kind: str) -> None:
    (check_every_e2m1_code if kind == "mxfp4" else check_every_code)(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 17, 33, 64])
def test_selected_blocks(num_tokens: int, dtype: torch.dtype, kind: str) -> None:
    for shape in (QWEN3, GEMMA4):
        check_decode(DecodeCase(name="selected", T=num_tokens, quantised=kind, **shape), dtype, "cuda", runs=5)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64])
def test_selected_blocks_of_deepseek(num_tokens: int, kind: str) -> None:
    case = DecodeCase(name="deepseek", T=num_tokens, held=7, quantised=kind, **DEEPSEEK)
    check_decode(case, torch.bfloat16, "cuda", runs=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("routing", ["one", "masked", "none", "repeated", "unknown", "always"])
def test_routings(num_tokens: int, routing: str, dtype: torch.dtype, kind: str) -> None:
    """Sizes that no step of a kernel divides; a block of scales ends inside the gate rows."""
    sizes = dict(D=352, F=224) if kind.startswith("mx") else dict(D=336, F=208)
    case = DecodeCase(
        name=routing, T=num_tokens, K=4, E=16, routing=routing, held=11, seed=num_tokens, quantised=kind, **sizes
    )
    check_decode(case, dtype, "cuda")


@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed: int, kind: str) -> None:
    check_decode(random_case(seed, most_tokens=64, largest=640, quantised=kind), DTYPES[seed % 3], "cuda")


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    [
        (1, FOLD),
        (1, VECTOR),
        (1, WIDE),
        (2, FOLD),
        (2, VECTOR),
        (1, MATRIX),
        (9, MATRIX),
        (9, replace(MATRIX, tile=8)),
        (64, replace(MATRIX, tile=8)),
        (64, replace(MATRIX, tile=16)),
        (64, replace(MATRIX, gate_up=BlockShape(rows=128, depth=32), down=BlockShape(rows=128, depth=64))),
        (64, replace(MATRIX, gate_up=BlockShape(rows=128, depth=64), down=BlockShape(rows=128, depth=64))),
        (64, replace(MATRIX, gate_up=BlockShape(rows=64, depth=128, num_warps=8, num_stages=2))),
        (9, LONG),
        (64, replace(LONG, tile=16)),
        (64, LIMITED),
    ],
)
def test_other_blocks(num_tokens: int, config: DecodeConfig, dependent: bool, kind: str) -> None:
    case = DecodeCase(name="blocks", T=num_tokens, quantised=kind, config=replace(config, dependent=dependent), **QWEN3)
    if kind == "mxfp4" and config.gate_up.depth < 64 and config.form == "matrix":
        with pytest.raises(ValueError, match=r"gate_up.depth=32 must be at least 64"):
            check_decode(case, torch.bfloat16, "cuda")
    else:
        check_decode(case, torch.bfloat16, "cuda", runs=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(384, 640), (288, 416), (2880, 1152)])
def test_long_steps_with_tails(hidden_size: int, ffn_size: int, dtype: torch.dtype, kind: str) -> None:
    """Odd numbers of blocks of scales, and tails in each part of a step."""
    sizes = dict(T=20, K=4, E=8, D=hidden_size, F=ffn_size)
    check_decode(DecodeCase(name="long", quantised=kind, config=LONG, held=6, **sizes), dtype, "cuda", runs=5)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_offsets_past_two_billion_elements(num_tokens: int, kind: str) -> None:
    """Experts in the last slots of a large cache give the bits they give in a small one."""
    case = DecodeCase(name="large", T=num_tokens, K=2, E=2, D=8192, F=4096, quantised=kind)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    small, num_slots = inputs.weights, 72  # w2 of the last ones begins past 2^31 elements as well
    shift = num_slots - small.w1.shape[0]
    fields = {}
    for name in ("w1", "w2", "w1_scales", "w2_scales"):
        old = getattr(small, name)
        new = torch.zeros(num_slots, *old.shape[1:], dtype=torch.uint8, device="cuda")
        if old.dtype == torch.float32:
            new = new.float()
        new[shift:] = old if old.dtype == new.dtype else old.view(torch.uint8)
        fields[name] = new if name.endswith("scales") else new.view(old.dtype)
    large = DecodeWeights(slots=small.slots + shift, **fields)
    step = (inputs.tokens, inputs.ids, inputs.routing_weights)
    assert torch.equal(warp_decode(*step, large), warp_decode(*step, small))


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_graph_with_changing_routing(num_tokens: int, kind: str) -> None:
    check_graph(DecodeCase(name="graph", T=num_tokens, K=4, E=16, D=1024, F=768, quantised=kind), replays=100)


def test_cosine_similarity_to_float64_of_the_quantised_numbers(kind: str) -> None:
    for num_tokens in (1, 8, 64):
        case = DecodeCase(name="cosine", T=num_tokens, quantised=kind, **QWEN3)
        inputs = make_inputs(case, torch.bfloat16, "cuda")
        output = warp_decode(inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights)
        exact = inputs.double().twin()
        assert torch.cosine_similarity(output.double(), exact, dim=1).min() > 0.999996, num_tokens
