"""Modular layers over FP8 and MXFP8 weights: what is refused and kept; FP8 rows: how they are packed, where NaN goes.

That they equal the reference is for ``test_modular.py``, which runs every combination.
"""

import math

import pytest
import torch
from layer_cases import LayerCase, rank_inputs
from layer_ranks import open_group
from modular_cases import rank_weights
from torch import Tensor

import comet.decode.weights
from comet.comm.base import SymmTensor
from comet.layer.group import ExpertGroup
from comet.modular import (
    FusedExperts,
    FusedPrepareFinalize,
    GroupedContiguous,
    ModularMoE,
    SingleRank,
    WarpDecodeExperts,
)
from comet.quantization.formats import FP8, MXFP8, Weight, quantize_fp8, quantize_mxfp8, quantize_rows
from comet.quantization.packed import pack, packed_columns, unpack

CASE = LayerCase("quantised", 1, 1, (9,))
TYPES = [FP8, MXFP8]


@pytest.fixture
def group() -> ExpertGroup:
    return open_group(CASE)


def call(layer: ModularMoE, w1: Weight | None = None, tokens: Tensor | None = None) -> Tensor:
    inputs, weights = rank_inputs(CASE, 0), rank_weights(CASE, 0, layer.weight_type)
    routed = inputs.routed if tokens is None else inputs.routed._replace(tokens=tokens)
    return layer(routed, weights[0] if w1 is None else w1, weights[1])


def make(group: ExpertGroup, experts: type, weight_type: type[Weight]) -> ModularMoE:
    return ModularMoE(SingleRank(CASE.config, group), experts(CASE.config, group), weight_type=weight_type)


def test_types_that_experts_do_not_compute_with_are_refused(group: ExpertGroup) -> None:
    parts = FusedPrepareFinalize(CASE.config, group), FusedExperts(CASE.config, group)
    for kind in TYPES:
        name = kind.__name__
        rule = (
            f"and FusedExperts with {name} weights do not go together: FusedExperts computes with Tensor weights, not"
        )
        with pytest.raises(ValueError, match=f"^FusedPrepareFinalize {rule} with {name}$"):
            ModularMoE(*parts, weight_type=kind)
    with pytest.raises(ValueError, match=r"computes with FP8 or MXFP8 or Tensor weights, not with int"):
        make(group, GroupedContiguous, int)  # type: ignore[arg-type]


@pytest.mark.parametrize("made_for", [Tensor, *TYPES])
@pytest.mark.parametrize("given", [Tensor, *TYPES])
def test_weights_of_another_type_are_named(group: ExpertGroup, made_for: type, given: type) -> None:
    layer = make(group, GroupedContiguous, made_for)
    w1, w2 = rank_weights(CASE, 0, given)
    if given is made_for:
        call(layer, w1)
        return
    with pytest.raises(
        ValueError, match=rf"w1 is {given.__name__}, must be the {made_for.__name__} the layer was made for"
    ):
        call(layer, w1)
    inputs, right = rank_inputs(CASE, 0), rank_weights(CASE, 0, made_for)[0]
    with pytest.raises(ValueError, match=rf"w2 is {given.__name__}, must be the {made_for.__name__}"):
        layer(inputs.routed, right, w2)


@pytest.mark.parametrize("experts", [GroupedContiguous, WarpDecodeExperts])
def test_bad_quantised_weights_are_named(group: ExpertGroup, experts: type) -> None:
    layer, plain = make(group, experts, FP8), rank_weights(CASE, 0, Tensor)[0]
    with pytest.raises(ValueError, match=r"w1 of shape \(4, 64, 64\) must be \(e, 2F, D\) = \(4, 64, 32\)"):
        call(layer, quantize_fp8(torch.zeros(4, 64, 64)))
    with pytest.raises(ValueError, match="block_rows=1 of w1 must be 128, as of any weight"):
        call(layer, quantize_rows(plain))
    narrow = [quantize_fp8(torch.zeros(shape)) for shape in ((4, 48, 32), (4, 32, 24))]
    inputs = rank_inputs(CASE, 0)
    with pytest.raises(ValueError, match="F/TP=24 of FP8 weights must be a multiple of 16"):
        layer(inputs.routed, *narrow)


@pytest.mark.parametrize("weight_type", TYPES)
def test_scales_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, group: ExpertGroup, weight_type: type[Weight]
) -> None:
    """The check waits for the device: a decode step must not, and a CUDA graph cannot."""
    looks: list[object] = []
    check = comet.decode.weights.check_scales
    monkeypatch.setattr(comet.decode.weights, "check_scales", lambda *args: (looks.append(args), check(*args)))
    layer = make(group, WarpDecodeExperts, weight_type)
    first = [call(layer) for _ in range(3)]
    assert len(looks) == 1
    assert all(torch.equal(y, first[0]) for y in first)
    kind = {FP8: quantize_fp8, MXFP8: quantize_mxfp8}[weight_type]
    other = call(layer, kind(2 * rank_weights(CASE, 0, Tensor)[0]))
    assert len(looks) == 2, "other weights are looked at"
    assert not torch.equal(other, first[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_rows_fit_and_come_back(dtype: torch.dtype) -> None:
    assert [packed_columns(size, torch.bfloat16) for size in (16, 2048)] == [16, 1056]
    for hidden_size in (*range(16, 2064, 16), 4096, 7168):
        columns = packed_columns(hidden_size, dtype)
        assert columns <= hidden_size
        assert columns % 16 == 0, "rows that kernels move in pieces of 16 bytes"
    for shape in ((0, 32), (5, 16), (3, 144), (2, 3, 272)):
        rows = quantize_rows(torch.randn(shape))
        found = unpack(pack(rows, dtype), shape[-1])
        assert torch.equal(found.elements.view(torch.uint8), rows.elements.view(torch.uint8))
        assert torch.equal(found.scales, rows.scales)


def test_narrow_rows_of_symmetric_memory() -> None:
    memory = SymmTensor((torch.arange(12.0).view(3, 4),), torch.zeros(1, dtype=torch.int64), 0)
    narrow = memory.with_columns(2)
    assert narrow.local.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert narrow.local.data_ptr() == memory.local.data_ptr()
    assert narrow.pointers is memory.pointers
    for columns in (0, 5):
        with pytest.raises(ValueError, match=rf"columns={columns} must be between 1 and the 4 there is memory for"):
            memory.with_columns(columns)


def test_trusted_rows_carry_what_is_no_number_as_nan_of_its_block() -> None:
    tokens = torch.randn(4, 160)
    clean = quantize_rows(tokens)
    for column, bad in ((3, math.nan), (130, math.inf), (159, -math.inf)):
        spoilt = tokens.clone()
        spoilt[1, column] = bad
        packed = quantize_rows(spoilt, trusted=True)
        block = slice(0, 128) if column < 128 else slice(128, 160)
        found, wanted = packed.dequantize(), clean.dequantize()
        assert found[1, block].isnan().all()
        found[1, block] = wanted[1, block]
        assert torch.equal(found, wanted)
    again = FP8(elements=packed.elements, scales=packed.scales, block_rows=1, trusted=True)
    assert again.dequantize()[1, 128:].isnan().all()
    with pytest.raises(ValueError, match=r"scales\[1, 1\]=inf must be finite"):
        FP8(elements=packed.elements, scales=packed.scales, block_rows=1)
