"""Writes ``kernels/cuda/include/wgmma.cuh``: one function for each matrix instruction, which names all its registers.

    python -m comet.kernels.runtime.wgmma

A test compares the file with what this writes.
"""

from pathlib import Path
from textwrap import wrap

HEADER = Path(__file__).parents[1] / "cuda" / "include" / "wgmma.cuh"
WIDTH = 120
ROWS = range(16, 257, 16)  # N of the instructions of 16 bits
FP8_COLS = 128  # N of that of e4m3
TYPES = {"Bf16": "bf16", "Fp16": "f16", "E4m3": "e4m3"}  # of C++, and of PTX

BEGIN = """\
// Written by kernels/runtime/wgmma.py.
//
// Wgmma<Element, N>::multiply: a product of the 64 rows and of the N columns that two descriptors name, over 32 bytes
// of each. It goes to N / 2 of a thread's numbers from FIRST on: added where `adds`, else in place of what they were.
// TRANSPOSE_A, TRANSPOSE_B: the contraction of an operand does not lie along its lines in shared memory.

#ifndef COMET_WGMMA_CUH
#define COMET_WGMMA_CUH

#include "config.cuh"

template <class Element, int N>
struct Wgmma;
"""


def header() -> str:
    """The text of the file."""
    sixteen_bits = [_sixteen_bits(element, rows) for element in ("Bf16", "Fp16") for rows in ROWS]
    return "\n".join([BEGIN, *sixteen_bits, _e4m3(), "#endif\n"])


def _sixteen_bits(element: str, n: int) -> str:
    count = n // 2
    body = _asm(
        [
            *_adding(count),
            f"{_name(element, n, 16)} {{",
            *_registers(count),
            f"}}, %{count}, %{count + 1}, adds, 1, 1, ",
        ],
        f"%{count + 3}, %{count + 4};",
        count,
        '"l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B))',
    )
    return _struct(element, n, "template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>", body)


def _e4m3() -> str:
    count = FP8_COLS // 2
    body = _asm(
        [
            *_adding(count),
            f"{_name('E4m3', FP8_COLS, 32)} {{",
            *_registers(count),
            f"}}, %{count}, %{count + 1}, adds, ",
        ],
        "1, 1;",
        count,
        '"l"(a), "l"(b), "r"(int(adds))',
    )
    wait = [
        "",
        "    // For all products; from here on the thread's numbers are what they have become.",
        "    template <int FIRST, int COUNT>",
        "    static __device__ __forceinline__ void wait(float (&d)[COUNT]) {",
        '        asm volatile("wgmma.wait_group.sync.aligned 0;"',
        *_operands(count),
        '            :: "memory");',
        "    }",
    ]
    return _struct("E4m3", FP8_COLS, "template <int FIRST, int COUNT>", [*body, *wait])


def _struct(element: str, n: int, template: str, body: list[str]) -> str:
    return "\n".join(
        [
            "template <>",
            f"struct Wgmma<{element}, {n}> {{",
            f"    {template}",
            "    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {",
            *body,
            "};",
            "",
        ]
    )


def _asm(parts: list[str], last: str, count: int, inputs: str) -> list[str]:
    *lines, tail = parts
    return [
        f'        asm volatile("{lines[0]}"',
        *(f'            "{line}"' for line in lines[1:]),
        f'            "{tail}{last}\\n}}"',
        *_operands(count),
        f"            : {inputs});",
        "    }",
    ]


def _adding(count: int) -> list[str]:
    return [f"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"]


def _name(element: str, n: int, k: int) -> str:
    kind = TYPES[element]
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}"


def _registers(count: int) -> list[str]:
    text = ", ".join(f"%{index}" for index in range(count))
    lines = wrap(text, WIDTH - 16)
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


def _operands(count: int) -> list[str]:
    text = ", ".join(f'"+f"(d[FIRST + {index}])' for index in range(count))
    first, *rest = wrap(text, WIDTH - 14)
    return [f"            : {first}", *(f"              {line}" for line in rest)]


if __name__ == "__main__":
    HEADER.write_text(header())
