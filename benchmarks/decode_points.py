"""One point of the decode benchmark: every variant checked against float64, then all of them timed in one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from decode_library import PREFIX
from decode_own import OWN, in_place
from decode_report import Row, figures
from decode_steps import StepRun, WeightSet, make_steps
from decode_team import Team
from decode_variants import Settings, step_runs
from points import Ranks
from torch import Tensor

from comet.tuner.timing import Variant, capture, max_over_ranks, rank_barrier, time_interleaved

FLUSH_BYTES = 2**28
# Root mean square of the error relative to float64; rounding explains a tenth of it, one wrong token in 64 the double.
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
WAITS = "makes the host wait for the device"


@dataclass(frozen=True, slots=True)
class Checked:
    """Variants that run and are right, as they are timed, with their errors; the others under ``failures``.

    ``no_graph`` says which of them are launched by the host, and why.
    """

    variants: dict[str, Variant] = field(default_factory=dict)
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    no_graph: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure_point(team: Team, sets: Sequence[WeightSet], num_tokens: int, settings: Settings) -> Row:
    """Check and time all variants at one number of tokens (collective)."""
    ranks = team.ranks
    steps = make_steps(team.config, team.layout, sets, num_tokens, settings.routing)
    exact = team.total(steps[0].exact())
    checked = Checked(failures=dict(team.failures))
    for name, run in step_runs(team, steps, settings).items():
        check_variant(name, run, exact, len(steps), team, checked)
    timings = time_interleaved(
        checked.variants,
        rounds=settings.rounds,
        barrier=flush_and_meet(ranks),
        rotate=1,
        device=ranks.device,
        slowest=max_over_ranks(ranks.device, ranks.process_group),
        warmup=3,
    )
    _, failure = team.attempt(team.check)
    if failure:
        checked.failures["after timing"] = failure
    touched = ranks.worst(sum(step.touched_bytes for step in steps) / len(steps))
    row = figures(timings, checked.accuracy, len(steps), touched, settings.roof_tbs)
    return row | {"no_graph": checked.no_graph, "failures": checked.failures}


def check_variant(name: str, run: StepRun, exact: Tensor, num_steps: int, team: Team, checked: Checked) -> None:
    """Run a variant once, compare it, and make of it what is timed (collective)."""
    ranks = team.ranks
    output, failure = team.attempt(partial(run, 0))
    if output is not None:
        accuracy, failure = judge(name, output, exact, team)
    timed: tuple[Variant, str] | None = None
    if not failure:
        form = partial(timed_form, run, num_steps, ranks.device, may_wait=name.startswith(PREFIX))
        timed, failure = team.attempt(form)
    if failure or timed is None:
        checked.failures[name] = failure
        return
    checked.variants[name], checked.accuracy[name] = timed[0], accuracy
    if timed[1]:
        checked.no_graph[name] = timed[1]


def judge(name: str, output: Tensor, exact: Tensor, team: Team) -> tuple[tuple[float, float], str]:
    """Error and cosine of the worst rank, and why the output cannot be right ("" if it can; collective).

    Of ``local`` the sum over ranks is compared, of ``OWN`` the outputs of all ranks side by side, and ``comet`` has to
    give all ranks the same bits.
    """
    ranks = team.ranks
    if name in OWN:
        output = team.total(in_place(output, exact, team.layout))
    error, cosine = compare(team.total(output.double()) if name == "local" else output, exact)
    limit = TOLERANCE[ranks.dtype]
    is_wrong = ranks.worst(float(not error <= limit))  # also when it is no number
    accuracy = (ranks.worst(error), -ranks.worst(-cosine))
    if is_wrong:
        return accuracy, f"error {accuracy[0]:.3g} relative to float64 is above {limit}"
    if name == "comet" and not team.is_alone:
        first = output.clone()
        dist.broadcast(first, src=0, group=ranks.process_group)
        if ranks.worst(float(not torch.equal(first, output))):
            return accuracy, "ranks have different bits"
    return accuracy, ""


def timed_form(run: StepRun, num_steps: int, device: torch.device, *, may_wait: bool) -> tuple[Variant, str]:
    """What is timed, a step on every set of weights, as a CUDA graph; where that cannot be, as it is, and why."""
    every_step = partial(run_all, run, num_steps)
    if device.type != "cuda":
        return every_step, ""
    if may_wait and host_waits(run):
        return every_step, WAITS
    return capture(every_step, rotate=1), ""


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


def run_all(run: StepRun, num_steps: int, _: int) -> None:
    """One step on every set of weights: what is timed."""
    for index in range(num_steps):
        run(index)


def flush_and_meet(ranks: Ranks) -> Callable[[], None]:
    """Read more than L2 holds, then wait, on the device, for all ranks."""
    flush = torch.empty(FLUSH_BYTES // 4 if ranks.device.type == "cuda" else 4, device=ranks.device)
    meet = rank_barrier(ranks.device, ranks.process_group)

    def barrier() -> None:
        flush.sum()
        meet()

    return barrier


def compare(output: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square of the error relative to the exact output, and the least cosine similarity of a token.

    Example: output [[3, 4]] against [[3, 5]]: sqrt(1 / 34) = 0.1715 and 29 / sqrt(25 * 34) = 0.9947.
    """
    error = (output.double() - exact).norm() / exact.norm()
    cosine = torch.cosine_similarity(output.double(), exact, dim=1).min()
    return error.item(), cosine.item()
