"""Decode on one GPU: microseconds and TB/s of distinct touched weight bytes, warp decode against expert-centric paths.

    python benchmarks/bench_decode.py --models qwen3_30b_a3b,mixtral_8x7b --tokens 1,2,4,8,16,32,64
    python benchmarks/bench_decode.py --weights bf16,mxfp8,fp8
    python benchmarks/bench_decode.py --try form=matrix,gate_up.rows=64 --try dependent=1 --tokens 1,4
    python benchmarks/bench_decode.py --device cpu --models tiny --tokens 1,3

One timed call runs a step on each of several weight sets, so that L2 does not flatter; a step's time is a part of it.
On a GPU the call is a CUDA graph. All variants run interleaved (``timing``). ``--try`` adds a variant: the selected
blocks with some fields changed. Writes ``bench_decode.csv`` and ``.json`` to ``--out``, prints one table and, as the
last line, the run as JSON. ``triton`` is the fastest of several tile shapes; errors are root mean squares relative to
float64. One GPU; what the ranks add is not measured here.

Quantised ``--weights``: bytes are those of elements and scales, errors relative to the quantised numbers; the other
paths, which take no such weights, run on the same numbers in the dtype of the tokens (block FP8 rounded to it).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch
from bench_moe import gather_facts
from decode_paths import EXPERT_CONFIGS, torch_experts, triton_experts
from decode_steps import WEIGHTS, Step, WeightSet, make_set, make_steps
from points import Ranks, attempt
from routing import ROUTINGS
from shapes import MODELS
from timing import Timing, Variant, capture, rank_barrier, time_interleaved
from torch import Tensor

from comet.config import MoEConfig, require
from comet.decode import DecodeScratch, warp_decode
from comet.decode.local import run_kernels
from comet.kernels.warp_decode import BlockShape, DecodeConfig, select

SHAPES = {
    "qwen3_30b_a3b": MODELS["qwen3_30b_a3b"],
    "gemma4_like": MoEConfig(num_experts=128, top_k=8, hidden_size=2816, ffn_size=704),
    "mixtral_8x7b": MODELS["mixtral_8x7b"],
    "deepseek_v3_slice": MoEConfig(num_experts=64, top_k=8, hidden_size=7168, ffn_size=2048),
    "tiny": MODELS["tiny"],
}
SETS = 4
ROOF_BYTES = 2**32
FLUSH_BYTES = 2**28

Row = dict[str, object]
Trial = dict[str, str]


def change(config: DecodeConfig, trial: Trial) -> DecodeConfig:
    """``config`` with fields set as ``{"gate_up.rows": "8", "fold": "1"}`` says; ``ValueError`` for one that is not."""
    known = [field.name for field in fields(DecodeConfig) if field.name not in ("gate_up", "down")]
    known += [f"{block}.{field.name}" for block in ("gate_up", "down") for field in fields(BlockShape)]
    for name, value in trial.items():
        require(name in known, f"--try {name}={value}: the field must be one of {', '.join(known)}")
        block, _, field = name.rpartition(".")
        if block:
            config = replace(config, **{block: replace(getattr(config, block), **{field: int(value)})})
        elif name == "form":
            continue
        else:
            config = replace(config, **{name: bool(int(value))})
    return config


def configs(
    model: MoEConfig,
    num_tokens: int,
    dtype: torch.dtype,
    trials: Sequence[Trial],
    weight_dtype: torch.dtype | None = None,
) -> dict[str, DecodeConfig]:
    """The selected blocks as ``comet``, and every trial under its text; a trial may name the form to start at."""
    choose = partial(select, dtype, weight_dtype=weight_dtype)
    shape = (model.top_k, model.hidden_size, model.ffn_size)
    found = {"comet": choose(num_tokens, *shape)}
    for trial in trials:
        tokens_of_form = {"vector": min(num_tokens, 2), "matrix": max(num_tokens, 3)}
        base = choose(tokens_of_form.get(trial.get("form", ""), num_tokens), *shape)
        changed = change(base, trial).fit(model.hidden_size, model.ffn_size)
        found[",".join(f"{name}={value}" for name, value in trial.items())] = changed
    return found


def step_functions(
    model: MoEConfig, steps: Sequence[Step], trials: Sequence[Trial]
) -> dict[str, Callable[[Step], Tensor]]:
    """Every way to run one step."""
    first = steps[0]
    on_gpu, dtype, num_tokens = first.tokens.is_cuda, first.tokens.dtype, first.tokens.shape[0]
    scratch = DecodeScratch.create(first.weights, model.top_k, dtype, max_tokens=num_tokens)

    def decode(step: Step, config: DecodeConfig) -> Tensor:
        arguments = (step.tokens, step.ids, step.routing_weights, step.weights)
        return run_kernels(*arguments, scratch=scratch, config=config) if on_gpu else warp_decode(*arguments)

    def centric(step: Step, path: Callable[..., Tensor], *rest: object) -> Tensor:
        return path(step.tokens, step.ids, step.routing_weights, step.set.plain.w1, step.set.plain.w2, *rest)

    chosen = configs(model, num_tokens, dtype, trials, first.weights.w1.dtype)
    found: dict[str, Callable[[Step], Tensor]] = {
        name: partial(decode, config=config) for name, config in chosen.items()
    }
    found["torch"] = lambda step: centric(step, torch_experts)
    for index, config in enumerate(EXPERT_CONFIGS):
        found[f"triton{index}"] = lambda step, config=config: centric(step, triton_experts, config)
    return found


def measure_point(
    model: MoEConfig, sets: Sequence[WeightSet], arguments: argparse.Namespace, num_tokens: int, roof_tbs: float
) -> Row:
    """Check and time all variants at one number of tokens."""
    steps = make_steps(model, sets, num_tokens, arguments.routing)
    device = steps[0].tokens.device
    ranks = Ranks(0, device, None)
    exact = steps[0].exact()
    variants: dict[str, Variant] = {}
    accuracy: dict[str, tuple[float, float]] = {}
    failures: dict[str, str] = {}
    for name, run in step_functions(model, steps, arguments.trials).items():
        output, failure = attempt(partial(run, steps[0]), ranks)
        timed: Variant | None = partial(run_all, run, steps)
        if not failure and device.type == "cuda":
            timed, failure = attempt(partial(capture, timed, rotate=1), ranks)
        if failure or output is None or timed is None:
            failures[name] = failure
        else:
            variants[name], accuracy[name] = timed, compare(output, exact)
    flush = torch.empty(FLUSH_BYTES // 4 if device.type == "cuda" else 4, device=device)
    timings = time_interleaved(
        variants, rounds=arguments.rounds, barrier=lambda: flush.sum(), rotate=1, device=device, warmup=3
    )
    touched = sum(step.touched_bytes for step in steps) / len(steps)
    return figures(timings, accuracy, len(steps), touched, roof_tbs) | {"failures": failures}


def run_all(run: Callable[[Step], Tensor], steps: Sequence[Step], index: int) -> None:
    """One step on every set of weights: what is timed."""
    for step in steps:
        run(step)


def compare(output: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square of the error relative to the exact output, and the least cosine similarity of a token.

    Example: output [[3, 4]] against [[3, 5]]: sqrt(1 / 34) = 0.1715 and 29 / sqrt(25 * 34) = 0.9947.
    """
    error = (output.double() - exact).norm() / exact.norm()
    cosine = torch.cosine_similarity(output.double(), exact, dim=1).min()
    return error.item(), cosine.item()


