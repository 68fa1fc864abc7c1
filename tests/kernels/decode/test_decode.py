"""Warp decode: the twin against the reference, the kernels under the interpreter against the twin, and bad input."""

import gc
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from activation_cases import ACTIVATIONS, NAMES, draw_biases
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase, check_decode, check_rows_in_turn, make_inputs, random_case
from ranks import in_ranks

from comet.comm.base import LocalCommunicator
from comet.config import MAX_TOP_K
from comet.decode import DecodeScratch, DecodeWeights, RankDecode, warp_decode, warp_decode_torch
from comet.decode.local import run_kernels
from comet.kernels.decode.blocks import BlockShape, is_large, least_depth, select
from comet.kernels.decode.routing import NO_ROW, pass_of, rows_in_passes, serves
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.reference.layer import reference_experts
from comet.utils.graphs import hold_if_captured

TILES = replace(MATRIX, tile=8)

CASES = [
    DecodeCase(name="fold, tail of D and F", T=1, K=2, E=4, D=48, F=48, config=FOLD),
    DecodeCase(name="fold, not all held", T=1, K=4, E=4, D=16, F=32, config=FOLD, held=2, seed=1),
    DecodeCase(name="fold, repeated", T=1, K=3, E=5, D=32, F=16, config=FOLD, routing="repeated"),
    DecodeCase(name="one token, partial sums", T=1, K=3, E=5, D=32, F=16, config=VECTOR, routing="repeated"),
    DecodeCase(name="two tokens by expert", T=2, K=2, E=3, D=48, F=48, config=VECTOR),
    DecodeCase(name="two tokens by row", T=2, K=2, E=9, D=32, F=32, config=VECTOR, routing="one", held=7),
    DecodeCase(name="two tokens, unknown", T=2, K=3, E=7, D=32, F=32, config=VECTOR, routing="unknown"),
    DecodeCase(
        name="fold, all ahead", T=1, K=3, E=7, D=32, F=80, config=replace(FOLD, ahead=3), routing="unknown", held=4
    ),
    DecodeCase(name="fold, some ahead", T=1, K=5, E=5, D=32, F=80, config=replace(FOLD, ahead=2), routing="masked"),
    DecodeCase(name="fold, repeated, by expert", T=1, K=3, E=3, D=32, F=16, config=FOLD, routing="repeated"),
    DecodeCase(name="fold of two tokens", T=2, K=3, E=7, D=32, F=48, config=replace(FOLD, ahead=1), held=5),
    DecodeCase(name="partial sums, ahead", T=1, K=3, E=5, D=32, F=48, config=replace(VECTOR, ahead=9), held=4),
    DecodeCase(
        name="two tokens, ahead", T=2, K=2, E=9, D=32, F=80, config=replace(VECTOR, ahead=2), routing="one", held=7
    ),
    DecodeCase(name="matrix by row", T=3, K=2, E=30, D=48, F=32, config=MATRIX, routing="one"),
    DecodeCase(name="matrix by expert", T=17, K=3, E=4, D=48, F=48, config=MATRIX, routing="masked", held=3),
    DecodeCase(name="matrix, two always", T=5, K=4, E=8, D=32, F=32, config=MATRIX, routing="always", held=6),
    DecodeCase(name="matrix, repeated", T=4, K=3, E=6, D=32, F=16, config=MATRIX, routing="repeated"),
    DecodeCase(name="64 tokens, one expert", T=64, K=1, E=2, D=16, F=16, config=MATRIX, routing="one"),
    DecodeCase(name="three passes", T=20, K=2, E=4, D=48, F=48, config=TILES, routing="one", held=3),
    DecodeCase(name="two passes by row", T=9, K=1, E=30, D=32, F=16, config=TILES, routing="one"),
    DecodeCase(
        name="three passes, masked", T=34, K=2, E=2, D=32, F=32, config=replace(TILES, tile=16), routing="masked"
    ),
    DecodeCase(name="passes, repeated", T=25, K=3, E=3, D=16, F=48, config=TILES, routing="repeated"),
    DecodeCase(name="passes, two always", T=17, K=3, E=5, D=32, F=32, config=TILES, routing="always", held=4),
    DecodeCase(name="passes, unknown", T=40, K=2, E=2, D=16, F=16, config=TILES, routing="unknown"),
    DecodeCase(name="passes, all masked", T=17, K=2, E=4, D=16, F=16, config=TILES, routing="none"),
    DecodeCase(name="32 experts per token", T=3, K=32, E=32, D=16, F=16, config=MATRIX),
    DecodeCase(name="all masked", T=5, K=2, E=4, D=16, F=16, config=MATRIX, routing="none"),
]


