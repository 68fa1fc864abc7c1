"""Decode steps of a layer: microseconds and TB/s of touched weights, warp decode against every other way.

    python benchmarks/bench.py decode --models qwen3_30b_a3b,mixtral_8x7b --tokens 1,2,4,8,16,32,64,128,256
    python benchmarks/bench.py decode --weights bf16,fp8,mxfp8,mxfp4 --variants comet,triton
    torchrun --nproc-per-node 4 benchmarks/bench.py decode --ep 4 --tokens 1,8,32
    torchrun --nproc-per-node 2 benchmarks/bench.py decode --ep 2 --tokens 2,16,64 --variants comet,local,own
    python benchmarks/bench.py decode --device cpu --models tiny --tokens 1,3

One timed call runs a step on each of several weight sets, so that L2 does not flatter; a step's time is a part of it.
On a GPU the call is a CUDA graph, but for variants that wait for the device (``no_graph`` names them). All variants run
interleaved (``comet.tuner.timing``) after their output was compared with float64.

On one GPU *comet* is warp decode; *torch* and *triton* are expert-centric (sort, pad, grouped GEMMs, weighted sum, no
host sync), *fused* is Comet's fused path. Over ranks *comet* has the all-reduce inside; *local* is a rank's part alone,
*local_nccl* that and an all-reduce of ``torch.distributed``; of *fused* every rank takes its slice of the tokens and
gathers the results.

``--tokens`` are those of a step. Over ranks all of them hold these; but for *own*, *own_nccl* and *own_fused*
(data-parallel attention) each rank brings its share, of 16 over 2 ranks 8 each, and gets the output of that: what they
take longer than *local* is the cost of bringing tokens together and sums back. *own* is
``RankDecode(replicated=False)``; *own_nccl* an all-gather by NCCL, the local step and a reduce-scatter.

Quantised ``--weights``: bytes are those of elements and scales, errors relative to the quantised numbers; the other
paths, which take no such weights, run on the same numbers in the dtype of the tokens (block FP8 rounded to it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from comet.config import require
from comet.decode import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights, warp_decode
from comet.decode.runners import rank_slice, run_path_on_slices
from comet.kernels.decode.step import Batch
from comet.layout import ExpertLayout, RoutedTokens
from comet.tuner.timing import Timing, Variant, capture

from baselines.decode import EXPERT_CONFIGS, Library, find_library, torch_experts, triton_experts
from lib.decode import OWN, PREFIX, WEIGHTS, Step, StepRun, Team, WeightSet, make_set, make_steps, open_team
from lib.ranks import Ranks, differs_over_ranks, release
from lib.report import Row, over
from lib.shapes import ROUTINGS, swiglu_model
from lib.suite import Checked, Point, Suite, option
from lib.timing import read_roofline_tbs

CENTRIC = "triton"
OTHERS = ("torch", "fused", "local", "local_nccl", *OWN)
ON_ONE_GPU = ("comet", "torch", "triton", "transformers", "fused")
OVER_RANKS = ("comet", "local", "local_nccl", "fused", *OWN)
MANY_TOKENS = ("torch", "triton", "transformers", "fused", "own_fused")  # variants for more than MAX_DECODE_TOKENS
SETS = 4  # for each rank, which holds a part of the experts: a call has as many bytes, and more steps that absorb skew
FLUSH_BYTES = 2**28  # read before each call, more than L2 holds
# Root mean square of the error relative to float64; rounding explains a tenth of it, one wrong token in 64 the double.
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
WAITS = "makes the host wait for the device"


def own_runs(team: Team, steps: Sequence[Step], variants: Sequence[str]) -> dict[str, StepRun]:
    """The variants of ``OWN`` that are asked for; without warp decode where W equal shares have no room in it."""
    num_tokens, ranks, group = len(steps[0].tokens), team.layout.world_size, team.ranks.process_group
    mine = share_of(num_tokens, team.layout)
    slots = -(-num_tokens // ranks)  # a step has room for as many of every rank
    shares = [Batch(step.tokens[mine], step.ids[mine], step.routing_weights[mine]) for step in steps]
    # NCCL gathers equally many of every rank: the last tokens go to no expert.
    missing = (0, 0, 0, slots - len(shares[0].tokens))
    filled = [
        Batch(pad(share.tokens, missing), pad(share.ids, missing, value=-1), pad(share.routing_weights, missing))
        for share in shares
    ]
    step, rows = steps[0], min(slots * ranks, MAX_DECODE_TOKENS)
    scratch, other_scratch = (
        DecodeScratch.create(step.weights, team.config.top_k, step.tokens.dtype, max_tokens=rows) for _ in range(2)
    )

    def own(index: int) -> Tensor:
        return team.decode(slots, replicated=False)(*shares[index], steps[index].weights, scratch=scratch)

    def own_nccl(index: int) -> Tensor:
        """One launch of NCCL gathers tokens, ids and routing weights, the next one scatters the sums."""
        batch = Batch(*(tensor.new_empty(ranks * len(tensor), tensor.shape[1]) for tensor in filled[index]))
        with dist._coalescing_manager(group):
            for gathered, part in zip(batch, filled[index], strict=True):
                dist.all_gather_into_tensor(gathered, part, group=group)
        sums = warp_decode(*batch, steps[index].weights, scratch=other_scratch)
        output = torch.empty_like(filled[index].tokens)
        dist.reduce_scatter_tensor(output, sums, group=group)
        return output[: mine.stop - mine.start]

    def own_fused(index: int) -> Tensor:
        assert team.fused is not None
        weights = steps[index].set.plain
        return team.fused(RoutedTokens(*shares[index]), weights.w1, weights.w2)

    has_room = slots * ranks <= MAX_DECODE_TOKENS
    found: dict[str, StepRun] = {"own_nccl": own_nccl} if has_room else {}
    if team.group is not None:
        found |= {"own": own, "own_fused": own_fused} if has_room else {"own_fused": own_fused}
    return {name: found[name] for name in OWN if name in found and name in variants}


def share_of(num_tokens: int, layout: ExpertLayout) -> slice:
    """Which tokens of a batch this rank brings; of 5 over 4 ranks: 0..1, 2..3, 4, none."""
    return rank_slice(0, num_tokens, layout.rank, layout.world_size)


def step_runs(
    team: Team, steps: Sequence[Step], variants: Sequence[str], library: Library | None, most: int
) -> dict[str, StepRun]:
    """All variants that take so many tokens; past ``MAX_DECODE_TOKENS`` there is no warp decode.

    Args:
        library: ``None`` where none is wanted.
        most: Tokens of the largest step of the run.
    """
    found: dict[str, StepRun] = {}
    if len(steps[0].tokens) <= MAX_DECODE_TOKENS:
        found |= decode_runs(team, steps, variants, min(most, MAX_DECODE_TOKENS))
    if "torch" in variants:
        found["torch"] = lambda index: torch_experts(*plain(steps[index]))
    for number, config in enumerate(EXPERT_CONFIGS if "triton" in variants else ()):
        found[f"triton{number}"] = lambda index, config=config: triton_experts(*plain(steps[index]), config)  # type: ignore[misc]
    if library is not None:
        found |= library.runs(steps)
    if "fused" in variants and team.group is not None:
        found["fused"] = partial(run_fused, team, steps)
    if not team.is_alone:
        found |= own_runs(team, steps, variants)
    return found


def decode_runs(team: Team, steps: Sequence[Step], variants: Sequence[str], most: int) -> dict[str, StepRun]:
    tokens, weights = steps[0].tokens, steps[0].weights
    scratch, other_scratch = (
        DecodeScratch.create(weights, team.config.top_k, tokens.dtype, max_tokens=len(tokens)) for _ in range(2)
    )

    def local(index: int) -> Tensor:
        return warp_decode(*routed(steps[index]), scratch=scratch)

    def over_ranks(index: int) -> Tensor:
        return team.decode(most, replicated=True)(*routed(steps[index]), scratch=other_scratch)

    found: dict[str, StepRun] = {"local": local, "local_nccl": lambda index: team.total(local(index))}
    if team.is_alone or team.group is not None:
        found = {"comet": local if team.is_alone else over_ranks} | found
    return {name: run for name, run in found.items() if name in variants}


def run_fused(team: Team, steps: Sequence[Step], index: int) -> Tensor:
    """Comet's fused path; a rank alone has no slices to take or to gather."""
    step, path, group = steps[index], team.fused, team.group
    assert path is not None
    assert group is not None
    if team.is_alone:
        return path(*plain(step))
    compute = partial(path, w1=step.set.plain.w1, w2=step.set.plain.w2)
    return run_path_on_slices(plain(step)[0], compute, group)


