"""Rows of the fault matrix that are jobs of the command line, and what is resumed after them.

Each path trains once undisturbed. A disturbed job has the same losses up to its end; resumed, it ends with the same
bits, from the newest checkpoint that is whole.
"""

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from fault_app import ORDER
from fault_rows import SENT, SIGNALS, STRUCK, Finding, Order, await_file, note, unnamed
from forked import Program
from launch_jobs import SMALL, environment, train_as_rank
from ranks import run_ranks
from training_cases import losses

from comet.launch.cli import PROGRAM
from comet.schedule.table import Table
from comet.training.checkpoint_folder import list_checkpoints

APP = (str(Path(__file__).with_name("fault_app.py")),)
START_S = 300.0  # until a job reaches the fault, and for an undisturbed one: not counted
HUNG_S = 60.0  # beyond the limit
PATIENCE_S = 60.0
STEPS = 6
TEXT = "text.txt"
SAYS = r"comet: (error|stopped|skipped|saved)|[\w.]+(Error|Exception): "
TINY = (
    *SMALL, "train.batch_size=2", "train.warmup_steps=0", "train.eval_batches=1", "train.sample_bytes=4",
    f"train.steps={STEPS}",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its ``status``, ``None`` if it was killed here, and seconds since the fault, or NaN."""

    status: int | None
    seconds: float
    error: str
    left: int

    @property
    def said(self) -> str:
        """The command's lines about its end: its own, and the last ones of tracebacks."""
        return " ".join(line for line in self.error.splitlines() if re.match(SAYS, line))


class Jobs:
    """Runs rows, which share undisturbed runs; these go to ``folder``, where rows have folders, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / TEXT).write_bytes(bytes(range(256)) * 40)
        self.trained: dict[str, Path] = {}

    def undisturbed(self, order: Order) -> Path:
        """The output folder of such a run."""
        path = order.row.path
        if path not in self.trained:
            folder = self.folder / f"undisturbed-{path}"
            folder.mkdir()
            words = [*train_words(order, folder / "out"), "train.checkpoint_every=1"]
            ended = run(order, folder, words, PROGRAM)
            assert ended.status == 0, f"undisturbed: {ended.error}"
            self.trained[path] = folder / "out"
        return self.trained[path]

    def run(self, order: Order) -> Finding:
        out = order.folder / "out"
        if order.row.phase == "tune":
            return run_tune(order, out)
        trained = self.undisturbed(order)
        if order.row.phase == "decode":
            return run_generate(order, trained)
        if order.row.phase == "checkpoint load":
            shutil.copytree(trained, out)
            shutil.rmtree(max(out.glob("step-*")))  # so that something is left to train
        finding = judge(order, run(order, order.folder, train_words(order, out), APP))
        finding.wrong += wrong_training(order, out, trained)
        return finding


def train_words(order: Order, out: Path) -> list[str]:
    text = next(folder / TEXT for folder in out.parents if (folder / TEXT).exists())
    is_preempted = order.row.fault == "SIGTERM" and not order.row.phase.startswith("checkpoint")
    return [
        "train", *TINY, f"data.path={text}", f"output_dir={out}", f"moe_path={order.row.path}", "resume=auto",
        f"train.checkpoint_every={0 if is_preempted else 1}", *rank_words(order),
    ]  # fmt: skip


def rank_words(order: Order) -> list[str]:
    ranks = order.world_size
    experts = [f"model.moe.num_experts={4 * ranks}"]
    # Only of a frozen rank do the others learn by their deadline; SIGTERM takes its time on a busy machine.
    deadline_s = order.deadline_s if order.row.fault == "SIGSTOP" else PATIENCE_S
    return [f"nproc={ranks}", f"parallel.ep={ranks}", f"comm.timeout_s={deadline_s}", *experts]


def run(order: Order, folder: Path, words: Sequence[str], program: Sequence[str]) -> Ended:
    """Run a job to its end; with ``APP`` its culprit meets the fault."""
    (folder / "order").write_bytes(pickle.dumps(order))
    env = environment() | {ORDER: str(folder / "order")}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        command = [sys.executable, *program, *words]
        process = Program(command, env=env, stdout=stdout, stderr=stderr)
        try:
            began = time.monotonic()
            struck = (
                await_file(
                    order.folder / STRUCK, lambda: process.poll() is not None or time.monotonic() > began + START_S
                )
                if program is APP
                else ""
            )
            family = psutil.Process(process.pid).children(recursive=True) if struck else []
            at = meet_fault(order, process.pid, struck)
            status = wait(process, order.limit_s + HUNG_S if struck else START_S)
            seconds = time.monotonic() - at
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    _, left = psutil.wait_procs(family, timeout=10.0)
    for each in left:
        each.kill()
    return Ended(status, seconds, (folder / "stderr").read_text(), len(left))


def meet_fault(order: Order, launcher: int, struck: str) -> float:
    """Send the row's signal to the rank that waits for it, SIGTERM to the launcher; when the fault was."""
    if not struck:
        return math.nan
    pid, at = struck.split()
    if order.row.fault not in SIGNALS:
        return float(at)
    os.kill(launcher if order.row.fault == "SIGTERM" else int(pid), getattr(signal, order.row.fault))
    sent = time.monotonic()
    note(order.folder / SENT)
    return sent


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def losses_of(out: Path) -> dict[int, float]:
    """Training loss by step, and the held-out loss of the end as that of step -1."""
    found = dict(enumerate(losses(out), start=1))
    end = json.loads((out / "result.json").read_text()) if (out / "result.json").exists() else {}
    return found | ({-1: end["heldout_nats_per_byte"]} if "heldout_nats_per_byte" in end else {})


def judge(order: Order, ended: Ended) -> Finding:
    row = order.row
    finding = Finding(row, said=ended.said, seconds=ended.seconds)
    if math.isnan(ended.seconds):
        finding.wrong.append(f"the fault did not happen: {ended.error[-500:]}")
        return finding
    if ended.seconds > order.limit_s:
        finding.wrong.append(f"the job went on for {ended.seconds:.1f} s, allowed are {order.limit_s:.1f} s")
    if ended.status == 0 and row.fault != "SIGTERM":
        finding.wrong.append("the job ended as if nothing had happened")
    missing = unnamed(order, ended.said, reason=True)
    finding.wrong += [each for each in missing if row.fault != "SIGTERM" or " is not named" not in each]
    if ended.left:
        finding.wrong.append(f"{ended.left} processes were left behind")
    return finding


def wrong_training(order: Order, out: Path, trained: Path) -> list[str]:
    """The differences of a disturbed job from the beginning of the undisturbed one, and after a resume from its end."""
    wanted = losses_of(trained)
    wrong = different(losses_of(out), wanted, "disturbed", whole=False)
    whole = [each.path.name for each in list_checkpoints(out)[0]]
    if not whole:
        return [*wrong, "no whole checkpoint was left"]
    try:
        run_ranks(train_as_rank, order.world_size, train_words(order, out)[1:])
    except AssertionError as error:
        return [*wrong, f"resuming failed: {error}"]
    return wrong + different(losses_of(out), wanted, f"resumed from {whole[0]}", whole=True)


def different(found: dict[int, float], wanted: dict[int, float], what: str, *, whole: bool) -> list[str]:
    """Losses that are not the undisturbed run's, bit for bit; of a ``whole`` run those that are missing, too."""
    steps = wanted if whole else found.keys() & wanted.keys()
    return [
        f"{what}: loss of step {step} is {found.get(step)}, undisturbed {wanted[step]}"
        for step in sorted(steps)
        if found.get(step) != wanted[step]
    ]


def run_tune(order: Order, out: Path) -> Finding:
    words = ["tune", *SMALL, "tune.tokens=[32,64]", "tune.rounds=3", f"tune.profiles={out}", *rank_words(order)]
    finding = judge(order, run(order, order.folder, words, APP))
    for file in out.glob("*.csv"):
        Table.load(file)
    return finding


def run_generate(order: Order, trained: Path) -> Finding:
    prompt = [f"generate.source={trained}", "generate.prompt=def ", "generate.max_new_tokens=20"]
    return judge(order, run(order, order.folder, ["generate", *prompt, *rank_words(order)[:-1]], APP))
