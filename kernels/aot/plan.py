"""The configurations of the plan's kernels that ship, for the compile-ahead tool."""

from collections.abc import Mapping

from ..plan.counting import exchange_kernel
from ..plan.metadata import PlanConfig, exchange_constants, num_warps, place_constants
from ..plan.placement import place_kernel
from ..runtime.case import KernelCase

NUM_COUNTERS = 128
FEW_CHUNKS = 4  # of a source with 512 tokens
MANY_CHUNKS = 64
# Name: experts, top-k, EP, TP.
LAYERS = {
    "Mixtral, EP4": (8, 2, 4, 1),
    "Qwen3-30B, EP4": (128, 8, 4, 1),
    "Qwen2-MoE, EP2 x TP2": (60, 4, 2, 2),
    "DeepSeek-V3, EP8": (256, 8, 8, 1),
    "256 experts on one rank": (256, 8, 1, 1),
    "top-32 of 32": (32, 32, 4, 1),
}
FLOATS = ("weights_ptr", "own_weights_ptr", "row_weights")
INT64 = ("id_addresses", "weight_addresses", "flag_addresses", "fault_ptr")
NUMBERS = ("first_program", "rank", "num_tokens", "M", "capacity", "num_routed_rows")


def aot_cases() -> list[KernelCase]:
    """Both kernels for every layer."""
    cases = []
    for name, (num_experts, top_k, ep, tp) in LAYERS.items():
        config = PlanConfig(
            top_k=top_k,
            experts_local=num_experts // ep,
            ep=ep,
            tp=tp,
            block_rows=128,
            expert_capacity=2**31 - 1,
        )
        launches = [
            *((exchange_kernel, values) for values in _exchanges(config)),
            *((place_kernel, place_constants(config, top_k, num_chunks)) for num_chunks in (FEW_CHUNKS, MANY_CHUNKS)),
        ]
        cases += [
            KernelCase(
                name=name + _suffix(values),
                fn=kernel,
                signature={argument: _kind(argument) for argument in kernel.arg_names if argument not in values},
                constexprs=values,
                num_warps=num_warps(config),
                expects=frozenset({"wide_stores"} if kernel is exchange_kernel and top_k >= 4 else ()),
            )
            for kernel, values in launches
        ]
    return cases


def _suffix(values: Mapping[str, int | bool]) -> str:
    """What tells the configurations of one kernel and layer apart."""
    if "E_BLOCK" in values:
        return f", {values['E_BLOCK']} experts at once"
    return f", {values['SUM_BLOCK']} chunks at once"


def _exchanges(config: PlanConfig) -> list[dict[str, int | bool]]:
    """Constants for few and for many chunks, where they differ."""
    few, many = (
        exchange_constants(config, config.top_k, num_chunks, NUM_COUNTERS) for num_chunks in (FEW_CHUNKS, MANY_CHUNKS)
    )
    return [few] if few == many else [few, many]


def _kind(argument: str) -> str:
    if argument in NUMBERS:
        return "i32"
    if argument in INT64:
        return "*i64"
    if argument == "timeout_ns":
        return "i64"
    return "*fp32" if argument in FLOATS else "*i32"
