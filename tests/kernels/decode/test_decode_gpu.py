"""Warp decode on a GPU, of all types of weights: selected and other blocks against the twin, and CUDA graphs."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES
from cache_cases import cache_of
from cached_layers import CUDA, K, case_of, draw_step
from decode_cases import (
    SLOT_SIZES,
    DecodeCase,
    check_decode,
    check_dequantize,
    check_every_code,
    check_graph,
    check_rows_in_turn,
    make_inputs,
    random_case,
    stored_slots,
)
from gpus import captured, take_free_memory

from comet.decode import DecodeScratch, warp_decode
from comet.decode.runners import LocalRunner
from comet.decode.twin import slot_weights
from comet.experts import streaming
from comet.experts.cached import CachedExperts
from comet.kernels.decode.blocks import BlockShape, DecodeConfig
from comet.kernels.decode.dequantize import dequantize_slots
from comet.kernels.runtime.activation import Activation

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED = ("mxfp8", "fp8", "mxfp4")
of_all_kinds = pytest.mark.parametrize("kind", ["", *QUANTISED], ids=lambda kind: kind or "plain")
QWEN3 = dict(K=8, E=32, D=2048, F=768)
DEEPSEEK = dict(K=4, E=8, D=7168, F=2048, held=7)
GEMMA4 = dict(K=8, E=16, D=2816, F=704)
TWO_EXPERTS = dict(K=2, E=4, D=1024, F=3584, held=3)
LARGE_EXPERTS = dict(K=2, E=4, D=4096, F=2048, held=3)
GPT_OSS = dict(K=4, E=8, D=2880, F=2880, biased=True, activation=Activation("clamped_swiglu"))

VECTOR = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=64), down=BlockShape(rows=16, depth=64))
FOLD = replace(VECTOR, fold=True)
MATRIX = DecodeConfig(form="matrix", gate_up=BlockShape(rows=32, depth=64), down=BlockShape(rows=64, depth=128))
LONG = replace(MATRIX, gate_up=BlockShape(rows=32, depth=256), down=BlockShape(rows=64, depth=256), tile=8)
HIGH, DEEP = BlockShape(rows=128, depth=64), BlockShape(rows=64, depth=128, num_warps=8, num_stages=2)
# A token and half a warp a row, a few tokens, and matrices of any number of them.
BLOCKS = [
    *((num_tokens, form) for num_tokens in (1, 2) for form in (FOLD, VECTOR)),
    *((num_tokens, MATRIX) for num_tokens in (1, 9)),
    *((num_tokens, replace(MATRIX, tile=tile)) for num_tokens, tile in ((9, 8), (64, 8), (64, 16))),
    (64, replace(MATRIX, gate_up=HIGH, down=HIGH)),
]
PLAIN_BLOCKS = [
    (1, replace(FOLD, ahead=24)),
    (1, replace(VECTOR, ahead=2)),
    (2, replace(VECTOR, ahead=4)),
    (1, replace(FOLD, gate_up=BlockShape(rows=1, depth=256, num_warps=1), down=BlockShape(rows=8, depth=1024))),
]
QUANTISED_BLOCKS = [
    (
        1,
        replace(
            FOLD, gate_up=BlockShape(rows=1, depth=512, num_warps=1), down=BlockShape(rows=8, depth=2048, num_warps=4)
        ),
    ),
    (64, replace(MATRIX, gate_up=BlockShape(rows=128, depth=32), down=HIGH)),
    (64, replace(MATRIX, gate_up=DEEP)),
    (9, LONG),
    (64, replace(LONG, tile=16)),
    (64, replace(LONG, down=BlockShape(rows=64, depth=128, num_stages=4, max_registers=80))),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTISED)
def test_every_code(kind: str, dtype: torch.dtype) -> None:
    check_every_code(kind, dtype, "cuda")


@of_all_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 17, 33, 64])
def test_selected_blocks(num_tokens: int, dtype: torch.dtype, kind: str) -> None:
    shapes = [QWEN3, GEMMA4, DEEPSEEK][: 3 if dtype == torch.bfloat16 else 2]
    for shape in shapes if kind else (QWEN3, TWO_EXPERTS, LARGE_EXPERTS):
        check_decode(DecodeCase(name="selected", T=num_tokens, quantised=kind, **shape), dtype, "cuda", runs=5)


@of_all_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("routing", ["one", "masked", "none", "repeated", "unknown", "always"])
def test_routings(num_tokens: int, routing: str, dtype: torch.dtype, kind: str) -> None:
    """No step of a kernel divides the sizes, and a block of scales ends inside the gate rows."""
    sizes = dict(D=352, F=224) if kind.startswith("mx") else dict(D=336, F=208)
    case = DecodeCase(
        name=routing, T=num_tokens, K=4, E=16, routing=routing, held=11, seed=num_tokens, quantised=kind, **sizes
    )
    check_decode(case, dtype, "cuda")


@of_all_kinds
@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed: int, kind: str) -> None:
    check_decode(random_case(seed, most_tokens=64, largest=640, quantised=kind), DTYPES[seed % 3], "cuda")


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_tokens", "config"),
    [(kind, *each) for kind in ("", *QUANTISED) for each in (*BLOCKS, *(QUANTISED_BLOCKS if kind else PLAIN_BLOCKS))],
)
def test_other_blocks(kind: str, num_tokens: int, config: DecodeConfig, dependent: bool) -> None:
    if kind == "mxfp4" and config.gate_up.depth < 64 and config.form != "vector":
        pytest.skip("a step is at least 64 columns of MXFP4")  # ``least_depth``
    case = DecodeCase(name="blocks", T=num_tokens, quantised=kind, config=replace(config, dependent=dependent), **QWEN3)
    check_decode(case, torch.bfloat16, "cuda", runs=20)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(384, 640), (288, 416), (2880, 1152)])
def test_long_steps_with_tails(hidden_size: int, ffn_size: int, dtype: torch.dtype, kind: str) -> None:
    """Blocks of scales are odd in number, and each part of a step has a tail."""
    sizes = dict(T=20, K=4, E=8, D=hidden_size, F=ffn_size)
    check_decode(DecodeCase(name="long", quantised=kind, config=LONG, held=6, **sizes), dtype, "cuda", runs=5)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64])
def test_activations(num_tokens: int, activation: Activation) -> None:
    for biased in (False, True):
        case = DecodeCase(name="small", T=num_tokens, K=3, E=7, D=336, F=208, activation=activation, biased=biased)
        check_decode(case, torch.bfloat16, "cuda")


@of_all_kinds
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_gpt_oss(num_tokens: int, kind: str) -> None:
    case = DecodeCase(name="gpt_oss", T=num_tokens, held=6, quantised=kind, **GPT_OSS)
    check_decode(case, torch.bfloat16, "cuda")
    if kind != "fp8":
        check_rows_in_turn(case, torch.bfloat16, "cuda")


@of_all_kinds
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_offsets_past_two_billion_elements(num_tokens: int, kind: str) -> None:
    """Experts in the last slots of a large cache, where w2 begins past 2^31 too, give the bits of a small one."""
    case = DecodeCase(name="large", T=num_tokens, K=2, E=2, D=8192, F=4096, quantised=kind)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    small, num_slots, parts = inputs.weights, 72, {}
    shift = num_slots - small.w1.shape[0]
    for name in ("w1", "w2", "w1_scales", "w2_scales") if kind else ("w1", "w2"):
        old = getattr(small, name)
        parts[name] = torch.zeros(num_slots, *old.shape[1:], dtype=old.dtype, device="cuda")
        parts[name][shift:] = old
    step, large = (
        (inputs.tokens, inputs.ids, inputs.routing_weights),
        replace(small, slots=small.slots + shift, **parts),
    )
    assert torch.equal(warp_decode(*step, large), warp_decode(*step, small))


@of_all_kinds
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_graph_with_changing_routing(num_tokens: int, dependent: bool, kind: str) -> None:
    case = DecodeCase(name="graph", T=num_tokens, K=4, E=16, D=1024, F=768, quantised=kind)
    check_graph(case, replays=100, dependent=dependent)


def test_graph_of_gpt_oss() -> None:
    check_graph(DecodeCase(name="gpt_oss", T=2, **GPT_OSS), replays=5)


def test_nothing_but_the_output_is_allocated() -> None:
    inputs = make_inputs(DecodeCase(name="memory", T=8, **QWEN3), torch.bfloat16, "cuda")
    scratch = DecodeScratch.create(inputs.weights, 8, torch.bfloat16)
    arguments = (inputs.tokens.contiguous(), inputs.ids, inputs.routing_weights, inputs.weights)
    warp_decode(*arguments, scratch=scratch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    warp_decode(*arguments, scratch=scratch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1


def test_a_graph_runs_on_when_its_caller_has_let_go_of_the_scratch() -> None:
    inputs = make_inputs(DecodeCase(name="let go", T=8, **QWEN3), torch.bfloat16, "cuda")
    step = (inputs.tokens.contiguous(), inputs.ids, inputs.routing_weights, inputs.weights)
    scratch = DecodeScratch.create(inputs.weights, 8, torch.bfloat16, max_tokens=8)
    graph, output = captured(partial(warp_decode, *step, scratch=scratch))
    del scratch
    gc.collect()
    taken = take_free_memory()
    for _ in range(3):
        step[0].normal_()
        graph.replay()
        assert torch.equal(output, warp_decode(*step))
    assert all(bool((memory == 1).all()) for memory in taken), "others' memory was written to"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", SLOT_SIZES)
def test_dequantised_slots_have_the_bits_of_torch(kind: str, dtype: torch.dtype) -> None:
    qwen3, gpt_oss = ((1536, 2048), (2048, 768)), ((5760, 2880),)
    for rows, columns in (*SLOT_SIZES[kind], *qwen3, *gpt_oss):
        check_dequantize(kind, rows, columns, dtype, CUDA)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8"])
def test_dequantised_offsets_past_two_billion_elements(kind: str) -> None:
    """The last slots of a large cache give what they give in a small one."""
    stored, first = stored_slots(kind, 2, 8192, 4096, seed=1), 70
    large = []
    for part in (stored.elements, stored.scales):
        slots = torch.zeros(first + 2, *part.shape[1:], dtype=part.dtype, device=CUDA)
        slots[first:] = part.to(CUDA)
        large.append(slots)
    assert large[0].numel() > 2**31
    found = dequantize_slots(*large, torch.tensor([first + 1, first], dtype=torch.int32, device=CUDA), torch.bfloat16)
    assert torch.equal(found.cpu(), stored.dequantize(torch.bfloat16)[[1, 0]])


@pytest.mark.parametrize("kind", SLOT_SIZES)
@pytest.mark.parametrize("num_bytes", [1, streaming.FLOATING_BYTES], ids=["one by one", "in groups"])
def test_prompts_have_the_bits_that_torch_gives_them(
    kind: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel and torch dequantise the experts of a cache."""
    monkeypatch.setattr(streaming, "FLOATING_BYTES", num_bytes)
    made, case = torch.Generator().manual_seed(3), case_of(1, F=224, quantised=kind, seed=3)
    paths = [CachedExperts(cache_of(case, 11, device=CUDA), LocalRunner(K, 4), K) for _ in range(2)]
    for num_tokens in (60, 5, 200):
        inputs = draw_step(made, num_tokens, masked=False)
        found = paths[0](inputs, *paths[0].cache.weights.parts[:2])
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "floating_slots", slot_weights)
            wanted = paths[1](inputs, *paths[1].cache.weights.parts[:2])
        assert torch.equal(found, wanted), f"{num_tokens} tokens"
