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

from comet.launch.tasks import TASKS, Task, find_task

PROGRAM = ("-m", "comet.launch")

EXAMPLES = """settings are Hydra overrides, name=value; a group picks a file:
  comet train                                   the small default model, on all GPUs or on two CPU ranks
  comet train model=tiny parallel.ep=2 train.steps=200
  comet train model=qwen3_30b_a3b model.num_layers=2 parallel=ep4
  comet train data.path=book.txt output_dir=outputs/book train.checkpoint_every=100
  comet train resume=outputs/book               continue from the newest checkpoint there
  comet train nproc=4 parallel=ep2              two data-parallel copies of two ranks
  comet train train.cuda_graph=off              launch steps kernel by kernel, not from a CUDA graph
  comet generate generate.source=outputs/book generate.prompt="It was a " generate.max_new_tokens=200
  comet generate generate.source=models/qwen3 generate.temperature=0 generate.prompt="def " parallel=ep4
  comet tune model=qwen3_30b_a3b tune.tokens=[2048,8192]
  comet explain model=qwen3_30b_a3b tune.tokens=[2048] parallel.ep=2 tune.machine=h200
  comet sweep sweep.tokens=[512,2048] sweep.layouts=[[4,1],[2,2]] output_dir=outputs/sweep
  comet modular modular.pair=[AllToAll,GroupedContiguous] model=qwen3_30b_a3b parallel=ep4
  comet train --dry-run model=mixtral_8x7b      print the settings and the memory they need
on several nodes, run on each:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m comet.launch train ...
exit status: 0 done, 1 failed, 2 a mistake in the settings or input, 130 stopped by Ctrl-C, 143 by SIGTERM
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, like all mistakes of the user."""

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError(message)``."""
        raise ValueError(message)


def main(
    arguments: Sequence[str] | None = None, tasks: Mapping[str, Task] = TASKS, program: Sequence[str] = PROGRAM
) -> int:
    """Run one command.

    Args:
        arguments: Words of the command line; ``None`` takes those of this process.
        tasks: The tasks to choose from.
        program: Arguments for the Python interpreter that start this same command line as a rank.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            sys.stdout.write(help_page(tasks))
            status = 0
        else:
            status = _run(words, tasks, program)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, RuntimeError) as error:
        from comet.launch.distributed import speaks_for_job
        from comet.launch.failures import STATUS_USER, is_user_error, one_line, say

        if not is_user_error(error):
            raise
        if speaks_for_job():
            if "--traceback" in words:
                traceback.print_exc()
            say(f"error: {one_line(error)}")
        return STATUS_USER


def help_page(tasks: Mapping[str, Task]) -> str:
    """The text of ``comet --help``."""
    from comet.launch.config import config_groups

    lines = ["usage: comet TASK [--dry-run] [--traceback] [settings]", "", "tasks:"]
    lines += [f"  {name:<10} {task.summary}" for name, task in tasks.items()]
    lines += ["", "options:", "  --dry-run   print the resolved settings and the bytes each rank needs; start nothing"]
    lines += ["  --traceback print the traceback of mistakes in the settings as well", "", "groups:"]
    lines += [f"  {name}={'|'.join(choices)}" for name, choices in config_groups().items()]
    return "\n".join(lines) + "\n\n" + EXAMPLES


def _run(words: Sequence[str], tasks: Mapping[str, Task], program: Sequence[str]) -> int:
    task = find_task(words[0], tasks)
    if task.dry_run is None:
        return int(task.load()(list(words[1:])) or 0)
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(list(words[1:]))
    if options.help:
        sys.stdout.write(help_page(tasks))
        return 0
    if not task.ranks and not options.dry_run:
        return int(task.load()(options.overrides) or 0)
    return _run_with_ranks(task, words, options, program)


def _run_with_ranks(task: Task, words: Sequence[str], options: argparse.Namespace, program: Sequence[str]) -> int:
    import torch

    from comet.launch.config import compose, default_ranks, make_job
    from comet.launch.distributed import speaks_for_job, started_by_torchrun

    if not options.dry_run and started_by_torchrun():
        from comet.launch.failures import say_logged
        from comet.launch.rank import run_rank

        if task.shows_split and speaks_for_job():
            say_logged("comet.tuner.choice")
        run_rank(task, options.overrides, options.traceback)
    container = compose([*task.settings, *options.overrides])
    num_gpus = torch.cuda.device_count()
    num_ranks = default_ranks(container, num_gpus)
    job = make_job(container, num_ranks)
    if options.dry_run:
        sys.stdout.write(task.load_dry_run()(container, job, num_ranks, on_gpu=num_gpus > 0))
        return 0
    from comet.launch.local import run_local_ranks

    return run_local_ranks([*program, *words], num_ranks, container)
