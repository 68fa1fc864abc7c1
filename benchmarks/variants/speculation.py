"""Ways to decode a trained model that the suite times in turn, all over one model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from comet.experts import CachedExperts, CacheReport
from comet.generation.engine import GPTEngine
from comet.generation.generate import Generated, encode_prompts, generate, warm_up
from comet.generation.text import ByteCodec
from comet.jobs.generate import GenerateConfig
from comet.layer.paths import ExpertPath
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT


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
    device_mb: float | None = None  # device memory that it took, dense weights apart
    prompts: list[str] = field(default_factory=list)
    runs: list[Generated] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    spent: list[CacheReport] = field(default_factory=list)

    def take_over(self) -> None:
        """Let the model's layers be those of this variant."""
        for layer, path in zip(self.engine.model.moe_layers(), self.paths, strict=True):
            layer.experts = path

    def warm(self, prompt: str, context: int) -> None:
        """Compile, capture, and fill the caches."""
        self.take_over()
        self.settings = replace(self.settings, prompt=prompt)
        warm_up(self.engine, encode_prompts(self.settings, ByteCodec(), context), self.settings, context=context)
        self.run(prompt, context, seed=0)
        self.prompts, self.runs, self.spent = [], [], []

    def run(self, prompt: str, context: int, seed: int) -> None:
        """Continue a prompt once, and count."""
        self.take_over()
        self.settings = replace(self.settings, prompt=prompt, seed=seed)
        prompts = encode_prompts(self.settings, ByteCodec(), context)
        reports: list[CacheReport] = []

        def count(*_: object) -> None:
            if not reports:  # the prompt has been read
                reports.append(self.report())

        self.runs.append(generate(self.engine, ByteCodec(), prompts, self.settings, context=context, show=count))
        self.spent.append(self.report().since(reports[0]))
        self.prompts.append(prompt)

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
    codec = ByteCodec()
    given, made = codec.encode(prompt), codec.encode(text)
    ids = torch.tensor([[*given, *made]], device=model.rotary.device)
    logits = model(ids[:, :-1]).logits[0, len(given) - 1 :, : codec.num_tokens].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, len(given) :]))
