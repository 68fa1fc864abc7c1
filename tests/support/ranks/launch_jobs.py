"""Jobs of the launcher as processes of their own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from forked import Program, completed
from training_cases import Rank

from comet.launch.config import compose, make_job
from comet.training.trainer import train

APP = str(Path(__file__).parent / "launch_app.py")
TIMEOUT_S = 180
SMALL = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.context=32",
    "model.moe.ffn_size=32",
)  # fmt: skip
TINY = (*SMALL, "train.batch_size=2", "train.warmup_steps=0", "train.eval_batches=1", "train.sample_bytes=0")


def environment() -> dict[str, str]:
    """Ranks of these tests compute on the CPU, also on a machine with GPUs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(
    *words: str, program: Sequence[str] = (APP,), stderr: int = subprocess.PIPE, folder: Path | None = None
) -> Program:
    command = [sys.executable, *program, *words]
    return Program(command, env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(*words: str, program: Sequence[str] = (APP,), timeout_s: float = TIMEOUT_S) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of standard output, lines of standard error."""
    ended = completed([sys.executable, *program, *words], environment(), timeout_s)
    return ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines()


def training(folder: Path, *words: str) -> list[str]:
    """The words of a small job that trains on a text in ``folder``, and writes to ``folder/run``."""
    (folder / "text.txt").write_bytes(bytes(range(256)) * 40)
    return ["train", f"data.path={folder}/text.txt", f"output_dir={folder}/run", *TINY, *words]


def train_as_rank(rank: int, world_size: int, settings: Sequence[str]) -> None:
    """Train as a rank of ``comet train`` does; ``run_ranks`` starts ranks faster than the command."""
    train(make_job(compose(settings), world_size), Rank(rank, world_size))


def rank_pids(folder: Path, num_ranks: int, job: subprocess.Popen[str] | None = None) -> list[int]:
    """Wait until every rank has noted its process id; a job that ends before says why."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("pid.*"))) < num_ranks or not all(file.read_text() for file in folder.glob("pid.*")):
        if job is not None and job.poll() is not None:
            pytest.fail(f"the job ended with {job.returncode} before its ranks started: {job.communicate()}")
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int((folder / f"pid.{rank}").read_text()) for rank in range(num_ranks)]


def all_gone(pids: Sequence[int]) -> bool:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    return not alive


def wait_for_checkpoint(folder: Path, *jobs: subprocess.Popen[str]) -> int:
    """The step of the first complete checkpoint, while training goes on."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (complete := sorted(folder.glob("step-??????"))):
        assert [job.poll() for job in jobs] == [None] * len(jobs), end_of(jobs)
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.05)
    return int(complete[-1].name.removeprefix("step-"))


def processes_of(*jobs: subprocess.Popen[str]) -> dict[int, int]:
    """The process id of each rank of a local job, or of all agents of one: their children as they were started."""
    begun = psutil.Process.create_time
    children = [child for job in jobs for child in sorted(psutil.Process(job.pid).children(), key=begun)]
    return {rank: child.pid for rank, child in enumerate(children)}


def free_port() -> int:
    """Return a free port below the ephemeral ones, so that no other program gets this port before its use."""
    for port in range(10_000 + os.getpid() % 10_000, 30_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


def start_two_agents(*words: str, ranks: int = 1, program: Sequence[str] = (APP,)) -> list[subprocess.Popen[str]]:
    """Two torchrun agents on this host, as on two nodes with ``ranks`` ranks each.

    The first agent has the rendezvous store, as on the endpoint's node; on one host either agent might take it. When
    the agent with the store ends, the other agent ends its ranks before they can name the missing rank.
    """
    port = free_port()
    options = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    agent = ["-m", "torch.distributed.run", *options, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf"]
    return [start(*words, program=[*agent, f"is_host={is_host}", *program]) for is_host in ("true", "false")]


def end_of(agents: Sequence[subprocess.Popen[str]]) -> list[tuple[int, list[str], list[str]]]:
    try:
        texts = [agent.communicate(timeout=TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [
        (agent.returncode, out.splitlines(), err.splitlines()) for agent, (out, err) in zip(agents, texts, strict=True)
    ]


def run_two_agents(*words: str, ranks: int = 1) -> list[tuple[int, list[str], list[str]]]:
    return end_of(start_two_agents(*words, ranks=ranks))
