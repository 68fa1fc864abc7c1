"""A trained model with experts beyond GPU memory: decode by every mechanism, and what speculation costs.

    comet train model=moe_600m train.batch_size=32 train.steps=400 train.lr=1e-3 output_dir=outputs/moe
    python benchmarks/bench.py speculation --source outputs/moe --budgets 0.1,0.3 --seconds 230 --out outputs/found

Continues texts that training did not see, one at a time. *on_demand* keeps no expert from one token to the next,
*cache* does (by the policy or stored as the type behind it), *conservative* and *adaptive* draft with
``--draft-experts`` of the K experts and verify with all. *resident* has a slot for every expert; ``of_resident``
compares with it. All are timed in turn, for ``--seconds`` or ``--rounds`` texts, and each was made within its budget:
device memory beside the dense weights, which all share, is limited to the slots and ``--workspace-mb``.

``first_token_ms`` is for a prompt of 1,000 tokens; ``nll`` the mean negative log-likelihood of the texts by the whole
model, in nats a token, of which adaptive mode costs some. The routing of held-out text goes to ``routing.pt``, for
``bench.py experts --trace``. Results so far stand in ``--out`` after every round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from comet.config import ParallelConfig, require
from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, bytes_of_expert, slots_of_budget, total
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.source import find_source, model_of
from comet.generation.text import ByteCodec, ByteStream
from comet.jobs.config import DataConfig
from comet.jobs.generate import GenerateConfig
from comet.launch.failures import one_line
from comet.layer.paths import ExpertPath
from comet.layer.sharding import local
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.training.checkpoint import load_weights
from comet.training.data import read_corpus

from lib.arguments import BUDGETS, parsed, require_known, suite_parser, whole_numbers, words
from lib.ranks import FAILURES, Ranks, memory_limit, release, tell
from lib.report import Row, cell, set_aside, table_of, write_json
from lib.timing import link_bytes, link_gbs, run_facts
from lib.traces import Trace, record_routing


class ExactCodec(ByteCodec):
    """Texts that encode to the very bytes that were made, each of which is shown at once."""

    def stream(self, prompt: Sequence[int]) -> ByteStream:
        """A stream of what was made alone."""
        return ByteStream("ascii", "surrogateescape")


CODEC = ExactCodec()


class OnDemand(CachedExperts):
    """Experts that are forgotten before every step."""

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        tables = self.cache.tables
        for table in (tables.slots, tables.arriving, tables.owners):
            table.fill_(-1)
        return super().__call__(*inputs, **options)


@dataclass
class Variant:
    """One way to decode, and what was measured of it."""

    name: str  # in the table
    budget: float  # share of the experts on the device
    slots: int  # experts of a layer on the device
    settings: GenerateConfig  # of generate
    engine: GPTEngine  # over the model that all variants share
    paths: list[ExpertPath]  # that the model's layers take while this variant runs
    weights: list[tuple[Tensor, Tensor]]  # theirs, as the engine left them: in host memory, or empty where quantised
    device_mb: float | None = None  # device memory that it took, dense weights apart
    runs: list[Generated] = field(default_factory=list)  # of the first prompt, the second, ...
    first_tokens_s: list[float] = field(default_factory=list)
    spent: list[CacheReport] = field(default_factory=list)

    def take_over(self) -> None:
        """Let the model's layers be those of this variant."""
        layers = self.engine.model.moe_layers()
        for layer, path, (w1, w2) in zip(layers, self.paths, self.weights, strict=True):
            layer.experts = path
            local(layer.w1).data, local(layer.w2).data = w1, w2

    def warm(self, prompt: str, context: int) -> None:
        """Compile, capture, and fill the caches."""
        self.take_over()
        self.settings = replace(self.settings, prompt=prompt)
        warm_up(self.engine, encode_prompts(self.settings, CODEC, context), self.settings, context=context)
        self.run(prompt, context, seed=0)
        self.runs, self.spent = [], []

    def run(self, prompt: str, context: int, seed: int) -> None:
        """Continue a prompt once, and count."""
        self.take_over()
        self.settings = replace(self.settings, prompt=prompt, seed=seed)
        prompts = encode_prompts(self.settings, CODEC, context)
        reports: list[CacheReport] = []

        def count(*_: object) -> None:
            if not reports:  # the prompt has been read
                reports.append(self.report())

        self.runs.append(generate(self.engine, CODEC, prompts, self.settings, context=context, show=count))
        self.spent.append(self.report().since(reports[0]))

    def report(self) -> CacheReport:
        """What the caches did so far."""
        report = self.engine.cache_report()
        assert report is not None, "all variants decode from caches"
        return report

    def read(self, ids: Tensor) -> None:
        """Time the first token behind a prompt ``(1, P)``."""
        self.take_over()
        model = self.engine.model
        room: dict[str, Any] = dict(num_sequences=1, length=ids.shape[1], dtype=model.dtype, device=ids.device)
        started = time.perf_counter()
        length = torch.full((1,), ids.shape[1], device=ids.device)
        model.prefill(ids, length, KeyValueCache(model.config, **room)).logits.argmax().item()
        self.first_tokens_s.append(time.perf_counter() - started)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second behind the first one, the median over the prompts."""
        return median((run.new_tokens - 1) / run.decode_s for run in self.runs)


def score(model: GPT, prompt: str, text: str) -> float:
    """Mean negative log-likelihood of a text's bytes behind a prompt, in nats, with all experts."""
    given, made = CODEC.encode(prompt), CODEC.encode(text)
    ids = torch.tensor([[*given, *made]], device=model.rotary.device)
    logits = model(ids[:, :-1]).logits[0, len(given) - 1 :, : CODEC.num_tokens].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, len(given) :]))


