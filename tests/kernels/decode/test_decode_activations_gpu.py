"""Warp decode with every activation and with biases on a GPU, in all types of weights, against the twin."""

from __future__ import annotations

import pytest
import torch
from activation_cases import ACTIVATIONS, NAMES
from decode_cases import DecodeCase, check_decode, check_graph

from comet.kernels.runtime.activation import Activation

pytestmark = pytest.mark.gpu

GPT_OSS = dict(K=4, E=8, D=2880, F=2880, held=6, biased=True)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64])
def test_selected_blocks(num_tokens: int, activation: Activation) -> None:
    for biased in (False, True):
        case = DecodeCase(name="small", T=num_tokens, K=3, E=7, D=336, F=208, activation=activation, biased=biased)
        check_decode(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("quantised", ["", "mxfp8", "fp8", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_gpt_oss(num_tokens: int, quantised: str) -> None:
    activation = Activation("clamped_swiglu")
    case = DecodeCase(name="gpt_oss", T=num_tokens, **GPT_OSS, quantised=quantised, activation=activation)
    check_decode(case, torch.bfloat16, "cuda")


def test_graph() -> None:
    shape = GPT_OSS | dict(held=None)  # another replay routes to experts that the first one must not
    check_graph(DecodeCase(name="gpt_oss", T=2, **shape, activation=Activation("clamped_swiglu")), replays=5)
