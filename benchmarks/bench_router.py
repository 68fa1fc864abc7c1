"""The router on one GPU: logits, best ids, and the whole router with its statistics, by kernels and by plain torch.

    python benchmarks/bench_router.py --models mixtral_8x7b,qwen3_30b_a3b,deepseek_v3 --tokens 2048,8192

All variants are CUDA graphs, interleaved by the protocol of ``timing``; bfloat16 tokens, float32 weights. Prints one
table in microseconds and, as the last line, the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from report import align
from shapes import model
from timing import Variant, capture, rank_barrier, time_interleaved
from torch import Tensor

from comet.config import MoEConfig
from comet.kernels.router import router_logits, top_k_ids
from comet.router import Router, score_logits, weigh_experts
from comet.router_losses import measure_routing

ROTATE = 4


def torch_ids(logits: Tensor, top_k: int) -> Tensor:
    """The ids as the router takes them on a CPU."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def torch_router(tokens: Tensor, router: Router, config: MoEConfig) -> Tensor:
    """The router without kernels."""
    logits = torch.nn.functional.linear(tokens.float(), router.weight)
    scores, ids = score_logits(logits, config.score), torch_ids(logits, config.top_k)
    measure_routing(logits, scores, ids, config)
    return weigh_experts(scores, ids, config)


def variants_of(config: MoEConfig, num_tokens: int) -> dict[str, Variant]:
    """Name to what is timed, of the number of an input set."""
    device = torch.device("cuda")
    router, seen = Router(config, device=device), torch.zeros((), device=device)
    tokens = [torch.randn(num_tokens, config.hidden_size, device=device).bfloat16() for _ in range(ROTATE)]
    logits = [router_logits(each, router.weight) for each in tokens]

    def whole(index: int) -> object:
        routing = router(tokens[index])
        return router.measure(routing.logits, routing.scores, routing.top_k_ids, largest_logit=seen)

    return {
        "router": whole,
        "router_torch": lambda index: torch_router(tokens[index], router, config),
        "logits": lambda index: router_logits(tokens[index], router.weight),
        "logits_torch": lambda index: torch.nn.functional.linear(tokens[index].float(), router.weight),
        "top_k": lambda index: top_k_ids(logits[index], config.top_k),
        "top_k_torch": lambda index: torch_ids(logits[index], config.top_k),
    }


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Time the models and sizes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mixtral_8x7b,qwen3_30b_a3b,deepseek_v3")
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    device, rows = torch.device("cuda"), []
    for name in options.models.split(","):
        for num_tokens in map(int, options.tokens.split(",")):
            variants = variants_of(model(name), num_tokens)
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
