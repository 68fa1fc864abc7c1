"""The same model, seed and batches trained through several paths of the MoE layer: do the loss curves agree?

    torchrun --nproc-per-node 2 benchmarks/compare_paths.py --paths fused,plain,reference --ep 2
    torchrun --nproc-per-node 2 benchmarks/compare_paths.py --paths twin,plain,reference --ep 2 --device cpu

Rank 0 writes ``compare_paths.csv``, ``.png`` and ``.json`` to ``--out``, prints one table and, as the last line, the
JSON. Every path is judged against the first one by the tolerance of ``curves.py``; the exit status is 1 if one is
outside of it. ``--wrong-seed PATH`` trains that path with another seed, to see the comparison fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from curves import Curve, Verdict, as_record, draw, early_tolerance, format_table, judge, pairwise, write_csv
from start import words
from torch import Tensor
from tqdm import tqdm

from comet.config import MoEConfig, ParallelConfig, require
from comet.config import Path as MoEPath
from comet.group import ExpertGroup, make_expert_group
from comet.launch.distributed import (
    LaunchContext,
    current_context,
    leave,
    open_store,
    process_group,
    started_by_torchrun,
)
from comet.models.config import ModelConfig
from comet.models.gpt import GPT
from comet.training.config import DataConfig, TrainConfig, TrainDtype
from comet.training.data import read_corpus
from comet.training.loop import Trainer, deterministic
from comet.training.optimizer import make_optimizer
from comet.training.run import activation_dtype

WARMUP_STEPS = 5  # not timed: kernels are compiled there
HEAD_DIM = 64


def train_path(
    path: str, model_config: ModelConfig, config: TrainConfig, group: ExpertGroup, text: Tensor, bar: tqdm
) -> Curve:
    """Train a fresh model through ``path`` (collective)."""
    bar.set_description(path, refresh=False)
    model = GPT(model_config, group, path=path, seed=config.seed)
    trainer = Trainer(model, make_optimizer(model, config), group, text, config)
    warmup = min(WARMUP_STEPS, config.steps // 2)
    started = _now(group.device)
    losses: list[Tensor] = []
    for step in range(config.steps):
        if step == warmup:
            started = _now(group.device)
        losses.append(trainer.step(step).loss)
        bar.update()
    seconds = _now(group.device) - started
    group.workspace.check()
    return Curve(torch.stack(losses).tolist(), (config.steps - warmup) * trainer.tokens_per_step / seconds)


def run(arguments: argparse.Namespace, context: LaunchContext) -> bool:
    """Train through all paths and report (collective); whether all agree, the same answer on every rank."""
    model, config = model_config(arguments), train_config(arguments)
    text = read_corpus(DataConfig(path=arguments.data), model.context).train
    group = make_expert_group(
        model.moe,
        ParallelConfig(ep=arguments.ep, tp=arguments.tp),
        max_tokens=config.batch_size * model.context,
        dtype=activation_dtype(config.dtype, context.device),
        device=context.device,
        backend=arguments.backend,
    )
    curves, reports = {}, context.rank == 0
    num_steps, interval_s = len(arguments.paths) * config.steps, 0.5 if sys.stderr.isatty() else 10.0
    with (
        deterministic(context.device),
        tqdm(total=num_steps, disable=not reports, file=sys.stderr, unit="step", mininterval=interval_s) as bar,
    ):
        for path in arguments.paths:
            seed = config.seed + (path == arguments.wrong_seed)
            curves[path] = train_path(path, model, replace(config, seed=seed), group, text, bar)
    dtype = group.workspace.shape.dtype
    wanted = curves[arguments.paths[0]].losses
    verdicts = {path: judge(curve.losses, wanted, dtype) for path, curve in curves.items()}
    if reports:
        report(arguments, group, curves, verdicts)
    dist.barrier()  # a rank that leaves with status 1 makes torchrun end the others: rank 0 has to be done
    group.close()
    return all(verdict.within_tolerance for verdict in verdicts.values())


def report(
    arguments: argparse.Namespace, group: ExpertGroup, curves: Mapping[str, Curve], verdicts: Mapping[str, Verdict]
) -> None:
    """Write the files, print the table and the JSON."""
    device, dtype = group.device, group.workspace.shape.dtype
    result = {
        "task": "compare_paths",
        "world_size": group.world_size,
        "ep": arguments.ep,
        "tp": arguments.tp,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": arguments.steps,
        "command": " ".join(sys.argv),
        "early_tolerance": early_tolerance(dtype),
        "early_differences": pairwise(curves, dtype),
        "paths": {path: as_record(curve, verdicts[path]) for path, curve in curves.items()},
        "within_tolerance": all(verdict.within_tolerance for verdict in verdicts.values()),
    }
    line = json.dumps(result, allow_nan=False)
    write_csv(arguments.out / "compare_paths.csv", curves)
    (arguments.out / "compare_paths.json").write_text(line + "\n")
    draw(arguments.out / "compare_paths.png", curves, dtype)
    print(f"{format_table(curves, verdicts)}\n{line}", flush=True)


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The model all paths train."""
    moe = MoEConfig(
        hidden_size=arguments.hidden, ffn_size=arguments.ffn, num_experts=arguments.experts, top_k=arguments.top_k
    )
    heads = max(1, arguments.hidden // HEAD_DIM)
    shape = dict(hidden_size=arguments.hidden, num_heads=heads, num_kv_heads=heads, head_dim=HEAD_DIM)
    return ModelConfig(name="compare_paths", context=arguments.context, num_layers=arguments.layers, moe=moe, **shape)


def train_config(arguments: argparse.Namespace) -> TrainConfig:
    """How all paths train it."""
    return TrainConfig(
        steps=arguments.steps,
        batch_size=arguments.batch,
        lr=arguments.lr,
        warmup_steps=min(10, arguments.steps // 4),
        seed=arguments.seed,
        dtype=arguments.dtype,
    )


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown, repeated or lonely path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = get_args(MoEPath)
    parser.add_argument(
        "--paths", type=words, default=("fused", "plain", "reference"), help=f"two or more of {','.join(known)}"
    )
    sizes = {"steps": 60, "ep": 1, "tp": 1, "hidden": 256, "layers": 4, "experts": 16, "top-k": 4, "ffn": 256}
    for name, value in (sizes | {"context": 256, "batch": 16, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--lr", type=float, default=1e-3, help="default 0.001")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=get_args(TrainDtype), default="auto", help="bfloat16 on GPUs, else float32")
    parser.add_argument("--backend", default="auto", help="communicator: auto, nvshmem, symm_mem, cpu_shm")
    parser.add_argument("--data", help="file or folder to read; default: the Python standard library")
    parser.add_argument("--wrong-seed", metavar="PATH", help="the path that is to differ")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare_paths"))
    arguments = parser.parse_args(command_line)
    for path in arguments.paths:
        require(path in known, f"paths={path!r} must be one of {', '.join(known)}")
    different = len(set(arguments.paths)) == len(arguments.paths) >= 2
    require(different, f"paths={','.join(arguments.paths)} must be two or more different ones")
    wrong = arguments.wrong_seed
    require(wrong is None or wrong in arguments.paths, f"wrong_seed={wrong!r} must be one of the paths")
    return arguments


def main(command_line: Sequence[str]) -> int:
    """One rank of the comparison; its exit status."""
    arguments = parse(command_line)
    require(started_by_torchrun(), "start the comparison with torchrun: it sets rank and world size")
    context = current_context()
    require(
        arguments.device != "cuda" or context.device.type == "cuda", "device='cuda' needs a GPU, and none is visible"
    )
    if arguments.device == "cpu":
        context = replace(context, device=torch.device("cpu"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with process_group(context, open_store(context)):
        return 0 if run(arguments, context) else 1


def _now(device: torch.device) -> float:
    """Seconds, when the device has done everything it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
