"""Ways to keep experts beyond GPU memory: of routed experts alone, which follow a trace, and of a trained model.

Letters: N steps of a trace, L layers, K experts of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comet.comm.handshake import gather
from comet.config import MoEConfig, ParallelConfig, require
from comet.decode.runners import ReplicatedRunner
from comet.experts.cache import CacheReport, total
from comet.experts.cached import CachedExperts
from comet.experts.paths import CachedPath, Slots, host_paths, report_of_paths
from comet.experts.store import HeldExperts
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.source import find_source, model_of
from comet.generation.text import ByteCodec, ByteStream
from comet.jobs.config import DataConfig
from comet.jobs.generate import GenerateConfig
from comet.layer.group import ExpertGroup
from comet.layer.sharding import local
from comet.layout import RoutedTokens
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.quantization.formats import MXType, quantize_mx
from comet.training.checkpoint import load_weights
from comet.training.data import read_corpus
from comet.tuner.timing import capture

from lib.ranks import Ranks
from lib.report import Row
from lib.timing import link_bytes, time_by_protocol
from lib.traces import Trace, record_routing

ON_DEMAND, RESIDENT = "on_demand", "resident"
STEPS_PER_CALL = 32  # so that calls have about as many misses
PROMPT_BYTES, FIRST_TOKEN_BYTES, LEAST_PROMPTS = 64, 1000, 64
HELDOUT_SHAPE = (4, 8, 512)  # batches of texts of tokens
Step = Callable[[], Any]


class OnDemand(CachedExperts):
    """Experts that are forgotten before every step."""

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        tables = self.cache.tables
        for table in (tables.slots, tables.arriving, tables.owners):
            table.fill_(-1)
        return super().__call__(*inputs, **options)


def on_demand(paths: Sequence[CachedPath], runner: ReplicatedRunner, top_k: int) -> Sequence[CachedPath]:
    return [OnDemand(path.cache, runner, top_k) for path in paths if isinstance(path, CachedExperts)]


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with their speed over that of *on_demand* and *resident*, where these were timed."""
    us = {row["variant"]: row["us"] for row in reversed(rows)}
    for row in rows:
        row["x_on_demand"] = us[ON_DEMAND] / row["us"] if ON_DEMAND in us else None
        row["of_resident"] = us[RESIDENT] / row["us"] if RESIDENT in us else None
    return rows


@dataclass(kw_only=True)
class Way:
    name: str  # in the table
    settings: GenerateConfig  # their budget, and how experts are kept
    paths: Sequence[CachedPath]  # the layers' experts
    step: Step | None = None  # of routed experts alone
    device_mb: float | None = None  # device memory that it took

    @property
    def is_resident(self) -> bool:
        return self.name.startswith(RESIDENT)

    def report(self) -> CacheReport:
        report = report_of_paths(self.paths)
        assert report is not None, "all of them read from caches"
        return report

    def row(self, spent: Sequence[CacheReport], num_steps: int, us: float, link: float) -> Row:
        """Figures of steps of so many microseconds, and of what all ranks spent in them.

        Example: two ranks that needed 6 and 2 experts and fetched 1 and 1: hits .75.
        """
        whole, num_bytes = total(spent), max(map(link_bytes, spent)) / num_steps
        row: Row = {"variant": self.name, "budget": self.settings.expert_budget, "device_mb": self.device_mb}
        row["slots"] = self.paths[0].cache.num_slots
        row |= {"hits": whole.hits, "prefetch_precision": whole.prefetch_precision}
        row |= {"hosted": whole.hosted / whole.needed, "us": us, "mb_per_token": num_bytes / 1e6}
        return row | {"link_gbs": num_bytes / (us * 1e3), "link_share": num_bytes / (us * 1e3) / link}


