"""How far gradients of routing weights may be off, from the sizes of what is rounded on the way to them.

The gradient of weight (t, k) is ``sum_d g[d] * y[d]``, and as the layer computes it, without y, the sum of F terms
``grad_hidden[f] * hidden[f]`` with ``grad_hidden = g @ w2``. Where terms cancel, the error of another calculation says
nothing: plain torch rounds y, and an y of 0 it rounds without error. What is rounded to the layer's dtype here is
gate, up, hidden and grad_hidden; sums run in float32.

Roundings are independent of each other and of mean 0. One of at most ``b_i`` each in a sum: by Hoeffding's inequality
the sum is beyond ``c * sqrt(sum b_i^2)`` with a probability below ``2 exp(-c^2 / 2)``. The root is the *unit* here, and
with ``UNITS`` = 7 a number in 2e10 is a false alarm. The square mean of errors in units is at most 1/3, that of numbers
equally likely in [-1, 1]: over ``MANY`` numbers it stays below 1, which shows errors of all numbers in the same
direction that are too small for each alone.

Not covered: signs of roundings that agree, as in float32 sums rounded towards zero, beyond what 7 units leave for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNITS = 7.0
MANY = 64


@dataclass(frozen=True)
class Sum:
    """Scalar products of rows with all columns: their values, and the size of the running sums on the way to them."""

    value: Tensor
    running: Tensor

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> Sum:
        """``rows (R, N)`` times ``columns (N, M)``, both float64.

        Running sums of terms with random signs reach the root of the sum of the terms' squares, of terms of one sign
        the value itself. Each of the N additions rounds one: together a root of N of it.
        """
        value, squares = rows @ columns, rows.square() @ columns.square()
        return cls(value, (rows.shape[1] * (squares + value.square())).sqrt())

    def rounding(self, dtype: torch.dtype) -> Tensor:
        """Squared error of the value, added up in float32 and rounded to ``dtype``."""
        return square_rounding(self.value, dtype) + square_rounding(self.running, torch.float32)


def square_rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The most a number moves when rounded to ``dtype``, squared; below the normal numbers, what they move at least."""
    limits = torch.finfo(dtype)
    return (limits.eps / 2 * value.abs().clamp(min=limits.tiny)).square()


def unit_of_rows(x: Tensor, g: Tensor, w1: Tensor, w2: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit of the gradient of each row's weight, for rows of one expert.

    Example (D = F = 1, float16): x 1, gate row 32 and up row 1 of w1, w2 0.5, g 1. silu(32) is 32 with slope 1: hidden
    is 32, grad_hidden 0.5, the gradient 16. A rounding of gate by one part in 2048 moves it by 16/2048, and so do those
    of up, hidden and grad_hidden: the unit is ``sqrt(4) * 16/2048 = 1/64``, and 7/64 are allowed. With F = 2, the same
    w1 twice and w2 0.5 and -0.5, y and the gradient are 0; the unit is ``sqrt(2)/64``.

    Args:
        x: ``(R, D)`` float64 tokens.
        g: ``(R, D)`` float64 gradients of the layer's output.
        w1: ``(2, F, D)`` float64, gate and up.
        w2: ``(D, F)`` float64.
        dtype: What the layer computes in.

    Returns:
        ``(R,)`` float64.
    """
    gate, up, grad_hidden = Sum.of(x, w1[0].T), Sum.of(x, w1[1].T), Sum.of(g, w2)
    sigmoid = gate.value.sigmoid()
    hidden = gate.value * sigmoid * up.value
    slope_of_gate = up.value * sigmoid * (1 + gate.value * (1 - sigmoid))
    squares = (
        grad_hidden.value.square() * square_rounding(hidden, dtype)
        + hidden.square() * grad_hidden.rounding(dtype)
        + (grad_hidden.value * slope_of_gate).square() * gate.rounding(dtype)
        + (grad_hidden.value * gate.value * sigmoid).square() * up.rounding(dtype)
    )
    total = Sum.of(grad_hidden.value * hidden, torch.ones_like(w2[0])[:, None])
    return (squares.sum(dim=1) + total.rounding(torch.float32).squeeze(1)).sqrt()


def weight_gradient_units(
    x: Tensor, ids: Tensor, g: Tensor, weights: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """``(T, K)`` float64 units of all gradients of routing weights; 0 where a slot is masked or was dropped.

    Args:
        x: ``(T, D)`` tokens.
        ids: ``(T, K)`` experts, -1 for slots without one.
        g: ``(T, D)`` gradients of the layer's output.
        weights: w1 ``(E, 2, F, D)`` and w2 ``(E, D, F)``, float64.
        dtype: What the layer computes in.
    """
    units = torch.zeros(ids.shape, dtype=torch.float64, device=x.device)
    for expert, (w1, w2) in enumerate(zip(*weights, strict=True)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        units[tokens, slots] = unit_of_rows(x[tokens].double(), g[tokens].double(), w1, w2, dtype)
    return units


def wrong_weight_gradients(actual: Tensor, exact: Tensor, units: Tensor) -> list[str]:
    """What is wrong with gradients of routing weights: nothing, the worst number, or the mean of many.

    Args:
        actual: ``(T, K)`` from the layer.
        exact: ``(T, K)`` float64.
        units: ``(T, K)`` from ``weight_gradient_units``; where they are 0, the gradient must be 0.
    """
    wrong = []
    error = (actual.double() - exact).abs()
    beyond = ~(error <= UNITS * units)  # NaN is beyond
    if bool(beyond.any()):
        worst = int((error / units).masked_fill(~beyond, -1).nan_to_num(float("inf"), float("inf")).argmax())
        got, true, unit = (float(tensor.flatten()[worst]) for tensor in (actual, exact, units))
        wrong.append(
            f"{int(beyond.sum())} of {beyond.numel()} are more than {UNITS:g} units off, worst at element {worst} of "
            f"shape {tuple(actual.shape)}: {got} instead of {true}, unit {unit:.3e}"
        )
    used = units > 0
    mean_square = float((error[used] / units[used]).square().mean()) if int(used.sum()) >= MANY else 0.0
    if mean_square > 1:
        wrong.append(f"errors of {int(used.sum())} numbers have a square mean of {mean_square:.2f} units, 1 is allowed")
    return wrong
