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
MOST_ROWS = 256  # routed rows per block
STEP = 16  # rows come in steps of
TILE_ROWS = 128  # rows of the plan's tiles
WARPS = 8  # that multiply
ITEM_SLOTS = 8  # items that the loading warps can be ahead, and more
PASS_COLS = 256  # columns that a communicating warp has at a time: 16 bytes per lane
COMMON = dict(
    LINE=LINE, DEPTH=DEPTH, COLS=COLS, MOST_ROWS=MOST_ROWS, STEP=STEP, TILE_ROWS=TILE_ROWS, WARPS=WARPS,
    ITEM_SLOTS=ITEM_SLOTS, PASS_COLS=PASS_COLS, EVENT_WORDS=EVENT_WORDS.value,
)  # fmt: skip
HEIGHTS = range(STEP, MOST_ROWS + 1, STEP)


def cuda_text(constants: Mapping[str, int], dtype: torch.dtype, sources: Sequence[str]) -> str:
    """One text to compile.

    Args:
        constants: Numbers by name, beside ``COMMON``.
        dtype: Of the elements, bfloat16 or float16.
        sources: Files of ``cuda/`` without their ending, in the order of their use.
    """
    is_bf16 = dtype == torch.bfloat16
    numbers = {"ELEMENT_IS_BF16": int(is_bf16)} | COMMON | dict(constants)
    folder = Path(__file__).parent / "cuda"
    return "\n".join(
        [
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"#define FOR_EACH_HEIGHT(CASE) {' '.join(f'CASE({height})' for height in HEIGHTS)}",
            f"using Sums = float[{MOST_ROWS // 2}];",
            "template <int ROWS>\n__device__ void multiply(Sums& sums, unsigned long long a, unsigned long long b);",
            *(_product(height, "bf16" if is_bf16 else "f16") for height in HEIGHTS),
            *((folder / f"{name}.cu").read_text() for name in sources),
        ]
    )


def memory_bytes(num_stages: int, staging_bytes: int, item_bytes: int) -> int:
    """Bytes of ``Memory`` of ``cuda/products.cu``: alignment, stages, staging, barriers, items.

    Example: 4 stages, 8192 bytes of staging, items of 32: 1024 + 4 * 49152 + 8192 + 64 + 256 = 206144.
    """
    stages = num_stages * (COLS + MOST_ROWS) * LINE
    return 1024 + stages + staging_bytes + 16 * num_stages + ITEM_SLOTS * item_bytes


def _product(rows: int, element: str) -> str:
    """``multiply`` for pieces of ``rows`` rows: the instruction names each of its registers."""
    num_sums = rows // 2  # the first of an item's
    sums = ", ".join(f"%{index}" for index in range(num_sums))
    operands = ", ".join(f'"+f"(sums[{index}])' for index in range(num_sums))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{element}.{element}"
    return (
        f"template <>\n__device__ __forceinline__ void multiply<{rows}>(Sums& sums, unsigned long long a, "
        "unsigned long long b) {\n"
        '    asm volatile("{\\n.reg .pred adds;\\nsetp.ne.b32 adds, 1, 0;\\n'
        f'{instruction} {{{sums}}}, %{num_sums}, %{num_sums + 1}, adds, 1, 1, 0, 0;\\n}}"\n'
        f'        : {operands} : "l"(a), "l"(b));\n}}\n'
    )
