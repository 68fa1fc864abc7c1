"""The text of a kernel in CUDA C++: constants, one matrix product for each number of rows, and files of ``cuda/``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


def cuda_text(constants: Mapping[str, int], dtype: torch.dtype, heights: Sequence[int], sources: Sequence[str]) -> str:
    """One text to compile.

    Args:
        constants: Numbers by name.
        dtype: Of the elements, bfloat16 or float16.
        heights: Rows of the pieces that the text has products for, multiples of 8 up to 256.
        sources: Files of ``cuda/`` without their ending, in the order of their use.
    """
    is_bf16 = dtype == torch.bfloat16
    folder = Path(__file__).parent / "cuda"
    return "\n".join(
        [
            f"constexpr int ELEMENT_IS_BF16 = {int(is_bf16)};",
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"#define FOR_EACH_HEIGHT(CASE) {' '.join(f'CASE({height})' for height in heights)}",
            *(_product(height, "bf16" if is_bf16 else "f16") for height in heights),
            *((folder / f"{name}.cu").read_text() for name in sources),
        ]
    )


def _product(rows: int, element: str) -> str:
    """``multiply`` for pieces of ``rows`` rows: the instruction names each of its registers."""
    num_sums = rows // 2
    sums = ", ".join(f"%{index}" for index in range(num_sums))
    operands = ", ".join(f'"+f"(sums[{index}])' for index in range(num_sums))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{element}.{element}"
    return (
        f"__device__ __forceinline__ void multiply(float (&sums)[{num_sums}], unsigned long long a, "
        "unsigned long long b) {\n"
        '    asm volatile("{\\n.reg .pred adds;\\nsetp.ne.b32 adds, 1, 0;\\n'
        f'{instruction} {{{sums}}}, %{num_sums}, %{num_sums + 1}, adds, 1, 1, 0, 0;\\n}}"\n'
        f'        : {operands} : "l"(a), "l"(b));\n}}\n'
    )
