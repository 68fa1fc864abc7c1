"""The command line: ``comet [task] [options] [settings]``.

Started plainly, a task that needs ranks starts them itself; started by torchrun, the process is one rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from comet.kernels.runtime.process import PARENT, end_with_parent
from comet.launch.help import help_page, task_page, version_line
from comet.launch.messages import STATUS_USER, is_user_error, one_line, say, speaks_for_job, started_by_torchrun
from comet.launch.tasks.registry import TASKS, Task, find_task, imported

PROGRAM = ("-P", "-m", "comet.launch")  # not what the current folder has under the same names


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, like all mistakes of the user."""

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError(message)``."""
        raise ValueError(message)


def main(
    arguments: Sequence[str] | None = None, tasks: Mapping[str, Task] = TASKS, program: Sequence[str] = PROGRAM
) -> int:
    """Run one command, by default that of this process; the exit status.

    Args:
        program: Arguments for the Python interpreter that start this same command line as a rank.
    """
    if os.environ.get("LOCAL_RANK"):  # The launcher may be killed in the seconds that importing torch takes.
        launcher = os.environ.pop(PARENT, "")
        end_with_parent(int(launcher) if launcher.isdecimal() else None)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for word in words:
            if word != word.encode(errors="replace").decode():
                raise ValueError(f"the argument {os.fsencode(word)!r} must be text in UTF-8")
        status = 0
        if not words or words[0] in ("-h", "--help", "help"):
            sys.stdout.write(help_page(tasks))
        elif words[0] == "--version":
            sys.stdout.write(version_line())
        else:
            status = _run(words, tasks, program)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, RuntimeError, MemoryError, ModuleNotFoundError) as error:
        if not is_user_error(error):
            raise
        if speaks_for_job():
            if "--traceback" in words:
                traceback.print_exc()
            say(f"error: {one_line(error)}")
        return STATUS_USER


def _run(words: Sequence[str], tasks: Mapping[str, Task], program: Sequence[str]) -> int:
    task = find_task(words[0], tasks)
    if not task.settings:
        return int(imported(task.function)(list(words[1:])) or 0)
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(list(words[1:]))
    if options.help:
        sys.stdout.write(task_page(words[0], task))
        return 0
    from comet.launch.config import compose, default_ranks, make_job, refuse_options, require_inputs

    settings = imported(task.settings)
    if unknown:
        refuse_options(unknown, words, settings)
    if not options.dry_run and started_by_torchrun():
        task.require_packages()
        from comet.launch.failures import say_logged
        from comet.launch.rank import run_rank

        if task.shows_split and speaks_for_job():
            say_logged("comet.schedule.choice")
        run_rank(task, options)
    container = compose(options.overrides, settings, file=options.config)
    make_job(container, default_ranks(container, 0), settings)  # A wrong value is refused before torch is imported.
    require_inputs(container, options.dry_run)
    if not options.dry_run:
        task.require_packages()
    import torch

    num_gpus = torch.cuda.device_count()
    num_ranks = default_ranks(container, num_gpus)
    job = make_job(container, num_ranks, settings)
    if options.dry_run:
        from comet.launch.dry_run import resolved_yaml

        lines = imported(task.dry_run)(job, num_ranks, torch.device("cuda" if num_gpus else "cpu"))
        sys.stdout.write(resolved_yaml(container, job, num_ranks) + "\n".join(lines) + "\n")
        return 0
    from comet.launch.local import run_local_ranks
    from comet.launch.memory import require_memory

    if num_gpus == 0:
        require_memory(task, job, num_ranks, num_ranks, torch.device("cpu"))
    return run_local_ranks([*program, *words], num_ranks, container)
