"""The configurations of grouped GEMMs, and of kernels around them, for the compile-ahead tool."""

import torch

from ..gemm.activation import activation_backward
from ..gemm.bias import add_bias_products, bias_gradient
from ..gemm.fp8 import pack_rows
from ..gemm.gather_rows import OwnRows, gather_rows
from ..gemm.group_gemm import GemmConfig, group_gemm
from ..gemm.wgrad import group_gemm_wgrad
from ..runtime.activation import DEFINITIONS, SWIGLU, Activation
from ..runtime.arguments import as_triton_dtype
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, meta_tiles, recorded

ROWS, WIDTH, EXPERTS, TOP_K = 4096, 2048, 8, 4  # Q and R, F, e, K
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILES, SEGMENTS = meta_tiles(ROWS), (meta(EXPERTS + 1), meta(EXPERTS))


def aot_cases() -> list[KernelCase]:
    """GEMMs of both directions in all types, and the kernels around them in the types of users."""
    return [*_gemms(), *_around()]


def _gemms() -> list[KernelCase]:
    """Rows that are gathered or in place, layouts of both passes, even and ragged K; float32 as the oracle runs it."""
    cases = []
    for dtype, gather, layout, depth in (
        (BF16, True, "nk", 4096), (BF16, False, "nk", 4096), (BF16, False, "kn", 4096), (BF16, True, "nk", 4112),
        (FP16, True, "nk", 4096), (FP16, False, "kn", 4096), (FP32, True, "nk", 4096), (FP32, False, "kn", 4096),
    ):  # fmt: skip
        name = f"{as_triton_dtype(dtype)} {layout} {'gathered' if gather else 'in place'}"
        b = meta(EXPERTS, *((WIDTH, depth) if layout == "nk" else (depth, WIDTH)), dtype=dtype)
        cases += recorded(
            f"{name} {'ragged K' if depth % 64 else 'even K'}", gemm_features(dtype), group_gemm,
            meta(ROWS, depth, dtype=dtype), b, meta(ROWS, WIDTH, dtype=dtype), TILES,
            gather=gather, layout=layout, config=GemmConfig.select(dtype),
        )  # fmt: skip
    for dtype in (BF16, FP16, FP32):
        shapes = (ROWS, WIDTH), (ROWS, 2 * WIDTH), (EXPERTS, WIDTH, 2 * WIDTH)
        operands, config = [meta(*shape, dtype=dtype) for shape in shapes], GemmConfig.select(dtype)
        name = as_triton_dtype(dtype)
        cases += recorded(name, gemm_features(dtype), group_gemm_wgrad, *operands, *SEGMENTS, config=config)
        cases += recorded(name, WIDE_ACCESS, pack_rows, meta(1001, 7168, dtype=dtype), meta(1001, 1856))
    return cases


def _around() -> list[KernelCase]:
    """Backward passes of all activations, copies of rows, and gradients of biases."""
    cases, slots, weights = [], meta(ROWS), meta(ROWS, TOP_K, dtype=FP32)
    for dtype, activation in (*((BF16, Activation(name)) for name in DEFINITIONS), (FP32, SWIGLU)):
        name = f"{as_triton_dtype(dtype)} backward" + f" {activation.name}" * (activation != SWIGLU)
        pre, hidden = meta(ROWS, 2 * WIDTH, dtype=dtype), meta(ROWS, WIDTH, dtype=dtype)
        tensors = pre, hidden, slots, weights, TILES, pre, hidden, weights
        cases += recorded(name, WIDE_ACCESS, activation_backward, *tensors, activation)
    own = OwnRows(rows=meta(512, WIDTH, dtype=BF16), first=512)
    for name, dtype, apart in (("bf16", BF16, None), ("bf16, own rows apart", BF16, own), ("fp32", FP32, None)):
        rows = meta(ROWS, WIDTH, dtype=dtype)
        cases += recorded(name, WIDE_ACCESS, gather_rows, rows, rows, slots, TILES, apart)
    rows, bias = meta(ROWS, WIDTH, dtype=BF16), meta(EXPERTS, WIDTH, dtype=BF16)
    for name, routing in (("bf16 b1", None), ("bf16 b2", (slots, slots, weights))):
        cases += recorded(name, WIDE_ACCESS[:1], bias_gradient, rows, bias, SEGMENTS, routing)
    name = "bf16 routing weights"
    return cases + recorded(name, WIDE_ACCESS[:1], add_bias_products, rows, bias, slots, TILES, weights)


def gemm_features(dtype: torch.dtype) -> frozenset[str]:
    """The machine code that a GEMM of a type must have; IEEE float32 has no tensor-core instruction."""
    return frozenset({*WIDE_ACCESS} | ({"wgmma"} if dtype != FP32 else set()))
