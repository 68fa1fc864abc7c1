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
    structs = [_struct(element, n, [_multiply(element, n)]) for element in ("Bf16", "Fp16") for n in ROWS]
    structs.append(_struct("E4m3", FP8_COLS, [_multiply("E4m3", FP8_COLS), _wait(FP8_COLS // 2)]))
    return "\n".join([BEGIN, *structs, "#endif\n"])


def _struct(element: str, n: int, functions: list[str]) -> str:
    return f"template <>\nstruct Wgmma<{element}, {n}> {{\n" + "\n\n".join(functions) + "\n};\n"


def _multiply(element: str, n: int) -> str:
    kind, count, is_fp8 = TYPES[element], n // 2, element == "E4m3"
    transposes = "" if is_fp8 else "bool TRANSPOSE_A, bool TRANSPOSE_B, "
    modifiers = "1, 1" if is_fp8 else f"1, 1, %{count + 3}, %{count + 4}"
    inputs = '"l"(a), "l"(b), "r"(int(adds))' + ("" if is_fp8 else ', "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B))')
    return "\n".join(
        [
            f"    template <{transposes}int FIRST, int COUNT>",
            "    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {",
            f'        asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"',
            f'            "wgmma.mma_async.sync.aligned.m64n{n}k{32 if is_fp8 else 16}.f32.{kind}.{kind} {{"',
            *(f'            "{line}"' for line in _registers(count)),
            f'            "}}, %{count}, %{count + 1}, adds, {modifiers};\\n}}"',
            *_operands(count),
            f"            : {inputs});",
            "    }",
        ]
    )


def _wait(count: int) -> str:
    return "\n".join(
        [
            "    // For all products; from here on the thread's numbers are what they have become.",
            "    template <int FIRST, int COUNT>",
            "    static __device__ __forceinline__ void wait(float (&d)[COUNT]) {",
            '        asm volatile("wgmma.wait_group.sync.aligned 0;"',
            *_operands(count),
            '            :: "memory");',
            "    }",
        ]
    )


def _registers(count: int) -> list[str]:
    *lines, last = wrap(", ".join(f"%{index}" for index in range(count)), WIDTH - 16)
    return [*(f"{line} " for line in lines), last]


def _operands(count: int) -> list[str]:
    first, *rest = wrap(", ".join(f'"+f"(d[FIRST + {index}])' for index in range(count)), WIDTH - 14)
    return [f"            : {first}", *(f"              {line}" for line in rest)]


if __name__ == "__main__":
    HEADER.write_text(header())
