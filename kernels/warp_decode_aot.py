"""The configurations of the decode kernels that ship, for the compile-ahead tool."""

import torch
import triton

from .aot_case import KernelCase
from .arguments import as_triton_dtype
from .group_gemm import dot_precision
from .warp_decode import LOAD_BYTES, WORD_COLS, DecodeConfig, select
from .warp_decode_down import down_kernel
from .warp_decode_gate_up import gate_up_kernel

# name: E, K, D, F
SHAPES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336)}
RANKS = 4


def aot_cases() -> list[KernelCase]:
    """Vector form for 1 and 2 tokens, matrix form for 8 and 64, alone and over ranks, bfloat16 and float32."""
    cases = []
    for name in SHAPES:
        for num_tokens in (1, 2, 8, 64):
            cases += [*_cases(torch.bfloat16, name, num_tokens)]
        cases += [*_cases(torch.bfloat16, name, 1, ranks=RANKS), *_cases(torch.bfloat16, name, 8, ranks=RANKS)]
    cases += [*_cases(torch.float32, "qwen3", 1), *_cases(torch.float32, "qwen3", 8)]
    return [*cases, *_cases(torch.bfloat16, "qwen3", 1, dependent=True), *_cases(torch.float16, "qwen3", 8)]


def _cases(
    dtype: torch.dtype, name: str, num_tokens: int, *, ranks: int = 1, dependent: bool = False
) -> tuple[KernelCase, KernelCase]:
    num_experts, top_k, hidden_size, ffn_size = SHAPES[name]
    config = select(dtype, num_tokens, top_k, hidden_size, ffn_size, dependent=dependent)
    constants = dict(
        K=top_k, K_BLOCK=triton.next_power_of_2(top_k), T_BLOCK=num_tokens if config.form == "vector" else
        max(16, num_tokens), BY_EXPERT=num_tokens * top_k >= num_experts, VECTOR=config.form == "vector",
        LANE=LOAD_BYTES // dtype.itemsize, PRECISION=dot_precision(dtype), DEPENDENT=dependent,
    )  # fmt: skip
    words = [as_triton_dtype(dtype), name, f"{num_tokens} tokens", config.form]
    label = ", ".join([*words, f"{ranks} ranks"] if ranks > 1 else [*words, "dependent"] if dependent else words)
    return (
        _gate_up(label, dtype, config, constants, hidden_size, advance=ranks > 1),
        _down(label, dtype, config, constants, ffn_size, ranks=ranks),
    )


def _gate_up(
    label: str, dtype: torch.dtype, config: DecodeConfig, constants: dict, hidden_size: int, *, advance: bool
) -> KernelCase:
    shape, element = config.gate_up, as_triton_dtype(dtype)
    w1 = f"*{element}" if config.form == "vector" else f"tensordesc<{element}[1, 2, {shape.rows}, {shape.depth}]>"
    even = hidden_size % shape.depth == 0
    return _case(
        label, gate_up_kernel, config, {"w1": w1, "x_ptr": f"*{element}", "hidden_ptr": f"*{element}"},
        dict(constants, BLOCK_F=shape.rows, BLOCK_K=shape.depth, EVEN_K=even, ADVANCE=advance),
    )  # fmt: skip


def _down(
    label: str, dtype: torch.dtype, config: DecodeConfig, constants: dict, ffn_size: int, *, ranks: int
) -> KernelCase:
    shape, element = config.down, as_triton_dtype(dtype)
    w2 = f"*{element}" if config.form == "vector" else f"tensordesc<{element}[1, {shape.rows}, {shape.depth}]>"
    pointers = {
        "w2": w2, "hidden_ptr": f"*{element}", "out_ptr": f"*{element}",
        "weights_ptr": "*fp32", "partials_ptr": "*fp32",
        "landing_addresses": "*i64" if ranks > 1 else "*i32", "fault_ptr": "*i64" if ranks > 1 else "*i32",
    }  # fmt: skip
    return _case(
        label, down_kernel, config, pointers,
        dict(
            constants, FOLD=config.fold, BLOCK_D=shape.rows, BLOCK_K=shape.depth, EVEN_K=ffn_size % shape.depth == 0,
            W=ranks, WORD_COLS=WORD_COLS, INTERPRET=False,
        ),
    )  # fmt: skip


def _case(
    label: str, kernel: triton.JITFunction, config: DecodeConfig, pointers: dict[str, str], constants: dict
) -> KernelCase:
    """Wide stores where a thread has 16 bytes of the tile to store; the vector form stores a value per row."""
    kinds = pointers | {"timeout_ns": "i64"}
    kinds |= dict.fromkeys(("ids_ptr", "slots_ptr", "tickets_ptr", "epoch_ptr"), "*i32")
    shape = config.gate_up if kernel is gate_up_kernel else config.down
    expects = {"wide_loads"}
    if config.form == "matrix":
        item_bytes = 4 if kernel is down_kernel else LOAD_BYTES // constants["LANE"]
        if shape.rows * constants["T_BLOCK"] * item_bytes >= 32 * shape.num_warps * LOAD_BYTES:
            expects |= {"wide_stores"}
        if constants["PRECISION"] != "ieee":
            expects |= {"wgmma"}
    return KernelCase(
        name=label,
        fn=kernel,
        signature={name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants},
        constexprs=constants,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        expects=frozenset(expects),
    )