COLUMNS = (
    "variant", "budget", "slots", "hits", "tokens_per_s", "x_on_demand", "of_resident", "first_token_ms",
    "mb_per_token", "link_share", "prefetch_precision", "hosted",
    "acceptance", "tokens_per_round", "nll", "device_mb", "failure",
)  # fmt: skip
ON_DEMAND, RESIDENT = "on_demand", "resident"
# A variant is a line: its name, and how its settings of ``comet generate`` differ from those of a plain cache.
KINDS: dict[str, dict[str, Any]] = {
    ON_DEMAND: {},
    "cache": {},
    "cache lfu": dict(expert_policy="lfu"),
    "cache + prefetch": dict(expert_prefetch=True),
    "cache + host cores": dict(host_cores="auto"),
    "cache + prefetch + host cores": dict(expert_prefetch=True, host_cores="auto"),
    "cache mxfp8": dict(expert_dtype="mxfp8"),
    "cache mxfp4": dict(expert_dtype="mxfp4"),
    "conservative": dict(speculate="conservative"),
    "conservative + prefetch": dict(speculate="conservative", expert_prefetch=True),
    "adaptive": dict(speculate="adaptive"),
    "adaptive + prefetch": dict(speculate="adaptive", expert_prefetch=True),
}
TO_THE_ENGINE = ("expert_dtype", "expert_policy", "expert_prefetch", "host_cores")  # settings, by the same names
PROMPT_BYTES = 64
FIRST_TOKEN_BYTES = 1000
HELDOUT_SHAPE = (4, 8, 512)  # batches of texts of tokens
LEAST_PROMPTS = 64
MAKING = 0.6  # of the seconds, after which no further variant is made


