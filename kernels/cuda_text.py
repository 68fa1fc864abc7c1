"""The text of a kernel in CUDA C++: constants, one matrix product for each number of rows, and files of ``cuda/``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .recorder import EVENT_WORDS

SHARED_LIMIT = 232448  # bytes of shared memory a block can have

# Constants of the sources, which get them from here.
LINE = 128  # bytes of a row in shared memory: what a swizzle spans
DEPTH = 64  # elements of the contraction per stage: a line
COLS = 128  # rows of a weight per block
MOST_AT_ONCE = 256  # routed rows of one instruction of the tensor cores
STEP = 16  # rows come in steps of
TILE_ROWS = 128  # rows of the plan's tiles
WARPS = 8  # that multiply
LAUNCH_REGISTERS = 168  # of each of 384 threads, before some give theirs to others
ITEM_SLOTS = 8  # items that the loading warps can be ahead, and more
PASS_COLS = 256  # columns that a communicating warp has at a time: 16 bytes per lane
COMMON = dict(
    LINE=LINE, DEPTH=DEPTH, COLS=COLS, MOST_AT_ONCE=MOST_AT_ONCE, STEP=STEP, TILE_ROWS=TILE_ROWS, WARPS=WARPS,
    LAUNCH_REGISTERS=LAUNCH_REGISTERS,    ITEM_SLOTS=ITEM_SLOTS, PASS_COLS=PASS_COLS, EVENT_WORDS=EVENT_WORDS.value,
)  # fmt: skip


def cuda_text(constants: Mapping[str, int], dtype: torch.dtype, sources: Sequence[str], most_rows: int) -> str:
    """One text to compile.

    Args:
        constants: Numbers by name, beside ``COMMON``.
        dtype: Of the elements, bfloat16 or float16.
        sources: Files of ``cuda/`` without their ending, in the order of their use.
        most_rows: Routed rows that a block multiplies at a time, at most; a multiple of ``STEP``.
    """
    is_bf16 = dtype == torch.bfloat16
    numbers = {"ELEMENT_IS_BF16": int(is_bf16), "MOST_ROWS": most_rows} | COMMON | dict(constants)
    heights = range(STEP, most_rows + 1, STEP)
    folder = Path(__file__).parent / "cuda"
    return "\n".join(
        [
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"#define FOR_EACH_HEIGHT(CASE) {' '.join(f'CASE({height})' for height in heights)}",
            f"using Sums = float[{most_rows // 2}];",
            "template <int ROWS>\n__device__ void multiply(Sums& sums, unsigned long long a, unsigned long long b);",
            *(_product(height, "bf16" if is_bf16 else "f16") for height in heights),
            *((folder / f"{name}.cu").read_text() for name in sources),
        ]
    )


def memory_bytes(num_stages: int, most_rows: int, staging_bytes: int, item_bytes: int) -> int:
    """Bytes of ``Memory`` of ``cuda/products.cu``: alignment, stages, staging, barriers, items.

    Example: 4 stages of 256 rows, 8192 bytes of staging, items of 32: 1024 + 4 * 49152 + 8192 + 64 + 256 = 206144.
    """
    stages = num_stages * (COLS + most_rows) * LINE
    return 1024 + stages + staging_bytes + 16 * num_stages + ITEM_SLOTS * item_bytes


def _product(rows: int, element: str) -> str:
    """``multiply`` for pieces of ``rows`` rows: the instruction names each of its registers."""
    parts = "".join(
        _instruction(first, min(rows - first, MOST_AT_ONCE), element) for first in range(0, rows, MOST_AT_ONCE)
    )
    return (
        f"template <>\n__device__ __forceinline__ void multiply<{rows}>(Sums& sums, unsigned long long a, "
        f"unsigned long long b) {{\n{parts}}}\n"
    )


def _instruction(first_row: int, rows: int, element: str) -> str:
    """The product of ``rows`` rows from ``first_row`` on, a multiple of 8."""
    first_sum, num_sums = first_row // 2, rows // 2
    sums = ", ".join(f"%{index}" for index in range(num_sums))
    operands = ", ".join(f'"+f"(sums[{first_sum + index}])' for index in range(num_sums))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{element}.{element}"
    rows_from = f"b + {first_row * LINE // 16}" if first_row else "b"  # in units of 16 bytes
    return (
        '    asm volatile("{\\n.reg .pred adds;\\nsetp.ne.b32 adds, 1, 0;\\n'
        f'{instruction} {{{sums}}}, %{num_sums}, %{num_sums + 1}, adds, 1, 1, 0, 0;\\n}}"\n'
        f'        : {operands} : "l"(a), "l"({rows_from}));\n'
    )