class Alone:
    """Routed experts of L layers in host memory: a step is that of one token, whose experts a trace names.

    Args:
        trace: ``(N, L, K)`` expert ids, and what was guessed of them, if anything.
        stored: Types that the experts are held in.
    """

    def __init__(
        self, moe: MoEConfig, trace: tuple[Tensor, Tensor | None], stored: set[MXType | None], ranks: Ranks,
        parallel: ParallelConfig,
    ) -> None:  # fmt: skip
        self.moe, self.ranks, self.device = moe, ranks, ranks.device
        self.group: ExpertGroup = ranks.make_group(moe, parallel, 1)
        self.layout, self.num_layers, self.dtype = self.group.layout(moe), trace[0].shape[1], ranks.dtype
        self.trace = trace[0][:, :, None].int().to(self.device)
        self.guessed = None if trace[1] is None else trace[1][:, :, None].int().to(self.device)
        self.host = {kind: [self.held(kind) for _ in range(self.num_layers)] for kind in (None, *stored - {None})}
        self.token = torch.randn(1, moe.hidden_size, device=self.device, dtype=self.dtype)
        self.weights = torch.full((1, moe.top_k), 1 / moe.top_k, device=self.device)

    def held(self, stored: MXType | None) -> HeldExperts:
        sizes = {"w1": (2 * self.moe.ffn_size, self.moe.hidden_size), "w2": (self.moe.hidden_size, self.moe.ffn_size)}
        parts: dict[str, Tensor] = {}
        for name, size in sizes.items():
            weight = (torch.randn(self.layout.experts_local, *size, device=self.device) / 32).to(self.dtype)
            packed = None if stored is None else quantize_mx(weight, stored)
            parts |= {name: weight} if packed is None else {name: packed.elements, f"{name}_scales": packed.scales}
        return HeldExperts.hold({name: part.cpu() for name, part in parts.items()}, self.device)

    def next_ids(self, at: Tensor) -> Tensor:
        """``(L, 1, K)``: ids of the next step; ``at (1,)`` int64 counts on the device, so that a graph goes on."""
        return self.trace.index_select(0, at.add_(1).remainder_(len(self.trace)))[0]

    def counter(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def make(self, name: str, settings: GenerateConfig, num_slots: int) -> Way:
        """Caches of all layers, and a step that reads from them (collective)."""
        held, at, runner = self.host[settings.expert_dtype], self.counter(), ReplicatedRunner(self.moe, self.group, 2)

        def guess(layer: int, _: Tensor) -> Any:
            assert self.guessed is not None, "prefetch comes with a trace"
            return SimpleNamespace(top_k_ids=self.guessed[:, layer].index_select(0, at)[0])

        where: dict[str, Any] = dict(device=self.device, dtype=self.dtype, group=self.group)
        routers: Any = [partial(guess, layer) for layer in range(self.num_layers)]
        paths = host_paths(
            Slots(options=settings, num_slots=num_slots, layout=self.layout, runner=runner, **where),
            lambda file: [HeldExperts.hold(each.named_parts, self.device, file) for each in held],
            lambda: routers,
            self.moe.hidden_size,
        )
        paths = on_demand(paths, runner, self.moe.top_k) if name == ON_DEMAND else paths

        def step() -> None:
            for path, each, ids in zip(paths, held, self.next_ids(at), strict=True):
                path(RoutedTokens(self.token, ids, self.weights), each.w1, each.w2)

        return Way(name=name, settings=settings, paths=paths, step=step)

    @torch.no_grad()
    def rows(self, ways: Sequence[Way], rounds: int, link: float) -> list[Row]:
        """Time all ways in turn, over whole traces: a text has parts of few misses and of many (collective)."""
        variants = {number: self.variant(way.step) for number, way in enumerate(ways) if way.step is not None}
        calls, reports = -(-len(self.trace) // STEPS_PER_CALL), []
        for _ in range(2):  # after the first time the caches are as full as they get
            for variant, _ in product(variants.values(), range(calls)):
                variant(0)
            reports.append([way.report() for way in ways])
        timings = time_by_protocol(variants, self.ranks, rounds=-(-rounds // calls) * calls, leads=False)
        rows = []
        for timing, way, before, after in zip(timings.values(), ways, *reports, strict=True):
            spent = gather(self.group.process_group, after.since(before))
            rows.append(way.row(spent, calls * STEPS_PER_CALL, timing.mean_ms * 1e3 / STEPS_PER_CALL, link))
        alone = {way.settings.expert_dtype: row["us"] for way, row in zip(ways, rows, strict=True) if way.is_resident}
        for way, row in zip(ways, rows, strict=True):
            row["bound_us"] = max(alone[way.settings.expert_dtype], row["mb_per_token"] / link * 1e3)
            row["of_bound"] = row["bound_us"] / row["us"]
        return with_ratios(rows)

    def variant(self, step: Step) -> Callable[[int], Any]:
        """Some steps as they are timed, on a GPU as a graph."""

        def steps(_: int) -> None:
            for _ in range(STEPS_PER_CALL):
                step()

        return capture(steps) if self.device.type == "cuda" else steps


class ExactCodec(ByteCodec):
    """Texts that encode to the very bytes that were made, each of which is shown at once."""

    def stream(self, prompt: Sequence[int]) -> ByteStream:
        return ByteStream("ascii", "surrogateescape")


CODEC = ExactCodec()


@dataclass(kw_only=True)
class TextWay(Way):
    """One way to decode texts of a model that all ways share."""

    engine: GPTEngine
    weights: list[tuple[Tensor, Tensor]]  # w1 and w2 of each layer: in host memory, or empty where they are quantised
    runs: list[Generated] = field(default_factory=list)  # of the first prompt, the second, ...
    first_tokens_s: list[float] = field(default_factory=list)
    spent: list[CacheReport] = field(default_factory=list)

    def take_over(self) -> None:
        layers = self.engine.model.moe_layers()
        for layer, path, (w1, w2) in zip(layers, self.paths, self.weights, strict=True):
            layer.experts = path
            local(layer.w1).data, local(layer.w2).data = w1, w2

    def run(self, prompt: str, seed: int, *, warm: bool = False) -> None:
        """Continue a prompt once, and count; ``warm`` compiles and captures before, and forgets what was counted."""
        self.take_over()
        context = self.engine.model.config.context
        most = min(self.settings.max_new_tokens, context - PROMPT_BYTES)
        settings = replace(self.settings, max_new_tokens=most, prompt=prompt, seed=seed)
        prompts, reports = encode_prompts(settings, CODEC, context), list[CacheReport]()
        if warm:
            warm_up(self.engine, prompts, settings, context=context)

        def count(*_: object) -> None:
            if not reports:  # the prompt has been read
                reports.append(self.report())

        made = generate(self.engine, CODEC, prompts, settings, context=context, show=count)
        if not warm:
            self.runs.append(made)
            self.spent.append(self.report().since(reports[0]))

    def read(self, ids: Tensor) -> float:
        """Seconds to the first token behind a prompt ``(1, P)``."""
        self.take_over()
        model, length = self.engine.model, torch.full((1,), ids.shape[1], device=ids.device)
        room: dict[str, Any] = dict(num_sequences=1, length=ids.shape[1], dtype=model.dtype, device=ids.device)
        started = time.perf_counter()
        model.prefill(ids, length, KeyValueCache(model.config, **room)).logits.argmax().item()
        return time.perf_counter() - started

    def text_row(self, link: float) -> Row:
        """The medians over the prompts; the first token of each comes of the prompt and counts as no step."""
        made = sum(run.new_tokens - 1 for run in self.runs)
        rate = median((run.new_tokens - 1) / run.decode_s for run in self.runs)
        row = self.row([total(self.spent)], made, 1e6 / rate, link)
        row |= {"tokens_per_s": rate, "first_token_ms": 1e3 * median(self.first_tokens_s)}
        facts = [run.speculation for run in self.runs if run.speculation is not None]
        if facts:
            row["acceptance"] = sum(each["accepted"] for each in facts) / max(sum(each["drafted"] for each in facts), 1)
            row |= {"tokens_per_round": made / sum(each["rounds"] for each in facts), "speculation": facts}
        return row


class Texts:
    """A trained model, its experts in host memory, that continues held-out text, one text at a time.

    Args:
        source: An output folder of ``comet train``.
        data: Its text, as ``data.path``.
    """

    @torch.no_grad()
    def __init__(self, source: Path, data: str | None, ranks: Ranks) -> None:
        found = find_source(str(source))
        require(found.checkpoint is not None, f"source={str(source)!r} must hold checkpoints of comet train")
        assert found.checkpoint is not None
        config = model_of(found)
        self.moe, self.num_layers, self.device = config.moe, config.num_layers, ranks.device
        self.group = ranks.make_group(config.moe, ParallelConfig(), PROMPT_BYTES)
        self.model = GPT(config, self.group, expert_device=torch.device("cpu"))
        self.dtype = self.model.dtype
        load_weights(self.model, found.checkpoint)
        self.heldout = read_corpus(DataConfig(path=data), config.context).heldout
        self.whole: TextWay | None = None  # the one that has all experts, made first

    @torch.no_grad()
    def make(self, name: str, settings: GenerateConfig, num_slots: int) -> TextWay:
        """One way, warm."""
        model, before = self.model, self.memory()
        if self.whole is not None:  # the last one may have quantised the model's experts
            self.whole.take_over()
        speculation = None if settings.speculate == "off" else settings
        engine = GPTEngine(model, self.group, store=settings, speculation=speculation)
        paths = on_demand(engine.stored, engine.runner, self.moe.top_k) if name == ON_DEMAND else engine.stored
        weights = [(local(layer.w1).data, local(layer.w2).data) for layer in model.moe_layers()]
        way = TextWay(name=name, settings=settings, paths=paths, engine=engine, weights=weights)
        way.run(self.prompt(0), 0, warm=True)
        way.read(self.long_prompt())
        way.device_mb = (self.memory() - before) / 2**20
        self.whole = self.whole or way
        return way

    @torch.no_grad()
    def time(self, way: TextWay, number: int) -> None:
        way.run(self.prompt(number), number)
        way.first_tokens_s.append(way.read(self.long_prompt()))

    def rows(self, ways: Sequence[TextWay], link: float) -> list[Row]:
        return with_ratios([way.text_row(link) for way in ways])

    @torch.no_grad()
    def scored_rows(self, ways: Sequence[TextWay], link: float) -> list[Row]:
        """The rows with the loss of each way's texts in nats a token, by the whole model."""
        assert self.whole is not None
        self.whole.take_over()
        texts = [[self.score(self.prompt(at), run.texts[0]) for at, run in enumerate(way.runs, 1)] for way in ways]
        return [row | {"nll": mean(scores)} for row, scores in zip(self.rows(ways, link), texts, strict=True)]

    def score(self, prompt: str, text: str) -> float:
        """Mean negative log-likelihood of a text's bytes behind a prompt."""
        given, made = CODEC.encode(prompt), CODEC.encode(text)
        ids = torch.tensor([[*given, *made]], device=self.device)
        logits = self.model(ids[:, :-1]).logits[0, len(given) - 1 :, : CODEC.num_tokens].float()
        return float(torch.nn.functional.cross_entropy(logits, ids[0, len(given) :]))

    @torch.no_grad()
    def record(self) -> Trace:
        assert self.whole is not None
        self.whole.take_over()
        count, size, length = HELDOUT_SHAPE
        length = min(length, self.model.config.context, len(self.heldout) - 1)
        starts = self.starts(count * size, length, seed=1)
        texts = torch.stack([self.heldout[start : start + length].long() for start in starts]).to(self.device)
        return record_routing(self.model, texts.split(size))

    def memory(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def prompt(self, number: int) -> str:
        start = self.starts(max(number + 1, LEAST_PROMPTS), PROMPT_BYTES, seed=0)[number]
        return bytes(self.heldout[start : start + PROMPT_BYTES].tolist()).decode("utf-8", "surrogateescape")

    def long_prompt(self) -> Tensor:
        """``(1, P)`` held-out text, P 1,000 where the context has room for it."""
        return self.heldout[: min(FIRST_TOKEN_BYTES, self.model.config.context)][None].long().to(self.device)

    def starts(self, count: int, length: int, seed: int) -> list[int]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.heldout) - length, (count,), generator=drawn).tolist()
