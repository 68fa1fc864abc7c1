"""The texts of ``comet --help``, ``comet TASK --help`` and ``comet --version``.

The first page is there at once: it imports neither torch nor Hydra. A task's page is made of the dataclasses that
declare the settings: their types, their docstrings, and the defaults of the task.
"""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from runpy import run_path
from typing import Any

from comet.launch.tasks.registry import Task, config_groups

WIDTH = 110
OPTIONS = """options:
  --config FILE   read settings from a YAML file; the command line overrides them
  --dry-run       print the resolved settings and the bytes each rank needs; start nothing
  --traceback     print the traceback of mistakes in the settings as well"""
NODES = """on several nodes, run on each:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m comet.launch train ..."""
STATUS = "exit status: 0 done, 1 failed, 2 a mistake in the settings or input, 130 stopped by Ctrl-C, 143 by SIGTERM"


def help_page(tasks: Mapping[str, Task]) -> str:
    """The text of ``comet --help``."""
    lines = ["usage: comet TASK [options] [settings]", "", "tasks (comet TASK --help shows the settings of one):"]
    lines += [f"  {name:<10} {task.summary}" for name, task in tasks.items()]
    lines += ["", OPTIONS, "  --version       print the versions of Comet, torch, Triton and CUDA", ""]
    lines += ["settings are Hydra overrides, name=value; a group picks a file:"]
    lines += [f"  {name}={'|'.join(choices)}" for name, choices in config_groups().items()]
    lines += ["", "examples:"]
    lines += [line for name, task in tasks.items() for line in _examples(name, task)[:2]]
    return "\n".join([*lines, NODES, STATUS]) + "\n"


def task_page(name: str, task: Task) -> str:
    """The text of ``comet TASK --help``: examples, and every setting that the task reads."""
    from comet.jobs.config import JobConfig
    from comet.launch.config import CommandSettings, compose

    defaults = compose([], defaults=task.settings)
    known = {each: found for cls in (JobConfig, CommandSettings) for each, found in settings_of(cls)}
    lines = [f"usage: comet {name} [options] [settings]", "", task.summary, "", OPTIONS, "", "examples:"]
    lines += [*_examples(name, task), "", f"settings and their defaults for {name}:"]
    for part in task.reads:
        for setting, (limits, meaning) in known.items():
            if setting == part or setting.startswith(f"{part}."):
                value = reduce(getitem, setting.split("."), defaults)
                text = f"{setting}: settings" if isinstance(value, dict) else f"{setting}={_typed(value)}"
                lines.append(f"  {text}" + (limits and f"  ({limits})"))
                lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def settings_of(cls: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, limits and meaning of every setting that a dataclass and those in it declare; inherited ones come last.

    Example: ``comm.timeout_s`` of ``JobConfig``: "above 0 and at most 1000000", "Deadline of every wait for ...".
    """
    from comet.limits import limits_in

    hints = typing.get_type_hints(cls, include_extras=True)
    meanings: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        meanings |= arguments_of(inspect.getdoc(part) or "")
    own = list(cls.__annotations__)
    for item in sorted(fields(cls), key=lambda item: own.index(item.name) if item.name in own else len(own)):
        hint, limits = hints[item.name], limits_in(hints[item.name])
        words = limits.words(limits.limits).replace("be ", "", 1).replace("None", "null")
        yield f"{prefix}{item.name}", (words, meanings.get(item.name, ""))
        for inner in (hint, *typing.get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from settings_of(inner, f"{prefix}{item.name}.")


def arguments_of(doc: str) -> dict[str, str]:
    """The entries of a docstring's ``Args``, each on one line and as they are typed on a command line."""
    _, _, section = doc.partition("\nArgs:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith(" " * 8):
            entries[name] += f" {line.strip()}"
        else:
            name, _, text = line.strip().partition(": ")
            entries[name] = text
    return {name: text.replace("``None``", "null").replace("``", "") for name, text in entries.items()}


def version_line() -> str:
    """Versions of Comet and what it runs on; looks at no GPU and does not import torch, which takes seconds."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    from comet.version import comet_commit, comet_version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    found = find_spec("torch")
    torch = (
        run_path(str(Path(str(found.origin)).with_name("version.py"))) if found else {"__version__": "not installed"}
    )
    commit = comet_commit()
    parts = [f"comet {comet_version()}" + (f" (commit {commit})" if commit else "")]
    parts += [f"torch {torch['__version__']}", f"triton {triton}", f"CUDA {torch.get('cuda') or 'not in torch'}"]
    return ", ".join(parts) + "\n"


def _examples(name: str, task: Task) -> list[str]:
    return [
        f"  comet {name} {words}".ljust(50).rstrip() + f"   {does}".rstrip() for words, does in task.examples.items()
    ]


def _typed(value: Any) -> str:
    """The value as text, as an override has it."""
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value)
