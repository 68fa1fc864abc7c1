"""Experts beyond GPU memory: time of a token against the share of the experts that GPU memory holds.

    python benchmarks/bench.py experts --model qwen3_30b_a3b --layers 4 --budgets 0.1,0.3,1.0 --out outputs/experts
    python benchmarks/bench.py experts --device cpu --model tiny --layers 2 --budgets 0.5,1.0 --steps 8
    torchrun --nproc-per-node 4 benchmarks/bench.py experts --ep 4 --model deepseek_v3 --layers 1 --budgets 0.1,0.3

A step runs the routed experts of some layers for one token, on a GPU as one CUDA graph, over a routing trace. Without
``--trace`` it is made, and says nothing about models: a token keeps an expert of the one before with probability
``--sticky``, and draws the others by a Zipf law of its layer. ``--trace routing.pt``, recorded by
``bench.py speculation``, is replayed at this shape: experts come again as soon as they did in the recording, counted in
shares of all experts (``lib/traces.py``).

``--stored bf16,mxfp8,mxfp4`` measures the experts as they are and quantised, budgets being shares of them in any case;
``--variants`` the ways to keep them: by the policy behind *cache*, with the next layer's experts prefetched, of which
as large a share is guessed right as the recording says of the next layer's router, or with the host's cores, which
compute some of those that are missing (not quantised ones).

*on_demand* copies each step's experts into as many slots, asked for by the host, which knows the trace, and keeps
nothing. *resident* has all experts in GPU memory. *bound* is ``max(resident, missing bytes / link)``, with the hits and
the link of this run.

With ``--ep`` each rank has its share of the experts, slots and a link of its own, and all compute the same token:
budgets are shares of a rank's experts, hits those of all ranks, bytes those of the rank that brings most over the link,
which is that of the slowest rank while all copy.

``--prompt 1000`` measures prompts of so many tokens, too, one after the other through the caches of the first of the
variants. Their *bound* is ``max(products, missing bytes / link)``, *products* the two grouped ones with all experts in
GPU memory in bfloat16, and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from comet.comm.handshake import gather
from comet.config import MoEConfig, ParallelConfig, require
from comet.decode import DecodeWeights, rank_slots
from comet.decode.runners import LocalRunner, ReplicatedRunner, Runner
from comet.experts.budget import plan_budget
from comet.experts.cache import CachedExperts, CacheReport, ExpertCache, report_of, total
from comet.experts.host.cores import TIMEOUT_S, HostCores
from comet.experts.host.profile import HostSizes
from comet.experts.options import StoreOptions
from comet.experts.prefetch import prefetch_between
from comet.experts.store import HeldExperts
from comet.kernels.runtime.process import usable_cores
from comet.layer.group import ExpertGroup
from comet.layout import ExpertLayout, RoutedTokens
from comet.measure.timing import capture, time_interleaved
from comet.quantization.formats import MXType, quantize_mx
from comet.reference.plain import grouped_matmul

from lib.arguments import BUDGETS, parsed, require_known, suite_parser, words
from lib.ranks import Ranks, memory_limit, release, tell
from lib.report import Row, report
from lib.shapes import swiglu_model
from lib.timing import link_bytes, link_gbs, run_facts, time_by_protocol
from lib.traces import Trace, made_trace, resized_guesses, resized_trace

COLUMNS = (
    "stored", "variant", "budget", "slots", "hits", "precision", "hosted", "us", "bound_us", "of_bound", "link_gbs",
    "x_on_demand",
)  # fmt: skip
STORED = ("bf16", "mxfp8", "mxfp4")
PREFETCH = "cache + prefetch"
HOST_CORES = " + host cores"
# A way to keep experts is a line: its name, and arguments of its ``ExpertCache``.
KINDS: dict[str, dict[str, Any]] = {"cache": {}, "cache lfu": dict(policy="lfu"), PREFETCH: {}}
KINDS |= {name + HOST_CORES: KINDS[name] for name in ("cache", PREFETCH)}
TABLES_BYTES = 2**26  # A variant needs these for its tables and the allocator's rounding, in addition to its slots.
STEPS_PER_CALL = 32  # so that calls have about as many misses


class Layers:
    """Experts of some layers in host memory, and what a step has: a token, routing weights, and ids of the trace.

    Args:
        trace: ``(N, num_layers, K)`` expert ids of N steps, and what was guessed of them, if anything.
        stored: What experts are quantised to; ``None``: not.
        num_cores: Of the host, that compute missing experts of some variants; 0: no variant wants any.
    """

    def __init__(
        self,
        config: MoEConfig,
        num_layers: int,
        trace: tuple[Tensor, Tensor | None],
        ranks: Ranks,
        group: ExpertGroup | None,
        stored: MXType | None,
        num_cores: int = 0,
    ) -> None:
        device, dtype = ranks.device, ranks.dtype
        self.config, self.ranks, self.device, self.cores = config, ranks, device, None
        alone = ExpertLayout.create(config, ParallelConfig(), 0)
        self.layout = alone if group is None else group.layout(config)
        if num_cores:
            sizes = HostSizes(
                num_experts=config.num_experts, first_expert=self.layout.first_expert, top_k=config.top_k,
                hidden_size=config.hidden_size, max_tokens=1, dtype=dtype,
            )  # fmt: skip
            self.cores = HostCores(num_cores, sizes, device, TIMEOUT_S)
        ids, guessed = trace
        self.trace = ids[:, :, None].int().to(device)
        self.guessed = None if guessed is None else guessed[:, :, None].int().to(device)
        self.host = [host_experts(config, self.layout, ranks, stored) for _ in range(num_layers)]
        # Memory that processes share has other pages than memory that they do not: each variant has what users get.
        self.shared = [HeldExperts.hold(parts, device, self.cores.file) for parts in self.host] if self.cores else []
        self.runner: Runner = LocalRunner(config.top_k, 2) if group is None else ReplicatedRunner(config, group, 2)
        self.token = torch.randn(1, config.hidden_size, device=device, dtype=dtype)
        self.weights = torch.full((1, config.top_k), 1 / config.top_k, device=device)

    def ids(self, at: Tensor | None = None) -> Callable[[], Tensor]:
        """Return a function for the next step's ids ``(num_layers, 1, K)``; the device counts, so that a graph goes on.

        Args:
            at: ``(1,)`` int64, number of the step; ``None``: its own.
        """
        counted = torch.zeros(1, dtype=torch.int64, device=self.device) if at is None else at
        return lambda: self.trace.index_select(0, counted.add_(1).remainder_(len(self.trace)))[0]

    def cached(self, num_slots: int, kind: str) -> tuple[Callable[[], Any], list[ExpertCache]]:
        """A step that reads from caches kept in one of ``KINDS``, and these."""
        place: dict[str, Any] = dict(
            num_slots=num_slots, device=self.device, num_experts=self.config.num_experts,
            first_expert=self.layout.first_expert, **KINDS[kind],
        )  # fmt: skip
        is_shared = kind.endswith(HOST_CORES)
        stores = [held.named_parts for held in self.shared] if is_shared else self.host
        caches = [ExpertCache(**parts, **place) for parts in stores]
        if is_shared:
            self.share(caches)
        layers = [CachedExperts(cache, self.runner, self.config.top_k) for cache in caches]
        at = torch.zeros(1, dtype=torch.int64, device=self.device)
        next_ids = self.ids(at)
        if kind.startswith(PREFETCH):
            prefetch_between(layers, [partial(self.guess, at, layer) for layer in range(len(layers))])

        def step() -> None:
            for parts, layer, ids in zip(stores, layers, next_ids(), strict=True):
                layer(RoutedTokens(self.token, ids, self.weights), parts["w1"], parts["w2"])

        return step, caches

    def share(self, caches: Sequence[ExpertCache]) -> None:
        """Leave some missing experts to the host's cores, one process for all variants."""
        assert self.cores is not None, "they were counted"
        if self.cores.process is None:
            self.cores.start([cache.host for cache in caches])
            tell(self.ranks, f"host cores: {self.cores.facts()}")
        for number, cache in enumerate(caches):
            cache.share_with(self.cores, number)

    def guess(self, at: Tensor, layer: int, _: Tensor) -> Tensor:
        """``(1, K)``: what the step number ``at (1,)`` is expected to need of a layer."""
        assert self.guessed is not None, "parse asks for a trace"
        return self.guessed[:, layer].index_select(0, at)[0]

    def resident(self) -> Callable[[], Any]:
        """A step whose experts are all on the device."""
        slots = rank_slots(self.layout, self.device)
        held = []
        for parts in self.host:
            there: dict[str, Any] = {name: part.to(self.device) for name, part in parts.items()}
            held.append(DecodeWeights(**there, slots=slots))
        next_ids = self.ids()

        def step() -> None:
            for experts, ids in zip(held, next_ids(), strict=True):
                self.compute(ids, experts)

        return step

    def compute(self, ids: Tensor, experts: DecodeWeights) -> None:
        """A layer's step, from experts that are where ``experts`` has them."""
        routed = RoutedTokens(self.token, ids, self.weights)
        self.runner(routed, experts.w1, experts.w2, experts=experts)

    def on_demand(self) -> Callable[[], Any]:
        """A step for which the host copies the rank's experts that the trace names."""
        top_k, host_trace = self.config.top_k, self.trace.cpu().tolist()
        held_by_rank = rank_slots(self.layout, "cpu").tolist()
        here = rank_slots(self.layout, self.device) >= 0
        slots = torch.full((self.config.num_experts,), -1, dtype=torch.int32, device=self.device)
        room: dict[str, Any] = {
            name: torch.zeros(top_k, *part.shape[1:], dtype=part.dtype, device=self.device)
            for name, part in self.host[0].items()
        }
        held = DecodeWeights(**room, slots=slots)
        taken = torch.arange(top_k, dtype=torch.int32, device=self.device)
        at = 0

        def step() -> None:
            nonlocal at
            at = (at + 1) % len(host_trace)
            for index, (parts, ids) in enumerate(zip(self.host, host_trace[at], strict=True)):
                for (slot, expert), name in product(enumerate(ids[0]), parts):
                    if (place := held_by_rank[expert]) >= 0:
                        room[name][slot].copy_(parts[name][place], non_blocking=True)
                on_device = self.trace[at, index]
                slots.scatter_(0, on_device[0].long(), taken).masked_fill_(~here, -1)
                self.compute(on_device, held)

        return step

    def prompt(self, num_tokens: int, caches: Sequence[ExpertCache]) -> Callable[[int], Any]:
        """A prompt through caches, for which the host waits for the routing of each layer."""
        layers = [CachedExperts(cache, self.runner, self.config.top_k) for cache in caches]
        routed = RoutedTokens(*self.prompt_tokens(num_tokens))

        def read(_: int) -> None:
            for layer, parts in zip(layers, self.host, strict=True):
                layer(routed, parts["w1"], parts["w2"])

        return read

    def products(self, num_tokens: int) -> Callable[[int], Any]:
        """The products of a prompt, of rows that are in the order of their experts, which are on the device."""
        config = self.config
        _, ids, _ = self.prompt_tokens(num_tokens)
        counts = ids.flatten().bincount(minlength=config.num_experts)
        rows = torch.randn(ids.numel(), config.hidden_size, device=self.device, dtype=self.token.dtype)
        sizes = (2 * config.ffn_size, config.hidden_size), (config.hidden_size, config.ffn_size)
        w1, w2 = (rows.new_ones(config.num_experts, *size) for size in sizes)
        named = tuple(counts.tolist()), counts.cumsum(0).int()

        def multiply(_: int) -> None:
            for _layer in self.host:
                grouped_matmul(grouped_matmul(rows, w1, *named)[:, : config.ffn_size], w2, *named)

        return multiply

    def prompt_tokens(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``(T, D)`` of a prompt, their experts ``(T, K)``, all equally likely, and weights ``(T, K)``."""
        config, drawn = self.config, torch.Generator().manual_seed(0)
        ids = torch.rand(num_tokens, config.num_experts, generator=drawn).topk(config.top_k).indices.int()
        tokens = self.token.expand(num_tokens, -1).contiguous()
        return tokens, ids.to(self.device), self.weights.expand(num_tokens, -1).contiguous()


def host_experts(config: MoEConfig, layout: ExpertLayout, ranks: Ranks, stored: MXType | None) -> dict[str, Any]:
    """The rank's random experts of a layer in pinned memory, quantised on the device: w1 and w2, and their scales."""
    sizes = {"w1": (2 * config.ffn_size, config.hidden_size), "w2": (config.hidden_size, config.ffn_size)}
    parts = {}
    for name, size in sizes.items():
        weight = (torch.randn(layout.experts_local, *size, device=ranks.device) / 32).to(ranks.dtype)
        if stored is None:
            parts[name] = weight
        else:
            packed = quantize_mx(weight, stored)
            parts |= {name: packed.elements, f"{name}_scales": packed.scales}
    return HeldExperts.hold({name: part.cpu() for name, part in parts.items()}, ranks.device).named_parts


@torch.no_grad()
def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure and print."""
    link = -ranks.worst(-link_gbs(ranks.device))
    facts = {"task": "bench_experts", "model": arguments.model, "layers": arguments.layers, "ep": arguments.ep,
             "link_gbs": link,
             "trace": str(arguments.trace or f"made, sticky={arguments.sticky}")} | run_facts(ranks)  # fmt: skip
    rows, keys = measure(arguments, ranks, link), ("stored", "variant", "budget")
    report("bench_experts", rows, ranks, arguments.out, keys=keys, facts=facts, columns=COLUMNS)


def measure(arguments: argparse.Namespace, ranks: Ranks, link: float) -> Iterator[Row]:
    """The rows of experts stored in one type after the other (collective)."""
    config = swiglu_model(arguments.model)
    for name in arguments.stored:
        group = ranks.make_group(config, arguments.parallel, 1) if arguments.ep > 1 else None
        yield from rows_of(arguments, name, config, ranks, group, link)
        release(ranks)  # graphs are gone before the group they recorded
        if group is not None:
            group.close()


def rows_of(
    arguments: argparse.Namespace, name: str, config: MoEConfig, ranks: Ranks, group: ExpertGroup | None, link: float
) -> list[Row]:
    """Measure experts that are stored in one type, a name of ``STORED``; all variants in turn."""
    stored, device = None if name == STORED[0] else cast(MXType, name), ranks.device
    wants_cores = any(kind.endswith(HOST_CORES) for kind in arguments.variants)
    num_cores = max(usable_cores() // arguments.ep - 1, 1) if wants_cores else 0
    layers = Layers(config, arguments.layers, trace_of(arguments), ranks, group, stored, num_cores)
    made = {}
    for budget, kind in product(arguments.budgets, arguments.variants):
        options = StoreOptions(budget, expert_dtype=stored)
        held = plan_budget(options, config, arguments.layers, ranks.dtype, arguments.parallel)
        assert held is not None
        aside = held.expert_bytes if kind.endswith(HOST_CORES) else 0  # that is copied to measure the link
        with memory_limit(device, held.device_bytes + aside + TABLES_BYTES):
            made[kind, budget] = layers.cached(held.slots, kind)
    steps: dict[Any, Callable[[], Any]] = {"on_demand": layers.on_demand(), "resident": layers.resident()}
    steps |= {key: step for key, (step, _) in made.items()}
    variants = {name: as_variant(step, device, graph=name != "on_demand") for name, step in steps.items()}
    calls, reports = -(-len(layers.trace) // STEPS_PER_CALL), []
    for _ in range(2):  # after the first time the caches are as full as they get
        for variant, _ in product(variants.values(), range(calls)):
            variant(0)
        reports.append({key: report_of(caches) for key, (_, caches) in made.items()})
    # Whole traces, and their mean: a text has parts of few misses and of many.
    rounds = -(-arguments.rounds // calls) * calls
    timings = time_by_protocol(variants, ranks, rounds=rounds, leads=False)
    microseconds = {name: timing.mean_ms * 1e3 / STEPS_PER_CALL for name, timing in timings.items()}
    rows: list[Row] = [
        {"stored": name, "variant": variant, "us": microseconds[variant]} for variant in ("on_demand", "resident")
    ]
    for (kind, budget), (_, caches) in made.items():
        mine = reports[1][kind, budget].since(reports[0][kind, budget])
        spent = gather(ranks.process_group, mine)
        num_bytes = max(map(link_bytes, spent)) / (calls * STEPS_PER_CALL)
        figures = cache_figures(spent, num_bytes, microseconds[kind, budget], microseconds["resident"], link)
        rows.append(
            {"stored": name, "variant": kind, "budget": budget, "slots": caches[0].num_slots,
             "x_on_demand": microseconds["on_demand"] / figures["us"]} | figures
        )  # fmt: skip
    if arguments.prompt:
        by_budget = {budget: made[arguments.variants[0], budget][1] for budget in arguments.budgets}
        prompts = prompt_rows(layers, arguments.prompt, by_budget, link, arguments.rounds)
        rows += [{"stored": name} | row for row in prompts]
    return rows


def prompt_rows(
    layers: Layers, num_tokens: int, caches: dict[float, list[ExpertCache]], link: float, rounds: int
) -> list[Row]:
    """Time prompts through the caches of each budget, and the products of one alone."""
    variants: dict[Any, Callable[[int], Any]] = {budget: layers.prompt(num_tokens, caches[budget]) for budget in caches}
    products = layers.products(num_tokens)
    variants["products"] = capture(products) if layers.device.type == "cuda" else products
    for read in variants.values():
        read(0)  # so that the slots hold what a prompt leaves there
    before = {budget: report_of(caches[budget]) for budget in caches}
    timings = time_interleaved(variants, rounds=rounds, device=layers.device, leads=False)
    microseconds = {name: timing.median_ms * 1e3 for name, timing in timings.items()}
    name, num_needed = f"prompt of {num_tokens}", len(layers.host) * layers.config.num_experts
    rows: list[Row] = [{"variant": f"{name}, products", "us": microseconds["products"]}]
    for budget, held in caches.items():
        spent = report_of(held).since(before[budget])
        num_bytes = link_bytes(spent) / spent.needed * num_needed
        figures = cache_figures([spent], num_bytes, microseconds[budget], microseconds["products"], link)
        rows.append({"variant": name, "budget": budget, "slots": held[0].num_slots} | figures)
    return rows


def cache_figures(spent: Sequence[CacheReport], num_bytes: float, us: float, alone_us: float, link: float) -> Row:
    """Time of what needs so many bytes, shares of all ranks; the bound: without a cache, or the bytes over the link.

    Example: two ranks that needed 6 and 2 experts and fetched 1 and 1: hits .75.
    """
    whole = total(spent)
    bound = max(alone_us, num_bytes / (link * 1e3))
    return {"hits": whole.hits, "precision": whole.prefetch_precision, "hosted": whole.hosted / whole.needed, "us": us,
            "bound_us": bound, "of_bound": bound / us, "link_gbs": num_bytes / (us * 1e3)}  # fmt: skip


def trace_of(arguments: argparse.Namespace) -> tuple[Tensor, Tensor | None]:
    """``(N, L, K)`` ids of the command line's shape, replayed with what was guessed of them, or made."""
    config, layers, steps = swiglu_model(arguments.model), arguments.layers, arguments.steps
    if arguments.trace is None:
        return made_trace(config, layers, steps, arguments.sticky), None
    recorded = Trace.load(arguments.trace)
    ids = resized_trace(recorded, config, layers, steps)
    return ids, resized_guesses(recorded, ids, config.num_experts)


def as_variant(step: Callable[[], Any], device: torch.device, *, graph: bool) -> Callable[[int], Any]:
    """Some steps as they are timed: a graph where the host need not know anything."""

    def steps(_: int) -> None:
        for _ in range(STEPS_PER_CALL):
            step()

    return capture(steps) if device.type == "cuda" and graph else steps


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model or a number out of range."""
    parser = suite_parser(
        "experts", __doc__, model="qwen3_30b_a3b", layers=4, budgets=BUDGETS, ep=1, device="auto", out=None
    )
    parser.add_argument("--stored", type=words, default=STORED[:1], help=f"of {','.join(STORED)}: a group of rows each")
    parser.add_argument("--variants", type=words, default=("cache",), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--trace", type=Path, help="routing.pt of bench.py speculation, to be replayed")
    parser.add_argument("--sticky", type=float, default=0.5, help="chance that an expert serves the next token, too")
    parser.add_argument("--steps", type=int, default=256, help="tokens of the trace")
    parser.add_argument(
        "--rounds", type=int, default=20, help=f"counted calls of {STEPS_PER_CALL} steps, at least; whole traces"
    )
    parser.add_argument("--prompt", type=int, default=0, help="tokens of prompts that are measured, too; 0: none are")
    arguments = parsed(parser, command_line)
    arguments.parallel.check(swiglu_model(arguments.model))
    require(arguments.prompt == 0 or arguments.ep == 1, f"ep={arguments.ep} must be 1 with --prompt")
    require(arguments.prompt == 0 or arguments.prompt > 2, f"prompt={arguments.prompt} must be 0 or at least 3")
    require_known("stored", arguments.stored, STORED)
    require_known("variants", arguments.variants, KINDS)
    for name in arguments.variants if arguments.trace is None else ():
        known = not name.startswith(PREFETCH)
        require(known, f"variants={name!r} must come with --trace: made routing says nothing of guesses")
    require(0 <= arguments.sticky < 1, f"sticky={arguments.sticky} must be at least 0 and below 1")
    return arguments
