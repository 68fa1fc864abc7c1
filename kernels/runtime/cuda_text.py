"""The text of a kernel in CUDA C++: constants, one matrix product for each number of rows, and files of ``cuda/``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .arch import HOPPER
from .recorder import EVENT_WORDS

SHARED_LIMIT = HOPPER.shared_bytes

# Constants of the sources, which get them from here.
LINE = 128  # bytes of a row in shared memory: what a swizzle spans
DEPTH = 64  # elements of the contraction per stage: a line
COLS = 128  # rows of a weight per block
MOST_AT_ONCE = 256  # routed rows that one instruction of the tensor cores takes; what pieces of rows are cut to
STEP = 16  # rows come in steps of
TILE_ROWS = 128  # rows of the plan's tiles
WARPS = 8  # that multiply
LAUNCH_REGISTERS = 168  # of each of 384 threads, before some give theirs to others
ITEM_SLOTS = 8  # items that the loading warps can be ahead, and more
DRAW_BYTES = 16  # of a slot through which they learn which item is next: a barrier and its ticket
PASS_COLS = 256  # columns that a communicating warp has at a time: 16 bytes per lane
COMMON = dict(
    LINE=LINE, TILE_ROWS=TILE_ROWS, WARPS=WARPS, LAUNCH_REGISTERS=LAUNCH_REGISTERS, ITEM_SLOTS=ITEM_SLOTS,
    DRAW_BYTES=DRAW_BYTES, PASS_COLS=PASS_COLS, EVENT_WORDS=EVENT_WORDS.value, IS_FP8=0, DEPTH=DEPTH, COLS=COLS,
    MOST_AT_ONCE=MOST_AT_ONCE, STEP=STEP, SCALE_STEPS=1,
)  # fmt: skip
LAYER = {"TILE_ROWS", "PASS_COLS", "EVENT_WORDS"}  # those of ``COMMON`` that a GEMM alone has no use for

# In block FP8 (cuda/fp8_products.cu) the contraction of a stage shares its scales; the instructions take STEP rows.
FP8_COLS = 256  # COLS
FP8_ROWS = 128  # MOST_ROWS and MOST_AT_ONCE: what both warpgroups multiply at once
FP8_STEP = 64  # STEP
FP8 = dict(IS_FP8=1, DEPTH=LINE, COLS=FP8_COLS, MOST_ROWS=FP8_ROWS, MOST_AT_ONCE=FP8_ROWS, STEP=FP8_STEP)


def cuda_text(constants: Mapping[str, int], dtype: torch.dtype, sources: Sequence[str], most_rows: int) -> str:
    """One text to compile.

    Args:
        constants: Numbers by name, beside ``COMMON``. With ``IS_GRADIENT`` the columns of a weight, and not its
            contraction, are neighbours in memory.
        dtype: Of the elements, bfloat16 or float16.
        sources: Files of ``cuda/`` without their ending, in the order of their use.
        most_rows: Routed rows that a block multiplies at a time, at most; a multiple of ``STEP``.
    """
    heights = range(STEP, most_rows + 1, STEP)
    products = [
        f"#define FOR_EACH_HEIGHT(CASE) {' '.join(f'CASE({height})' for height in heights)}",
        f"using Sums = float[{most_rows // 2}];",
        "template <int ROWS>\n__device__ void multiply(Sums& sums, unsigned long long a, unsigned long long b);",
        *(_product(height, _element(dtype), constants["IS_GRADIENT"]) for height in heights),
    ]
    return _text(COMMON | {"MOST_ROWS": most_rows} | dict(constants), dtype, products, sources)


def fp8_cuda_text(constants: Mapping[str, int], dtype: torch.dtype, sources: Sequence[str]) -> str:
    """The same in block FP8.

    Args:
        constants: Numbers by name, beside ``COMMON`` and ``FP8``.
        dtype: Of the results, bfloat16 or float16.
        sources: See ``cuda_text``.
    """
    return _text(COMMON | FP8 | dict(constants), dtype, [_fp8_product()], sources)


def transposed_cuda_text(constants: Mapping[str, int], dtype: torch.dtype, sources: Sequence[str]) -> str:
    """The same of products whose operands have the contraction as rows, not as columns.

    Args:
        constants: Numbers by name, beside those of ``COMMON`` that shape no layer.
        dtype: Of the elements, bfloat16 or float16.
        sources: See ``cuda_text``.
    """
    common = {name: value for name, value in COMMON.items() if name not in LAYER}
    return _text(common | dict(constants), dtype, [_transposed_product(_element(dtype))], sources)


def _text(numbers: Mapping[str, int], dtype: torch.dtype, products: Sequence[str], sources: Sequence[str]) -> str:
    numbers = dict(numbers) | {"ELEMENT_IS_BF16": int(dtype == torch.bfloat16)}
    folder = Path(__file__).parents[1] / "cuda"
    return "\n".join(
        [
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            *products,
            *((folder / f"{name}.cu").read_text() for name in sources),
        ]
    )


def memory_bytes(num_stages: int, most_rows: int, staging_bytes: int, item_bytes: int) -> int:
    """Bytes of ``Memory`` of ``cuda/ring.cu``: alignment, stages, staging, barriers, items, draws.

    Args:
        num_stages: Depth of the load pipeline.
        most_rows: See ``cuda_text``.
        staging_bytes: Of both warpgroups that multiply.
        item_bytes: Of one item.

    Example:
        4 stages of 256 rows, 8192 bytes of staging, items of 32: 1024 + 4 * 49152 + 8192 + 64 + 384 = 206272.
    """
    return _memory_bytes(num_stages, (COLS + most_rows) * LINE, staging_bytes, item_bytes)


def fp8_memory_bytes(num_stages: int, scale_steps: int, staging_bytes: int, item_bytes: int) -> int:
    """The same in block FP8, with scales of each row for ``scale_steps`` steps as many times as there are stages.

    Args:
        num_stages: See ``memory_bytes``.
        scale_steps: Steps whose scales are loaded together, ``SCALE_STEPS``.
        staging_bytes: See ``memory_bytes``.
        item_bytes: See ``memory_bytes``.

    Example:
        4 stages, scales of 4 steps, staging 1024, items of 48: 1024 + 4 * (49152 + 2048) + 1024 + 64 + 512 = 207424.
    """
    stage_bytes = (FP8_COLS + FP8_ROWS) * LINE + 4 * FP8_ROWS * scale_steps
    return _memory_bytes(num_stages, stage_bytes, staging_bytes, item_bytes)


def tile_memory_bytes(num_stages: int, lines: int, staging_bytes: int, item_bytes: int, item_slots: int) -> int:
    """The same with stages of so many lines and so many items.

    Args:
        num_stages: See ``memory_bytes``.
        lines: Of both operands.
        staging_bytes: See ``memory_bytes``.
        item_bytes: See ``memory_bytes``.
        item_slots: ``ITEM_SLOTS`` there.

    Example:
        8 stages of 192 lines, staging 32768, 16 items of 32: 1024 + 8 * (24576 + 16) + 32768 + 16 * 48 = 231296.
    """
    return _memory_bytes(num_stages, lines * LINE, staging_bytes, item_bytes, item_slots)


def _memory_bytes(
    num_stages: int, stage_bytes: int, staging_bytes: int, item_bytes: int, item_slots: int = ITEM_SLOTS
) -> int:
    return 1024 + num_stages * (stage_bytes + 16) + staging_bytes + item_slots * (item_bytes + DRAW_BYTES)


def _product(rows: int, element: str, transposed: int) -> str:
    """``multiply`` for pieces of ``rows`` rows: the instruction names each of its registers."""
    parts = "".join(
        _instruction(first, min(rows - first, MOST_AT_ONCE), element, transposed)
        for first in range(0, rows, MOST_AT_ONCE)
    )
    return (
        f"template <>\n__device__ __forceinline__ void multiply<{rows}>(Sums& sums, unsigned long long a, "
        f"unsigned long long b) {{\n{parts}}}\n"
    )


def _instruction(first_row: int, rows: int, element: str, transposed: int) -> str:
    """The product of ``rows`` rows from ``first_row`` on, a multiple of 8."""
    first_sum, num_sums = first_row // 2, rows // 2
    sums = ", ".join(f"%{index}" for index in range(num_sums))
    operands = ", ".join(f'"+f"(sums[{first_sum + index}])' for index in range(num_sums))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{element}.{element}"
    rows_from = f"b + {first_row * LINE // 16}" if first_row else "b"  # in units of 16 bytes
    return (
        '    asm volatile("{\\n.reg .pred adds;\\nsetp.ne.b32 adds, 1, 0;\\n'
        f'{instruction} {{{sums}}}, %{num_sums}, %{num_sums + 1}, adds, 1, 1, {transposed}, 0;\\n}}"\n'
        f'        : {operands} : "l"(a), "l"({rows_from}));\n'
    )


def _transposed_product(element: str) -> str:
    """``multiply`` of 64 columns and ``MOST_AT_ONCE``: adds 16 rows to a thread's ``Sums``, or begins them anew."""
    count = MOST_AT_ONCE // 2
    instruction = f"wgmma.mma_async.sync.aligned.m64n{MOST_AT_ONCE}k16.f32.{element}.{element}"
    return f"using Sums = float[{count}];\n" + _adding("Sums", count, instruction, "1, 1, 1, 1")


