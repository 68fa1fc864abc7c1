"""The configurations of the fused kernels that ship, for the compile-ahead tool."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ..gemm.group_gemm import gemm_features
from ..layer.settings import LaunchSettings, TileShape
from ..layer.triton.combine import CombineSizes
from ..layer.triton.dispatch import NUM_WARPS, DispatchLists, dispatch_kernel, move_cols, push_constants
from ..layer.triton.dispatch_gemm import Sizes, dispatch_gemm_kernel, gemm_constants
from ..layer.triton.gemm_combine import MOVE_COLS, combine_constants, gemm_combine_kernel, panel_constants
from ..layer.triton.gemm_panels import PanelTensors
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import (
    CombineLists,
    GradBuffer,
    SymmTensors,
    TileTensors,
)
from ..runtime.case import KernelCase

# Top-k of the five models; layer 1 unrolls over it.
TOP_KS = (2, 4, 8)
WIDTH = 4096  # D and F
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SENDS = DispatchLists(*["*i32"] * 4)
TABLE = TileTensors(*["*i32"] * 4)
BIAS_LOADS = 4  # most loads of a bias of 16 bits, a few of which are no pairs
RECORDED = 4096  # events per block, where a configuration records


def aot_cases() -> list[KernelCase]:
    """Layer 0 and layer 1 in every type, with and without what training adds; in bf16 also recording."""
    cases = []
    for dtype in DTYPES:
        cases += [_layer0(dtype, save_pre=False), _layer0(dtype, save_pre=True), _dispatch(dtype)]
        for backward in (False, True):
            cases += [_layer1(dtype, top_k, backward=backward) for top_k in TOP_KS]
    cases += [_layer0("bf16", save_pre=save_pre, events=RECORDED) for save_pre in (False, True)]
    cases += [_layer1("bf16", top_k, backward=False, events=RECORDED) for top_k in TOP_KS]
    cases += [_layer1("bf16", TOP_KS[-1], backward=True, events=RECORDED), _dispatch("bf16", events=RECORDED)]
    cases += [_layer0("bf16", save_pre=True, activation=Activation(name)) for name in ("geglu", "reglu")]
    gpt_oss = Activation("clamped_swiglu")
    cases += [_layer0("bf16", save_pre=save_pre, activation=gpt_oss, biased=True) for save_pre in (False, True)]
    return [*cases, _layer1("bf16", 4, backward=False, biased=True)]


def _layer0(
    dtype: str, *, save_pre: bool, events: int = 0, activation: Activation = SWIGLU, biased: bool = False
) -> KernelCase:
    tile = TileShape.select(DTYPES[dtype], WIDTH, WIDTH)
    settings = LaunchSettings(tile=tile, activation=activation)
    kind = activation.name + (" with biases" if biased else "")
    return fused_case(
        f"{dtype}, {'training' if save_pre else 'inference'}{recording_suffix(events)}"
        f"{'' if kind == SWIGLU.name else f', {kind}'}",
        dispatch_gemm_kernel,
        {"GEMM": gemm_constants(settings, 128, WIDTH, DTYPES[dtype], events)},
        x_ptr=f"*{dtype}",
        recv_offset="i64",
        w1_desc=f"tensordesc<{dtype}[1, 2, {tile.block_f}, {tile.block_k}]>",
        hidden_desc=f"tensordesc<{dtype}[128, {tile.block_f}]>",
        pre_desc=f"tensordesc<{dtype}[128, 1, {tile.block_f}]>" if save_pre else None,
        b1_ptr=f"*{dtype}" if biased else None,
        symm=symm_of(dtype, events),
        sizes=Sizes("i32", "i32", "i32", None, None),
    )(
        num_stages=tile.num_stages,
        expects=gemm_features(DTYPES[dtype]),
        # Beside the 128 registers of its sums a thread has 64 for biases, once a tile, behind the loop.
        spilled_bytes=64 if biased else 0,
        narrow_loads=BIAS_LOADS if biased else 0,
    )


def _dispatch(dtype: str, *, events: int = 0) -> KernelCase:
    return fused_case(
        f"{dtype}{recording_suffix(events)}",
        dispatch_kernel,
        {"PUSH": push_constants(DTYPES[dtype], WIDTH, events)},
        x_ptr=f"*{dtype}",
        counters="*i32",
        symm=symm_of(dtype, events),
    )(expects=frozenset({"wide_loads", "wide_stores"}))


def _layer1(dtype: str, top_k: int, *, backward: bool, events: int = 0, biased: bool = False) -> KernelCase:
    tile = TileShape.select(DTYPES[dtype], WIDTH, WIDTH)
    b_block = (tile.block_k, tile.block_n) if backward else (tile.block_n, tile.block_k)
    return fused_case(
        f"{dtype}, top-{top_k}, {'backward' if backward else 'forward'}{recording_suffix(events)}"
        f"{', biases' if biased else ''}",
        gemm_combine_kernel,
        layer1_constants(tile, DTYPES[dtype], top_k, events, backward=backward),
        a_desc=f"tensordesc<{dtype}[128, {tile.block_k}]>",
        b_desc=f"tensordesc<{dtype}[1, {b_block[0]}, {b_block[1]}]>",
        gemm=PanelTensors(None, None, f"*{dtype}" if biased else None, f"*{dtype}"),
        out_ptr=f"*{dtype}",
        returns=combine_lists(backward=backward),
        symm=symm_of(dtype, events),
        sizes=CombineSizes(*["i32"] * 4),
    )(num_stages=tile.num_stages, expects=gemm_features(DTYPES[dtype]), narrow_loads=BIAS_LOADS if biased else 0)


def fused_case(name: str, fn: JITFunction, constants: dict[str, Any], **kinds: Any) -> Callable[..., KernelCase]:
    """A case of one of the layer's kernels, but for what is expected of it; ``None``: an argument that is not there."""
    kinds = dict(sends=SENDS, table=TABLE, timeout_ns="i64") | kinds
    constants = constants | {name: None for name, kind in kinds.items() if kind is None}
    return partial(KernelCase.of, name, fn, constants, kinds, num_warps=NUM_WARPS)


def symm_of(element: str, events: int) -> SymmTensors:
    """Types of a receive buffer of rows of a type."""
    return SymmTensors(f"*{element}", "*i64", "*i32", "*i64", "*i32", "*i64", "*i32" if events else None)


def combine_lists(*, backward: bool) -> CombineLists:
    """Types of what the combine is handed."""
    grads = GradBuffer("*fp32", "*fp32", "*i64", "*fp32") if backward else None
    return CombineLists("*i32", None if backward else "*fp32", "*i32", "*i32", grads)


def layer1_constants(
    tile: TileShape, dtype: torch.dtype, top_k: int, events: int, *, backward: bool = False
) -> dict[str, Any]:
    """Constants of layer 1 over four ranks."""
    combine = combine_constants(tile.block_n, move_cols(dtype, WIDTH, MOVE_COLS), 4, top_k, events)
    return {"GEMM": panel_constants(tile, 128, dtype, backward, events), "COMBINE": combine}


def recording_suffix(events: int) -> str:
    """What the name of a kernel that records up to ``events`` events per block ends with."""
    return ", recording" if events else ""
