"""The configurations of the fused kernels that ship, for the compile-ahead tool."""

from ..gemm.tiles import GROUP_TILES
from ..layer.triton.combine import slot_block
from ..layer.triton.dispatch import NUM_WARPS, PUSH_ROWS, dispatch_kernel
from ..layer.triton.dispatch_gemm import dispatch_gemm_kernel
from ..layer.triton.gemm_combine import MOVE_ROWS, SUM_TOKENS, gemm_combine_kernel
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import CHUNK_FLAGS, CHUNK_ROWS, COMBINE_CHUNK_ROWS, PANEL_COUNTERS
from ..runtime.case import KernelCase

# Top-k of the five models; layer 1 unrolls over it.
TOP_KS = (2, 4, 8)
TYPES = {"bf16": (128, 256, 64, 4), "fp16": (128, 256, 64, 4), "fp32": (16, 64, 16, 2)}
INT32 = (
    "flag_ptr send_token_ids send_counts recv_counts tiles_ptr num_tiles_ptr row_ids_ptr counters epoch_ptr row_slots "
    "send_rows events_ptr"
).split()
INT64 = "recv_addresses flag_addresses combine_addresses combine_grad_addresses fault_ptr".split()
ROWS = "x_ptr y_ptr out_ptr combine_ptr b1_ptr bias_ptr".split()
BIAS_LOADS = 4  # most loads of a bias of 16 bits, a few of which are no pairs
RECORDED = 4096  # events per block, where a configuration records
FLOATS = "grads_out row_weights row_grads combine_grads".split()


def aot_cases() -> list[KernelCase]:
    """Layer 0 and layer 1 in every type, with and without what training adds; in bf16 also recording."""
    cases = []
    for dtype in TYPES:
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
    block_f, _, block_k, num_stages = TYPES[dtype]
    descriptors = {
        "w1_desc": f"tensordesc<{dtype}[1, 2, {block_f}, {block_k}]>",
        "hidden_desc": f"tensordesc<{dtype}[128, {block_f}]>",
        "pre_desc": f"tensordesc<{dtype}[128, 1, {block_f}]>",
    }
    constants = dict(
        BLOCK_M=128, BLOCK_F=block_f, BLOCK_K=block_k, GROUP_TILES=GROUP_TILES, PUSH_ROWS=PUSH_ROWS,
        PUSH_COLS=_most_cols(dtype, 1024),
        CHUNK=CHUNK_ROWS, EVEN_K=True, SAVE_PRE=save_pre, FLATTEN=dtype != "fp32", PRECISION=_precision(dtype),
        INTERPRET=False, ACTIVATION=activation, **recording_constants(events), **({} if biased else {"b1_ptr": None}),
    )  # fmt: skip
    kind = activation.name + (" with biases" if biased else "")
    return KernelCase(
        name=f"{dtype}, {'training' if save_pre else 'inference'}{recording_suffix(events)}"
        f"{'' if kind == SWIGLU.name else f', {kind}'}",
        fn=dispatch_gemm_kernel,
        signature=_signature(dispatch_gemm_kernel.arg_names, constants, descriptors, dtype),
        constexprs=constants,
        num_warps=NUM_WARPS,
        num_stages=min(num_stages, 3) if save_pre else num_stages,
        expects=_expects(dtype),
        # Beside the 128 registers of its sums a thread has 64 for biases, once a tile, behind the loop.
        spilled_bytes=64 if biased else 0,
        narrow_loads=BIAS_LOADS if biased else 0,
    )


def _dispatch(dtype: str, *, events: int = 0) -> KernelCase:
    constants = dict(PUSH_ROWS=PUSH_ROWS, PUSH_COLS=_most_cols(dtype, 1024), CHUNK=CHUNK_ROWS, INTERPRET=False)
    constants |= recording_constants(events)
    return KernelCase(
        name=f"{dtype}{recording_suffix(events)}",
        fn=dispatch_kernel,
        signature=_signature(dispatch_kernel.arg_names, constants, {}, dtype),
        constexprs=constants,
        num_warps=NUM_WARPS,
        expects=frozenset({"wide_loads", "wide_stores"}),
    )


def _layer1(dtype: str, top_k: int, *, backward: bool, events: int = 0, biased: bool = False) -> KernelCase:
    _, block_n, block_k, num_stages = TYPES[dtype]
    b_block = (block_k, block_n) if backward else (block_n, block_k)
    descriptors = {
        "a_desc": f"tensordesc<{dtype}[128, {block_k}]>",
        "b_desc": f"tensordesc<{dtype}[1, {b_block[0]}, {b_block[1]}]>",
    }
    constants = dict(
        BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_TILES=GROUP_TILES, W=4, K=top_k, K_BLOCK=slot_block(top_k),
        WEIGHTED=not backward, HAS_GRADS=backward, B_IS_KN=backward, FLATTEN=dtype != "fp32", TOKENS=SUM_TOKENS,
        ROWS=MOVE_ROWS, COLS=_most_cols(dtype, 512), CHUNK=COMBINE_CHUNK_ROWS, FLAGS=CHUNK_FLAGS,
        PANEL_COUNTERS=PANEL_COUNTERS, PRECISION=_precision(dtype), INTERPRET=False, a_scales=None, b_scales=None,
        **recording_constants(events), **({} if biased else {"bias_ptr": None}),
    )  # fmt: skip
    return KernelCase(
        name=f"{dtype}, top-{top_k}, {'backward' if backward else 'forward'}{recording_suffix(events)}"
        f"{', biases' if biased else ''}",
        fn=gemm_combine_kernel,
        signature=_signature(gemm_combine_kernel.arg_names, constants, descriptors, dtype),
        constexprs=constants,
        num_warps=NUM_WARPS,
        num_stages=num_stages,
        expects=_expects(dtype),
        narrow_loads=BIAS_LOADS if biased else 0,
    )


def _signature(names: list[str], constants: dict, descriptors: dict[str, str], dtype: str) -> dict[str, str]:
    kinds = dict.fromkeys(INT32, "*i32") | dict.fromkeys(INT64, "*i64") | dict.fromkeys(FLOATS, "*fp32")
    kinds |= dict.fromkeys(ROWS, f"*{dtype}") | descriptors | {"timeout_ns": "i64", "recv_offset": "i64"}
    return {name: kinds.get(name, "i32") for name in names if name not in constants}


def recording_constants(events: int) -> dict[str, int | None]:
    """Constants of a kernel that records up to ``events`` events per block; one that does not has no buffer."""
    return {"EVENTS": events} if events else {"EVENTS": 0, "events_ptr": None}


def recording_suffix(events: int) -> str:
    """What the name of such a kernel ends with."""
    return ", recording" if events else ""


def _most_cols(dtype: str, most: int) -> int:
    return most // 4 if dtype == "fp32" else most


def _precision(dtype: str) -> str:
    return "ieee" if dtype == "fp32" else "tf32"


def _expects(dtype: str) -> frozenset[str]:
    """IEEE float32 has no tensor-core instruction."""
    return frozenset({"wide_loads", "wide_stores"} | ({"wgmma"} if dtype != "fp32" else set()))
