"""Decode a trained model with experts beyond GPU memory: load on demand, cache, and self-speculative decoding.

    comet train model=moe_600m train.batch_size=32 train.steps=1400 train.lr=1e-3 output_dir=outputs/moe
    python benchmarks/bench_speculation.py --source outputs/moe --budgets 0.1,0.3 --out outputs/speculation

Continues texts that training did not see, one at a time. *on_demand* keeps no expert from one token to the next,
*cache* does, *conservative* and *adaptive* draft with ``--draft-experts`` of the K experts and verify with all;
``cached`` behind them: drafts take experts that have a slot. Budget 1.0 holds all experts, and is what ``of_resident``
compares with. ``nll`` is the mean negative log-likelihood of the texts by the whole model, in nats a token: what
adaptive mode costs. All are timed in turn; the last line is JSON, also in ``--out``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_experts import link_gbs, shares
from points import Ranks
from report import Row, cell, table_of
from start import run_and_leave, start_ranks
from torch import Tensor

from comet.config import ParallelConfig, require
from comet.experts import CachedExperts, CacheReport, ExpertCache, slots_of_budget
from comet.generation.config import GenerateConfig
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.source import find_source, model_of
from comet.generation.text import ByteCodec
from comet.group import make_expert_group
from comet.launch.cli import Parser
from comet.models.gpt import GPT
from comet.paths import ExpertPath
from comet.training.checkpoint import load_weights
from comet.training.config import DataConfig
from comet.training.data import read_corpus

COLUMNS = (
    "variant", "budget", "hits", "tokens_per_s", "x_on_demand", "of_resident", "mb_per_token", "link_share",
    "acceptance", "tokens_per_round", "nll",
)  # fmt: skip
PROMPT_BYTES = 64
SCORED_AT_ONCE = 32


class OnDemand(CachedExperts):
    """Experts that are forgotten before every step."""

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """See ``CachedExperts``."""
        tables = self.cache.tables
        for table in (tables.slots, tables.arriving, tables.owners):
            table.fill_(-1)
        return super().__call__(tokens, top_k_ids, top_k_weights, w1, w2)


@dataclass
class Variant:
    """One way to decode, and what was measured of it.

    Args:
        name: In the table.
        budget: Share of the experts on the device.
        settings: Of ``generate``.
        engine: Over the model that all variants share.
        paths: That the model's layers take while this variant runs.
    """

    name: str
    budget: float
    settings: GenerateConfig
    engine: GPTEngine
    paths: list[ExpertPath] = field(default_factory=list)
    runs: list[Generated] = field(default_factory=list)
    needed: int = 0
    fetched: int = 0

    def run(self, context: int) -> None:
        """Continue the prompt of the settings once, and count."""
        for layer, path in zip(self.engine.model.moe_layers(), self.paths, strict=True):
            layer.experts = path
        prompts = encode_prompts(self.settings, ByteCodec(), context)
        warm_up(self.engine, prompts, self.settings, context=context)
        reports: list[CacheReport | None] = []

        def count(*_: object) -> None:
            if not reports:  # the prompt has been read
                reports.append(self.engine.cache_report())

        self.runs.append(generate(self.engine, ByteCodec(), prompts, self.settings, context=context, show=count))
        before, after = reports[0], self.engine.cache_report()
        assert before is not None, "all variants decode from caches"
        assert after is not None
        self.needed += after.needed - before.needed
        self.fetched += after.fetched - before.fetched


def make_variants(model: GPT, arguments: argparse.Namespace) -> list[Variant]:
    """All that is timed."""
    plain = GenerateConfig(
        max_new_tokens=arguments.tokens, temperature=arguments.temperature, draft_experts=arguments.draft_experts,
        draft_tokens=arguments.draft_tokens, tau=arguments.tau, adaptive_tolerance=arguments.tolerance,
        expert_budget=1.0,
    )  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {"cache": {}}
    for mode in ("conservative", "adaptive"):
        kinds[mode] = dict(speculate=mode)
        kinds[f"{mode} cached"] = dict(speculate=mode, draft_cached_only=True)
    variants = [make_variant("on_demand", min(arguments.budgets), plain, model, OnDemand)]
    for budget in arguments.budgets:
        for name, changes in kinds.items():
            variants.append(make_variant(name, budget, replace(plain, **changes), model))
    return [*variants, make_variant("cache", 1.0, plain, model)]


def make_variant(
    name: str, budget: float, settings: GenerateConfig, model: GPT, path: type[CachedExperts] = CachedExperts
) -> Variant:
    """One variant, with caches of its own."""
    config = model.config
    slots = slots_of_budget(budget, config.moe, len(model.moe_layers()), model.dtype)
    speculation = None if settings.speculate == "off" else settings
    group = model.moe_layers()[0].group
    engine = GPTEngine(model, group, expert_slots=slots, speculation=speculation)
    caches = [cache for cache in engine.caches if isinstance(cache, ExpertCache)]
    paths = [path(cache, engine.runner, config.moe.top_k) for cache in caches]
    return Variant(name, budget, settings, engine, list(paths))


def score(engine: GPTEngine, prompt: str, text: str) -> float:
    """Mean negative log-likelihood of a text's bytes behind a prompt, in nats, with all experts."""
    codec = ByteCodec()
    given, made = codec.encode(prompt), codec.encode(text)
    ids = torch.tensor([made], device=engine.device)
    read, length = torch.tensor([given], device=ids.device), torch.tensor([len(given)], device=ids.device)
    logits = [engine.prefill(read, length, len(given) + len(made))[:, None]]
    logits += [engine.verify(part) for part in ids[:, :-1].split(SCORED_AT_ONCE, dim=1)]
    return float(torch.nn.functional.cross_entropy(torch.cat(logits, dim=1)[0, :, : codec.num_tokens], ids[0]))


