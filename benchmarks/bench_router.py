"""The router on one GPU, whole and in parts, by kernels and by plain torch.

    python benchmarks/bench_router.py --models mixtral_8x7b,qwen3_30b_a3b,deepseek_v3 --tokens 1,64,2048,8192

*select*: scores, ids and weights of given logits; *measure*: losses, loads and the largest logit; *train*: both, and
the gradient of the logits. DeepSeek-V3 takes its own rule: sigmoids, 4 of 8 groups, selection bias. All variants are
CUDA graphs, interleaved by the protocol of ``comet.tuner.timing``; bfloat16 tokens, float32 weights. Prints one table
in microseconds and, as the last line, the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from report import align
from shapes import model
from torch import Tensor

from comet import router_kernels
from comet.config import MoEConfig
from comet.router import Router, compute_logits, score_logits, select_experts, watch_finite, weigh_experts
from comet.router_losses import RouterStats, measure_routing
from comet.tuner.timing import Variant, capture, rank_barrier, time_interleaved

ROTATE = 4
DEEPSEEK: dict[str, Any] = dict(score="sigmoid", num_groups=8, top_groups=4, balance="bias", routed_scale=2.5)

Select = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
Measure = Callable[[Tensor, Tensor, Tensor], RouterStats]


def config_of(name: str) -> MoEConfig:
    """The model's layer with the model's routing rule."""
    return replace(model(name), **DEEPSEEK) if name == "deepseek_v3" else model(name)


def torch_select(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, weights and scores without kernels."""
    scores = score_logits(logits, config.score)
    compared = logits.detach() if bias is None else scores.detach() + bias
    ids = select_experts(compared, config)
    return ids.int(), weigh_experts(scores, ids, config), scores


def torch_measure(logits: Tensor, scores: Tensor, ids: Tensor, config: MoEConfig, largest: Tensor) -> RouterStats:
    """Statistics without kernels."""
    watch_finite(logits, largest)
    return measure_routing(logits, scores, ids, config)


@torch.enable_grad()
def train(logits: Tensor, select: Select, measure: Measure) -> Tensor:
    """Forward and backward pass behind the logits, up to their gradient."""
    leaf = logits.detach().requires_grad_()
    ids, weights, scores = select(leaf)
    losses = [loss for loss in measure(leaf, scores, ids)[:2] if loss.requires_grad]
    (grad,) = torch.autograd.grad([weights, *losses], leaf, [weights.detach(), *map(torch.ones_like, losses)])
    return grad


def variants_of(config: MoEConfig, num_tokens: int) -> dict[str, Variant]:
    """Name to what is timed, of the number of an input set."""
    device = torch.device("cuda")
    router, seen = Router(config, device=device), torch.zeros((), device=device)
    tokens = [torch.randn(num_tokens, config.hidden_size, device=device).bfloat16() for _ in range(ROTATE)]
    logits = [compute_logits(each, router.weight) for each in tokens]
    select = partial(router_kernels.select, selection_bias=router.selection_bias, config=config)
    plain_select = partial(torch_select, bias=router.selection_bias, config=config)
    measure = partial(router_kernels.measure, config=config, largest_logit=seen)
    plain_measure = partial(torch_measure, config=config, largest=seen)
    routed = [select(each) for each in logits]

    def whole(index: int) -> object:
        routing = router(tokens[index])
        return router.measure(routing.logits, routing.scores, routing.top_k_ids, largest_logit=seen)

    def torch_whole(index: int) -> object:
        found = torch.nn.functional.linear(tokens[index].float(), router.weight)
        ids, _, scores = plain_select(found)
        return plain_measure(found, scores, ids)

    def measured(by: Measure, index: int) -> object:
        ids, _, scores = routed[index]
        return by(logits[index], scores, ids)

    return {
        "router": whole,
        "router_torch": torch_whole,
        "logits": lambda index: compute_logits(tokens[index], router.weight),
        "logits_torch": lambda index: torch.nn.functional.linear(tokens[index].float(), router.weight),
        "select": lambda index: select(logits[index]),
        "select_torch": lambda index: plain_select(logits[index]),
        "measure": partial(measured, measure),
        "measure_torch": partial(measured, plain_measure),
        "train": lambda index: train(logits[index], select, measure),
        "train_torch": lambda index: train(logits[index], plain_select, plain_measure),
    }


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Time the models and sizes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mixtral_8x7b,qwen3_30b_a3b,deepseek_v3")
    parser.add_argument("--tokens", default="1,64,2048,8192")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    device, rows = torch.device("cuda"), []
    for name in options.models.split(","):
        for num_tokens in map(int, options.tokens.split(",")):
            variants = variants_of(config_of(name), num_tokens)
            timed = {key: capture(variant, rotate=ROTATE) for key, variant in variants.items()}
            timings = time_interleaved(
                timed, rounds=options.rounds, barrier=rank_barrier(device, None), rotate=ROTATE, device=device
            )
            microseconds = {key: round(timing.median_ms * 1e3, 1) for key, timing in timings.items()}
            rows.append({"model": name, "tokens": num_tokens} | microseconds)
    print("\n".join(align([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])))
    print(json.dumps({"task": "bench_router", "device": torch.cuda.get_device_name(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
