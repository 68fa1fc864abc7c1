"""The configurations of the kernels in block FP8 that ship, for the compile-ahead tool."""

from dataclasses import replace

from triton.runtime.jit import JITFunction

from ..gemm.fp8 import PACKED_GROUPS, SCALE_GROUP, pack_rows_kernel
from ..layer.triton.combine import slot_block
from ..layer.triton.fp8_dispatch_gemm import fp8_dispatch_gemm_kernel
from ..layer.triton.gemm_combine import MOVE_ROWS, SUM_TOKENS, gemm_combine_kernel
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import CHUNK_FLAGS, CHUNK_ROWS, COMBINE_CHUNK_ROWS, PANEL_COUNTERS
from ..runtime.case import KernelCase
from .fused import RECORDED, recording_constants, recording_suffix

E4M3 = "fp8e4nv"
PUSH_WORDS = 512
# A tile takes all 255 registers: 128 for sums, 64 for a product. What does not fit are addresses and strides that are
# the same in every step, read back from the first-level cache.
FEW_SPILLS = 64
TWIN_SPILLS = 384  # of layer 1, whose blocks multiply and combine; what production runs is in CUDA C++
POINTERS = {
    "*i32": "rows_ptr words_ptr flag_ptr send_token_ids send_counts tiles_ptr num_tiles_ptr row_ids_ptr counters "
    "epoch_ptr events_ptr row_slots send_rows recv_counts",
    "*i64": "recv_addresses flag_addresses fault_ptr combine_addresses combine_grad_addresses",
    "*fp32": "w1_scales hidden_scales a_scales b_scales grads_out row_weights row_grads combine_grads",
    "*bf16": "y_ptr b1_ptr bias_ptr out_ptr combine_ptr",
    "i64": "timeout_ns",
}


def aot_cases() -> list[KernelCase]:
    """Packing of every type; layer 0 and layer 1, also recording."""
    packs = [_pack(dtype) for dtype in ("bf16", "fp16", "fp32")]
    cases = [*packs, *(case(events) for case in (_layer0, _layer1) for events in (0, RECORDED))]
    return [*cases, _layer0(0, Activation("clamped_swiglu"), biased=True), _layer1(0, biased=True)]


def _pack(dtype: str) -> KernelCase:
    constants = dict(D=7168, GROUPS=PACKED_GROUPS, INTERPRET=False)
    return KernelCase(
        name=dtype,
        fn=pack_rows_kernel,
        signature=_signature(pack_rows_kernel.arg_names, constants, {"x_ptr": f"*{dtype}"}),
        constexprs=constants,
        unaligned=frozenset({"num_groups"}),
        num_warps=4,
        expects=frozenset({"wide_loads", "wide_stores"}),
    )


def _layer0(events: int, activation: Activation = SWIGLU, biased: bool = False) -> KernelCase:
    constants = dict(
        BLOCK_M=128, GROUP_TILES=8, PUSH_ROWS=32, PUSH_COLS=PUSH_WORDS, CHUNK=CHUNK_ROWS, INTERPRET=False,
        **recording_constants(events), ACTIVATION=activation, **({} if biased else {"b1_ptr": None}),
    )  # fmt: skip
    descriptors = {
        "w1_desc": f"tensordesc<{E4M3}[1, 1, {SCALE_GROUP}, {SCALE_GROUP}]>",
        "hidden_desc": f"tensordesc<{E4M3}[128, {SCALE_GROUP}]>",
    }
    kind = "" if activation == SWIGLU and not biased else f", {activation.name} with biases"
    return _gemm(f"inference{recording_suffix(events)}{kind}", fp8_dispatch_gemm_kernel, constants, descriptors)


def _layer1(events: int, biased: bool = False) -> KernelCase:
    block_n = 2 * SCALE_GROUP
    constants = dict(
        BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=SCALE_GROUP, GROUP_TILES=8, B_IS_KN=False, FLATTEN=True,
        W=4, K=8, K_BLOCK=slot_block(8), WEIGHTED=True, HAS_GRADS=False, TOKENS=SUM_TOKENS, ROWS=MOVE_ROWS, COLS=512,
        CHUNK=COMBINE_CHUNK_ROWS, FLAGS=CHUNK_FLAGS, PANEL_COUNTERS=PANEL_COUNTERS, PRECISION="tf32", INTERPRET=False,
        **recording_constants(events), **({} if biased else {"bias_ptr": None}),
    )  # fmt: skip
    descriptors = {
        "a_desc": f"tensordesc<{E4M3}[128, {SCALE_GROUP}]>",
        "b_desc": f"tensordesc<{E4M3}[1, {block_n // 2}, {SCALE_GROUP}]>",
    }
    kind = ", biases" if biased else ""
    name = f"block FP8, forward{recording_suffix(events)}{kind}"
    return replace(_gemm(name, gemm_combine_kernel, constants, descriptors), spilled_bytes=TWIN_SPILLS)


def _gemm(name: str, fn: JITFunction, constants: dict, descriptors: dict[str, str]) -> KernelCase:
    return KernelCase(
        name=name,
        fn=fn,
        signature=_signature(fn.arg_names, constants, descriptors),
        constexprs=constants,
        num_warps=8,
        num_stages=4,
        spilled_bytes=FEW_SPILLS,
        expects=frozenset({"wgmma", "wide_loads", "wide_stores"}),
    )


def _signature(names: list[str], constants: dict, others: dict[str, str]) -> dict[str, str]:
    kinds = {name: kind for kind, pointers in POINTERS.items() for name in pointers.split()} | others
    return {name: kinds.get(name, "i32") for name in names if name not in constants}
