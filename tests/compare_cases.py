"""Points of ``bench_layers.py --compare`` on CPUs, and what its kernels are handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from layer_points import Point, open_point
from points import Ranks, Settings, open_layer
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.group import make_expert_group

CPU = torch.device("cpu")


class HalfRanks(Ranks):
    """Ranks that compute in 16 bits: CUDA C++ takes nothing else, and the interpreter is wrong in bfloat16."""

    dtype = torch.float16


@contextmanager
def opened(config: MoEConfig, ranks: Ranks, parallel: ParallelConfig) -> Iterator[Point]:
    """A point of 200 tokens with the default split."""
    group = make_expert_group(config, parallel, max_tokens=200, dtype=ranks.dtype, device=CPU)
    with open_layer(config, Settings(parallel=parallel, max_tokens=200, variants=()), ranks) as layer:
        yield open_point(layer, group, 200, "zipf", [OverlapConfig()], ranks)
    group.close()


@contextmanager
def cuda_stood_in_for(kernels: dict[ModuleType, Callable[..., None]]) -> Iterator[None]:
    """A device that has CUDA C++, where these functions are the kernels of these modules, which are named like them."""
    with ExitStack() as stack:
        for module, kernel in kernels.items():
            stack.enter_context(patch.object(module, "is_available", lambda _: True))
            stack.enter_context(patch.object(module, module.__name__.rpartition(".")[2], kernel))
        yield


def same(one: Any, other: Any) -> bool:
    """Equal, and of tensors that they are the same memory."""
    if isinstance(one, Tensor):
        return (one.data_ptr(), one.shape, one.dtype) == (other.data_ptr(), other.shape, other.dtype)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)
