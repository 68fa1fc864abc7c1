"""Comet: Mixture-of-Experts layers whose communication runs inside their computation.

The public names are loaded on first use, so that ``import comet`` alone is fast.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comet.comm import Communicator, make_communicator
    from comet.config import MoEConfig, OverlapConfig, ParallelConfig
    from comet.data_parallel import GradScaler, clip_grad_norm_, exclude_experts, reduce_gradients
    from comet.errors import (
        CapacityError,
        CommTimeoutError,
        EpochError,
        HostComputeError,
        NotFiniteError,
        StepFailedError,
        UnavailableError,
    )
    from comet.graphed.moe import GraphedMoE
    from comet.layer.group import ExpertGroup, make_expert_group
    from comet.moe import MoE
    from comet.redundant_experts import add_redundant_experts

_MODULES = {
    "CapacityError": "comet.errors",
    "CommTimeoutError": "comet.errors",
    "Communicator": "comet.comm",
    "EpochError": "comet.errors",
    "ExpertGroup": "comet.layer.group",
    "GradScaler": "comet.data_parallel",
    "GraphedMoE": "comet.graphed.moe",
    "HostComputeError": "comet.errors",
    "MoE": "comet.moe",
    "MoEConfig": "comet.config",
    "NotFiniteError": "comet.errors",
    "OverlapConfig": "comet.config",
    "ParallelConfig": "comet.config",
    "StepFailedError": "comet.errors",
    "UnavailableError": "comet.errors",
    "add_redundant_experts": "comet.redundant_experts",
    "clip_grad_norm_": "comet.data_parallel",
    "exclude_experts": "comet.data_parallel",
    "make_communicator": "comet.comm",
    "make_expert_group": "comet.layer.group",
    "reduce_gradients": "comet.data_parallel",
}
__all__ = list(_MODULES)

if importlib.util.find_spec("comet.kernels") is None:
    _FOLDER = Path(__file__).resolve().parents[1]
    raise ImportError(
        f"{_FOLDER} is the source of Comet, not the installed package: install it with `pip install -e {_FOLDER}`, or"
        f" use another installation: start Python with -P, or outside {_FOLDER}"
    )


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    if name == "__version__":
        from comet.version import comet_version

        return comet_version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
