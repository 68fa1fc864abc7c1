"""The ``modular`` task: which parts go together; one pair timed against the fused layer, with a torch trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from comet.comm.base import settle
from comet.comm.handshake import largest
from comet.config import MoEConfig, require
from comet.errors import UnavailableError
from comet.jobs.config import MeasureConfig, ModularJob
from comet.launch.distributed import LaunchContext
from comet.launch.tasks.registry import did_you_mean
from comet.layer.group import ExpertGroup
from comet.layer.paths import CollectivePath, make_path
from comet.modular import EXPERTS, PREPARE_FINALIZE, ModularMoE
from comet.modular.composer import incompatibility
from comet.quantization.formats import WEIGHT_TYPES
from comet.schedule.choice import Problem
from comet.tuner.layers import NUM_INPUTS, make_group, make_inputs, problems_of
from comet.tuner.timing import time_interleaved
from comet.utils.tables import aligned

Call = Callable[[int], Tensor]
TRACE = "trace.json"


def pairs(config: MoEConfig, group: ExpertGroup) -> list[dict[str, Any]]:
    """All pairs of the registries for this layer over these ranks, each part as made by default (collective).

    ``weights`` are the types of weights that a pair computes with; ``reason`` says why there are none.
    """
    made: dict[type, Any] = {}  # a part, or the reason why it cannot be made here
    kinds: Sequence[Any] = (*EXPERTS, *PREPARE_FINALIZE)
    for kind in kinds:
        try:
            made[kind] = kind(config, group)
        except (ValueError, UnavailableError) as error:
            made[kind] = str(error)
    found = []
    for left, right in product(PREPARE_FINALIZE, EXPERTS):
        parts = made[left], made[right]
        lacking = next((part for part in parts if isinstance(part, str)), None)
        reasons = {kind.__name__: lacking or incompatibility(*parts, kind) for kind in WEIGHT_TYPES}
        weights = [name for name, reason in reasons.items() if reason is None]
        pair = {"prepare_finalize": left.__name__, "experts": right.__name__, "weights": weights}
        found.append(pair | {"reason": None if weights else next(iter(reasons.values()))})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """One line for each pair: both names, then the types of weights, or why they do not fit."""
    rows = []
    for name, experts, weights, reason in (pair.values() for pair in found):
        rows.append((name, experts, f"no: {reason}" if reason else f"fits: {', '.join(weights)} weights"))
    return "\n".join(aligned(rows, left=(0, 1, 2)))


def modular_job(config: ModularJob, context: LaunchContext) -> dict[str, Any]:
    """Print all pairs and run the one that was asked for (collective).

    Returns:
        The pairs, and the times and the trace of ``modular.pair``. Rank 0 has printed a table and, as the last line,
        these facts.
    """
    (problem,) = modular_problems(config, context.device)
    kinds = find_parts(config)
    group = make_group(config, problem, context, max_tokens=problem.num_tokens)
    found = pairs(problem.moe, group)
    if context.rank == 0:
        sys.stdout.write(f"{table(found)}\n")
        sys.stdout.flush()
    facts: dict[str, Any] = {"task": "modular", "pairs": found}
    if kinds:
        calls = _calls(kinds, problem, group, config)
        facts |= _measured(calls, group, config.modular.rounds)
        facts["trace"] = _trace(calls, Path(config.output_dir), context)
    group.close()
    if context.rank == 0:
        sys.stdout.write(f"{_told(facts)}{json.dumps(facts)}\n")
    return facts


def modular_problems(config: ModularJob, device: torch.device) -> list[Problem]:
    """The one call whose parts are matched; raises ``ValueError`` where the settings of the pair break a rule."""
    find_parts(config)
    tokens = (config.modular.tokens,) if config.modular.tokens else ()
    return problems_of(MeasureConfig(tokens=tokens), config, [config.parallel], device)


def find_parts(config: ModularJob) -> list[type]:
    """The two classes of ``modular.pair``, none where it is empty.

    Raises:
        ValueError: For a wrong name, or where the trace would replace another one.
    """
    found: list[type] = []
    registries: Sequence[Any] = (PREPARE_FINALIZE, EXPERTS)
    for name, known in zip(config.modular.pair, registries, strict=False):
        names = {kind.__name__: kind for kind in known}
        near = did_you_mean(name, names)
        require(name in names, f"modular.pair: {name!r} must be one of {', '.join(names)}{near}")
        found.append(names[name])
    is_free = config.overwrite or not found or not (Path(config.output_dir) / TRACE).exists()
    ways = "overwrite=true replaces it, or choose another output_dir"
    require(is_free, f"output_dir={config.output_dir!r} holds the {TRACE} of an earlier run: {ways}")
    return found


def _calls(kinds: list[type], problem: Problem, group: ExpertGroup, config: ModularJob) -> dict[str, Call]:
    """Calls by name: the pair, and the layer that ``auto`` is on the same inputs."""
    transport, experts = (kind(problem.moe, group) for kind in kinds)
    layer = make_path("auto", problem.moe, group, config.overlap)
    layers = {
        f"{kinds[0].__name__} + {kinds[1].__name__}": ModularMoE(transport, experts),
        "plain layer" if isinstance(layer, CollectivePath) else "fused layer": layer,
    }
    inputs = make_inputs(problem, group, seed=0)
    return {name: torch.no_grad()(partial(inputs.run, layer)) for name, layer in layers.items()}


def _measured(calls: Mapping[str, Call], group: ExpertGroup, rounds: int) -> dict[str, Any]:
    """Times of calls launched one by one, and how far apart their outputs are, as a share of the largest number."""
    pair, fused = (call(0).double() for call in calls.values())
    mine = [(pair - fused).abs().max().item(), fused.abs().max().item()]
    apart, most = largest(mine, group.device, group.process_group)
    times = time_interleaved(
        calls, rounds=rounds, device=group.device, process_group=group.process_group, rotate=NUM_INPUTS, leads=False
    )
    group.workspace.check()
    return {"times": {name: asdict(timing) for name, timing in times.items()}, "apart": apart / most}


def _trace(calls: Mapping[str, Call], folder: Path, context: LaunchContext) -> str | None:
    """Run each once more; rank 0 profiles the calls, and returns the path of the trace (Chrome's JSON)."""
    on_gpu = [ProfilerActivity.CUDA] if context.device.type == "cuda" else []
    profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu]) if context.rank == 0 else None
    with profiler or nullcontext():
        for name, call in calls.items():
            with record_function(name):
                call(0)
        settle(context.device)
    if profiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / TRACE))
    return str(folder / TRACE)


def _told(facts: Mapping[str, Any]) -> str:
    """The lines of a pair that ran; none where there was none."""
    if "times" not in facts:
        return ""
    lines = [
        f"{name}: {time['median_ms']:.3f} ms ({time['p10_ms']:.3f} to {time['p90_ms']:.3f})"
        for name, time in facts["times"].items()
    ]
    lines += [f"outputs apart by {facts['apart']:.1e} of the largest", f"trace: {facts['trace']}", ""]
    return "\n".join(lines)