@torch.no_grad()
def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure and print."""
    source, device = find_source(str(arguments.source)), ranks.device
    require(source.checkpoint is not None, f"source={str(arguments.source)!r} must hold checkpoints of comet train")
    assert source.checkpoint is not None
    config = model_of(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    group = make_expert_group(config.moe, ParallelConfig(), max_tokens=PROMPT_BYTES, dtype=dtype, device=device)
    model = GPT(config, group, expert_device=torch.device("cpu"))
    load_weights(model, source.checkpoint)
    heldout = read_corpus(DataConfig(path=arguments.data), config.context).heldout
    starts = torch.randint(len(heldout) - PROMPT_BYTES, (arguments.rounds,), generator=torch.Generator().manual_seed(0))
    prompts = [bytes(heldout[start : start + PROMPT_BYTES].tolist()).decode("latin1") for start in starts.tolist()]
    variants = make_variants(model, arguments)
    for number, prompt in enumerate([prompts[0], *prompts]):
        for variant in variants:
            variant.settings = replace(variant.settings, prompt=prompt, seed=number)
            variant.run(config.context)
            if number == 0:  # the caches are filled and all kernels compiled
                variant.runs, variant.needed, variant.fetched = [], 0, 0
    expert_bytes = variants[0].engine.caches[0].expert_bytes
    resident = variants[-1]
    for layer, path in zip(model.moe_layers(), resident.paths, strict=True):
        layer.experts = path
    scored = partial(score, resident.engine)
    link = link_gbs(device)
    rows = [row_of(each, variants[0], resident, expert_bytes, link, prompts, scored) for each in variants]
    print(table_of(rows, COLUMNS, cell))
    facts = {
        "task": "bench_speculation",
        "model": config.name,
        "source": str(source.path),
        "link_gbs": link,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    line = json.dumps(facts | {"rows": rows})
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "bench_speculation.json").write_text(line + "\n")
    print(line)
    group.close()


def speed(variant: Variant) -> float:
    """Tokens a second behind the first one, the median over the prompts."""
    return median((run.new_tokens - 1) / run.decode_s for run in variant.runs)


def row_of(
    variant: Variant,
    on_demand: Variant,
    resident: Variant,
    expert_bytes: int,
    link: float,
    prompts: Sequence[str],
    scored: Callable[[str, str], float],
) -> Row:
    """What the table says of a variant."""
    made = sum(run.new_tokens for run in variant.runs)
    rate, per_token = speed(variant), variant.fetched * expert_bytes / made
    facts = [run.speculation for run in variant.runs if run.speculation is not None]
    drafted = sum(each["drafted"] for each in facts)
    losses = [scored(prompt, run.texts[0]) for prompt, run in zip(prompts, variant.runs, strict=True)]
    row: Row = {
        "variant": variant.name, "budget": variant.budget, "tokens_per_s": rate, "x_on_demand": rate / speed(on_demand),
        "of_resident": rate / speed(resident), "hits": 1 - variant.fetched / variant.needed,
        "mb_per_token": per_token / 1e6, "link_share": per_token * rate / (link * 1e9),
        "nll": sum(losses) / len(losses),
    }  # fmt: skip
    if facts:
        row |= {
            "acceptance": sum(each["accepted"] for each in facts) / max(drafted, 1),
            "tokens_per_round": made / sum(each["rounds"] for each in facts),
            "speculation": facts,
        }
    return row


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="an output folder of comet train")
    parser.add_argument("--data", default=None, help="as data.path of the training (default: the standard library)")
    parser.add_argument("--budgets", type=shares, default=(0.1, 0.2, 0.3), help="shares of the experts")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--rounds", type=int, default=5, help="texts")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-experts", type=lambda text: tuple(map(int, text.split(","))), default=(2,))
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tau", type=float, default=0.4)
    parser.add_argument("--tolerance", type=float, default=0.3, help="T of adaptive mode")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(command_line)


def main(command_line: Sequence[str]) -> None:
    """The whole benchmark, which has one rank."""
    arguments = parse(command_line)
    start_ranks(ParallelConfig(), arguments.device, partial(run, arguments))


if __name__ == "__main__":
    run_and_leave(main)
