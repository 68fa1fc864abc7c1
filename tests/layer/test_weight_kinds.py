"""Experts given as plain tensors, in FP8 or in MXFP8: what a path does not take is named."""

import pytest
import torch
from fp8_cases import fp8_shard
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer

from comet.decode.weights import DecodeWeights
from comet.layer.routed_experts import SymmetricPath
from comet.quantization.formats import quantize_mxfp8


@pytest.mark.parametrize("path", ["plain", "reference", "twin", "fused"])
@pytest.mark.usefixtures("interpreted")
def test_weights_of_another_kind_are_refused_by_name(path: str) -> None:
    case = LayerCase("one rank", 1, 1, (4,), hidden_size=128, ffn_size=128, fp8=True)
    routed, experts = rank_inputs(case, 0).routed, build_layer(case, 0, path).experts
    in_fp8 = fp8_shard(case, 0)
    plain = tuple(weight.dequantize() for weight in in_fp8)
    mx = tuple(quantize_mxfp8(weight) for weight in plain)
    with torch.no_grad():
        right = None if path == "fused" else experts(routed, *plain)
        for w1, w2, name, kind in (
            (*in_fp8, "w1", "FP8"), (plain[0], in_fp8[1], "w2", "FP8"), (*mx, "w1", "MXFP8"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{name} of type {kind} must be a tensor: dequantize"):
                experts(routed, w1, w2)
        assert right is None or torch.equal(experts(routed, *plain), right)
        if not isinstance(experts, SymmetricPath):
            return
        for w1, w2, name, kind in (
            (*plain, "w1", "Tensor"), (in_fp8[0], plain[1], "w2", "Tensor"), (*mx, "w1", "MXFP8"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{name} of type {kind} must be FP8: call the path"):
                experts.fp8(routed, w1, w2)
    with pytest.raises(ValueError, match="w1 of type FP8 must be its elements; scales are w1_scales"):
        DecodeWeights(w1=in_fp8[0], w2=in_fp8[1], slots=torch.arange(4, dtype=torch.int32))
