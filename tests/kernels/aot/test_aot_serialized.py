"""Tensor-core instructions that are waited for one by one are found, also where it is one height of many."""

import re
from pathlib import Path
from typing import Any

import pytest

from comet.kernels.aot.compile import SERIALIZED, Quality, compile_case, examine_ptx, waited_alone
from comet.kernels.runtime.case import CudaCase
from comet.kernels.runtime.cuda_source import CudaSource
from comet.kernels.runtime.nvrtc import what_is_missing

needs_compiler = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "it is there")

# Items of 16, 32 or 48 rows: four instructions a step each.
KERNEL = """
#include "include/gemm/wgmma.cuh"

struct Config : Block {
    using Element = Bf16;
    static constexpr int BLOCK_N = 128, BLOCK_K = 64, MAX_TILE_ROWS = 48, MMA_ROWS = 256, ROW_STEP = 16, CLUSTER = 1;
    static constexpr int NUM_STAGES = 4, TILE_SLOTS = 8, SCALE_STEPS = 1;
    static constexpr bool IS_DGRAD = false, IS_FP8 = false, HAS_BIAS = false;
};

// Before mma.cuh, which takes it as it finds it: the products of 32 rows in the place of its own.
struct Mine {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        BODY
    }
};

template <class Element, int N>
struct Chosen : Wgmma<Element, N> {};
template <>
struct Chosen<Bf16, 32> : Mine {};
#define Wgmma Chosen
#include "include/gemm/mma.cuh"
#undef Wgmma

extern "C" __global__ void __launch_bounds__(128, 1) some_products(float* out, int rows, int num_steps) {
    extern __shared__ char shared[];
    SharedStorage<Config, int, 0> storage(shared);
    Pipeline<Config> pipeline = storage.pipeline();
    Accumulator<Config> sums;
    multiply_tile<false>(pipeline, sums, 0, rows, 0, threadIdx.x % 32, num_steps, [] {});
    for (int index = 0; index < Config::MAX_TILE_ROWS / 2; ++index) out[index * 128 + threadIdx.x] = sums[index];
}
"""
PTX = """
.version 8.3
.target sm_90a
.address_size 64

.visible .entry products(.param .u64 out, .param .u64 tiles) {
    .reg .b64 %rd<2>;
    .reg .f32 %f<4>;
    .reg .pred %adds;
    ld.param.u64 %rd0, [out];
    ld.param.u64 %rd1, [tiles];
    mov.f32 %f0, 0f00000000;
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, 0f00000000;
    mov.f32 %f3, 0f00000000;
    setp.ne.b64 %adds, %rd0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1, %adds, 1, 1, 0, 0;
    BETWEEN
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1, %adds, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.f32 [%rd0], {%f0, %f1, %f2, %f3};
    ret;
}
"""
PRODUCT = "Wgmma<Bf16, 32>::multiply<false, false, 0>(d, a, b, true);"  # the instruction that ships
WAITS = f"{PRODUCT} wgmma_commit_group(); wgmma_wait_group<0>();"
TOUCHES = f"{PRODUCT} d[3] += 1.0f;"


class Products(CudaSource):
    """The products of ``cuda/``; the template is the text of those of 32 rows."""

    @property
    def text(self) -> str:
        return KERNEL.replace("BODY", self.template)


def products(of_32_rows: str) -> CudaCase:
    nothing: dict[str, Any] = dict(arguments={}, types={}, constants={})
    return CudaCase(Products(template=of_32_rows, entry="some_products", shared_bytes=1000, **nothing), "small")


def about_waiting(quality: Quality, case: CudaCase) -> list[str]:
    return [complaint for complaint in quality.complaints(case) if complaint.startswith("waits for a wgmma")]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@needs_compiler
def test_one_height_that_is_serialized_fails_and_is_named() -> None:
    case = products(WAITS)
    quality = compile_case(case)
    assert about_waiting(quality, case) == ["waits for a wgmma before the next: 64x32x16"]


@needs_compiler
def test_what_the_assembler_serializes_fails() -> None:
    """One bad product makes the assembler serialize all products of a function."""
    case = products(TOUCHES)
    quality = compile_case(case)
    assert {"64x16x16", "64x48x16"} <= set(quality.serialized)
    assert len(about_waiting(quality, case)) == 1


def test_a_wait_that_the_assembler_injects_into_ptx_fails() -> None:
    lines, options = ("", "add.f32 %f0, %f0, %f0;"), {"num_warps": 4}
    good, bad = (examine_ptx(PTX.replace("BETWEEN", line), 0, options) for line in lines)
    assert (good.wgmma, good.serialized) == (2, ())
    assert len(bad.serialized) == 1
    assert "is injected" in bad.serialized[0]


def test_what_the_assembler_says_of_a_whole_function_fails() -> None:
    reason = "Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers"
    assert re.findall(SERIALIZED, f"ptxas info    : (C7511) {reason}\nptxas info    : 0 bytes gmem\n") == [reason]
    assert re.findall(SERIALIZED, "(C7519) warpgroup.arrive is injected in around line 20 by compiler") == []


FIRST, LAST = "HGMMA.64x256x16.F32 R24, gdesc[UR8], R24 ;", "HGMMA.64x32x16.F32 R152, gdesc[UR12], R152, gsb0 ;"
ARRIVE, WAIT_ALL, WAIT_BUT_ONE = (
    "WARPGROUP.ARRIVE ;",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
)


@pytest.mark.parametrize(
    ("code", "alone"),
    [
        (["HGMMA.64x32x16.F32 R24, gsb0 ;", WAIT_ALL], ("64x32x16",)),
        ([ARRIVE, LAST, "IADD3 R1, R1, 0x1 ;", WAIT_ALL], ("64x32x16",)),
        ([ARRIVE, LAST, WAIT_ALL, LAST, WAIT_ALL, ARRIVE, FIRST, LAST, WAIT_ALL], ("64x32x16",)),
        ([ARRIVE, FIRST, LAST, WAIT_ALL], ()),
        ([ARRIVE, LAST, WAIT_BUT_ONE, WAIT_ALL], ()),
        ([ARRIVE, FIRST, WAIT_ALL], ()),
        ([ARRIVE, LAST], ()),
        ([], ()),
    ],
)
def test_waited_alone(code: list[str], alone: tuple[str, ...]) -> None:
    assert waited_alone("\n".join(f"        /*00{line:02x}*/    {text}" for line, text in enumerate(code))) == alone
