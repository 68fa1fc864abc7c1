"""One graph break where ``torch.compile`` meets what it cannot trace, without importing the compiler before it is used.

``torch.compiler.disable`` imports ``torch._dynamo``, which takes as long as torch itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

REASON = "ranks wait for each other in a Comet layer, through memory the compiler does not see, so it runs as it stands"

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Keep ``torch.compile`` out of a function and all that it calls: in a compiled model it is one graph break.

    Costs about 0.1 us a call.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            result: T = _here.run_disabled(function, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    return call


def __getattr__(name: str) -> object:
    """Make ``run_disabled`` at its first use (PEP 562), which is the compiler's: the compiler traces no other way."""
    if name != "run_disabled":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = torch.compiler.disable(_run, reason=REASON)
    return made


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_here = sys.modules[__name__]
