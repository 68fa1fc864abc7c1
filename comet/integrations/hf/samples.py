"""Sample numbers for modules of a model: what they answer says what they compute, whatever their class is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from comet.utils.hooks import HOOKS

# A module that cannot run on sample numbers raises one of these.
UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SCALES = (0.3, 1.0, 10.0, 1e4)  # Clamps of gate and up show in the largest rows.


def samples(*shape: int) -> Tensor:
    """The same random numbers at each call, float64."""
    return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(47))


def sample_rows(width: int) -> Tensor:
    """Two sample rows of each scale, ``(8, width)``."""
    return samples(2 * len(SCALES), width) * torch.tensor(2 * SCALES, device="cpu")[:, None]


def close(found: Any, wanted: Tensor) -> bool:
    """Whether rows agree to about float32's rounding."""
    if not isinstance(found, Tensor) or found.numel() != wanted.numel():
        return False
    found = found.reshape(wanted.shape).double()
    return bool(((found - wanted).abs().amax(-1) <= 1e-5 * wanted.abs().amax(-1)).all())


def twin(module: nn.Module, **attributes: Any) -> Any:
    """A module of the same class and attributes, without hooks, which has other ``_parameters`` and the like."""
    made: Any = object.__new__(parametrize.type_before_parametrizations(module))
    made.__dict__ |= {name: value for name, value in vars(module).items() if name != "forward"}
    made.__dict__ |= {name: {} for name in HOOKS} | {"training": False, "_buffers": {}} | attributes
    return made


def filled(module: nn.Module) -> Any:
    """A module whose parameters and buffers are alike in all places, on the CPU."""
    tables: dict[str, Any] = {"_parameters": {}, "_buffers": {}}
    for table, found in tables.items():
        for name, each in vars(module)[table].items():
            dtype = torch.float32 if each is None or each.is_floating_point() else each.dtype
            found[name] = each if each is None else torch.full_like(each, 1 / 8, device="cpu", dtype=dtype)
    return twin(module, **tables, _modules={name: filled(each) for name, each in module.named_children()})