def figures(
    timings: dict[str, Timing],
    accuracy: dict[str, tuple[float, float]],
    num_steps: int,
    touched_bytes: float,
    roof_tbs: float,
) -> Row:
    """One row: microseconds of a step per variant, rate and fraction of the roof of the fastest of ours, and errors.

    Example: comet 0.4 ms for 4 steps that touch 2e8 bytes each, triton1 0.8 ms, roof 4 TB/s: 100 us, 2 TB/s, 0.5 of the
    roof, 2 x triton.
    """
    times_us = {name: timing.median_ms * 1e3 / num_steps for name, timing in timings.items()}
    centric = [name for name in times_us if name.startswith("triton")]
    ours = [name for name in times_us if name != "torch" and name not in centric]
    best_triton = min(centric, key=times_us.__getitem__, default=None)
    best = min(ours, key=times_us.__getitem__, default=None)
    best_us = None if best is None else times_us[best]
    row: Row = {
        "comet_us": times_us.get("comet"),
        "triton_us": times_us.get(best_triton),
        "torch_us": times_us.get("torch"),
        "best": best,
        "best_us": best_us,
        "mbytes": touched_bytes / 1e6,
        "tbs": None if best_us is None else touched_bytes / (best_us * 1e6),
        "of_roof": None if best_us is None else touched_bytes / (best_us * 1e6) / roof_tbs,
        "x_triton": None if best_us is None or best_triton is None else times_us[best_triton] / best_us,
        "x_torch": None if best_us is None or "torch" not in times_us else times_us["torch"] / best_us,
    }
    for name, key in (("comet", "comet"), (best_triton, "triton"), ("torch", "torch")):
        row[f"{key}_error"], row[f"{key}_cosine"] = accuracy.get(name, (None, None))
    return row | {"times_us": times_us, "quantiles": {name: asdict(timing) for name, timing in timings.items()}}


