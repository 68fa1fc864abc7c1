"""Triton's interpreter without what it does again and again for nothing: same results, less than half the time.

It reaches into parts that are private to the version of Triton named here; any other version runs as it is, slowly.
"""

from __future__ import annotations

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


def _rewrite_kernels() -> None:
    """Parse the kernel functions that are imported now rather than in every process forked from this one."""
    modules = [
        module for name, module in sys.modules.items() if name.startswith(("comet.kernels.", "triton.language."))
    ]
    for value in {id(value): value for module in modules for value in vars(module).values()}.values():
        if isinstance(value, interpreter.InterpretedFunction):
            value.rewrite()
