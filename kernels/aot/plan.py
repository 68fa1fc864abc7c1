"""The configurations of the plan's kernels that ship, for the compile-ahead tool."""

from typing import Any

from triton.runtime.jit import JITFunction

from ..plan.counting import exchange_kernel
from ..plan.metadata import (
    PlanConfig,
    PlanConstants,
    PlanScratch,
    PlanTensors,
    PoolTensors,
    num_warps,
    plan_constants,
)
from ..plan.placement import place_kernel
from ..runtime.case import KernelCase

NUM_COUNTERS = 128
FEW_CHUNKS = 4  # chunks of a source with 512 tokens
MANY_CHUNKS = 64


def _layer(num_experts: int, top_k: int, ep: int, tp: int) -> PlanConfig:
    experts = num_experts // ep
    return PlanConfig(top_k=top_k, experts_local=experts, ep=ep, tp=tp, block_rows=128, expert_capacity=2**31 - 1)


LAYERS = {
    "Mixtral, EP4": _layer(8, 2, 4, 1),
    "Qwen3-30B, EP4": _layer(128, 8, 4, 1),
    "Qwen2-MoE, EP2 x TP2": _layer(60, 4, 2, 2),
    "DeepSeek-V3, EP8": _layer(256, 8, 8, 1),
    "256 experts on one rank": _layer(256, 8, 1, 1),
    "top-32 of 32": _layer(32, 32, 4, 1),
}
SCRATCH = PlanScratch(*["*i32"] * len(PlanScratch._fields))
PLAN = PlanTensors(*["*i32"] * len(PlanTensors._fields))._replace(row_weights="*fp32")
POOL = PoolTensors("*i32", "*i64", "*fp32", "*i64", "*i32", "*i64", "*i32", "*i64", "*i32", "*i64")
KINDS = dict(
    own_ids_ptr="*i32", own_weights_ptr="*fp32", counters_ptr="*i32", timeout_ns="i64", pool=POOL, scratch=SCRATCH,
    plan=PLAN,
)  # fmt: skip


def aot_cases() -> list[KernelCase]:
    """Both kernels for every layer; for few and for many chunks, where they differ."""
    cases = []
    for name, config in LAYERS.items():
        wide = frozenset({"wide_stores"} if config.top_k >= 4 else ())
        few, many = (plan_constants(config, config.top_k, chunks, NUM_COUNTERS) for chunks in (FEW_CHUNKS, MANY_CHUNKS))
        for values in {values.expert_block: values for values in (few, many)}.values():
            words = f"{name}, {values.expert_block} experts at once"
            cases.append(_case(words, exchange_kernel, values, config, expects=wide))
        for values in (few, many):
            cases.append(_case(f"{name}, {values.sum_block} chunks at once", place_kernel, values, config))
    return cases


def _case(name: str, kernel: JITFunction, values: PlanConstants, config: PlanConfig, **options: Any) -> KernelCase:
    return KernelCase.of(name, kernel, {"PLAN": values}, KINDS, num_warps=num_warps(config), **options)
