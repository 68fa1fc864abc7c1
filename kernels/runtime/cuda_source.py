"""A kernel in CUDA C++ as the host knows it: a template of ``kernels/cuda``, its ``Config``, its arguments' layout.

The text that is compiled includes the template's file and holds no more than a ``Config``, what the host believes of
the arguments, which the compiler checks, and the entry.
"""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "cuda"

# Numbers that the host shares with the device's code. Where both need a number, the device gets it in its Config.
SWIZZLE_BYTES = 128  # bytes of a row in shared memory
MATH_WARPS = 8  # math warps of a block
NUM_THREADS = 32 * (MATH_WARPS + 4)
LAUNCH_REGISTERS = 168  # registers of each thread, before some give theirs to others
SCHEDULER_SLOT_BYTES = 16
MAP_ALIGNMENT = 64  # alignment of a structure that holds tensor maps

POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class TensorMap(ctypes.Structure):
    """A CUtensorMap."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class DeviceStruct(ctypes.Structure):
    """A structure of the device's code, which has the same name and the same fields there."""

    @classmethod
    def of(cls, **values: Any) -> "DeviceStruct":
        """One with all fields set; pointers by the tensors they point to, ``None`` for that of nothing."""
        count, pointers = _fields_of(cls)
        assert len(values) == count, f"{cls.__name__} has not the fields {', '.join(values)}"
        for name in pointers:
            tensor = values[name]
            values[name] = None if tensor is None else tensor.data_ptr()
        return cls(**values)


@functools.cache
def _fields_of(structure: type[DeviceStruct]) -> tuple[int, tuple[str, ...]]:
    """Number of the fields, and names of those that are pointers; kept, for a launch asks every time."""
    named = named_fields(structure)
    return len(named), tuple(name for name, kind in named.items() if kind is POINTER)


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type; ``fields(INT32, "rank cols")``."""
    return tuple((name, kind) for name in names.split())


def padded(*fields: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure with tensor maps, as long as it is in an array: what a launch copies of it."""
    length = ctypes.sizeof(type("Fields", (ctypes.Structure,), {"_fields_": fields}))
    return (*fields, ("padding", ctypes.c_char * (-length % MAP_ALIGNMENT)))


def named_fields(structure: type[ctypes.Structure]) -> dict[str, Any]:
    return {name: kind for name, kind in structure._fields_ if name != "padding"}


def layout_asserts(structure: type[ctypes.Structure]) -> list[str]:
    """Assertions on the layout of a structure and of those in it, for the compiler to check."""
    name, lines = structure.__name__, []
    for field, kind in named_fields(structure).items():
        if issubclass(kind, DeviceStruct):
            lines += layout_asserts(kind)
        place = f"OFFSET_OF({name}, {field}) == {getattr(structure, field).offset}"
        lines.append(f"static_assert({place} && sizeof({name}::{field}) == {ctypes.sizeof(kind)});")
    return [*lines, f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaSource:
    """One instantiation of a template."""

    template: str  # the function, and its file in kernels/cuda without the ending
    entry: str  # name of the kernel: what it is
    # structures that the kernel takes, in their order, by the names it has for them
    arguments: Mapping[str, type[DeviceStruct]]
    types: Mapping[str, str]  # types of Config: Element, Output, Activation, as the headers name them
    constants: Mapping[str, float]  # its numbers: int, bool or float
    shared_bytes: int  # dynamic shared memory of a block
    cluster: int = 1  # blocks of a cluster
    library: str = ""  # device library that is linked: ``nvshmem``, or none

    @property
    def text(self) -> str:
        """The text to compile."""
        members = [f"using {name} = {value};" for name, value in self.types.items()]
        members += [f"static constexpr {_declared(name, value)};" for name, value in self.constants.items()]
        return "\n".join(
            [
                *([f"#define COMET_{self.library.upper()}"] * bool(self.library)),
                f'#include "{self.template}.cu"\n',
                "struct Config : Block {",
                *(f"    {member}" for member in members),
                "};\n",
                *(line for structure in self.arguments.values() for line in layout_asserts(structure)),
                f'\nextern "C" __global__ void __launch_bounds__(Config::THREADS, 1) {self.entry}(',
                ",\n".join(
                    f"    const __grid_constant__ {kind.__name__} {name}" for name, kind in self.arguments.items()
                )
                + ") {",
                f"    {self.template}<Config>({', '.join(self.arguments)});",
                "}\n",
            ]
        )


def _declared(name: str, value: float) -> str:
    if isinstance(value, float):
        return f"float {name} = {value!r}f"
    return f"bool {name} = {str(value).lower()}" if isinstance(value, bool) else f"int {name} = {value}"


def element_of(dtype: torch.dtype) -> str:
    """Name in the headers: ``Bf16``, ``Fp16``, ``Fp32`` or ``E4m3``."""
    names = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32", torch.float8_e4m3fn: "E4m3"}
    return names[dtype]


def storage_bytes(num_stages: int, stage_bytes: int, staging_bytes: int, tile_bytes: int, tile_slots: int) -> int:
    """Bytes of ``SharedStorage`` of ``pipeline.cuh``: alignment, stages with two barriers each, staging, tiles.

    Example:
        4 stages of 49152, 8192 of staging, 8 tiles of 32: 1024 + 4 * (49152 + 16) + 8192 + 8 * (32 + 16) = 206272.
    """
    tiles = tile_slots * (tile_bytes + SCHEDULER_SLOT_BYTES)
    return 1024 + num_stages * (stage_bytes + 16) + staging_bytes + tiles
