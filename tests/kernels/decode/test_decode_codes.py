"""The PTX by which GPUs read e2m1 codes, carried out here instruction by instruction, for words of all codes.

The interpreter knows no PTX; what these texts say is otherwise only run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from decode_cases import E2M1

from comet.kernels.decode.scales import BFLOAT16_ASM, PARTS_ASM

NUMBERS = torch.tensor([*E2M1, *(-number for number in E2M1)])
WORD = 2**32 - 1


def prmt(first: int, second: int, selector: int) -> int:
    """Four bytes of the eight of two registers, each chosen by a hexadecimal digit of the selector."""
    bytes_of = (second << 32 | first).to_bytes(8, "little")
    assert selector & 0x8888 == 0, "no sign is spread"
    return int.from_bytes(bytes(bytes_of[selector >> 4 * place & 7] for place in range(4)), "little")


def fma_bf16x2(a: int, b: int, c: int) -> int:
    """Two products and sums in bfloat16, rounded once each; exact here, as float64 holds them."""
    first, second, third = (bfloat16_halves(word) for word in (a, b, c))
    low, high = (first * second + third).to(torch.bfloat16).view(torch.int16).tolist()
    return low & 0xFFFF | (high & 0xFFFF) << 16


def bfloat16_halves(word: int) -> torch.Tensor:
    halves = torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16)
    return halves.double()


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma_bf16x2,
    "cvt.f32.f16": lambda a: a,  # the test reads float16
}


def carry_out(text: str, word: int) -> list[int]:
    """The bits of the outputs ``$0`` to ``$7`` for the input ``$8``."""
    values = {"$8": word}
    lines = [line.strip() for line in text.strip("{} ").split(";")]
    for line in (line for line in lines if line and not line.startswith(".reg")):
        name, rest = line.split(" ", 1)
        if match := re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest):
            whole = values[match[3]]
            values[match[1]], values[match[2]] = whole & 0xFFFF, whole >> 16
        else:
            target, *sources = rest.split(", ")
            read = [values[each] if each in values else int(each, 0) for each in sources]
            values[target] = INSTRUCTIONS[name](*read)
    return [values[f"${k}"] for k in range(8)]


@pytest.mark.parametrize("kind", ["float16 parts", "bfloat16"])
def test_ptx_reads_every_code_at_every_place(kind: str) -> None:
    text, dtype = (PARTS_ASM.value, torch.float16) if kind == "float16 parts" else (BFLOAT16_ASM.value, torch.bfloat16)
    for shift in range(16):
        codes = [(shift + 5 * place) % 16 for place in range(8)]
        word = sum(code << 4 * place for place, code in enumerate(codes))
        found = torch.tensor(carry_out(text, word)).to(torch.uint16).view(dtype)
        wanted = NUMBERS[codes] * (2.0**-14 if dtype == torch.float16 else 1)
        assert found.view(torch.int16).tolist() == wanted.to(dtype).view(torch.int16).tolist(), f"codes {codes}"