def routed(step: Step) -> tuple[Tensor, Tensor, Tensor, DecodeWeights]:
    return step.tokens, step.ids, step.routing_weights, step.weights


def plain(step: Step) -> tuple[RoutedTokens, Tensor, Tensor]:
    return RoutedTokens(step.tokens, step.ids, step.routing_weights), step.set.plain.w1, step.set.plain.w2


def figures(
    timings: Mapping[str, Timing],
    accuracy: Mapping[str, tuple[float, float]],
    num_steps: int,
    touched_bytes: float,
    roofline_tbs: float,
) -> Row:
    """One row: microseconds of a step per variant, rate and fraction of the roofline of warp decode, and errors.

    Example: comet 0.4 ms for 4 steps that touch 2e8 bytes each, triton1 0.8 ms, roofline 4 TB/s: 100 us, 2 TB/s, 0.5 of
    the roofline, 2 x triton. With local 0.38 ms: added 5 us; with own 0.42 ms, too: own added 10 us.
    """
    times_us = {name: timing.median_ms * 1e3 / num_steps for name, timing in timings.items()}
    library = [name for name in times_us if name.startswith(PREFIX)]
    centric, fastest = (
        min((name for name in times_us if name.startswith(prefix)), key=times_us.__getitem__, default="")
        for prefix in (CENTRIC, PREFIX)
    )
    shown = {"comet": "comet", "triton": centric} | {name: name for name in (*OTHERS, *library)}
    row: Row = {f"{name}_us": times_us.get(source) for name, source in shown.items()}
    local_us, best_us = row["local_us"], row["comet_us"]
    for added, over_ranks_us in (("added_us", row["comet_us"]), ("own_added_us", row["own_us"])):
        row[added] = None if over_ranks_us is None or local_us is None else over_ranks_us - local_us
    tbs = over(touched_bytes / 1e6, best_us)
    row |= {"best_us": best_us, "mbytes": touched_bytes / 1e6, "tbs": tbs, "of_roofline": over(tbs, roofline_tbs)}
    for name, source in {"triton": centric, "torch": "torch", "fused": "fused", "transformers": fastest}.items():
        row[f"x_{name}"] = over(times_us.get(source), best_us)
    for name, source in (("comet", "comet"), ("triton", centric), ("torch", "torch")):
        row[f"{name}_error"], row[f"{name}_cosine"] = accuracy.get(source, (None, None))
    quantiles = {name: asdict(timing) for name, timing in timings.items()}
    return row | {"times_us": times_us, "quantiles": quantiles, "accuracy": dict(accuracy)}