@triton.jit
def serves_kernel(ids_ptr, expert_ptr, rows_ptr, T, K: tl.constexpr, BY_EXPERT: tl.constexpr):
    expert, rows = serves(ids_ptr, tl.program_id(0), T, K, K, 2, BY_EXPERT)
    tl.store(expert_ptr + tl.program_id(0), expert)
    tl.store(rows_ptr + tl.program_id(0) * 2 + tl.arange(0, 2), rows)


def check_serves_example() -> None:
    ids = torch.tensor([[3, 1], [1, 0]], dtype=torch.int32)
    expert, rows = torch.empty(4, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int32)
    none = NO_ROW.value
    serves_kernel[(4,)](ids, expert, rows, 2, K=2, BY_EXPERT=False)
    assert expert.tolist() == [3, 1, -1, 0]
    assert rows.tolist() == [[0, none], [1, 2], [1, 2], [none, 3]]
    serves_kernel[(4,)](ids, expert, rows, 2, K=2, BY_EXPERT=True)
    assert expert.tolist() == [0, 1, -1, 3]
    assert rows.tolist() == [[none, 3], [1, 2], [none, none], [0, none]]


@triton.jit
def passes_kernel(rows_ptr, passes_ptr, T_BLOCK: tl.constexpr, TILE: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, T_BLOCK))
    for first in range(0, rows_in_passes(rows, TILE), TILE):
        tl.store(passes_ptr + first + tl.arange(0, TILE), pass_of(rows, first, TILE))


def check_passes_example() -> None:
    none = NO_ROW.value
    rows = torch.tensor([none, 3, 4, 8], dtype=torch.int32)
    for tile, wanted in ((2, [3, 4, 8, none, -1, -1]), (4, [none, 3, 4, 8, -1, -1])):
        found = torch.full((6,), -1, dtype=torch.int32)
        passes_kernel[(1,)](rows, found, T_BLOCK=4, TILE=tile)
        assert found.tolist() == wanted


@in_ranks(1, interpret=True, timeout=500)
def test_kernels_under_the_interpreter(rank: int, world_size: int) -> None:
    for index, case in enumerate(CASES):
        check_decode(case, (torch.float32, torch.float16)[index % 2], "cpu", runs=1 if index % 3 else 2)
    for seed in range(4):
        case = random_case(seed, most_tokens=6, largest=48)
        config = FOLD if case.T == 1 else VECTOR if case.T == 2 else MATRIX
        check_decode(replace(case, config=config), torch.float32, "cpu", runs=1)
        check_decode(replace(case, T=8 + 4 * case.T, config=TILES), torch.float32, "cpu", runs=1)
    check_serves_example()
    check_passes_example()


# ---- the twin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_twin_is_the_reference_in_float64(seed: int, activation: Activation) -> None:
    case = replace(random_case(seed + 100, most_tokens=9, largest=64), held=None)
    case = replace(case, activation=activation, biased=seed % 2 == 0)
    inputs = make_inputs(case, torch.float32, "cpu").double()
    order, weights = inputs.weights.slots.long(), inputs.weights
    biases = None if weights.b1 is None else Biases(weights.b1[order], weights.b2[order])
    wanted = reference_experts(
        inputs.tokens, inputs.legal_ids, inputs.routing_weights, weights.w1[order], weights.w2[order],
        activation=activation, biases=biases,
    )  # fmt: skip
    torch.testing.assert_close(inputs.twin(), wanted, rtol=1e-12, atol=1e-12, msg=f"seed {seed}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_is_no_further_from_float64_than_the_reference(dtype: torch.dtype) -> None:
    case = DecodeCase(name="accuracy", T=32, K=4, E=8, D=256, F=128)
    inputs = make_inputs(case, dtype, "cpu")
    order = inputs.weights.slots.long()
    arguments = (inputs.tokens, inputs.ids, inputs.routing_weights)
    plain = reference_experts(*arguments, inputs.weights.w1[order], inputs.weights.w2[order])
    exact = inputs.double().twin()
    errors = [(output.double() - exact).square().mean().sqrt().item() for output in (inputs.twin(), plain)]
    assert errors[0] <= errors[1], errors


def test_twin_example() -> None:
    tokens = torch.zeros(1, 16)
    tokens[0, 0] = 1
    w1, w2 = torch.zeros(1, 32, 16), torch.zeros(1, 16, 16)
    w1[0, 0, 0], w1[0, 16, 0], w2[0, 0, 0] = 32, 2, 0.5
    weights = DecodeWeights(w1=w1, w2=w2, slots=torch.tensor([-1, 0], dtype=torch.int32))
    output = warp_decode(tokens, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[0.5, 9.0]]), weights)
    assert output.tolist() == [[16.0] + [0.0] * 15]


