"""Two torchrun agents, as on two nodes, whose ranks share experts: a whole job, and ranks that are killed or freeze."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from launch_jobs import TIMEOUT_S, all_gone, end_of, start_two_agents

from comet.launch.cli import PROGRAM

TINY = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.context=32",
    "model.moe.ffn_size=32", "train.batch_size=2", "train.warmup_steps=0", "train.eval_batches=1",
)  # fmt: skip
NODES = r"a group of 4 ranks spans several: ranks 0 to 1 on \S+ \(node 0\), ranks 2 to 3 on \S+ \(node 1\)"


def start_training(folder: Path, ranks: int, *words: str) -> list[subprocess.Popen[str]]:
    """Of as many ranks each, which share the experts."""
    (folder / "text.txt").write_bytes(bytes(range(256)) * 40)
    settings = [f"data.path={folder}/text.txt", f"output_dir={folder}/run", *TINY, *words]
    settings += [f"parallel.ep={2 * ranks}", f"parallel.node_size={ranks}"]
    return start_two_agents("train", *settings, ranks=ranks, program=PROGRAM[1:])  # torchrun knows no -P


def said(ends: Sequence[tuple[int, list[str], list[str]]]) -> list[str]:
    return [line for _, _, err in ends for line in err if line.startswith("comet:")]


@pytest.mark.slow
def test_a_job_of_two_agents_shares_experts_over_both(tmp_path: Path) -> None:
    ends = end_of(start_training(tmp_path, 2, "train.steps=2"))
    assert [status for status, _, _ in ends] == [0, 0], ends
    result = json.loads([line for _, out, _ in ends for line in out][-1])
    assert (result["steps"], result["ep"], result["world_size"]) == (2, 4, 4)
    warnings = [line for line in said(ends) if "spans several" in line]
    assert len(warnings) == 1, "once for all layers and ranks"
    assert re.match(f"comet: {NODES}. So its layers take path 'plain'", warnings[0])


def test_the_slurm_script_starts_an_agent_on_each_node(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S)
    commands = {
        "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "node1\nnode2\n"',
        "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && "$@" && "$@"',
        "torchrun": 'echo "$*"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    out = subprocess.run(
        ["bash", "-ec", script], env={"PATH": path, **slurm}, check=True, capture_output=True, text=True
    )
    line = (
        "--nnodes 2 --nproc-per-node 8 --rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint node1:29500 "
        "-m comet.launch train parallel.ep=16 output_dir=outputs/7 resume=auto"
    )
    assert out.stdout.splitlines() == [line] * 2


# An agent whose only rank is frozen does not hear of it: srun --kill-on-bad-exit ends it, or whoever started it.
@pytest.mark.slow
@pytest.mark.parametrize(("number", "state", "per_node"), [(signal.SIGKILL, "gone", 1), (signal.SIGSTOP, "frozen", 2)])
def test_a_rank_of_the_other_node_is_named_with_its_host(
    number: signal.Signals, state: str, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # what torchrun gives a rank that is stopped
    agents = start_training(tmp_path, per_node, "train.steps=1000000", "train.checkpoint_every=2", "comm.timeout_s=6")
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not list((tmp_path / "run").glob("step-??????")):
            assert [agent.poll() for agent in agents] == [None, None], end_of(agents)
            assert time.monotonic() < deadline, "no checkpoint appeared"
            time.sleep(0.05)
        children = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
        ranks = {int(child.environ()["RANK"]): child.pid for child in children if "RANK" in child.environ()}
        last = 2 * per_node - 1
        os.kill(ranks[last], number)
        ends = end_of(agents)
    finally:
        for agent in agents:
            agent.kill()
    errors = [line for line in said(ends) if "error" in line]
    assert len(errors) == 1, ends
    assert re.match(rf"comet: error: rank {last} \(pid {ranks[last]}, {socket.gethostname()}\) is {state}", errors[0])
    assert all(status != 0 for status, _, _ in ends)
    assert all_gone(list(ranks.values()))
