"""Whether the methods that define the arithmetic of experts are ones that Comet knows.

transformers' decorator records flags on an experts module, but a class may define its gate, or all of its forward pass,
itself: DeepSeek-V4 clamps before the gate, and no flag says so. So what a class defines or inherits is compared with
the methods of Mixtral's experts. The gate is one function for all classes; each has its own copy of the eager loop.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn import functional

from comet.config import require
from comet.integrations.hf.gpt_oss import stock_class

_METHODS = ("forward", "_apply_gate", "linear")


def check_methods(experts: nn.Module, name: str, like: type[nn.Module] | None = None) -> None:
    """Raise ``ValueError`` unless experts compute with SiLU and the methods of a class, ``None``: Mixtral's experts."""
    kind: Any = type(experts)
    known = like or _mixtral_experts()
    found = [(method, getattr(kind, method, None), getattr(known, method, None)) for method in _METHODS]
    # A forward pass of the object's own is around the class's: it is called all the same.
    others = [method for method, own, wanted in found if not _same_method(own, wanted)]
    others += [method for method in _METHODS[1:] if method in experts.__dict__]
    require(
        not others,
        f"{', '.join(others)} of {name} ({kind.__name__}) must be as in {known.__name__}: Comet computes the weighted "
        "sum of down_proj(silu(gate) * up), or gpt-oss's experts, and nothing else",
    )
    if known is stock_class():  # whose gate is the activation
        return
    activation: Any = getattr(experts, "act_fn", None)
    require(is_silu(activation), f"act_fn={activation} of {name} ({kind.__name__}) must be SiLU")


def is_silu(activation: Any) -> bool:
    """Whether an activation, which is a module or a function, is SiLU."""
    return activation is functional.silu or _class_forward(activation) in _silu_forwards()


def is_stock(module: nn.Module, family: str) -> bool:
    """Whether a module's forward pass is defined in the file that transformers has for a family of models."""
    return getattr(_class_forward(module), "__module__", None) == f"transformers.models.{family}.modeling_{family}"


def asks_registry(module: nn.Module) -> bool:
    """Whether a module's forward pass is that of transformers' decorator, which asks the registry of experts."""
    return getattr(type(module).forward, "__code__", None) is _mixtral_experts().forward.__code__


def _class_forward(module: Any) -> Any:
    """The forward pass of a module's class; ``None`` where the module has one of its own, or there is no module."""
    return None if "forward" in getattr(module, "__dict__", {}) else getattr(type(module), "forward", None)


@cache
def _mixtral_experts() -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return MixtralExperts


@cache
def _silu_forwards() -> tuple[Any, ...]:
    from transformers.activations import SiLUActivation

    return nn.SiLU.forward, SiLUActivation.forward


@cache
def _same_method(found: Any, known: Any) -> bool:
    """Whether two functions compute the same, each perhaps within the decorator's function, which must be there."""
    if found is known or found is None or known is None:
        return found is known
    decorator = known.__code__ if hasattr(known, "__wrapped__") else None
    if decorator is not None and getattr(found, "__code__", None) is not decorator:
        return False
    return _same_code(_undecorated(found, decorator), _undecorated(known, decorator))


def _undecorated(function: Any, decorator: Any) -> Any:
    while getattr(function, "__code__", None) is decorator:
        function = function.__wrapped__
    return function


def _same_code(found: Any, known: Any) -> bool:
    """Whether two functions are the same statements, whatever their comments and the names of their variables."""
    return hasattr(found, "__code__") and _statements(found) == _statements(known) and not found.__code__.co_freevars


def _statements(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, constants, code.co_argcount, function.__defaults__
