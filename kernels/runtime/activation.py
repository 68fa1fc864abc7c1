"""Activations between an expert's two projections: their names, parameters and torch definition.

An activation makes one hidden column of one gate and one up column. Kernels get an ``Activation`` as a constant and
have its definition once per language: ``kernels/gemm/activation.py`` in Triton, here in torch. This module needs no
Triton, and torch only when it computes: configurations hold an ``Activation``, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, pi, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    Backward = tuple[Tensor, Tensor, Tensor]

ActivationName = Literal["swiglu", "geglu", "reglu", "clamped_swiglu"]

GELU_CUBIC = 0.044715  # factor of x^3 in GELU with tanh
GELU_SCALE = 2 * sqrt(2 / pi)  # 0.5 * (1 + tanh(z)) is sigmoid(2 * z)


@dataclass(frozen=True, slots=True)
class Activation:
    """How gate and up become hidden.

    ``swiglu``: silu(gate) * up. ``geglu``: gelu(gate) * up, of GELU's tanh form. ``reglu``: relu(gate) * up.
    ``clamped_swiglu`` (gpt-oss): with g = min(gate, limit) and u = up clamped to +-limit, g * sigmoid(alpha * g) *
    (u + 1).

    Args:
        name: One of these.
        alpha: Of ``clamped_swiglu`` alone, above 0; ``None``: 1.702.
        limit: Of ``clamped_swiglu`` alone, above 0; ``None``: 7.0.

    Raises:
        ValueError: If there is no such activation, or it has no such parameter, or not with this value.
    """

    name: ActivationName = "swiglu"
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.name not in DEFINITIONS:
            raise ValueError(f"activation={self.name!r} must be one of {', '.join(DEFINITIONS)}")
        defaults = DEFINITIONS[self.name].parameters
        for field in ("alpha", "limit"):
            value = getattr(self, field)
            if field not in defaults:
                if value is not None:
                    raise ValueError(f"{field}={value} must be left out for activation={self.name!r}, which has none")
                continue
            value = float(defaults[field] if value is None else value)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{field}={value} of activation={self.name!r} must be positive and finite")
            object.__setattr__(self, field, value)

    @property
    def parameters(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in DEFINITIONS[self.name].parameters}

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Hidden, computed in the type of gate and up, which may have any equal shape; differentiable.

        Example: gate 0, up 3: 0 for each of them.
        """
        return DEFINITIONS[self.name].forward(gate, up, self)

    def backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden once more, and the gradients of gate and of up for hidden's, all of one shape.

        Example (swiglu): gate 0, up 3, grad 2: hidden 0, gradients ``2 * 3 * 0.5 = 3`` and 0.
        """
        return DEFINITIONS[self.name].backward(gate, up, grad, self)


class Definition(NamedTuple):
    """One activation in torch.

    Args:
        forward: (gate, up, activation) -> hidden.
        backward: (gate, up, gradient of hidden, activation) -> hidden, gradients of gate and of up.
        parameters: Those it has, with their defaults.
    """

    forward: Callable[[Tensor, Tensor, Activation], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Activation], Backward]
    parameters: Mapping[str, float]


def _swiglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    from torch.nn.functional import silu

    return silu(gate) * up


def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> Backward:
    sigmoid = gate.sigmoid()
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return gate * sigmoid * up, grad_gate, grad * gate * sigmoid


def _geglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    from torch.nn.functional import gelu

    return gelu(gate, approximate="tanh") * up


def _geglu_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> Backward:
    sigmoid = (GELU_SCALE * gate * (1 + GELU_CUBIC * gate * gate)).sigmoid()
    slope = GELU_SCALE * gate * (1 + 3 * GELU_CUBIC * gate * gate)
    grad_gate = grad * up * sigmoid * (1 + slope * (1 - sigmoid))
    return gate * sigmoid * up, grad_gate, grad * gate * sigmoid


def _reglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return gate.relu() * up


def _reglu_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> Backward:
    return gate.relu() * up, (grad * up).where(gate > 0, 0.0), grad * gate.relu()


def _clamped_swiglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate.clamp(max=activation.limit), up.clamp(-_limit(activation), activation.limit)
    return gate * (gate * activation.alpha).sigmoid() * (up + 1)


def _clamped_swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> Backward:
    limit, alpha = _limit(activation), activation.alpha
    free_gate, free_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = (gate * alpha).sigmoid()
    grad_gate = grad * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    return gate * sigmoid * (up + 1), grad_gate.where(free_gate, 0.0), grad_up.where(free_up, 0.0)


def _limit(activation: Activation) -> float:
    assert activation.limit is not None, "set where it is left out"
    return activation.limit


DEFINITIONS = {
    "swiglu": Definition(_swiglu, _swiglu_backward, {}),
    "geglu": Definition(_geglu, _geglu_backward, {}),
    "reglu": Definition(_reglu, _reglu_backward, {}),
    "clamped_swiglu": Definition(_clamped_swiglu, _clamped_swiglu_backward, {"alpha": 1.702, "limit": 7.0}),
}
SWIGLU = Activation()