class Run:
    """All variants over one model, its experts in host memory, and the rows of the table.

    ``heldout`` ``(H,)`` uint8 is text that training did not see.
    """

    def __init__(self, arguments: argparse.Namespace, model: GPT, ranks: Ranks, heldout: Tensor) -> None:
        self.arguments, self.model, self.ranks, self.heldout = arguments, model, ranks, heldout
        self.device, self.context = ranks.device, model.config.context
        self.link, self.facts = link_gbs(self.device), run_facts(ranks)
        self.variants: list[Variant] = []
        self.failures: list[Row] = []
        self.plain = GenerateConfig(  # the cache alone: prefetch is a variant of its own
            max_new_tokens=min(arguments.tokens, self.context - PROMPT_BYTES),
            temperature=arguments.temperature, draft_experts=tuple(arguments.draft_experts),
            draft_tokens=arguments.draft_tokens, tau=arguments.tau, adaptive_tolerance=arguments.tolerance,
            expert_budget=1.0, expert_prefetch=False,
        )  # fmt: skip
        self.resident = self.make(RESIDENT, 1.0, {})

    def make(self, name: str, budget: float, changes: dict[str, Any]) -> Variant:
        """One variant, warm, made within its budget."""
        model, settings = self.model, replace(self.plain, **changes)
        layers, moe, stored = len(model.moe_layers()), model.config.moe, settings.expert_dtype
        slots = slots_of_budget(budget, moe, layers, model.dtype, stored)
        expert = bytes_of_expert(moe.hidden_size, moe.ffn_size, model.dtype, stored)
        if name != RESIDENT:  # the last one may have quantised the model's experts
            self.resident.take_over()
        with memory_limit(self.device, layers * slots * expert + self.arguments.workspace_mb * 2**20):
            before = self.memory()
            engine = GPTEngine(
                model, model.moe_layers()[0].group, expert_slots=slots,
                speculation=None if settings.speculate == "off" else settings,
                **{setting: getattr(settings, setting) for setting in TO_THE_ENGINE},
            )  # fmt: skip
            paths: list[ExpertPath] = [*engine.stored]
            if name == ON_DEMAND:
                caches = [cache for cache in engine.caches if isinstance(cache, ExpertCache)]
                paths = [OnDemand(cache, engine.runner, moe.top_k) for cache in caches]
            weights = [(local(layer.w1).data, local(layer.w2).data) for layer in model.moe_layers()]
            made = Variant(name, budget, slots, settings, engine, paths, weights)
            made.warm(self.prompt(0), self.context)
            made.read(self.long_prompt())
            made.device_mb = (self.memory() - before) / 2**20
        made.first_tokens_s = []
        return made

    def make_all(self, deadline: float) -> None:
        """All that is asked for, until the time is over; what fails or is left out has a row that says why."""
        budgets, names = self.arguments.budgets, self.arguments.variants
        for budget, name in product(budgets, names):
            if name == ON_DEMAND and budget != min(budgets):
                continue  # what keeps nothing depends on no budget
            if time.perf_counter() > deadline:
                self.failures.append({"variant": name, "budget": budget, "failure": "left out: the time was over"})
                continue
            started, told = time.perf_counter(), "ready"
            try:
                self.variants.append(self.make(name, budget, KINDS[name]))
            except FAILURES as error:
                told = self.fail(name, budget, error)
            release(self.ranks)
            tell(self.ranks, f"{name} at {budget}: {told}, {time.perf_counter() - started:.1f} s")
        self.variants.append(self.resident)

    def time_all(self, deadline: float) -> None:
        """Texts in turn, then first tokens; prints what is known after each round."""
        with memory_limit(self.device, self.arguments.workspace_mb * 2**20):
            for number in range(1, self.arguments.rounds + 1):
                if number > 1 and time.perf_counter() > deadline:
                    break
                for variant in [*self.variants]:
                    try:
                        variant.run(self.prompt(number), self.context, seed=number)
                        variant.read(self.long_prompt())
                    except FAILURES as error:
                        self.variants.remove(variant)
                        tell(self.ranks, self.fail(variant.name, variant.budget, error))
                tell(self.ranks, f"round {number}\n{table_of(self.rows(), COLUMNS, cell)}")
                self.write({"rows": self.rows()})

    def fail(self, name: str, budget: float, error: Exception) -> str:
        """Note in one line why a variant has no result."""
        self.failures.append({"variant": name, "budget": budget, "failure": one_line(error)})
        return one_line(error)

    def rows(self) -> list[Row]:
        """What the table says so far."""
        return [*map(self.row, self.variants), *self.failures]

    def row(self, variant: Variant) -> Row:
        """What the table says of a variant."""
        rate, spent = variant.tokens_per_s, total(variant.spent)
        slowest = next((each for each in self.variants if each.name == ON_DEMAND), None)
        made = sum(run.new_tokens - 1 for run in variant.runs)  # the first comes of the prompt, before ``spent``
        per_token = link_bytes(spent) / made
        row: Row = {
            "variant": variant.name, "budget": variant.budget, "tokens_per_s": rate,
            "x_on_demand": rate / slowest.tokens_per_s if slowest else None,
            "of_resident": rate / self.resident.tokens_per_s, "device_mb": variant.device_mb,
            "first_token_ms": 1e3 * median(variant.first_tokens_s),
            "slots": variant.slots, "hits": spent.hits, "mb_per_token": per_token / 1e6,
            "link_share": per_token * rate / (self.link * 1e9),
            "hosted": spent.hosted / spent.needed, "prefetch_precision": spent.prefetch_precision,
        }  # fmt: skip
        facts = [run.speculation for run in variant.runs if run.speculation is not None]
        if facts:
            drafted = sum(each["drafted"] for each in facts)
            row |= {
                "acceptance": sum(each["accepted"] for each in facts) / max(drafted, 1),
                "tokens_per_round": made / sum(each["rounds"] for each in facts),
                "speculation": facts,
            }
        return row

    def scored_rows(self) -> list[Row]:
        """The rows with the loss of the texts."""
        self.resident.take_over()
        rows = [*map(self.row, self.variants)]
        for variant, row in zip(self.variants, rows, strict=True):
            row["nll"] = mean(
                score(self.model, self.prompt(number), run.texts[0]) for number, run in enumerate(variant.runs, 1)
            )
        return [*rows, *self.failures]

    def record(self) -> Trace:
        """The routing of held-out text."""
        self.resident.take_over()
        count, size, length = HELDOUT_SHAPE
        length = min(length, self.context, len(self.heldout) - 1)
        starts = self.starts(count * size, length, seed=1)
        texts = torch.stack([self.heldout[start : start + length].long() for start in starts]).to(self.device)
        return record_routing(self.model, texts.split(size))

    def memory(self) -> int:
        """Bytes of the device's memory that this process uses."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def prompt(self, number: int) -> str:
        """Held-out text number so and so."""
        start = self.starts(max(number + 1, LEAST_PROMPTS), PROMPT_BYTES, seed=0)[number]
        return bytes(self.heldout[start : start + PROMPT_BYTES].tolist()).decode("utf-8", "surrogateescape")

    def long_prompt(self) -> Tensor:
        """``(1, P)`` held-out text, P 1,000 where the context has room for it."""
        return self.heldout[None, : min(FIRST_TOKEN_BYTES, self.context)].long().to(self.device)

    def starts(self, count: int, length: int, seed: int) -> list[int]:
        """Where texts of a length begin."""
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.heldout) - length, (count,), generator=drawn).tolist()

    def write(self, found: Row) -> str:
        """One line of JSON, also in ``--out``."""
        facts: Row = {"task": "bench_speculation", "model": self.model.config.name, "link_gbs": self.link}
        facts |= {"source": str(self.arguments.source), "workspace_mb": self.arguments.workspace_mb}
        return write_json(self.arguments.out, "bench_speculation", facts | self.facts | found)


@torch.no_grad()
def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure and print."""
    started = time.perf_counter()
    source, out = find_source(str(arguments.source)), arguments.out
    require(source.checkpoint is not None, f"source={str(arguments.source)!r} must hold checkpoints of comet train")
    assert source.checkpoint is not None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for stem in ("bench_speculation", "routing"):
            set_aside(out, stem)
    config = model_of(source)
    group = ranks.make_group(config.moe, ParallelConfig(), PROMPT_BYTES)
    model = GPT(config, group, expert_device=torch.device("cpu"))
    load_weights(model, source.checkpoint)
    heldout = read_corpus(DataConfig(path=arguments.data), config.context).heldout
    timed = Run(arguments, model, ranks, heldout)
    timed.make_all(started + MAKING * arguments.seconds)
    timed.time_all(started + arguments.seconds)
    rows = timed.scored_rows()
    if out is not None:
        timed.record().save(out / "routing.pt")
    print(table_of(rows, COLUMNS, cell), timed.write({"rows": rows}), sep="\n")
    group.close()


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown variant."""
    parser = suite_parser("speculation", __doc__, budgets=BUDGETS, device="auto", out=None)
    parser.add_argument("--source", type=Path, required=True, help="an output folder of comet train")
    parser.add_argument("--data", help="as data.path of the training (default: the standard library)")
    parser.add_argument("--variants", type=words, default=tuple(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--rounds", type=int, default=5, help="texts, at most")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no variant or text is begun")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-experts", type=whole_numbers, default=[2])
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tau", type=float, default=0.4)
    parser.add_argument("--tolerance", type=float, default=0.3, help="T of adaptive mode")
    parser.add_argument("--workspace-mb", type=int, default=512, help="device memory of a variant beside its slots")
    arguments = parsed(parser, command_line)
    require_known("variants", arguments.variants, KINDS)
    require(arguments.tokens >= 2, f"tokens={arguments.tokens} must be at least 2: the first is no step")
    return arguments