def _adding(name: str, count: int, instruction: str, modifiers: str) -> str:
    """``multiply``, which adds to ``count`` registers of a thread, called ``name``, or begins them anew."""
    variable = name.lower()
    registers = ", ".join(f"%{index}" for index in range(count))
    return (
        "__device__ __forceinline__ void multiply(\n"
        f"    {name}& {variable}, unsigned long long a, unsigned long long b, bool adds) {{\n"
        f'    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n'
        f'{instruction} {{{registers}}}, %{count}, %{count + 1}, adds, {modifiers};\\n}}"\n'
        f'        : {_operands(variable, count)} : "l"(a), "l"(b), "r"(int(adds)));\n}}\n'
    )


def _operands(variable: str, count: int) -> str:
    return ", ".join(f'"+f"({variable}[{index}])' for index in range(count))


def _element(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "f16"


def _fp8_product() -> str:
    """``Products`` of 64 rows and 128 columns, ``multiply``, which adds to them or begins anew, and a wait for them."""
    count = FP8_COLS // 4
    instruction = f"wgmma.mma_async.sync.aligned.m64n{FP8_COLS // 2}k32.f32.e4m3.e4m3"
    return (
        f"using Products = float[{count}];\n"
        f"using Sums = float[{FP8_ROWS // FP8_STEP}][{count}];\n"
        + _adding("Products", count, instruction, "1, 1")
        + "__device__ __forceinline__ void products_wait_for(Products& products) {\n"
        f'    asm volatile("wgmma.wait_group.sync.aligned 0;" : {_operands("products", count)} :: "memory");\n}}\n'
    )
