"""The description of one kernel configuration for the compile-ahead tool (see ``comet.kernels.aot.compile``).

Every module that ships kernels defines ``aot_cases() -> list[KernelCase]`` with the configurations users run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from triton.runtime.jit import JITFunction

from .cuda_source import LAUNCH_REGISTERS, CudaSource

FEATURES = ("wgmma", "wide_loads", "wide_stores")


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel with one set of types and constants.

    Raises:
        ValueError: If an argument of the kernel is missing or unknown, or a feature is unknown.
    """

    name: str  # the configuration in words, unique among the cases of the kernel
    fn: JITFunction  # the @triton.jit function
    # triton type of every argument that is not a constexpr: *bf16, i32, tensordesc<bf16[128, 64]>, or a tuple of such,
    # named if the kernel uses names, with None for members that are None
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]  # value of every constexpr
    # integer arguments that are not multiples of 16 (pointers and integers are taken to be, as the just-in-time
    # compiler finds at run time; arguments the kernel excludes from specialisation never are)
    unaligned: frozenset[str] = frozenset()
    num_warps: int = 4  # warps per block
    num_stages: int = 3  # depth of the load pipeline
    max_registers: int | None = None  # most registers of a thread, or None
    # features whose absence fails the compilation: wgmma; wide_loads and wide_stores: 16-byte accesses to global memory
    # are there and none is narrower than 4 bytes
    expects: frozenset[str] = field(default_factory=frozenset)
    # how many loads of less than 4 bytes are meant and do not count, such as scales of a byte per lane
    narrow_loads: int = 0
    spilled_bytes: int = 0  # how many bytes of spilled registers are known and do not fail the compilation

    def __post_init__(self) -> None:
        given = set(self.signature) | set(self.constexprs)
        needed = set(self.fn.arg_names)
        if given != needed:
            raise ValueError(
                f"{self.kernel} ({self.name}): missing arguments {sorted(needed - given)}, "
                f"unknown arguments {sorted(given - needed)}"
            )
        if unknown := self.expects - set(FEATURES):
            raise ValueError(f"{self.kernel} ({self.name}): expects={sorted(unknown)} must be among {FEATURES}")

    @classmethod
    def of(
        cls,
        name: str,
        fn: JITFunction,
        constexprs: Mapping[str, Any],
        kinds: Mapping[str, Any],
        default: str = "i32",
        **options: Any,
    ) -> KernelCase:
        """A case whose arguments have the types ``kinds`` gives for their names, or ``default``."""
        signature = {each: kinds.get(each, default) for each in fn.arg_names if each not in constexprs}
        return cls(name=name, fn=fn, signature=signature, constexprs=constexprs, **options)

    @property
    def kernel(self) -> str:
        return self.fn.__name__

    def types(self) -> dict[str, Any]:
        """Type of every argument in the order of the kernel, ``constexpr`` where a constant is given."""
        return {name: _type_of(self.signature.get(name)) for name in self.fn.arg_names}

    def constants(self) -> dict[str | tuple[int, ...], Any]:
        """Value of every constexpr, and ``None`` of members of tuples by their places."""
        kinds = [self.signature.get(name, "constexpr") for name in self.fn.arg_names]
        return {**self.constexprs, **{place: None for place, kind in _leaves(kinds) if kind is None}}

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Divisibility by 16 of the arguments, as the just-in-time compiler would record it."""
        kinds: dict[tuple[int, ...], str] = {}
        for index, parameter in enumerate(self.fn.params):
            kind = self.signature.get(parameter.name, "constexpr")
            fixed = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if isinstance(kind, tuple):
                kinds |= {place: each for place, each in _leaves(kind, (index,)) if each is not None}
            elif parameter.name not in self.unaligned and not fixed:
                kinds[index,] = kind
        return {place: [["tt.divisibility", 16]] for place, kind in kinds.items() if _has_divisor(kind)}


def _leaves(kinds: Sequence[Any], first: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Places and types of all that is no tuple."""
    for place, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _leaves(kind, (*first, place))
        else:
            yield (*first, place), kind


def _type_of(kind: Any) -> Any:
    """The type in Triton's form: ``constexpr`` where there is nothing, in a tuple of the same fields, too."""
    if not isinstance(kind, tuple):
        return kind or "constexpr"
    members = [_type_of(each) for each in kind]
    return type(kind)(*members) if hasattr(kind, "_fields") else tuple(members)


def _has_divisor(kind: str) -> bool:
    return kind.startswith(("*", "i", "u")) and kind not in ("i1", "u1")


@dataclass(frozen=True, kw_only=True)
class CudaCase:
    """One CUDA C++ kernel with one set of constants; it has to use the tensor cores and bulk loads."""

    name: str  # the configuration in words, unique among the cases of the kernel
    kernel: str  # name in the table
    source: str  # the text, constants included
    shared_bytes: int  # dynamic shared memory of a block
    spilled_bytes: int = 0  # of spilled registers that are known and do not fail the compilation
    registers: int | None = None  # of a thread at the launch, if the source counts on them

    @staticmethod
    def of(source: CudaSource, name: str, spilled_bytes: int = 0) -> CudaCase:
        """The case of an instantiation, under its kernel's name."""
        return CudaCase(
            name=name,
            kernel=source.entry,
            source=source.text,
            shared_bytes=source.shared_bytes,
            spilled_bytes=spilled_bytes,
            registers=LAUNCH_REGISTERS,
        )

    # The same meaning as in a ``KernelCase``, and the same value for all.
    narrow_loads: ClassVar[int] = 0
    expects: ClassVar[frozenset[str]] = frozenset({"wgmma", "wide_loads", "wide_stores"})
