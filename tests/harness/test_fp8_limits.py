"""The limits of block FP8: each part is as large as what it allows for, and none grows with the sizes of a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_cases import hidden_off, jump_of, layer_of, sums_off
from layer_cases import LayerCase, rank_inputs
from stress_ranks import quantised
from torch.nn.functional import silu

from comet.quantization.formats import FP8_BLOCK, quantize_rows


def test_the_limit_does_not_grow_with_columns() -> None:
    narrow = LayerCase("narrow", 1, 1, (16,), num_experts=2, top_k=1, hidden_size=256, ffn_size=128)
    found = []
    for case in (narrow, replace(narrow, hidden_size=4096)):
        generator = torch.Generator().manual_seed(5)
        w1 = torch.randn(2, 2, 128, case.hidden_size, generator=generator) / case.hidden_size**0.5
        w2 = torch.randn(2, case.hidden_size, 128, generator=generator)
        inputs = rank_inputs(case, 0)
        wanted = layer_of(case, inputs, inputs.top_k_ids, [quantised(w1, w2)], 5e-4)
        found.append(float(wanted.square.mean().sqrt() / wanted.output.square().mean().sqrt()))
    assert 0.02 < found[0] < 0.06
    assert found[1] < 1.2 * found[0]


def test_the_worked_example_of_sums() -> None:
    rows, weights = (torch.tensor(steps).repeat_interleave(FP8_BLOCK)[None].double() for steps in ([1, -1], [2, 3]))
    at_worst, free = sums_off(rows, weights, 2.0**-7)
    assert at_worst.item() == 5
    assert free.item() == pytest.approx(13**0.5)


@pytest.mark.parametrize("part", [1e-3, 1e-2, 0.3])
def test_hidden_is_within_its_limit(part: float) -> None:
    gate, up = torch.meshgrid(torch.linspace(-12, 12, 481), torch.linspace(-9, 9, 37), indexing="ij")
    gate, up = gate.double(), up.double()
    gate_off, up_off = part * (1 + gate.abs()), part * (2 + up.abs())
    limit = hidden_off(gate, up, gate_off, up_off)
    farthest = torch.zeros_like(gate)
    for a in torch.linspace(-1, 1, 9):
        for b in (-1, 1):
            moved = silu(gate + a * gate_off) * (up + b * up_off)
            farthest = torch.maximum(farthest, (moved - silu(gate) * up).abs())
    assert (farthest <= limit).all()
    if part < 0.1:
        assert float(limit.mean()) <= 1.1 * float(farthest.mean()), "far from what happens"


@pytest.mark.parametrize("part", [1e-6, 1e-3, 0.02, 0.4])
def test_what_is_quantised_jumps_no_further(part: float) -> None:
    generator = torch.Generator().manual_seed(2)
    draw = lambda: torch.randn(300, 256, generator=generator).double()  # noqa: E731
    hidden = draw() * draw() ** 3
    off = part * draw().abs() * hidden.abs().clamp(min=0.01)
    quantised_as_is = quantize_rows(hidden.float())
    limit = jump_of(hidden, off, quantised_as_is)
    moves = [torch.ones_like(hidden), -torch.ones_like(hidden), hidden.sign(), -hidden.sign()]
    moves += [draw().clamp(-1, 1) for _ in range(20)]
    for move in moves:
        moved = quantize_rows((hidden + move * off).float()).dequantize().double()
        over = (moved - quantised_as_is.dequantize().double()).abs() - limit
        assert float(over.max()) <= 0