# ---- activations and biases ------------------------------------------------------------------------------------------

ACTIVATED = [
    DecodeCase(name="fold", T=1, K=3, E=5, D=48, F=48, config=replace(FOLD, ahead=1), held=4, biased=True),
    DecodeCase(name="one token", T=1, K=3, E=5, D=32, F=16, config=VECTOR, routing="repeated", biased=True),
    DecodeCase(name="two tokens", T=2, K=2, E=9, D=48, F=48, config=VECTOR, routing="one", held=7, biased=True),
    DecodeCase(name="matrix", T=17, K=3, E=4, D=48, F=48, config=MATRIX, routing="masked", held=3, biased=True),
    DecodeCase(name="matrix without biases", T=3, K=2, E=30, D=48, F=32, config=MATRIX),
]
SHAPE = BlockShape(rows=16, depth=128)
DEEP_FOLD, DEEP = (replace(config, gate_up=SHAPE, down=SHAPE) for config in (FOLD, MATRIX))
QUANTISED_ACTIVATED = [
    DecodeCase(name=kind, T=num_tokens, K=2, E=4, D=64, F=96, quantised=kind, config=config, biased=True)
    for kind in ("mxfp8", "fp8", "mxfp4")
    for num_tokens, config in ((1, DEEP_FOLD), (9, DEEP))
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@in_ranks(1, interpret=True)
def test_activations_under_the_interpreter(rank: int, world_size: int, activation: Activation) -> None:
    for index, case in enumerate(ACTIVATED):
        given = replace(case, activation=activation, seed=index)
        check_decode(given, (torch.float32, torch.float16)[index % 2], "cpu", runs=1)


@in_ranks(1, interpret=True)
def test_activations_of_quantised_weights_under_the_interpreter(rank: int, world_size: int) -> None:
    for index, case in enumerate(QUANTISED_ACTIVATED):
        check_decode(replace(case, activation=ACTIVATIONS[3 - index % 4], seed=index), torch.float32, "cpu", runs=1)


@in_ranks(1, interpret=True)
def test_gate_and_up_rows_in_turn_give_the_same_bits(rank: int, world_size: int) -> None:
    for index, case in enumerate([*ACTIVATED, *QUANTISED_ACTIVATED]):
        case = replace(case, activation=ACTIVATIONS[-1], seed=index)
        if case.quantised == "fp8":
            with pytest.raises(ValueError, match="interleaved=True must be left out with experts in block FP8"):
                replace(make_inputs(case, torch.float32, "cpu").weights, interleaved=True)
        else:
            check_rows_in_turn(case, torch.float32, "cpu")


def test_biases_must_fit() -> None:
    inputs = make_inputs(DecodeCase(name="fit", T=2, K=1, E=2, D=32, F=16), torch.float32, "cpu")
    parts = dict(w1=inputs.weights.w1, w2=inputs.weights.w2, slots=inputs.weights.slots)
    b1, b2 = draw_biases(4, 16, 32, torch.float32)
    with pytest.raises(ValueError, match=r"b1 of shape \(4, 31\)"):
        DecodeWeights(**parts, b1=b1[:, 1:].contiguous(), b2=b2)
    narrow = DecodeWeights(**parts, b1=b1.half(), b2=b2)
    for step in (warp_decode, warp_decode_torch):
        with pytest.raises(ValueError, match=r"b1 of dtype torch.float16 must have the tokens' torch.float32"):
            step(inputs.tokens, inputs.ids, inputs.routing_weights, narrow)


# ---- bad input -------------------------------------------------------------------------------------------------------

GOOD = make_inputs(DecodeCase(name="good", T=3, K=2, E=4, D=32, F=16), torch.float32, "cpu")
MANY, NARROW, SIXES = torch.zeros(3, 33), torch.zeros(6, 32, 8), torch.full((4,), 6, dtype=torch.int32)


def call(**changes: object) -> torch.Tensor:
    named = dict(tokens=GOOD.tokens, top_k_ids=GOOD.ids, top_k_weights=GOOD.routing_weights, weights=GOOD.weights)
    return warp_decode(**(named | changes))


def changed(**changes: object) -> DecodeWeights:
    return replace(GOOD.weights, **changes)


def scratch(dtype: torch.dtype, **options: int) -> DecodeScratch:
    return DecodeScratch.create(GOOD.weights, 2, dtype, **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: call(tokens=torch.zeros(3, 32, requires_grad=True)),
            "requires_grad=True must be left out in warp decode",
        ),
        (lambda: call(tokens=torch.zeros(65, 32)), "T=65 must be at most 64"),
        (lambda: call(tokens=torch.zeros(3, 48)), r"tokens of shape \(3, 48\) must be \(T, D\) = \(T, 32\) with D=32"),
        (lambda: call(tokens=torch.zeros(96)), r"tokens of shape \(96,\) must be \(T, D\)"),
        (lambda: call(tokens=GOOD.tokens.half()), "tokens of dtype torch.float16 must have the weights' torch.float32"),
        (lambda: call(top_k_ids=GOOD.ids[:2]), r"top_k_ids of shape \(2, 2\) must be \(T, K\) = \(3, K\) with T=3"),
        (lambda: call(top_k_ids=GOOD.ids.float()), "top_k_ids of dtype torch.float32 must be torch.int32"),
        (lambda: call(top_k_ids=GOOD.ids + 4), r"contain \d; every id must be -1 \(masked\) or in \[0, \w+=4\)"),
        (lambda: call(top_k_ids=MANY.int(), top_k_weights=MANY), "K=33 must be at least 1 and at most 32"),
        (lambda: call(top_k_weights=GOOD.routing_weights[:, :1]), r"top_k_weights of shape \(3, 1\) must be \(T, K\)"),
        (lambda: call(top_k_weights=GOOD.routing_weights.half()), "top_k_weights of dtype torch.float16 must be"),
        (lambda: changed(w1=GOOD.weights.w1[:, :-16]), r"w1 of shape .* must be \(S, 2F, D\) = \(6, 32, 32\)"),
        (lambda: changed(w2=GOOD.weights.w2.half()), "w2 of dtype torch.float16 must be torch.float32"),
        (lambda: changed(w1=NARROW.mT.repeat(1, 2, 1), w2=NARROW), "F=8 must be at least 16 and a multiple of 16"),
        (lambda: changed(slots=GOOD.weights.slots.long()), "slots of dtype torch.int64 must be torch.int32"),
        (lambda: changed(w2=GOOD.weights.w2.mT.contiguous().mT), "w2 of shape .* must be contiguous"),
        (lambda: changed(w1_scales=torch.ones(1)), "w1_scales and w2_scales must both be given, or neither"),
        (lambda: call(weights=changed(slots=SIXES)), r"slots=\[6, 6, 6, 6\] must be -1 \(not held\) or in \[0, S=6\)"),
        (lambda: scratch(torch.float32, max_tokens=65), "max_tokens=65 must be at least 0 and at most 64"),
        (lambda: call(scratch=scratch(torch.float32, max_tokens=2), use_kernels=True), "must hold 6 of F, D"),
        (
            lambda: call(scratch=scratch(torch.float16), use_kernels=True),
            "scratch for .* of .*float16.* must hold .*float32",
        ),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_bad_input_is_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# ---- shapes of blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared_scale", "four_bits"), [(0, False), (32, False), (32, True), (128, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 32, 33, 64])
def test_blocks_are_selected_for_every_step(
    num_tokens: int, dtype: torch.dtype, shared_scale: int, four_bits: bool
) -> None:
    shapes = (32, 32), (160, 256), (2048, 768), (2816, 704), (4096, 14336), (7168, 2048)
    for top_k, shape in product(range(1, MAX_TOP_K + 1), shapes):
        config = select(dtype, num_tokens, top_k, *shape, shared_scale=shared_scale, four_bits=four_bits)
        assert config.dependent == (shape != (4096, 14336))
        assert not config.fold or num_tokens == 1
        for block in (config.gate_up, config.down):
            least = least_depth(32 if four_bits else 16) if shared_scale and config.form == "matrix" else 16
            assert least <= block.depth
            assert block.rows in ((1, 2, 4, 8, 16) if config.form == "vector" else (16, 32, 64, 128))
            assert block.max_registers in (0, 80, 128)
        if shared_scale:
            continue
        is_vector = num_tokens == 1 or (num_tokens == 2 and (dtype == torch.float32 or is_large(*shape)))
        assert config.form == ("vector" if is_vector else "matrix")
        assert config.tile == 64
        for block, contraction in ((config.gate_up, shape[0]), (config.down, shape[1])):
            lanes = 32 * block.num_warps * 16 // dtype.itemsize
            assert not is_vector or block.depth >= min(lanes, triton.next_power_of_2(contraction)), "16 bytes per lane"


def test_measured_blocks_examples() -> None:
    qwen3, mixtral = (2048, 768), (4096, 14336)
    assert select(torch.bfloat16, 1, 8, *qwen3).down == BlockShape(rows=8, depth=256, num_warps=1)
    assert select(torch.bfloat16, 1, 2, *mixtral).fold
    assert select(torch.bfloat16, 3, 1, 160, 96).gate_up == BlockShape(rows=16, depth=128, num_stages=4)
    assert select(torch.bfloat16, 9, 8, *qwen3, shared_scale=128).down.max_registers == 80
    assert [select(torch.bfloat16, 9, 8, *qwen3, shared_scale=scale).tile for scale in (0, 32)] == [64, 8]


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.usefixtures("interpreted")
def test_what_a_graph_uses_lives_as_long_as_the_weights_it_reads(
    monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """The owner of the scratch and of the weights' slot table may let go of them; later captures take no more."""
    monkeypatch.setattr("comet.utils.graphs.is_capturing", lambda device: captures)
    monkeypatch.setattr("comet.decode.local.decode", lambda *step: None)
    inputs = make_inputs(DecodeCase(name="graph", T=3, K=2, E=4, D=16, F=16), torch.float32, "cpu")
    first = DecodeScratch.create(inputs.weights, 2, torch.float32)
    w1, held = inputs.weights.w1, [weakref.ref(each) for each in (first.hidden, first.tickets, inputs.weights.slots)]
    view = w1[1:]  # the memory counts, not who looks at it
    step = (inputs.tokens, inputs.ids, inputs.routing_weights)
    for _ in range(2):
        run_kernels(*step, inputs.weights, scratch=first)
    del first, inputs, w1
    gc.collect()
    assert [each() is not None for each in held] == [captures] * 3
    del view
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_memory_does_not_hold_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet.utils.graphs.is_capturing", lambda device: True)
    owner = torch.zeros(4)
    seen = weakref.ref(owner.untyped_storage())
    hold_if_captured(owner, owner[1:], owner.view(2, 2))
    del owner
    gc.collect()
    assert seen() is None


@pytest.mark.usefixtures("interpreted")
def test_a_graph_of_a_step_over_ranks_outlives_the_object_that_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet.utils.graphs.is_capturing", lambda device: True)
    monkeypatch.setattr("comet.decode.local.decode", lambda *step: None)
    inputs = make_inputs(DecodeCase(name="graph", T=3, K=2, E=4, D=16, F=16), torch.float32, "cpu")
    comm = LocalCommunicator(torch.device("cpu"), 1.0)
    decode = RankDecode(comm, hidden_size=16, use_kernels=True)
    decode(inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights)
    held = weakref.ref(decode.words.pointers)
    del decode
    gc.collect()
    assert held() is not None
    del comm
    gc.collect()
    assert held() is None
