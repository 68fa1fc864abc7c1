"""Triton's interpreter without what it does again and again for nothing: same results, less than half the time.

It reaches into parts that are private to the version of Triton named here; any other version runs as it is, slowly.
"""

import sys
from dataclasses import replace
from typing import Any

import triton
from triton.runtime import interpreter

VERSION = "3.6."


def quicken() -> None:
    """Make the interpreter of this process quick; call it after the kernels are imported."""
    if not triton.__version__.startswith(VERSION):
        return
    # Overflow checks are computed for every sum and product, but assert only in debug mode, which is off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _patch_once_per_launch()
    _make_types_once()
    _rewrite_kernels()


def _patch_once_per_launch() -> None:
    """Patch ``triton.language`` when a launch begins, and not again whenever one kernel function calls another."""
    patch = interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def patch_once(fn: Any) -> Any:
        language, core = interpreter.tl, interpreter.tl.core
        seen = frozenset(id(value) for value in fn.__globals__.values() if value is language or value is core)
        if seen in patched:
            return None  # a call inside a launch does not look at it
        scope = patch(fn)
        if not patched:  # the launch itself
            undo = scope.restore

            def restore() -> None:
                patched.clear()
                undo()

            scope.restore = restore
        patched.add(seen)
        return scope

    interpreter._patch_lang = patch_once


def _make_types_once() -> None:
    """Cache types and shapes: the interpreter would make those of the result again in every operation."""
    core = interpreter.tl.core
    block_type, tensor, numpy_type = core.block_type, core.tensor, interpreter._get_np_dtype
    make_block, make_tensor, make_equal = block_type.__init__, tensor.__init__, core.tuple.__eq__
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}
    scalar = tensor(None, core.int32)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = tuple(length.value if isinstance(length, core.constexpr) else length for length in shape)
        known = blocks.get((element_ty.name, lengths))
        if known is None:
            make_block(self, element_ty, shape)
            like = object.__new__(tensor)
            make_tensor(like, None, self)
            self.of_tensor = like.shape, like.numel
            known = blocks[element_ty.name, lengths] = dict(vars(self))
        vars(self).update(known)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if isinstance(type, block_type) else (scalar.shape, scalar.numel)

    def equal(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        return core.constexpr(self.values == values) if isinstance(values, list) else make_equal(self, other)

    def look_up(type: Any) -> Any:
        of = type.element_ty if isinstance(type, block_type) else type
        if of.name not in numpy_types:
            numpy_types[of.name] = numpy_type(of)
        return numpy_types[of.name]

    block_type.__init__, tensor.__init__ = init_block, init_tensor
    core.tuple.__eq__, interpreter._get_np_dtype = equal, look_up


def _rewrite_kernels() -> None:
    """Parse the kernel functions that are imported now rather than in every process forked from this one."""
    modules = [
        module for name, module in sys.modules.items() if name.startswith(("comet.kernels.", "triton.language."))
    ]
    for value in {id(value): value for module in modules for value in vars(module).values()}.values():
        if isinstance(value, interpreter.InterpretedFunction):
            value.rewrite()
