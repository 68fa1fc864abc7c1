"""The configurations of the router's kernels that ship, for the compile-ahead tool."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from ..router.logits import router_logits
from ..router.measure import ROWS, LossRule, measure, measure_gradient
from ..router.select import MANY_TOKENS, SelectRule, select, select_gradient
from ..runtime.arguments import as_triton_dtype
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, recorded

RULES = {  # the routers of known models, groups that are padded, and the widest, by name: experts and rule
    "mixtral": (8, SelectRule(top_k=2)),
    "qwen2": (60, SelectRule(top_k=4, renormalize=False)),
    "qwen3": (128, SelectRule(top_k=8)),
    "deepseek_v3": (256, SelectRule(top_k=8, num_groups=8, top_groups=4, sigmoid=True, routed_scale=2.5)),
    "groups of 15": (60, SelectRule(top_k=4, num_groups=4, top_groups=2)),
    "top-32 of 512": (512, SelectRule(top_k=32)),
}
LOSSES = LossRule(aux=1e-2, z=1e-3)
wide = partial(meta, dtype=torch.float32)


def aot_cases() -> list[KernelCase]:
    """Known numbers of experts: logits of both types of weights, all rules, losses; few and many tokens."""
    cases, losses = [], wide(2)
    models, dtypes = (("qwen3", 128, 2048), ("mixtral", 8, 4096), ("tiny", 16, 48)), (torch.float32, torch.bfloat16)
    for (model, experts, hidden_size), dtype, tokens in product(models, dtypes, (1, 2048, 8192)):
        name, x = f"{as_triton_dtype(dtype)} weight, {model}", meta(tokens, hidden_size, dtype=torch.bfloat16)
        weight, expects = meta(experts, hidden_size, dtype=dtype), ("wide_loads", "wgmma")[: 1 + experts // 64]
        cases += recorded(f"{name}, {tokens} tokens", expects, router_logits, x, weight)
    for (name, (experts, rule)), tokens in product(RULES.items(), (1, 2 * MANY_TOKENS)):
        record = partial(_recorded, f"{name}, {tokens} tokens", experts)
        scores, weights, ids = wide(tokens, experts), wide(tokens, rule.top_k), meta(tokens, rule.top_k)
        cases += record(select, scores, scores[0] if rule.sigmoid else None, rule)
        cases += record(select_gradient, scores, ids, weights, scores, rule)
        cases += record(measure_gradient, scores, scores, scores[0], (losses[0], losses[0]), LOSSES)
    for (experts, top_k), (use, rule), tokens in product(
        ((8, 2), (60, 4), (128, 8), (256, 8), (512, 32)),
        (("training", LOSSES), ("inference", LossRule(aux=0.0, z=0.0))), (ROWS, 2 * ROWS),
    ):  # fmt: skip
        name = f"{experts} experts, {use}" + ", few tokens" * (tokens == ROWS)
        logits = wide(tokens, experts)
        cases += _recorded(name, experts, measure, logits, logits, meta(tokens, top_k), losses[0], rule)
    return cases


def _recorded(name: str, num_experts: int, launch: Callable[..., object], *arguments: Any) -> list[KernelCase]:
    """Return the cases of a launch behind the logits; rows of 128 experts and more are read in wide loads."""
    return recorded(name, WIDE_ACCESS[:1] if num_experts >= 128 else (), launch, *arguments)
