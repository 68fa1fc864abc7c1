"""Additions of users to modules: hooks, an object's own ``forward``, parametrizations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hook_tables(modules: Iterable[nn.Module]) -> list[Mapping[int, Any]]:
    """Return torch's tables of the modules' hooks and of global hooks; their keys are numbers that are never reused."""
    own = [getattr(each, kind) for each in modules for kind in HOOKS]
    return [*own, *(getattr(of_all, f"_global{kind}") for kind in HOOKS)]


def additions_of(model: nn.Module) -> list[Any]:
    """Return the numbers of a model's hooks, and ``forward`` functions of objects; graphs keep the captured ones."""
    modules = list(model.modules())
    forwards = [each.forward for each in modules if "forward" in each.__dict__]
    return [*chain.from_iterable(hook_tables(modules)), *forwards]


def are_unaltered(modules: Iterable[nn.Module]) -> bool:
    """Whether forward passes of modules do what their classes say. Costs about 0.1 us a module."""
    if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
        return False
    for module in modules:  # every decode step asks: neither a generator nor the modules' own attributes, twice as slow
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
            return False
        if "parametrizations" in own["_modules"]:
            return False
    return True
