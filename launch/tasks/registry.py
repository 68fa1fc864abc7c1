"""The tasks of the command line, one table; a task's module is imported only when the task runs."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of the command line."""

    summary: str  # text of the help page
    # called as function(settings, context) on every rank, with a comet.launch.distributed.LaunchContext; without
    # settings once, with its own words, and returns the exit status
    function: str  # its module's name and its own
    # name of the dataclass of its settings; "" where no ranks are started and the task reads the words after its name
    # itself, instead of the common options and Hydra overrides
    settings: str = "comet.jobs.config.TrainJob"
    # words that follow the task's name, each with what they do
    examples: Mapping[str, str] = field(default_factory=dict)
    dry_run: str = "comet.launch.dry_run.describe_train"  # name of the function that makes the lines of --dry-run
    needs: tuple[str, ...] = ()  # packages it cannot end without; what it imports at once need not be named
    memory: str = ""  # name of the function that counts the bytes of one rank; "" where nothing is known of them
    lower: str = ""  # the remedy where memory is short
    # whether rank 0 says which split its layers take; not where many are tried, and a table has them
    shows_split: bool = True

    def require_packages(self) -> None:
        """Raise ``ModuleNotFoundError`` if one is missing, before hours of work need it."""
        for name in self.needs:
            importlib.import_module(name)


def imported(name: str) -> Any:
    """The function or class of that name, which begins with its module's; the module is imported now."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


MEASURES: dict[str, Any] = {  # fields of tasks that measure layers
    "dry_run": "comet.launch.dry_run.describe_problems",
    "memory": "comet.launch.memory.largest_problem",
    "shows_split": False,
}
TASKS: Mapping[str, Task] = {
    "train": Task(
        "train a small MoE language model end to end",
        "comet.training.trainer.train",
        examples={
            "": "the small default model, on all GPUs or on two CPU ranks",
            "model=tiny parallel.ep=2 train.steps=200": "",
            "model=qwen3_30b_a3b model.num_layers=2 parallel=ep4": "",
            "data.path=book.txt output_dir=outputs/book train.checkpoint_every=100": "",
            "resume=outputs/book": "continue from the newest checkpoint there",
            "nproc=4 parallel=ep2": "two data-parallel copies of two ranks",
            "train.cuda_graph=off": "launch steps kernel by kernel, not from a CUDA graph",
            "--config my.yaml train.steps=10": "settings of a YAML file, and others on top",
            "--dry-run model=mixtral_8x7b": "print the settings and the memory they need",
        },
        needs=("matplotlib",),
        memory="comet.launch.memory.train_bytes",
        lower="lower model.num_layers, model.moe.num_experts, model.context or train.batch_size",
    ),
    "generate": Task(
        "continue texts with a trained or a Hugging Face model",
        "comet.generation.job.generate_job",
        settings="comet.jobs.config.GenerateJob",
        examples={
            'generate.source=outputs/book generate.prompt="It was a " generate.max_new_tokens=200': "",
            'generate.source=models/qwen3 generate.temperature=0 generate.prompt="def " parallel=ep4': "",
        },
        dry_run="comet.launch.dry_run.describe_generate",
        memory="comet.launch.memory.generate_bytes",
        lower="give generate.expert_budget, lower generate.max_new_tokens, or take fewer prompts or a smaller model",
    ),
    "tune": Task(
        "measure how fused kernels best share the GPU, store the fastest settings",
        "comet.tuner.sweep.tune_job",
        settings="comet.jobs.config.TuneJob",
        examples={"model=qwen3_30b_a3b tune.tokens=[2048,8192]": ""},
        lower="lower tune.tokens, or take a smaller model",
        **MEASURES,
    ),
    "sweep": Task(
        "measure a grid of overlap settings, models and layouts, draw it",
        "comet.tuner.sweep.sweep_job",
        settings="comet.jobs.config.SweepJob",
        examples={"sweep.tokens=[512,2048] sweep.layouts=[[4,1],[2,2]] output_dir=outputs/sweep": ""},
        lower="lower sweep.tokens, or take smaller models",
        needs=("matplotlib",),
        **MEASURES,
    ),
    "modular": Task(
        "which dispatches and experts go together; time and trace a pair",
        "comet.launch.tasks.modular.modular_job",
        settings="comet.jobs.config.ModularJob",
        examples={"modular.pair=[AllToAll,GroupedContiguous] model=qwen3_30b_a3b parallel=ep4": ""},
        lower="lower modular.tokens, or take a smaller model",
        **MEASURES,
    ),
    "place": Task(
        "order the experts of a checkpoint so that ranks have equal loads",
        "comet.launch.tasks.place.main",
        examples={
            "outputs/book --ep 4": "what another order of the experts, and copies of the hot ones, would bring",
            "outputs/book --ep 4 --output-dir outputs/placed": "write the checkpoint with its experts in that order",
        },
        settings="",
    ),
    "export": Task(
        "write a checkpoint as a folder that transformers loads",
        "comet.generation.export.main",
        examples={"outputs/book outputs/book-hf": "the newest checkpoint, as a Qwen3-MoE or GLM-4-MoE"},
        settings="",
    ),
    "compile": Task(
        "compile every kernel ahead of time, no GPU needed",
        "comet.kernels.aot.compile.main",
        examples={"--jobs 4": "with four compilers at a time"},
        settings="",
    ),
}

# Tasks that are gone, and what to use instead.
REMOVED_TASKS = {"explain": "comet train says which split it takes and why, comet tune what each takes"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: "; did you mean train?" of ``trian``; empty where none is close.

    Example: ``lr`` gives "; did you mean train.lr?", and ``seed`` names both settings that end in it.
    """
    known = list(known)
    close = [each for each in known if each.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def find_task(name: str, tasks: Mapping[str, Task]) -> Task:
    """The task called ``name``; raises ``ValueError`` that lists the tasks when there is none."""
    if name in REMOVED_TASKS:
        raise ValueError(f"task={name!r} is no longer a task: {REMOVED_TASKS[name]}")
    if name not in tasks:
        raise ValueError(f"task={name!r} must be one of {', '.join(tasks)}{did_you_mean(name, tasks)}")
    return tasks[name]


def config_groups() -> dict[str, list[str]]:
    """Names of the YAML groups and of the choices in each."""
    root = files("comet.configs")
    choices = {
        folder.name: sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))
        for folder in root.iterdir()
        if folder.is_dir()
    }
    return {name: found for name, found in sorted(choices.items()) if found}
