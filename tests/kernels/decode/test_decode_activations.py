"""Warp decode with every activation and with biases: the twin against the reference, the kernels against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES, draw_biases
from decode_cases import FOLD, MATRIX, VECTOR, DecodeCase, check_decode, make_inputs
from ranks import run_ranks

from comet.decode import DecodeWeights, warp_decode, warp_decode_torch
from comet.kernels.decode.blocks import BlockShape
from comet.kernels.runtime.activation import Activation
from comet.layout import Biases
from comet.reference.layer import reference_experts

CASES = [
    DecodeCase(name="fold", T=1, K=3, E=5, D=48, F=48, config=replace(FOLD, ahead=1), held=4, biased=True),
    DecodeCase(name="one token", T=1, K=3, E=5, D=32, F=16, config=VECTOR, routing="repeated", biased=True),
    DecodeCase(name="two tokens", T=2, K=2, E=9, D=48, F=48, config=VECTOR, routing="one", held=7, biased=True),
    DecodeCase(name="matrix", T=17, K=3, E=4, D=48, F=48, config=MATRIX, routing="masked", held=3, biased=True),
    DecodeCase(name="matrix without biases", T=3, K=2, E=30, D=48, F=32, config=MATRIX),
]
SHAPE = BlockShape(rows=16, depth=128)
DEEP_FOLD, DEEP = (replace(config, gate_up=SHAPE, down=SHAPE) for config in (FOLD, MATRIX))
QUANTISED = [
    DecodeCase(name=kind, T=num_tokens, K=2, E=4, D=64, F=96, quantised=kind, config=config, biased=True)
    for kind in ("mxfp8", "fp8", "mxfp4")
    for num_tokens, config in ((1, DEEP_FOLD), (9, DEEP))
]


def interpreted(rank: int, world_size: int, activation: Activation) -> None:
    for index, case in enumerate(CASES):
        given = replace(case, activation=activation, seed=index)
        check_decode(given, (torch.float32, torch.float16)[index % 2], "cpu", runs=1)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_kernels_under_the_interpreter(activation: Activation) -> None:
    run_ranks(interpreted, 1, activation, interpret=True, timeout=300)


def interpreted_quantised(rank: int, world_size: int) -> None:
    for index, case in enumerate(QUANTISED):
        check_decode(replace(case, activation=ACTIVATIONS[3 - index % 4], seed=index), torch.float32, "cpu", runs=1)


def test_quantised_weights_under_the_interpreter() -> None:
    run_ranks(interpreted_quantised, 1, interpret=True, timeout=300)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_twin_is_the_reference(activation: Activation) -> None:
    case = DecodeCase(name="reference", T=7, K=3, E=6, D=32, F=48, activation=activation, biased=True)
    inputs = make_inputs(case, torch.float32, "cpu").double()
    order, weights = inputs.weights.slots.long(), inputs.weights
    assert weights.b1 is not None
    assert weights.b2 is not None
    wanted = reference_experts(
        inputs.tokens, inputs.legal_ids, inputs.routing_weights, weights.w1[order], weights.w2[order],
        activation=activation, biases=Biases(weights.b1[order], weights.b2[order]),
    )  # fmt: skip
    torch.testing.assert_close(inputs.twin(), wanted, rtol=1e-12, atol=1e-12)


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
