"""The command line with one rank that meets a fault: ``python tests/support/faults/fault_app.py TASK [settings]``.

``COMET_FAULT_ORDER`` names the pickled ``Order``. Tasks and everything else are the launcher's own.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_rows import PLACES, TOLD, Order, note, set_trap, strike

from comet.jobs.config import TrainJob
from comet.launch.cli import main
from comet.launch.distributed import LaunchContext
from comet.launch.tasks.registry import TASKS, imported

ORDER = "COMET_FAULT_ORDER"
BROKEN = ("train", "generate", "tune")

# The number of the call that meets the fault: a step or two and one checkpoint come before.
NTH = {"checkpoint write": 2, "checkpoint load": 1}
LATER = 5


def arm(context: LaunchContext) -> None:
    order: Order = pickle.loads(Path(os.environ[ORDER]).read_bytes())
    if context.rank == order.culprit:
        row = order.row
        place = PLACES.get((row.phase, row.path)) or PLACES[row.phase, ""]
        set_trap(place, lambda: strike(order), nth=NTH.get(row.phase, LATER))
        set_trap("comet.training.ranks:StopRequest._note", lambda: note(order.folder / TOLD))


def broken(name: str) -> Callable[[TrainJob, LaunchContext], Any]:
    def run(config: TrainJob, context: LaunchContext) -> Any:
        arm(context)
        return imported(TASKS[name].function)(config, context)

    return run


train, generate, tune = map(broken, BROKEN)

if __name__ == "__main__":
    tasks = {name: replace(TASKS[name], function=f"fault_app.{name}") for name in BROKEN}
    raise SystemExit(main(tasks=tasks, program=(__file__,)))
