"""The configurations of the fused kernels that ship, for the compile-ahead tool."""

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ..gemm.fp8 import SCALE_GROUP
from ..gemm.group_gemm import gemm_features
from ..layer.settings import LaunchSettings, TileShape
from ..layer.triton.combine import CombineSizes
from ..layer.triton.dispatch import NUM_WARPS, DispatchLists, dispatch_kernel, move_cols, push_constants
from ..layer.triton.dispatch_gemm import Additions, Sizes, dispatch_gemm_kernel, fp8_constants, gemm_constants
from ..layer.triton.gemm_combine import MOVE_COLS, combine_constants, fp8_tile, gemm_combine_kernel, panel_constants
from ..layer.triton.gemm_panels import PanelTensors
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import CombineLists, GradBuffer, SymmTensors, TileTensors
from ..runtime.case import KernelCase

# Top-k of the five models; layer 1 unrolls over it.
TOP_KS = (2, 4, 8)
RANKS, WIDTH = 4, 4096  # W; D and F
E4M3 = "fp8e4nv"  # in block FP8, of tokens in bfloat16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SENDS = DispatchLists(*["*i32"] * 4)
TABLE = TileTensors(*["*i32"] * 4)
BIAS_LOADS = 4  # most loads of a bias of 16 bits, a few of which are no pairs
RECORDED = 4096  # events per block, where a configuration records
# In block FP8 a tile of layer 0 takes all 255 registers: 128 for sums, 64 for a product. What does not fit are
# addresses and strides that are the same in every step, read back from the first-level cache. In other types a thread
# has 64 for biases and 128 for its sums, once a tile, after the loop.
FEW_SPILLS = 64


def aot_cases() -> list[KernelCase]:
    """Layer 0 and layer 1 in every type, with and without what training adds; in bf16 and block FP8 also recording."""
    gpt_oss = Activation("clamped_swiglu")
    cases = []
    for dtype in DTYPES:
        cases += [_layer0(dtype), _layer0(dtype, save_pre=True), _dispatch(dtype)]
        cases += [_layer1(dtype, top_k, backward=backward) for backward in (False, True) for top_k in TOP_KS]
    cases += [_layer0("bf16", save_pre=save_pre, events=RECORDED) for save_pre in (False, True)]
    cases += [_layer1("bf16", top_k, events=RECORDED) for top_k in TOP_KS]
    cases += [_layer1("bf16", TOP_KS[-1], backward=True, events=RECORDED), _dispatch("bf16", events=RECORDED)]
    cases += [_layer0("bf16", save_pre=True, activation=Activation(name)) for name in ("geglu", "reglu")]
    cases += [_layer0("bf16", save_pre=save_pre, activation=gpt_oss, biased=True) for save_pre in (False, True)]
    cases += [_layer0(E4M3, events=events) for events in (0, RECORDED)]
    cases += [_layer1(E4M3, TOP_KS[-1], events=events) for events in (0, RECORDED)]
    cases += [_layer0(E4M3, activation=gpt_oss, biased=True), _layer1(E4M3, TOP_KS[-1], biased=True)]
    return [*cases, _layer1("bf16", 4, biased=True)]


def _layer0(
    dtype: str, *, save_pre: bool = False, events: int = 0, activation: Activation = SWIGLU, biased: bool = False
) -> KernelCase:
    in_fp8, settings = dtype == E4M3, LaunchSettings(tile=_tile(dtype), activation=activation)
    if in_fp8:
        gemm, w1_block = fp8_constants(settings, 128, WIDTH, events), [1, 1, SCALE_GROUP, SCALE_GROUP]
    else:
        gemm = gemm_constants(settings, 128, WIDTH, DTYPES[dtype], events)
        w1_block = [1, 2, gemm.block_f, gemm.block_k]
    scales, row_words = ("*fp32", "i32") if in_fp8 else (None, None)
    words = [
        "training" if save_pre else "inference",
        activation.name if activation != SWIGLU else "",
        "biases" * biased,
    ]
    return _case(
        dtype, words, dispatch_gemm_kernel, {"GEMM": gemm}, events, row_words or dtype,
        dict(spilled_bytes=FEW_SPILLS if in_fp8 or biased else 0, narrow_loads=_bias_loads(dtype, biased)),
        x_ptr=f"*{row_words or dtype}",
        recv_offset="i64",
        w1_desc=f"tensordesc<{dtype}{w1_block}>",
        additions=Additions(_bias(dtype, biased), scales, scales),
        hidden_desc=f"tensordesc<{dtype}[128, {gemm.block_f}]>",
        pre_desc=f"tensordesc<{dtype}[128, 1, {gemm.block_f}]>" if save_pre else None,
        sizes=Sizes("i32", "i32", "i32", row_words, row_words),
    )  # fmt: skip


