"""Steps of training by variants, which are timed if their first losses and gradients agree with a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lib.report import Row
from lib.suite import Checked

CHECKED_STEPS = 3  # graphs are captured in the second and replayed from then on
LEARNING_RATE = 1e-4
ROTATE = 4  # batches
# Largest deviations from the plain path that rounding can explain (bf16 on CPUs: 1e-4, and 0.06 where tokens whose
# scores nearly tie go to other experts; a slot left out makes 1e-3 and 0.3).
TOLERANCE = {
    "loss": {torch.bfloat16: 1e-3, torch.float32: 1e-4},
    "gradient": {torch.bfloat16: 0.15, torch.float32: 1e-2},
}
# Losses of the steps, and of each parameter the norms of the rows of its mean gradient, as the optimizer has it.
FirstSteps = tuple[Tensor, tuple[Tensor, ...]]


class Steps(Protocol):
    """Training steps of one model by variants."""

    dtype: torch.dtype

    def first_steps(self, variant: str) -> FirstSteps: ...

    def step(self, variant: str, index: int) -> object: ...


def check_variants(model: Steps, names: Sequence[str], checked: Checked, reference: str = "plain") -> Row:
    """Let the variants that run and agree with the reference be timed; the worst errors (collective)."""
    errors: Row = {}
    wanted: FirstSteps | None = None

    def judge(name: str, found: FirstSteps) -> str:
        nonlocal wanted
        wanted = found if name == reference else wanted
        if name in (reference, "rest") or wanted is None:
            return ""
        of = {part: checked.ranks.worst(error) for part, error in deviations(found, wanted).items()}
        for part, error in of.items():
            if error > TOLERANCE[part][model.dtype]:
                return f"{part} differs from that of {reference} by {error:.3g} of it"
        errors.update({f"{part}_error": max(error, errors.get(f"{part}_error", 0.0)) for part, error in of.items()})
        return ""

    for name in sorted(names, key=lambda name: name != reference):
        if checked.value(name, partial(model.first_steps, name), partial(judge, name)) is not None:
            checked.variants[name] = partial(model.step, name)
    return errors


def deviations(found: FirstSteps, wanted: FirstSteps) -> dict[str, float]:
    """Largest relative deviations: of a loss, and of the norms of a gradient's rows, taken together.

    Example: losses ``[4, 2]`` and norms ``[3, 4]`` where ``[4, 4]`` and ``[3, 5]`` are wanted: 0.5 and 1 / 34 ** 0.5.
    """
    pairs = zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True)
    errors = [((one - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs]
    finite = [error if math.isfinite(error) else math.inf for error in errors]
    return {"loss": max(finite[: len(found[0])]), "gradient": max(finite[len(found[0]) :], default=0.0)}


def row_norms(gradient: Tensor) -> Tensor:
    """``(N,)`` float32 of ``(N, ...)``, an expert's weights being a row; ``[[3, 4], [0, 1]]`` gives ``[5, 1]``."""
    return torch.linalg.vector_norm(gradient.reshape(gradient.shape[0], -1), dim=1, dtype=torch.float32)
