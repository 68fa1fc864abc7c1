"""Warp decode of MXFP8, MXFP4 and block FP8 weights: kernels (interpreted) against the twin, ranks, and bad scales."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from decode_cases import (
    SLOT_SIZES,
    DecodeCase,
    check_decode,
    check_dequantize,
    check_every_code,
    draw_experts,
    make_inputs,
    random_case,
    stored_parts,
)
from ranks import in_ranks
from tiers import slow

from comet.comm import make_communicator
from comet.decode import DecodeWeights, RankDecode, rank_slots, warp_decode, warp_decode_torch
from comet.decode.twin import decode_partial_torch
from comet.kernels.decode.blocks import BlockShape, DecodeConfig, lane_of, select
from comet.kernels.decode.scales import part_of
from comet.layout import ExpertLayout
from comet.reference.layer import shard_experts

KINDS = ("mxfp8", "fp8", "mxfp4")

# Steps of 64 leave tails; in the vector form 8 rows share a warp, so a token is there in several copies.
VECTOR = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=64), down=BlockShape(rows=16, depth=64))
FOLD = replace(VECTOR, fold=True)
# One lane after the other: no copies, whole warps along the contraction.
WIDE = replace(FOLD, gate_up=BlockShape(rows=8, depth=512), down=BlockShape(rows=16, depth=512))
MATRIX = DecodeConfig(form="matrix", gate_up=BlockShape(rows=32, depth=64), down=BlockShape(rows=32, depth=128))
TILES = replace(MATRIX, tile=8)
# Steps of two scales of block FP8, and of four; of eight of MXFP8.
LONG = replace(TILES, gate_up=BlockShape(rows=32, depth=256), down=BlockShape(rows=16, depth=256))
LONGER = replace(LONG, gate_up=BlockShape(rows=16, depth=512), down=BlockShape(rows=32, depth=512))

MX_CASES = [
    DecodeCase(name="fold, tails, not all held", T=1, K=3, E=4, D=96, F=32, config=FOLD, held=3),
    DecodeCase(name="one token, repeated", T=1, K=2, E=4, D=64, F=32, config=VECTOR, routing="repeated"),
    DecodeCase(name="two tokens, unknown", T=2, K=2, E=3, D=96, F=32, config=VECTOR, routing="unknown"),
    DecodeCase(name="ahead, two tokens", T=2, K=2, E=4, D=64, F=160, config=replace(VECTOR, ahead=2), held=3),
    DecodeCase(name="matrix, tails", T=5, K=2, E=4, D=160, F=96, config=MATRIX, routing="masked", held=3),
    DecodeCase(name="three passes, tails", T=20, K=2, E=3, D=160, F=96, config=TILES, routing="one", held=2),
    DecodeCase(name="matrix, no tails", T=3, K=2, E=9, D=128, F=128, config=MATRIX, routing="repeated"),
    DecodeCase(name="long steps, tails", T=9, K=2, E=3, D=288, F=416, config=LONG, held=2),
    DecodeCase(name="selected", T=1, K=2, E=4, D=32, F=32),
    DecodeCase(name="selected", T=17, K=2, E=4, D=96, F=160, routing="unknown"),
    DecodeCase(name="selected", T=3, K=2, E=4, D=64, F=32),
]
WIDER = replace(WIDE, gate_up=BlockShape(rows=8, depth=1024))
CASES = {
    "mxfp8": [
        *MX_CASES,
        DecodeCase(name="two tokens by row", T=2, K=1, E=5, D=32, F=96, config=VECTOR, routing="one"),
        DecodeCase(name="a warp along a row", T=1, K=1, E=2, D=544, F=32, config=WIDE),
        DecodeCase(name="two passes", T=9, K=2, E=4, D=64, F=128, config=TILES, routing="always"),
        DecodeCase(name="selected, passes", T=34, K=2, E=2, D=96, F=160, routing="masked"),
    ],
    "mxfp4": [*MX_CASES, DecodeCase(name="a warp along a row", T=1, K=1, E=2, D=1056, F=32, config=WIDER)],
    # A block of scales ends inside the gate rows, and the up rows begin in the middle of one.
    "fp8": [
        DecodeCase(name="fold, blocks of F", T=1, K=1, E=2, D=48, F=144, config=FOLD),
        DecodeCase(name="fold, not all held", T=1, K=3, E=3, D=144, F=16, config=FOLD, held=2),
        DecodeCase(name="two tokens, repeated", T=2, K=2, E=3, D=144, F=48, config=VECTOR, routing="repeated"),
        DecodeCase(name="a warp along a row", T=1, K=1, E=2, D=528, F=16, config=WIDE),
        DecodeCase(name="fold, ahead", T=1, K=2, E=4, D=48, F=208, config=replace(FOLD, ahead=3), routing="masked"),
        DecodeCase(name="two tokens, ahead", T=2, K=2, E=4, D=48, F=144, config=replace(VECTOR, ahead=1), held=3),
        DecodeCase(name="matrix, tails", T=5, K=2, E=4, D=176, F=208, config=MATRIX, routing="masked", held=3),
        DecodeCase(name="matrix, small steps", T=3, K=2, E=9, D=144, F=144, routing="one", config=replace(
            MATRIX, gate_up=BlockShape(rows=64, depth=32), down=BlockShape(rows=16, depth=64))),
        DecodeCase(name="three passes, tails", T=20, K=2, E=3, D=304, F=208, config=TILES, routing="one", held=2),
        DecodeCase(name="two passes, small steps", T=9, K=2, E=4, D=144, F=272, routing="always", config=replace(
            TILES, gate_up=BlockShape(rows=16, depth=32))),
        DecodeCase(name="two scales a step, no tails", T=9, K=2, E=3, D=512, F=768, config=LONG, routing="one"),
        DecodeCase(name="odd numbers of scales", T=3, K=2, E=4, D=384, F=640, config=LONG, held=3),
        DecodeCase(name="tails in the first part", T=9, K=2, E=3, D=272, F=304, config=LONG, routing="masked"),
        DecodeCase(name="tails in the second part", T=5, K=2, E=3, D=400, F=208, config=LONG, routing="unknown"),
        DecodeCase(name="four scales a step", T=9, K=2, E=2, D=1040, F=896, config=LONGER),
        DecodeCase(name="selected", T=2, K=2, E=4, D=16, F=16),
        DecodeCase(name="selected, passes", T=17, K=2, E=2, D=144, F=208, routing="unknown"),
        DecodeCase(name="selected", T=3, K=2, E=4, D=48, F=16),
        DecodeCase(name="selected, passes", T=34, K=2, E=2, D=144, F=208, routing="masked"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "long"), [*((kind, False) for kind in KINDS), *(slow(kind, True) for kind in KINDS)])
@in_ranks(1, interpret=True, timeout=500)
def test_kernels_under_the_interpreter(rank: int, world_size: int, kind: str, long: bool) -> None:
    """Cases with many tokens or long steps are slow and run apart."""
    cases = [case for case in enumerate(CASES[kind]) if (case[1].T > 8 or case[1].config in (LONG, LONGER)) == long]
    for index, case in cases:
        check_decode(replace(case, quantised=kind), (torch.float32, torch.float16)[index % 2], "cpu", runs=1)
    for dtype in () if long else (torch.float32, torch.float16):
        check_every_code(kind, dtype, "cpu")
    for seed in (1, 2) if long else (0,):
        check_decode(random_case(seed, most_tokens=6, largest=96, quantised=kind), torch.float32, "cpu", runs=1)
        case = random_case(seed + 50, most_tokens=3, largest=160, quantised=kind)
        check_decode(replace(case, T=8 * case.T + 1, config=TILES), torch.float16, "cpu", runs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_twin_runs_on_the_dequantised_numbers(kind: str) -> None:
    inputs = make_inputs(DecodeCase(name="twin", T=4, K=2, E=4, D=160, F=96, quantised=kind), torch.float32, "cpu")
    packed, step = inputs.weights, (inputs.tokens, inputs.ids, inputs.routing_weights)
    exact = inputs.double().weights
    plain = DecodeWeights(w1=exact.w1.float(), w2=exact.w2.float(), slots=packed.slots)
    assert torch.equal(warp_decode(*step, packed), warp_decode(*step, plain))
    assert warp_decode(step[0].bfloat16(), *step[1:], packed).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.usefixtures("interpreted")
def test_no_tokens(kind: str) -> None:
    inputs = make_inputs(DecodeCase(name="none", T=0, K=2, E=4, D=32, F=32, quantised=kind), torch.float32, "cpu")
    step = (inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights)
    for use_kernels in (False, True):
        assert warp_decode(*step, use_kernels=use_kernels).shape == (0, 32)


def test_torch_type_of_two_codes_a_byte_is_taken() -> None:
    """Its first element is in the low half, as ours; a step gives the bits that it gives for the codes."""
    inputs = make_inputs(DecodeCase(name="torch", T=3, K=2, E=4, D=64, F=32, quantised="mxfp4"), torch.float32, "cpu")
    packed, step = inputs.weights, (inputs.tokens, inputs.ids, inputs.routing_weights)
    views = {name: getattr(packed, name).view(torch.float4_e2m1fn_x2) for name in ("w1", "w2")}
    given = replace(packed, **views)
    assert given.w1.dtype == given.w2.dtype == torch.uint8
    assert (given.hidden_size, given.ffn_size, given.shared_scale, given.per_number) == (64, 32, 32, 2)
    assert torch.equal(warp_decode(*step, given), warp_decode(*step, packed))


# ---- over ranks ------------------------------------------------------------------------------------------------------


def shard_and_quantise(kind: str, case: DecodeCase, layout: ExpertLayout) -> DecodeWeights:
    shards = (weight.contiguous() for weight in shard_experts(*draw_experts(case), layout))
    return DecodeWeights(**stored_parts(kind, *shards), slots=rank_slots(layout, "cpu"))


@in_ranks(2, interpret=True)
def test_ranks_add_up_quantised_experts(rank: int, world_size: int) -> None:
    case = DecodeCase(name="ranks", T=3, K=2, E=4, D=32, F=64)
    comm = make_communicator("auto", dist.group.WORLD, "cpu", timeout_s=60.0)
    decode = RankDecode(comm, hidden_size=32, max_tokens=3, use_kernels=True)
    inputs = make_inputs(case, torch.float32, "cpu")
    for kind, (tp, num_tokens) in product(KINDS, ((1, 3), (2, 1))):
        layouts = [ExpertLayout(num_experts=4, top_k=2, ep=world_size // tp, tp=tp, rank=r) for r in range(world_size)]
        shards = [shard_and_quantise(kind, case, layout) for layout in layouts]
        step = (inputs.tokens[:num_tokens], inputs.ids[:num_tokens], inputs.routing_weights[:num_tokens])
        wanted = torch.zeros(num_tokens, 32)
        for shard in shards:
            wanted = wanted + decode_partial_torch(*step, shard)
        output = decode(*step, shards[rank])
        assert torch.allclose(output, wanted, atol=1e-5), f"{kind}, tp {tp}, rank {rank}, {num_tokens} tokens"
    comm.barrier()
    comm.close()


# ---- bad input -------------------------------------------------------------------------------------------------------

GOOD = {
    kind: make_inputs(DecodeCase(name="good", T=3, K=2, E=4, D=160, F=96, quantised=kind), torch.float32, "cpu").weights
    for kind in KINDS
}


BYTES, BLOCK, CODES = (GOOD[kind] for kind in KINDS)
FLOATS = {"w1": torch.zeros(6, 192, 160), "w2": torch.zeros(6, 160, 96)}


def with_value(scales: torch.Tensor, value: float) -> torch.Tensor:
    scales = scales.clone()
    scales[1, 0, 0] = value
    return scales


def e4m3(hidden_size: int, ffn_size: int) -> dict[str, torch.Tensor]:
    """Weights without scales."""
    shapes = {"w1": (6, 2 * ffn_size, hidden_size), "w2": (6, hidden_size, ffn_size)}
    return {name: torch.zeros(shape).to(torch.float8_e4m3fn) for name, shape in shapes.items()}


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fp8", {"w1_scales": None}, "w1_scales and w2_scales must both be given, or neither"),
        ("fp8", {"w1_scales": None, "w2_scales": None}, "torch.float8_e4m3fn must come with w1_scales and w2_scales"),
        ("fp8", FLOATS, "w1 of torch.float32 with w1_scales of torch.float32 must be one of torch.float8_e4m3fn with"),
        (
            "fp8",
            {"w1_scales": BLOCK.w1_scales[:, :1]},
            r"w1_scales of shape \(6, 1, 2\) .*F/128, D/128\) = \(6, 2, 2\)",
        ),
        ("fp8", {"w2_scales": BLOCK.w2_scales.mT.contiguous()}, r"must be \(S, D/128, F/128\) = \(6, 2, 1\)"),
        ("fp8", {"w2_scales": torch.zeros(6, 2, 1, device="meta")}, "w2_scales is on meta, must be on cpu"),
        ("fp8", {"w2_scales": with_value(BLOCK.w2_scales, math.nan)}, r"w2_scales\[1, 0, 0\]=nan must be fin"),
        ("fp8", {"w1_scales": with_value(BLOCK.w1_scales, math.inf)}, r"w1_scales\[1, 0, 0\]=inf must be fin"),
        ("fp8", {"w1_scales": with_value(BLOCK.w1_scales, -1.0)}, r"w1_scales\[1, 0, 0\]=-1.0 must be finite and"),
        ("mxfp8", {"w1_scales": torch.zeros(6, 192, 5).half()}, "w1_scales of torch.float16 must be one of"),
        ("mxfp8", {"w2_scales": BLOCK.w2_scales}, "w2_scales of dtype torch.float32 must be torch.uint8"),
        ("mxfp8", {"w1_scales": BYTES.w1_scales[:, :-1]}, r"w1_scales of shape \(6, 191, 5\) .* \(6, 192, 5\)"),
        ("mxfp8", {"w1_scales": BYTES.w1_scales.mT.contiguous().mT}, r"\(6, 192, 5\) must be contiguous, has strides"),
        (
            "mxfp8",
            {"w1_scales": with_value(BYTES.w1_scales, 255)},
            r"w1_scales\[1, 0, 0\]=255 must be at most 254; 255",
        ),
        ("mxfp8", e4m3(160, 80), "F=80 must be a multiple of 32: contractions of MXFP8"),
        ("mxfp8", e4m3(144, 96), "D=144 must be a multiple of 32: contractions of MXFP8"),
        (
            "mxfp4",
            {"w2_scales": CODES.w2_scales[:, :, :2].contiguous()},
            r"\(S, D, F/32\) = \(6, 160, 3\) with .*F=96 of w2",
        ),
        ("mxfp4", {"w1_scales": BLOCK.w1_scales}, r"w1 of torch.uint8 with w1_scales of torch.float32 must be one of"),
        ("mxfp4", {"w2": BYTES.w2}, "w2 of dtype torch.float8_e4m3fn must be torch.uint8"),
        ("mxfp4", {"w1": codes(6, 192, 96)}, r"w1 of shape \(6, 192, 96\) must be \(S, 2F, D/2\) = \(6, 192, 80\)"),
        ("mxfp4", {"w2": codes(7 * 160 * 48)[8:][: 6 * 160 * 48].view(6, 160, 48)}, "w2 starts 8 bytes past a multi"),
    ],
)
def test_bad_scales_are_named(kind: str, changes: dict, message: str) -> None:
    if kind == "mxfp8" and "w1" in changes:  # legal widths get their scales
        shapes = {name: weight.shape for name, weight in changes.items()}
        changes = changes | {f"{name}_scales": codes(*shape[:2], shape[2] // 32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        replace(GOOD[kind], **changes)


# ---- shapes of blocks ------------------------------------------------------------------------------------------------


def block(rows: int, depth: int, num_stages: int, max_registers: int = 0) -> BlockShape:
    return BlockShape(rows=rows, depth=depth, num_stages=num_stages, max_registers=max_registers)


@pytest.mark.parametrize("num_tokens", [3, 8, 9, 16, 17, 32, 33, 64])
def test_float16_tokens_take_no_long_steps_of_mxfp8(num_tokens: int) -> None:
    """In tf32 the operands are twice as large; for block FP8 they are as large as in bfloat16."""
    for shape in ((2048, 768), (7168, 2048)):
        config = select(torch.float16, num_tokens, 8, *shape, shared_scale=32)
        assert max(config.gate_up.depth, config.down.depth) <= 128
    small = partial(select, num_tokens=num_tokens, top_k=8, hidden_size=2048, ffn_size=768, shared_scale=128)
    assert small(torch.float16) == small(torch.bfloat16)


def test_lanes_example() -> None:
    assert [lane_of(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int32)] == [8, 16, 32]


def test_parts_of_a_step_example() -> None:
    assert [part_of(256, shared_scale) for shared_scale in (0, 32, 128)] == [256, 256, 128]
    assert part_of(64, 128) == 64


def test_kernels_refuse_tokens_in_float64() -> None:
    inputs = make_inputs(DecodeCase(name="wide", T=3, K=2, E=4, D=160, F=96), torch.float32, "cpu").double()
    step = (inputs.tokens, inputs.ids, inputs.routing_weights)
    assert warp_decode_torch(*step, GOOD["fp8"]).dtype == torch.float64
    with pytest.raises(ValueError, match=r"tokens of dtype torch.float64 must be one of"):
        warp_decode(*step, GOOD["fp8"], use_kernels=True)


@in_ranks(1, interpret=True)
def test_dequantised_slots_have_the_bits_of_torch(rank: int, world_size: int) -> None:
    for kind, sizes in SLOT_SIZES.items():
        for dtype, (rows, columns) in product((torch.float32, torch.float16), sizes):
            check_dequantize(kind, rows, columns, dtype, "cpu")
