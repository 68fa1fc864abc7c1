"""Whole decode steps: tokens/s over context lengths, Comet with and without a CUDA graph, and transformers.

    python benchmarks/bench.py generate --model qwen3_30b_a3b --layers 4 --contexts 128,1024,4096,16384
    torchrun --nproc-per-node 4 benchmarks/bench.py generate --ep 4 --layers 4
    python benchmarks/bench.py generate --device cpu --model tiny --layers 1 --contexts 8,40

A timed call takes ``--steps`` decode steps (embedding, all layers, logits, most probable token) from the end of a
context of random keys and values; a step's time is its part of the call. All paths run interleaved
(``comet.tuner.timing``) on the same random weights, made on the device:

    comet, comet_graph                 Comet's GPT, launched kernel by kernel, and replayed from a CUDA graph
    hf_comet, hf_comet_graph           transformers' Qwen3-MoE with Comet's experts (its attention, its small kernels)
    hf_grouped_mm, hf_batched_mm, ...  the same with transformers' own experts; its loop over experts (hf_eager) asks
                                       the device which of them were hit, so it cannot be captured
    hf_generate                        ``model.generate`` with static cache and default experts, not compiled: the
                                       compiler takes minutes. Its preparations count, once for all steps of a call

Over ranks (``--ep``, ``--tp``, with torchrun) the experts are shared, all else is on every rank, and Comet's GPT runs
alone: the library's models hold all experts. The slowest rank counts, and all have to get the same bits.

Bytes are those of the weights a step touches (each distinct expert once; over ranks, of the rank that touches the most)
and of the keys and values of the context; the roofline is a read measured in the same run. ``cosine`` compares the
logits of the first step with those of ``comet``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from comet.config import require
from comet.decode import MAX_DECODE_TOKENS, FrozenExperts
from comet.graphed.step import Passes
from comet.models.cache import KeyValueCache
from comet.models.gpt import GPT
from comet.tuner.timing import Timing
from comet.utils.graphs import WARM_CALLS, GraphMode

from baselines.library import Library, fill_library, library_version, make_library_model, rewind_library
from lib.gpt import VOCABULARY, make_gpt, model_config
from lib.ranks import Ranks, differs_over_ranks
from lib.report import Row, over
from lib.suite import Checked, Point, Suite, option
from lib.timing import read_roofline_tbs

COMET, LOOP = "comet", "eager"
STOCK = ("grouped_mm", "batched_mm", LOOP)  # transformers' own experts; the last is a loop that asks the device


class Stepwise:
    """Steps taken one after the other, ``(B,)`` tokens to ``(B, V)`` logits; the next token is chosen on the device.

    ``rewind`` stands at the end of the context again, without waiting. ``decode`` appends ``(B,)`` tokens, then the
    most probable ones, and returns the choice of the last of ``num_steps``.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], rewind: Callable[[], object]) -> None:
        self.step, self.rewind = step, rewind

    def decode(self, ids: Tensor, num_steps: int) -> Tensor:
        for _ in range(num_steps):
            ids = self.step(ids).argmax(-1)
        return ids


StepPath = Stepwise | Library  # one way to take decode steps


