"""The texts of ``comet --help``, ``comet TASK --help`` and ``comet --version``.

The first page is there at once: it imports neither torch nor Hydra. A task's page is made of the dataclasses that
declare the settings: their types, their docstrings, and the defaults of the task.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from runpy import run_path

from comet.launch.tasks.registry import Task, config_groups, imported

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
    """The text of ``comet TASK --help``: examples, and every setting of the task."""
    from comet.launch.config import compose
    from comet.launch.schema import as_text

    defaults = compose([], imported(task.settings))
    lines = [f"usage: comet {name} [options] [settings]", "", task.summary, "", OPTIONS, "", "examples:"]
    lines += [*_examples(name, task), "", f"settings and their defaults for {name}:"]
    for setting, (limits, meaning) in settings_of(imported(task.settings)):
        value = as_text(reduce(getitem, setting.split("."), defaults))
        lines.append(f"  {setting}={value}" + (limits and f"  ({limits})"))
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def settings_of(cls: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, limits and meaning of every setting that a dataclass and those in it declare; inherited ones come last.

    Example: ``comm.timeout_s`` of ``JobConfig``: "above 0 and at most 1000000", "Deadline of every wait for ...".
    """
    from comet.limits import limits_of

    meanings: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        meanings |= arguments_of(inspect.getdoc(part) or "")
    own = list(cls.__annotations__)
    for item in sorted(fields(cls), key=lambda item: own.index(item.name) if item.name in own else len(own)):
        limits = limits_of(cls)[item.name]
        words = limits.words(limits.limits).replace("be ", "", 1).replace("None", "null")
        if is_dataclass(limits.kind):
            yield from settings_of(limits.kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{item.name}", (words, meanings.get(item.name, ""))


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
