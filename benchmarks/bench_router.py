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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from points import Ranks
from report import Row
from shapes import model
from start import run_and_leave, start_ranks, whole_numbers, words
from torch import Tensor

from comet import router_kernels
from comet.config import MoEConfig, ParallelConfig, require
from comet.launch.cli import Parser
from comet.router import Router, compute_logits, score_logits, select_experts, watch_finite, weigh_experts
from comet.router_losses import RouterStats, measure_routing
from comet.tables import aligned
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


def variants_of(config: MoEConfig, num_tokens: int, device: torch.device) -> dict[str, Variant]:
    """Name to what is timed, of the number of an input set."""
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


def measure_point(name: str, num_tokens: int, rounds: int, device: torch.device) -> Row:
    """Median microseconds of all variants."""
    variants = variants_of(config_of(name), num_tokens, device)
    timed = {key: capture(variant, rotate=ROTATE) for key, variant in variants.items()}
    timings = time_interleaved(timed, rounds=rounds, barrier=rank_barrier(device, None), rotate=ROTATE, device=device)
    microseconds = {key: round(timing.median_ms * 1e3, 1) for key, timing in timings.items()}
    return {"model": name, "tokens": num_tokens} | microseconds


@torch.no_grad()
def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure all points and print them."""
    points = product(arguments.models, arguments.tokens)
    rows = [measure_point(name, num_tokens, arguments.rounds, ranks.device) for name, num_tokens in points]
    print("\n".join(aligned([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])))
    print(json.dumps({"task": "bench_router", "device": torch.cuda.get_device_name(ranks.device), "rows": rows}))


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model or a number that is too small."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3")
    parser.add_argument("--models", type=words, default=models, help="comma-separated names of shapes.py")
    parser.add_argument("--tokens", type=whole_numbers, default=[1, 64, 2048, 8192], help="comma-separated")
    parser.add_argument("--rounds", type=int, default=20, help="counted calls of each variant")
    arguments = parser.parse_args(command_line)
    for name in arguments.models:
        model(name)
    require(min(arguments.tokens) >= 1, f"tokens={arguments.tokens} must each be at least 1")
    require(arguments.rounds >= 1, f"rounds={arguments.rounds} must be at least 1")
    return arguments


def main(command_line: Sequence[str]) -> None:
    """The whole benchmark, which has one rank."""
    arguments = parse(command_line)
    require(torch.cuda.is_available(), "the router's benchmark needs a GPU")
    start_ranks(ParallelConfig(), "auto", partial(run, arguments))


if __name__ == "__main__":
    run_and_leave(main)