class Paths:
    """Makes every path over the weights of one model, from ``make_gpt``."""

    def __init__(self, gpt: GPT) -> None:
        self.gpt = gpt
        self._library_model = cache(partial(make_library_model, gpt))

    def makers(self, contents: Tensor, num_places: int, *, with_graphs: bool) -> dict[str, Callable[[], StepPath]]:
        """Functions that make each path, by name; one may fail without the others.

        Those of transformers are only where it is installed and this rank holds all experts. The context's keys and
        values are ``contents (2, L, B, G, C, w)``; ``num_places`` is how many positions there must be room for.
        """
        modes: Mapping[str, GraphMode] = {"_graph": "on", "": "off"} if with_graphs else {"": "off"}
        found: dict[str, Callable[[], StepPath]] = {}
        for suffix, mode in modes.items():
            found[f"{COMET}{suffix}"] = partial(self._comet, contents, num_places, mode)
        if library_version() is None or self.gpt.moe_layers()[0].layout.world_size > 1:
            return found
        for experts in (COMET, *STOCK):
            for suffix, mode in modes.items():
                if mode == "off" or experts != LOOP:
                    found[f"hf_{experts}{suffix}"] = partial(self._library, experts, contents, num_places, mode)
        found["hf_generate"] = partial(self._generate, contents, num_places)
        return found

    def check(self) -> None:
        for layer in self.gpt.moe_layers():
            assert isinstance(layer.experts, FrozenExperts), "the model is ready to generate"
            layer.experts.runner.check()

    def _comet(self, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        gpt, held = self.gpt, filled_cache(self.gpt, contents, num_places)
        passes = Passes(lambda ids, drafts: gpt.extend(ids, held).logits, cuda_graph=cuda_graph)
        return Stepwise(lambda ids: passes(ids[:, None])[:, 0], partial(held.lengths.fill_, contents.shape[4]))

    def _library(self, experts: str, contents: Tensor, num_places: int, cuda_graph: GraphMode) -> StepPath:
        from comet.integrations import hf

        decoder = hf.StaticDecoder(self._library_model(experts), contents.shape[2], num_places, cuda_graph=cuda_graph)
        fill_library(decoder.cache, contents)

        def rewind() -> None:
            decoder.skip_to(contents.shape[4], torch.zeros_like(decoder.pads))
            rewind_library(decoder.cache, contents.shape[4])

        return Stepwise(decoder.append, rewind)

    def _generate(self, contents: Tensor, num_places: int) -> StepPath:
        from transformers import StaticCache

        model = self._library_model(None)
        static = StaticCache(config=model.config, max_cache_len=num_places)
        fill_library(static, contents)
        return Library(model, static, contents)


def filled_cache(gpt: GPT, contents: Tensor, num_places: int) -> KeyValueCache:
    """Comet's attention memory that holds the context ``(2, L, B, G, C, w)``."""
    _, _, batch, _, positions, _ = contents.shape
    held = KeyValueCache(gpt.config, num_sequences=batch, length=num_places, dtype=gpt.dtype, device=contents.device)
    held.keys[:, :, :, :positions], held.values[:, :, :, :positions] = contents
    held.lengths.fill_(positions)
    return held


COLUMNS = (
    "model", "layers", "ep", "tp", "batch", "context",
    "path", "ms", "tokens_per_s", "mbytes", "tbs", "of_roofline", "cosine", "failure",
)  # fmt: skip


def path_rows(
    timings: Mapping[str, Timing],
    cosines: Mapping[str, float],
    failures: Mapping[str, str],
    *,
    steps: int,
    batch: int,
    num_bytes: float,
) -> list[Row]:
    """One row per path, the fastest first, those that failed last; ``steps`` of a call of ``batch`` sequences.

    Example: comet 4 ms for 8 steps of 2 sequences that touch 1e9 bytes each: 0.5 ms per step, 4000 tokens/s, 2 TB/s.
    """
    found = []
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
        step = timing.of_one(steps)
        row: Row = {"path": name, "ms": step.median_ms, "tokens_per_s": batch * 1e3 / step.median_ms}
        row |= {"mbytes": num_bytes / 1e6, "tbs": num_bytes / (step.median_ms * 1e9)}
        row |= {"cosine": cosines.get(name), "failure": None}
        found.append(row | {"quantiles": asdict(step)})
    for name, failure in failures.items():
        found.append(
            dict.fromkeys(COLUMNS[COLUMNS.index("path") :])
            | {"path": name, "cosine": cosines.get(name), "failure": failure}
        )
    return found


ALIGNMENT = 64  # positions a cache has room for
LEAST_COSINE = 0.9  # experts of nearly equal probability change places where the router is rounded differently


@torch.no_grad()
def measure_context(paths: Paths, context: int, asked: Run, roofline_tbs: float, ranks: Ranks) -> list[Row]:
    gpt = paths.gpt
    device, config, batch = gpt.rotary.device, gpt.config, asked.batch
    generator = torch.Generator(device).manual_seed(context)
    shape = (2, config.num_layers, batch, config.num_kv_heads, context, config.head_width)
    contents = torch.randn(shape, generator=generator, device=device, dtype=gpt.dtype)
    first = torch.randint(config.vocab_size, (batch,), generator=generator, device=device)
    num_places = room(context, asked.steps)
    ready, cosines, failures = prepare(paths, contents, first, num_places, ranks)

    def rewind() -> None:
        for path in ready.values():
            path.rewind()

    checked = Checked(ranks)
    checked.variants |= {
        name: lambda _, path=path: path.decode(first, asked.steps)  # type: ignore[misc]
        for name, path in ready.items()
    }
    timings = checked.time(rounds=asked.rounds, opening=rewind, leads=False, warmup=1)
    num_bytes = ranks.worst(step_bytes(gpt, contents, first, num_places, asked.steps))
    paths.check()
    found = path_rows(timings, cosines, failures, steps=asked.steps, batch=batch, num_bytes=num_bytes)
    return [row | {"of_roofline": over(row["tbs"], roofline_tbs)} for row in found]


def room(context: int, steps: int) -> int:
    """Positions of a cache: the context and the steps from it, those of the warm-up too."""
    return -(-(context + max(steps, WARM_CALLS + 2)) // ALIGNMENT) * ALIGNMENT


def prepare(
    paths: Paths, contents: Tensor, first: Tensor, num_places: int, ranks: Ranks
) -> tuple[dict[str, StepPath], dict[str, float], dict[str, str]]:
    """Every path that works, warm and captured; the cosine of its first logits and Comet's; what failed and why."""
    ready: dict[str, StepPath] = {}
    cosines: dict[str, float] = {}
    reference: Tensor | None = None
    checked = Checked(ranks, paths.gpt.moe_layers()[0].group.workspace)
    makers = paths.makers(contents, num_places, with_graphs=contents.is_cuda)

    def judge(name: str, made: tuple[StepPath, Tensor | None]) -> str:
        nonlocal reference
        logits = made[1]
        if logits is None:
            return ""
        reference = logits if name == COMET else reference
        if reference is not None:
            cosines[name] = torch.cosine_similarity(logits.double(), reference.double(), dim=1).min().item()
        if differs_over_ranks(logits, ranks):
            return "ranks have different bits"
        is_near = cosines.get(name, 1.0) >= LEAST_COSINE
        return "" if is_near else f"its logits are not Comet's: cosine {cosines[name]:.4f}"

    for name in sorted(makers, key=lambda name: name != COMET):
        made = checked.value(name, partial(warm_path, makers[name], first), partial(judge, name))
        if made is not None:
            ready[name] = made[0]
    return ready, cosines, checked.failures


def warm_path(maker: Callable[[], StepPath], first: Tensor) -> tuple[StepPath, Tensor | None]:
    """A path after its first steps, and the logits of the very first, where it shows them."""
    path = maker()
    path.rewind()
    logits = path.step(first) if isinstance(path, Stepwise) else None
    path.decode(first, WARM_CALLS + 1)
    return path, logits


def step_bytes(gpt: GPT, contents: Tensor, first: Tensor, num_places: int, steps: int) -> float:
    """Bytes a rank touches in a step on average: weights (distinct experts, rows of the embedding), keys and values."""
    layout = gpt.moe_layers()[0].layout
    mine = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    _, _, batch, _, positions, _ = contents.shape
    ids, touched, held = first, 0, filled_cache(gpt, contents, num_places)
    for _ in range(steps):
        output = gpt.extend(ids[:, None], held)
        touched += int((output.expert_load[:, mine] > 0).sum())
        ids = output.logits[:, 0].argmax(-1)
    embedding, (w1, w2) = gpt.embedding.weight, gpt.moe_layers()[0].expert_weights()
    dense = sum(weight.nbytes for weight in gpt.dense_parameters()) - embedding.nbytes + batch * embedding[0].nbytes
    context = contents.nbytes * (1 + (steps + 1) / 2 / positions)
    return dense + touched / steps * (w1[0].nbytes + w2[0].nbytes) + context


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    COLUMNS = COLUMNS

    model: str = option("qwen3_30b_a3b", of=VOCABULARY)
    layers: int = 4
    contexts: tuple[int, ...] = option((128, 1024, 4096, 16384), "positions before the first timed step")
    batch: int = option(1, "sequences that are extended at once, on all ranks")
    steps: int = option(16, "decode steps of a timed call")
    rounds: int = 5
    out: Path | None = Path("outputs/bench_generate")

    def check(self) -> None:
        most = MAX_DECODE_TOKENS
        require(self.batch <= most, f"batch={self.batch} must be at most {most}, which warp decode takes")
        self.check_models([self.model])

    def facts(self, ranks: Ranks) -> Row:
        found = {"read_roofline_tbs": read_roofline_tbs(ranks), "transformers": library_version(), "steps": self.steps}
        return super().facts(ranks) | found

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        longest = room(max(self.contexts), self.steps)
        config = model_config(self.model, self.layers, longest, VOCABULARY[self.model])
        group = ranks.make_group(config.moe, self.parallel, MAX_DECODE_TOKENS)
        gpt = make_gpt(config, group)
        facts["parameters"], paths = gpt.num_parameters(), Paths(gpt)
        keys: Row = {"model": config.name, "layers": self.layers, "ep": self.ep, "tp": self.tp, "batch": self.batch}
        for context in self.contexts:
            measure = partial(measure_context, paths, context, self, facts["read_roofline_tbs"], ranks)
            yield Point(keys | {"context": context}, measure, group.workspace)
        group.close()