def _layer1(dtype: str, top_k: int, *, backward: bool = False, events: int = 0, biased: bool = False) -> KernelCase:
    tile, output, in_fp8 = _tile(dtype), _output(dtype), dtype == E4M3
    b_block = [1, tile.block_k, tile.block_n] if backward else [1, tile.block_n, tile.block_k]
    scales, grads = "*fp32" if in_fp8 else None, GradBuffer("*fp32", "*fp32", "*i64", "*fp32")
    constants = dict(
        GEMM=panel_constants(tile, 128, DTYPES[output], backward, events),
        COMBINE=combine_constants(tile.block_n, move_cols(DTYPES[output], WIDTH, MOVE_COLS), RANKS, top_k, events),
    )
    words = [f"top-{top_k}", "backward" if backward else "forward", "biases" * biased]
    return _case(
        dtype, words, gemm_combine_kernel, constants, events, output,
        dict(narrow_loads=_bias_loads(dtype, biased)),
        a_desc=f"tensordesc<{dtype}[128, {tile.block_k}]>",
        b_desc=f"tensordesc<{dtype}{b_block}>",
        gemm=PanelTensors(scales, scales, _bias(dtype, biased), f"*{output}"),
        out_ptr=f"*{output}",
        returns=CombineLists("*i32", None if backward else "*fp32", "*i32", "*i32", grads if backward else None),
        sizes=CombineSizes(*["i32"] * 4),
    )  # fmt: skip


def _dispatch(dtype: str, *, events: int = 0) -> KernelCase:
    constants = {"PUSH": push_constants(DTYPES[dtype], WIDTH, events)}
    options = dict(num_stages=3, expects=frozenset({"wide_loads", "wide_stores"}))
    return _case(dtype, [], dispatch_kernel, constants, events, dtype, options, x_ptr=f"*{dtype}", counters="*i32")


def _case(
    dtype: str, words: list[str], fn: JITFunction, constants: dict[str, Any], events: int, rows: str,
    options: dict[str, Any], **kinds: Any,
) -> KernelCase:  # fmt: skip
    """A case of one of the layer's kernels; ``rows``: type of what travels; ``None``: an argument that is not there."""
    words = [{E4M3: "block FP8"}.get(dtype, dtype), *words, "recording" if events else ""]
    symm = SymmTensors(f"*{rows}", "*i64", "*i32", "*i64", "*i32", "*i64", "*i32" if events else None)
    kinds |= dict(sends=SENDS, table=TABLE, timeout_ns="i64", symm=symm)
    constants |= {name: None for name, kind in kinds.items() if kind is None}
    options = dict(num_stages=_tile(dtype).num_stages, expects=gemm_features(DTYPES[_output(dtype)])) | options
    return KernelCase.of(", ".join(filter(None, words)), fn, constants, kinds, num_warps=NUM_WARPS, **options)


def _tile(dtype: str) -> TileShape:
    return fp8_tile(TileShape()) if dtype == E4M3 else TileShape.select(DTYPES[dtype], WIDTH, WIDTH)


def _output(dtype: str) -> str:
    return "bf16" if dtype == E4M3 else dtype


def _bias(dtype: str, biased: bool) -> str | None:
    return f"*{_output(dtype)}" if biased else None


def _bias_loads(dtype: str, biased: bool) -> int:
    return BIAS_LOADS if biased and dtype != E4M3 else 0
