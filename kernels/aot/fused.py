"""The configurations of the fused kernels that ship, for the compile-ahead tool."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layer.settings import LaunchSettings, TileShape
from ..layer.triton.dispatch import DispatchLists, dispatch
from ..layer.triton.dispatch_gemm import dispatch_gemm
from ..layer.triton.gemm_combine import gemm_combine
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import CombineLists, GradBuffer, Scaled, SymmBuffer, as_triton_dtype
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, meta_tiles, recorded
from ..runtime.recorder import Recorder
from .gemm import gemm_features

# Top-k of the five models; layer 1 unrolls over it.
TOP_KS = (2, 4, 8)
RANKS, EXPERTS, TOKENS, ROWS, WIDTH = 4, 8, 2048, 8192, 4096  # W, e, T and M, R and Q, D and F
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn  # block FP8 is of tokens in bfloat16
PACKED = WIDTH // 4 + WIDTH // 128  # words of a packed row
SENDS = DispatchLists(*[meta(RANKS)] * 4)
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
    for dtype in (BF16, torch.float16, torch.float32):
        cases += [_layer0(dtype), _layer0(dtype, save_pre=True), _dispatch(dtype)]
        cases += [_layer1(dtype, top_k, backward=backward) for backward in (False, True) for top_k in TOP_KS]
    cases += [_layer0(BF16, save_pre=save_pre, events=RECORDED) for save_pre in (False, True)]
    cases += [_layer1(BF16, top_k, events=RECORDED) for top_k in TOP_KS]
    cases += [_layer1(BF16, TOP_KS[-1], backward=True, events=RECORDED), _dispatch(BF16, events=RECORDED)]
    cases += [_layer0(BF16, save_pre=True, activation=Activation(name)) for name in ("geglu", "reglu")]
    cases += [_layer0(BF16, save_pre=save_pre, activation=gpt_oss, biased=True) for save_pre in (False, True)]
    cases += [_layer0(E4M3, events=events) for events in (0, RECORDED)]
    cases += [_layer1(E4M3, TOP_KS[-1], events=events) for events in (0, RECORDED)]
    cases += [_layer0(E4M3, activation=gpt_oss, biased=True), _layer1(E4M3, TOP_KS[-1], biased=True)]
    return [*cases, _layer1(BF16, 4, biased=True)]


def _layer0(
    dtype: torch.dtype,
    *,
    save_pre: bool = False,
    events: int = 0,
    activation: Activation = SWIGLU,
    biased: bool = False,
) -> KernelCase:
    in_fp8, phase = dtype == E4M3, "training" if save_pre else "inference"
    case = _case(
        dtype, [phase, activation.name if activation != SWIGLU else "", "biases" * biased],
        gemm_features(_output(dtype)), dispatch_gemm, None if in_fp8 else meta(TOKENS, WIDTH, dtype=dtype),
        _matrix(EXPERTS, 2 * WIDTH, WIDTH, dtype=dtype), _matrix(ROWS, WIDTH, dtype=dtype),
        meta(ROWS, 2 * WIDTH, dtype=dtype) if save_pre else None,
        _symm(events, PACKED, torch.int32) if in_fp8 else _symm(events, WIDTH, dtype), SENDS, meta_tiles(ROWS),
        replace(_settings(dtype), activation=activation), _bias(dtype, biased),
    )  # fmt: skip
    narrow_loads = BIAS_LOADS if biased and not in_fp8 else 0
    return replace(case, spilled_bytes=FEW_SPILLS if in_fp8 or biased else 0, narrow_loads=narrow_loads)


def _layer1(
    dtype: torch.dtype, top_k: int, *, backward: bool = False, events: int = 0, biased: bool = False
) -> KernelCase:
    output, weights = _output(dtype), meta(ROWS, top_k, dtype=torch.float32)
    grads = GradBuffer(weights, weights, meta(RANKS, dtype=torch.int64), weights) if backward else None
    lists = CombineLists(meta(ROWS, top_k), None if backward else weights, meta(TOKENS, RANKS), meta(RANKS), grads)
    case = _case(
        dtype, [f"top-{top_k}", "backward" if backward else "forward", "biases" * biased], gemm_features(output),
        gemm_combine, _matrix(ROWS, WIDTH, dtype=dtype), _matrix(EXPERTS, WIDTH, WIDTH, dtype=dtype),
        meta(ROWS, WIDTH, dtype=output), meta(TOKENS, WIDTH, dtype=output), _symm(events, WIDTH, output), lists,
        meta_tiles(ROWS), _settings(dtype), _bias(dtype, biased),
    )  # fmt: skip
    return replace(case, narrow_loads=BIAS_LOADS if biased and dtype != E4M3 else 0)


def _dispatch(dtype: torch.dtype, *, events: int = 0) -> KernelCase:
    x = meta(TOKENS, WIDTH, dtype=dtype)
    return _case(dtype, [], WIDE_ACCESS, dispatch, x, _symm(events, WIDTH, dtype), SENDS, meta(2))


def _case(
    dtype: torch.dtype, words: list[str], expects: Collection[str], launch: Callable[..., None], *arguments: Any
) -> KernelCase:
    records = any(isinstance(each, SymmBuffer) and each.recorder for each in arguments)
    words = ["block FP8" if dtype == E4M3 else as_triton_dtype(dtype), *words, "recording" * records]
    [case] = recorded(", ".join(filter(None, words)), expects, launch, *arguments)
    return case


def _symm(events: int, width: int, dtype: torch.dtype) -> SymmBuffer:
    """Rows that are farther from this rank's own than 32 bits can say, as allocations mostly are."""
    rows, pointers = meta(2**40, dtype=dtype)[-ROWS * width :].view(ROWS, width), meta(RANKS, dtype=torch.int64)
    recorder = Recorder(events=meta(132, 1 + events, 12)) if events else None
    return SymmBuffer(
        rows=rows, row_pointers=pointers, flags=meta(RANKS, TOKENS // 128), flag_pointers=pointers, epoch=meta(1),
        fault=meta(8, dtype=torch.int64), rank=0, max_tokens=TOKENS, timeout_ns=10**10, recorder=recorder,
    )  # fmt: skip


def _matrix(*shape: int, dtype: torch.dtype) -> Tensor | Scaled:
    elements = meta(*shape, dtype=dtype)
    return Scaled(elements=elements, scales=meta(1, dtype=torch.float32)) if dtype == E4M3 else elements


def _settings(dtype: torch.dtype) -> LaunchSettings:
    return LaunchSettings(tile=TileShape.select(_output(dtype), WIDTH, WIDTH))


def _output(dtype: torch.dtype) -> torch.dtype:
    return BF16 if dtype == E4M3 else dtype


def _bias(dtype: torch.dtype, biased: bool) -> Tensor | None:
    return meta(EXPERTS, WIDTH, dtype=_output(dtype)) if biased else None