def read_roof_tbs(device: torch.device) -> float:
    """TB/s of adding up a large array, the fastest of three ways: what reading memory can reach here."""
    num_bytes = ROOF_BYTES if device.type == "cuda" else 2**20
    data = torch.ones(num_bytes // 4, device=device)
    readers: dict[str, Variant] = {
        "sum": lambda _: data.sum(),
        "rows": lambda _: data.view(-1, 4096).sum(dim=1),
        "bf16": lambda _: data.view(torch.bfloat16).view(-1, 8192).amax(dim=1),
    }
    timings = time_interleaved(
        readers, rounds=10, barrier=rank_barrier(device, None), rotate=1, device=device, warmup=3
    )
    return num_bytes / (min(timing.median_ms for timing in timings.values()) * 1e9)


def format_table(rows: Sequence[Row]) -> str:
    """One aligned line per row."""
    hidden = ("times_us", "quantiles")
    shown = [name for name in rows[0] if name not in hidden and any(row.get(name) not in (None, {}) for row in rows)]
    lines = [shown, *([_cell(row.get(name)) for name in shown] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(shown))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.7f}" if 0.99 < value < 1 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def run(arguments: argparse.Namespace) -> None:
    """Measure all points, model by model."""
    device = torch.device("cpu" if arguments.device == "cpu" or not torch.cuda.is_available() else "cuda")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    facts = gather_facts(Ranks(0, device, None)) | {"read_roof_tbs": read_roof_tbs(device), "sets": SETS}
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in arguments.models:
        for kind in arguments.weights:
            sets = [make_set(SHAPES[name], device, dtype, seed, kind) for seed in range(SETS)]
            for num_tokens in arguments.tokens:
                row = {"model": name, "weights": kind, "tokens": num_tokens}
                rows.append(row | measure_point(SHAPES[name], sets, arguments, num_tokens, facts["read_roof_tbs"]))
                write_csv(arguments.out / "bench_decode.csv", rows)
                print(f"{name} {kind} {num_tokens}: done", file=sys.stderr, flush=True)
            del sets  # before the next ones are made
    line = json.dumps({"facts": facts, "rows": rows})
    (arguments.out / "bench_decode.json").write_text(line + "\n")
    print(format_table(rows))
    print(line)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows so far, so that an interruption loses nothing."""
    names = [name for name in rows[0] if name not in ("times_us", "quantiles")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model, routing or field."""
    names = lambda text: tuple(text.split(","))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=("qwen3_30b_a3b",), help=", ".join(SHAPES))
    parser.add_argument(
        "--weights", type=names, default=("bf16",), help=", ".join(WEIGHTS) + "; bf16 is float32 on a CPU"
    )
    parser.add_argument("--tokens", type=names, default=("1", "2", "4", "8", "16", "32", "64"))
    parser.add_argument("--routing", default="uniform", help=", ".join(ROUTINGS))
    parser.add_argument(
        "--try", dest="trials", action="append", default=[], help="form=matrix,down.rows=64,dependent=1"
    )
    parser.add_argument("--rounds", type=int, default=30, help="counted calls of each variant")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_decode"))
    arguments = parser.parse_args(command_line)
    arguments.tokens = [int(number) for number in arguments.tokens]
    arguments.trials = [dict(pair.split("=", 1) for pair in trial.split(",")) for trial in arguments.trials]
    for name in arguments.models:
        require(name in SHAPES, f"models={name!r} must be one of {', '.join(SHAPES)}")
    for kind in arguments.weights:
        require(kind in WEIGHTS, f"weights={kind!r} must be one of {', '.join(WEIGHTS)}")
    require(arguments.routing in ROUTINGS, f"routing={arguments.routing!r} must be one of {', '.join(ROUTINGS)}")
    for trial in arguments.trials:
        configs(SHAPES["tiny"], 2, torch.bfloat16, [trial])
    return arguments


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
