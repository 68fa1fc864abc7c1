"""vLLM itself, as ``make vllm`` installs it, for tests in processes of their own; and what it demands of parts.

Importing vLLM takes seconds and changes much in a process, so no test does that in the process of pytest.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import LayerCase
from modular_cases import rank_weights
from torch import Tensor

from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, MXFP8, Weight

FOLDER = Path(__file__).parents[3] / "build" / "vllm"
WEIGHT_DTYPES = {Tensor: None, FP8: torch.float8_e4m3fn, MXFP8: "mxfp8"}

needs_vllm = pytest.mark.skipif(not (FOLDER / "ready").exists(), reason="needs vLLM in build/vllm: make vllm")


def modules() -> tuple[Any, Any]:
    """vLLM's ``modular_kernel`` and ``config``; whatever Comet has installed itself comes first."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    from vllm.model_executor.layers.fused_moe import config, modular_kernel

    return modular_kernel, config


def moe_config_of(case: LayerCase, activation: str = "silu", **fields: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    _, config = modules()
    parallel = config.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=case.ep, ep_size=case.ep, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=case.ep > 1, all2all_backend="naive", enable_eplb=False,
    )  # fmt: skip
    return config.FusedMoEConfig(
        num_experts=case.num_experts, num_logical_experts=case.num_experts, experts_per_token=case.top_k,
        num_local_experts=case.num_experts // case.ep, hidden_dim=case.hidden_size, intermediate_size=case.ffn_size,
        activation=MoEActivation(activation), device="cpu", routing_method=config.RoutingMethodType.Default,
        moe_parallel_config=parallel, in_dtype=case.dtype, **fields,
    )  # fmt: skip


def quant_config_of(case: LayerCase, rank: int, weight_type: type[Weight], *, fp8_rows: bool, **fields: Any) -> Any:
    w1, w2 = (getattr(weight, "scales", None) for weight in rank_weights(case, rank, weight_type))
    rows = dict(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128]) if fp8_rows else {}
    weight_dtype: Any = WEIGHT_DTYPES[weight_type]
    scales = {"w1_scale": w1, "w2_scale": w2} | fields
    return modules()[1].FusedMoEQuantConfig.make(**rows, weight_dtype=weight_dtype, **scales)


def expert_map_of(case: LayerCase, rank: int) -> Tensor | None:
    if case.ep == 1:
        return None
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    found = torch.full((case.num_experts,), -1, dtype=torch.int32)
    local = torch.arange(layout.experts_local, dtype=torch.int32)
    found[layout.first_expert : layout.first_expert + layout.experts_local] = local
    return found


def contract_breaches(adapted: type) -> list[str]:
    """What an adapter ``(mixin, abstract class)`` owes: methods that are missing, and arguments that differ."""
    mixin, base = adapted.__bases__
    found = [f"{name} is missing" for name in sorted(getattr(adapted, "__abstractmethods__", ()))]
    for name, ours in vars(mixin).items():
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None or name.startswith("__"):
            continue
        if isinstance(theirs, property) or isinstance(ours, property):
            same = isinstance(theirs, property) and isinstance(ours, property)
        else:
            same = arguments(getattr(mixin, name)) == arguments(getattr(base, name))
        if not same:
            found.append(f"{name} differs")
    halves = ("prepare_async", "finalize_async")
    if hasattr(base, halves[0]) and adapted.supports_async is not base.supports_async:
        found += [f"{half} is missing" for half in halves if getattr(adapted, half) is getattr(base, half)]
    return found


def arguments(method: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(method).parameters.values()]
