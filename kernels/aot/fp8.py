"""The configurations of the kernels in block FP8 that ship, for the compile-ahead tool."""

import torch

from ..gemm.fp8 import PACKED_GROUPS, SCALE_GROUP, pack_rows_kernel
from ..layer.settings import TileShape
from ..layer.triton.combine import CombineSizes
from ..layer.triton.dispatch_gemm import Sizes
from ..layer.triton.fp8_dispatch_gemm import Fp8Tensors, fp8_constants, fp8_dispatch_gemm_kernel
from ..layer.triton.gemm_combine import gemm_combine_kernel
from ..layer.triton.gemm_panels import PanelTensors
from ..runtime.activation import SWIGLU, Activation
from ..runtime.case import KernelCase
from .fused import RECORDED, WIDTH, combine_lists, fused_case, layer1_constants, recording_suffix, symm_of

EXPECTS = frozenset({"wgmma", "wide_loads", "wide_stores"})
E4M3 = "fp8e4nv"
# A tile takes all 255 registers: 128 for sums, 64 for a product. What does not fit are addresses and strides that are
# the same in every step, read back from the first-level cache.
FEW_SPILLS = 64
TWIN_SPILLS = 896  # of layer 1, whose blocks multiply and combine: production runs CUDA C++, this float32 tokens only


def aot_cases() -> list[KernelCase]:
    """Packing of every type; layer 0 and layer 1, also recording."""
    packs = [_pack(dtype) for dtype in ("bf16", "fp16", "fp32")]
    cases = [*packs, *(case(events) for case in (_layer0, _layer1) for events in (0, RECORDED))]
    return [*cases, _layer0(0, Activation("clamped_swiglu"), biased=True), _layer1(0, biased=True)]


def _pack(dtype: str) -> KernelCase:
    return KernelCase.of(
        dtype, pack_rows_kernel, dict(D=7168, GROUPS=PACKED_GROUPS, INTERPRET=False),
        dict(x_ptr=f"*{dtype}", words_ptr="*i32"), unaligned=frozenset({"num_groups"}), num_warps=4,
        expects=frozenset({"wide_loads", "wide_stores"}),
    )  # fmt: skip


def _layer0(events: int, activation: Activation = SWIGLU, biased: bool = False) -> KernelCase:
    kind = "" if activation == SWIGLU and not biased else f", {activation.name} with biases"
    return fused_case(
        f"inference{recording_suffix(events)}{kind}",
        fp8_dispatch_gemm_kernel,
        {"GEMM": fp8_constants(activation, 128, WIDTH, events)},
        w1_desc=f"tensordesc<{E4M3}[1, 1, {SCALE_GROUP}, {SCALE_GROUP}]>",
        hidden_desc=f"tensordesc<{E4M3}[128, {SCALE_GROUP}]>",
        scaled=Fp8Tensors("*fp32", "*bf16" if biased else None, "*fp32"),
        symm=symm_of("i32", events),
        sizes=Sizes(*["i32"] * 5),
    )(num_stages=3, spilled_bytes=FEW_SPILLS, expects=EXPECTS)


def _layer1(events: int, biased: bool = False) -> KernelCase:
    tile = TileShape(block_k=SCALE_GROUP)
    return fused_case(
        f"block FP8, forward{recording_suffix(events)}{', biases' if biased else ''}",
        gemm_combine_kernel,
        layer1_constants(tile, torch.bfloat16, 8, events),
        a_desc=f"tensordesc<{E4M3}[128, {SCALE_GROUP}]>",
        b_desc=f"tensordesc<{E4M3}[1, {tile.block_n // 2}, {SCALE_GROUP}]>",
        gemm=PanelTensors("*fp32", "*fp32", "*bf16" if biased else None, "*bf16"),
        out_ptr="*bf16",
        returns=combine_lists(backward=False),
        symm=symm_of("bf16", events),
        sizes=CombineSizes(*["i32"] * 4),
    )(num_stages=3, spilled_bytes=TWIN_SPILLS, expects=EXPECTS)