class CheckedSteps(Checked):
    """Variants with the ``accuracy`` of each; ``no_graph`` says which are launched by the host, and why."""

    def __init__(self, team: Team) -> None:
        super().__init__(team.ranks, team.pool, team.failures)
        self.team = team
        self.accuracy: dict[str, tuple[float, float]] = {}
        self.no_graph: dict[str, str] = {}

    def check(self, name: str, run: StepRun, exact: Tensor, num_steps: int) -> None:
        """Run a variant once, compare it, and make of it what is timed (collective)."""
        accuracy = (0.0, 0.0)

        def right(output: Tensor) -> str:
            nonlocal accuracy
            accuracy, failure = judge(name, output, exact, self.team)
            return failure

        if self.value(name, partial(run, 0), right) is None:
            return
        form = partial(timed_form, run, num_steps, self.ranks.device, may_wait=name.startswith(PREFIX))
        timed = self.value(name, form)
        if timed is not None:
            self.variants[name], self.accuracy[name] = timed[0], accuracy
            self.no_graph |= {name: timed[1]} if timed[1] else {}


@torch.no_grad()
def measure_point(
    team: Team, sets: Sequence[WeightSet], num_tokens: int, asked: Run, library: Library | None, roofline_tbs: float
) -> Row:
    ranks = team.ranks
    steps = make_steps(team.config, team.layout, sets, num_tokens, asked.routing)
    exact = team.total(steps[0].exact())
    checked = CheckedSteps(team)
    for name, run in step_runs(team, steps, asked.chosen, library, max(asked.tokens)).items():
        checked.check(name, run, exact, len(steps))
    flush = torch.empty(FLUSH_BYTES // 4 if ranks.device.type == "cuda" else 4, device=ranks.device)
    timings = checked.time(rounds=asked.rounds, opening=flush.sum, leads=False)
    touched = ranks.worst(sum(step.touched_bytes for step in steps) / len(steps))
    team.check()  # may raise on one rank alone: no collective may follow
    row = figures(timings, checked.accuracy, len(steps), touched, roofline_tbs)
    return row | {"no_graph": checked.no_graph, "failures": checked.failures}


def judge(name: str, output: Tensor, exact: Tensor, team: Team) -> tuple[tuple[float, float], str]:
    """Error and cosine of the worst rank, and why the output cannot be right ("" if it can; collective).

    Of ``local`` the sum over ranks is compared, of ``OWN`` the outputs of all ranks side by side, and ``comet`` has to
    give all ranks the same bits.
    """
    ranks = team.ranks
    if name in OWN:
        whole = torch.zeros_like(exact)
        whole[share_of(len(exact), team.layout)] = output.double()
        output = team.total(whole)
    error, cosine = compare(team.total(output.double()) if name == "local" else output, exact)
    error = math.inf if math.isnan(error) else error  # the worst of all ranks
    limit = TOLERANCE[ranks.dtype]
    accuracy = (ranks.worst(error), -ranks.worst(-cosine))
    if accuracy[0] > limit:
        return accuracy, f"error {accuracy[0]:.3g} relative to float64 is above {limit}"
    return accuracy, "ranks have different bits" if name == "comet" and differs_over_ranks(output, ranks) else ""


def timed_form(run: StepRun, num_steps: int, device: torch.device, *, may_wait: bool) -> tuple[Variant, str]:
    """A step on every set of weights as a CUDA graph; where that cannot be, as it is, and why."""

    def every_step(_: int) -> None:
        for index in range(num_steps):
            run(index)

    if device.type != "cuda":
        return every_step, ""
    if may_wait and host_waits(run):
        return every_step, WAITS
    return capture(every_step), ""


def host_waits(run: StepRun) -> bool:
    """Whether a step makes the host wait for the device; found out before a graph is tried, and broken, with it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(0)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def compare(output: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square of the error relative to the exact output, and the least cosine similarity of a token.

    Example: output [[3, 4]] against [[3, 5]]: sqrt(1 / 34) = 0.1715 and 29 / sqrt(25 * 34) = 0.9947.
    """
    error = (output.double() - exact).norm() / exact.norm()
    cosine = torch.cosine_similarity(output.double(), exact, dim=1).min()
    return error.item(), cosine.item()


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    models: tuple[str, ...] = ("qwen3_30b_a3b",)
    weights: tuple[str, ...] = option(WEIGHTS[:1], "(CPU: float32)", of=WEIGHTS)
    tokens: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64),
        "of a step; over ranks equal on all of them, or (own, own_nccl, own_fused) each rank's share of them",
    )
    routing: str = option("uniform", of=ROUTINGS)
    variants: tuple[str, ...] = option((), f"{','.join(ON_ONE_GPU)}; over ranks {','.join(OVER_RANKS)}; all by default")
    rounds: int = 30
    out: Path | None = Path("outputs/bench_decode")

    @property
    def known(self) -> tuple[str, ...]:
        return ON_ONE_GPU if self.parallel.world_size == 1 else OVER_RANKS

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.variants or self.known

    def check(self) -> None:
        self.check_models(self.models)
        for name in self.chosen:
            ranks = f"ep={self.ep} x tp={self.tp}"
            require(name in self.known, f"variants={name!r} must be one of {', '.join(self.known)} for {ranks}")
        for number in self.tokens:
            require(
                number <= MAX_DECODE_TOKENS or any(name in MANY_TOKENS for name in self.chosen),
                f"tokens={number} must be at most {MAX_DECODE_TOKENS} for variants={','.join(self.chosen)}",
            )

    def facts(self, ranks: Ranks) -> Row:
        library = find_library() if "transformers" in self.chosen else None
        return super().facts(ranks) | {
            "read_roofline_tbs": read_roofline_tbs(ranks),
            "sets": SETS * self.parallel.world_size,
            "transformers": None if library is None else library.version,
        }

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        most, wants_fused = max(self.tokens), "fused" in self.chosen
        library = find_library() if facts["transformers"] else None
        for name in self.models:
            config = swiglu_model(name)
            with open_team(config, self.parallel, max_tokens=most, wants_fused=wants_fused, ranks=ranks) as team:
                for kind in self.weights:
                    make = partial(make_set, team.config, team.layout, ranks.device, ranks.dtype, kind=kind)
                    sets = [make(seed=seed) for seed in range(facts["sets"])]
                    for num_tokens in self.tokens:
                        keys: Row = {"model": name, "weights": kind, "ep": self.ep, "tp": self.tp}
                        keys |= {"tokens": num_tokens, "routing": self.routing}
                        roofline = facts["read_roofline_tbs"]
                        yield Point(
                            keys, partial(measure_point, team, sets, num_tokens, self, library, roofline), team.pool
                        )
                    del sets
                    release(ranks)
