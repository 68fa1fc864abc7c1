"""Experts beyond GPU memory: time of a token by every way to keep them, and by the share that GPU memory holds.

    comet train model=moe_600m train.batch_size=32 train.steps=400 train.lr=1e-3 output_dir=outputs/moe
    python benchmarks/bench.py experts --source outputs/moe --budgets 0.1,0.3 --seconds 230 --out outputs/texts
    python benchmarks/bench.py experts --trace outputs/texts/routing.pt --budgets 0.1,0.3,1.0 --out outputs/experts
    python benchmarks/bench.py experts --device cpu --model tiny --layers 2 --budgets 0.5,1.0 --steps 8
    torchrun --nproc-per-node 4 benchmarks/bench.py experts --ep 4 --model deepseek_v3 --layers 1 --budgets 0.1,0.3

A variant keeps experts in a *cache*, stored as the type behind it, with the experts of the next layer
copied early (*prefetch*), or with the host's cores, which compute some of those that are missing. Each is made within
its budget: its slots, and ``--workspace-mb``. *resident* has all experts in GPU memory, *on_demand* keeps none from one
token to the next. All are timed in turn.

**Whole texts of a trained model** (``--source``): texts that training did not see are continued, one at a time.
*conservative* and *adaptive* draft with ``--draft-experts`` of the K experts and verify with all. Variants are made
until 0.6 of ``--seconds`` are over, and timed for ``--seconds`` or ``--rounds`` texts. ``first_token_ms`` is for a
prompt of 1,000 tokens; ``nll`` is the mean negative log-likelihood of the texts by the whole model, in nats a token, of
which adaptive mode costs some. The routing of held-out text goes to ``routing.pt``.

**Routed experts alone** (``--model``): a step runs those of some layers for one token, on a GPU as one CUDA graph.
``--trace routing.pt`` is replayed at this shape: experts come again as soon as they did in the recording, counted in
shares of all experts, and as large a share of guesses is right (``lib/traces.py``). Without a trace routing is made,
and says nothing about models: a token keeps an expert of the one before with probability ``--sticky``, and draws the
others by a Zipf law of its layer. ``bound_us`` is ``max(resident, missing bytes / link)``, with the hits and the link
of this run. With ``--ep`` each rank has its share of the experts, slots and a link of its own, and all compute the same
token: budgets are shares of a rank's experts, hits those of all ranks, bytes those of the rank that brings most over
the link.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from comet.config import require
from comet.experts.budget import plan_budget
from comet.jobs.generate import GenerateConfig

from lib.experts import ON_DEMAND, RESIDENT, Alone, Texts
from lib.ranks import Ranks, attempt, memory_limit, release, tell
from lib.report import Row, set_aside
from lib.shapes import swiglu_model
from lib.suite import Point, Suite, option
from lib.timing import link_gbs, run_facts
from lib.traces import Trace, made_trace, resized_guesses, resized_trace

# A variant is a line: its name, and how its settings of ``comet generate`` differ from those of a plain cache.
KINDS: dict[str, dict[str, Any]] = {
    ON_DEMAND: {},
    "cache": {},
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
MAKING = 0.6  # part of the seconds after which no further variant is made


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    COLUMNS = (
        "variant", "budget", "slots", "hits", "tokens_per_s", "us", "bound_us", "of_bound", "x_on_demand",
        "of_resident", "first_token_ms", "mb_per_token", "link_gbs", "link_share", "prefetch_precision", "hosted",
        "acceptance", "tokens_per_round", "nll", "device_mb", "failure",
    )  # fmt: skip

    source: Path | None = None
    data: str | None = option(None, "as data.path of the training (default: the standard library)")
    model: str = "qwen3_30b_a3b"
    layers: int = 4
    trace: Path | None = None
    sticky: float = option(0.5, "chance that an expert serves the next token, too")
    steps: int = option(256, "tokens of the trace")
    budgets: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 1.0)
    variants: tuple[str, ...] = option((), "all with --source, else on_demand and cache by default", of=tuple(KINDS))
    seconds: float = option(3600.0, "time after which no variant or text is begun")
    tokens: int = option(128, "tokens of each text", least=2)
    temperature: float = 1.0
    draft_experts: tuple[int, ...] = (2,)
    draft_tokens: int = 4
    tau: float = 0.4
    tolerance: float = option(0.3, "T of adaptive mode")
    workspace_mb: int = option(512, "device memory of a variant for all but its slots")

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.variants or (tuple(KINDS) if self.source else (ON_DEMAND, "cache"))

    def check(self) -> None:
        require(self.tp == 1, f"tp={self.tp} must be 1")
        require(self.source is None or self.ep == 1, f"ep={self.ep} must be 1 with --source")
        self.check_models([self.model])
        for name in self.chosen if self.source is None else ():
            drafts, guesses = ("speculate" in KINDS[name]), ("expert_prefetch" in KINDS[name])
            require(not drafts, f"variants={name!r} must come with --source: routed experts alone draft nothing")
            says = "must come with --trace: made routing says nothing of guesses"
            require(not guesses or self.trace is not None, f"variants={name!r} {says}")
        require(0 <= self.sticky < 1, f"sticky={self.sticky} must be at least 0 and below 1")

    def facts(self, ranks: Ranks) -> Row:
        read = (
            {"source": str(self.source)} if self.source else {"model": self.model, "layers": self.layers, "ep": self.ep}
        )
        read["trace"] = str(self.trace or f"made, sticky={self.sticky}")
        return run_facts(ranks) | read | {"link_gbs": -ranks.worst(-link_gbs(ranks.device)), "rounds": self.rounds}

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        """All variants at once; of texts again after each, so that an interruption loses none."""
        begun, failed, keys, link = time.perf_counter(), list[Row](), {"model": self.model}, facts["link_gbs"]
        if self.source is None:
            stored = {KINDS[name].get("expert_dtype") for name in self.chosen}
            alone = Alone(swiglu_model(self.model), self.routing(), stored, ranks, self.parallel)
            group, ways = alone.group, self.make(alone, begun, ranks, failed)
            for kind in alone.host:
                name = f"{RESIDENT} {kind}" if kind else RESIDENT
                ways.append(self.make_one(alone, name, 1.0, ranks, expert_dtype=kind))
            yield Point(keys, lambda: alone.rows(ways, self.rounds, link) + failed, group.workspace)
            del alone, ways
        else:
            texts = Texts(self.source, self.data, ranks)
            group, keys = texts.group, {"model": texts.model.config.name}
            for _ in set_aside(self.out, "routing") if self.out else []:
                tell(ranks, "routing.pt of an earlier run is set aside")
            whole = self.make_one(texts, RESIDENT, 1.0, ranks)
            shown = [*self.make(texts, begun, ranks, failed), whole]
            for number in range(1, self.rounds + 1):
                if number > 1 and time.perf_counter() > begun + self.seconds:
                    break
                with memory_limit(ranks.device, self.workspace_mb * 2**20):
                    for way in [*shown]:
                        _, failure = attempt(partial(texts.time, way, number), ranks)
                        if failure:
                            shown.remove(way)
                            failed.append(
                                {"variant": way.name, "budget": way.settings.expert_budget, "failure": failure}
                            )
                yield Point(keys, lambda: texts.rows(shown, link) + failed)
            yield Point(keys, lambda: texts.scored_rows(shown, link) + failed)
            if self.out:
                texts.record().save(self.out / "routing.pt")
            del texts, shown, whole, way
        release(ranks)  # graphs are gone before the group they recorded
        group.close()

    def make(self, subject: Alone | Texts, begun: float, ranks: Ranks, failed: list[Row]) -> list[Any]:
        """All variants, until their time is over; what fails or is left out has a row that says why (collective)."""
        ways = []
        for budget, name in product(self.budgets, self.chosen):
            if name == ON_DEMAND and budget != min(self.budgets):
                continue  # it depends on no budget
            started, way = time.perf_counter(), None
            failure = "left out: the time was over"
            if ranks.worst(started - begun) <= MAKING * self.seconds:
                way, failure = attempt(
                    partial(self.make_one, subject, name, budget, ranks), ranks, subject.group.workspace
                )
            ways += [way] if way is not None else []
            failed += [] if way is not None else [{"variant": name, "budget": budget, "failure": failure}]
            release(ranks)
            tell(ranks, f"{name} at {budget}: {failure or 'ready'}, {time.perf_counter() - started:.1f} s")
        return ways

    def make_one(self, subject: Alone | Texts, name: str, budget: float, ranks: Ranks, **changes: Any) -> Any:
        settings = GenerateConfig(
            max_new_tokens=self.tokens, temperature=self.temperature, draft_experts=self.draft_experts,
            draft_tokens=self.draft_tokens, tau=self.tau, adaptive_tolerance=self.tolerance,
            **{"expert_budget": budget, "expert_prefetch": False} | KINDS.get(name, changes),
        )  # fmt: skip
        held = plan_budget(settings, subject.moe, subject.num_layers, subject.dtype, self.parallel)
        assert held is not None
        with memory_limit(ranks.device, held.device_bytes + self.workspace_mb * 2**20):
            return subject.make(name, settings, held.num_slots)

    def routing(self) -> tuple[Tensor, Tensor | None]:
        """``(N, L, K)`` ids of this shape, replayed with what was guessed of them, or made."""
        config = swiglu_model(self.model)
        if self.trace is None:
            return made_trace(config, self.layers, self.steps, self.sticky), None
        recorded = Trace.load(self.trace)
        ids = resized_trace(recorded, config, self.layers, self.steps)
        return ids, resized_guesses(recorded, ids, config.num_experts)
