"""The configurations of the plan's kernels that ship, for the compile-ahead tool."""

import torch

from ..plan.metadata import (
    PlanConfig,
    PlanScratch,
    PlanTensors,
    PoolTensors,
    RoutingPool,
    exchange,
    place_plan,
    plan_constants,
)
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, recorded

NUM_COUNTERS = 128
LAYERS = {  # experts, K, EP and TP
    "Mixtral, EP4": (8, 2, 4, 1),
    "Qwen3-30B, EP4": (128, 8, 4, 1),
    "Qwen2-MoE, EP2 x TP2": (60, 4, 2, 2),
    "DeepSeek-V3, EP8": (256, 8, 8, 1),
    "256 experts on one rank": (256, 8, 1, 1),
    "top-32 of 32": (32, 32, 4, 1),
}
PLAN = dict.fromkeys(PlanTensors._fields, meta(64)) | {"row_weights": meta(64, dtype=torch.float32)}


def aot_cases() -> list[KernelCase]:
    """Both kernels for every layer; for few and for many chunks, where they differ."""
    cases = {}
    for name, (experts, top_k, ep, tp) in LAYERS.items():
        config = PlanConfig(
            top_k=top_k, experts_local=experts // ep, ep=ep, tp=tp, block_rows=128, expert_capacity=2**31 - 1
        )
        for chunks in (4, 64):
            constants, pool = plan_constants(config, top_k, chunks), _pool(config, chunks)
            own, of_plan = pool.tensors, (pool, config, PlanScratch.allocate(pool, config))
            words, expects = f"{name}, {constants.expert_block} experts at once", WIDE_ACCESS[1:] if top_k >= 4 else ()
            arguments = own.ids[0, 0], own.weights[0, 0], *of_plan, meta(NUM_COUNTERS)
            [cases[words]] = recorded(words, expects, exchange, *arguments)
            words = f"{name}, {constants.sum_block} chunks at once"
            [cases[words]] = recorded(words, (), place_plan, *of_plan, PLAN)
    return list(cases.values())


def _pool(config: PlanConfig, chunks: int) -> RoutingPool:
    addresses, epoch, ranks = meta(8, dtype=torch.int64), meta(1), config.world_size
    ids = meta(2, ranks, chunks * 128, config.top_k)
    tensors = PoolTensors(
        ids, addresses, ids.to(torch.float32), addresses, meta(ranks, chunks), addresses, meta(4, ranks), addresses,
        epoch, addresses,
    )  # fmt: skip
    return RoutingPool(tensors=tensors, rank=0, timeout_ns=10**10)
