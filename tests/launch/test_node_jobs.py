"""Jobs over two nodes, and two torchrun agents: a whole job, and ranks that are killed or freeze."""

import json
import math
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import DECODE_TOKENS, check_families, greedy, make_group, prompt, tiny_config, tiny_model
from hf_fp8_cases import published
from launch_jobs import all_gone, end_of, processes_of, start_two_agents, training, wait_for_checkpoint
from pages import fences
from ranks import run_ranks
from training_cases import MODEL, MOE, Rank, make_generation, make_job

from comet.config import ParallelConfig
from comet.generation.job import generate_job
from comet.integrations import hf
from comet.jobs.config import TrainJob
from comet.jobs.generate import GenerateConfig
from comet.launch.cli import PROGRAM
from comet.training.trainer import train

TRAINED = replace(MODEL, dense_layers=1, moe=replace(MOE, shared_ffn_size=16))
ONE_NODE, TWO_NODES = ParallelConfig(ep=2), ParallelConfig(ep=2, tp=2, node_size=2)
GREEDY = GenerateConfig(prompts=("17 times 4 is ", "3 ti"), max_new_tokens=6, temperature=0.0)
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}  # whole blocks
EXACT = ("heldout_nats_per_byte", "steps", "parameters", "cuda_graph")


def job_of(folder: Path, name: str, parallel: ParallelConfig, **changes: Any) -> TrainJob:
    settings: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "sample_bytes": 3, "eval_batches": 1}
    job = make_job(folder, model=TRAINED, output_dir=str(folder / name), **(settings | changes))
    return replace(job, parallel=parallel)


def first_runs(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """On two nodes; on one, plain; from the first one's fourth step on two nodes again; and its text."""
    me, saved = Rank(rank, world_size), folder / "two" / "step-000004"
    runs = {
        "two": train(job_of(folder, "two", TWO_NODES), me),
        "one": train(job_of(folder, "one", replace(TWO_NODES, node_size=None), moe_path="plain"), me),
        "again": train(job_of(folder, "again", TWO_NODES, resume=str(saved)), me),
    }
    source = replace(GREEDY, source=str(folder / "two"))
    runs["text"] = generate_job(replace(make_generation(TRAINED, source), parallel=TWO_NODES), me)["texts"]
    return runs


def go_on(
    rank: int, world_size: int, folder: Path, start: str, end: str, parallel: ParallelConfig, steps: int
) -> float:
    """The held-out loss of a run that goes on from another one up to that step."""
    job = job_of(folder, end, parallel, resume=str(folder / start), steps=steps, resume_changes=("train.steps",))
    result = train(job, Rank(rank, world_size))
    assert result["steps"] == steps
    return result["heldout_nats_per_byte"]


@pytest.mark.slow
def test_training_goes_on_over_another_number_of_nodes(tmp_path: Path) -> None:
    two, *others = run_ranks(first_runs, 4, tmp_path, timeout=300)
    assert [each["text"] for each in others] == [two["text"]] * 3
    assert [two["again"][key] for key in EXACT] == [two["two"][key] for key in EXACT]
    assert two["one"]["heldout_nats_per_byte"] == pytest.approx(two["two"]["heldout_nats_per_byte"], rel=1e-5)
    job = make_generation(TRAINED, replace(GREEDY, source=str(tmp_path / "two")))
    assert generate_job(job, Rank())["texts"] == two["text"], "of a rank alone"
    start, _ = run_ranks(go_on, 2, tmp_path, "two", "start", ONE_NODE, 6, timeout=300)
    assert start == pytest.approx(two["two"]["heldout_nats_per_byte"], rel=1e-5)
    end, _ = run_ranks(go_on, 2, tmp_path, "two", "small", ONE_NODE, 8, timeout=300)
    assert start != end < math.log(256)
    back, *_ = run_ranks(go_on, 4, tmp_path, "small", "back", TWO_NODES, 8, timeout=300)
    assert back == pytest.approx(end, rel=1e-5)


def converted(rank: int, world_size: int, folder: Path) -> list[torch.Tensor]:
    answers = check_families(rank, 2, 1, ("qwen3_moe", "deepseek_v3"), node_size=1)
    model = tiny_model("deepseek_v3")
    group = make_group(model, 2, 1, node_size=1)
    hf.convert(model, group, decode_tokens=DECODE_TOKENS)
    answers.append(greedy(model, prompt(1, 5)))
    hf.check(model)
    group.close()
    group = make_group(tiny_config("qwen3_moe", **SIZES), 2, 1, node_size=1)
    kept, plain = (hf.load_pretrained(folder, group, keep_fp8=keep_fp8) for keep_fp8 in (True, False))
    with torch.no_grad():
        assert torch.equal(kept(prompt(2, 9)).logits, plain(prompt(2, 9)).logits), "experts kept in block FP8"
    group.close()
    return answers


@pytest.mark.slow
def test_hugging_face_models_over_two_nodes(tmp_path: Path) -> None:
    alone = tiny_model("deepseek_v3")
    first, second = run_ranks(converted, 2, published(tmp_path, "qwen3_moe", **SIZES), timeout=300)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    assert torch.equal(first[-1], greedy(alone, prompt(1, 5)))


def start_training(folder: Path, ranks: int, *words: str) -> list[subprocess.Popen[str]]:
    settings = [f"parallel.ep={2 * ranks}", f"parallel.node_size={ranks}", *words]
    return start_two_agents(*training(folder, *settings), ranks=ranks, program=PROGRAM[1:])  # torchrun knows no -P


def said(ends: Sequence[tuple[int, list[str], list[str]]]) -> list[str]:
    return [line for _, _, err in ends for line in err if line.startswith("comet:")]


@pytest.mark.slow
def test_a_job_of_two_agents_shares_experts_over_both(tmp_path: Path) -> None:
    ends = end_of(start_training(tmp_path, 2, "train.steps=2"))
    assert [status for status, _, _ in ends] == [0, 0], ends
    result = json.loads([line for _, out, _ in ends for line in out][-1])
    assert (result["steps"], result["ep"], result["world_size"]) == (2, 4, 4)
    assert result["moe_path"] == "twin", "inside each node"
    assert not [line for line in said(ends) if "plain" in line]


def test_the_slurm_script_starts_an_agent_on_each_node(tmp_path: Path) -> None:
    (script,) = [block for block in fences("docs/howto/nodes.md", "bash") if block.startswith("#!")]
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
        "-m comet.launch train model=qwen3_30b_a3b parallel.ep=16 output_dir=outputs/7 resume=auto"
    )
    assert out.stdout.splitlines() == [line] * 2


# An agent whose only rank is frozen does not notice: srun --kill-on-bad-exit or the starter of the agent ends it.
@pytest.mark.slow
@pytest.mark.parametrize(("number", "state", "per_node"), [(signal.SIGKILL, "gone", 1), (signal.SIGSTOP, "frozen", 2)])
def test_a_rank_of_the_other_node_is_named_with_its_host(
    number: signal.Signals, state: str, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")  # seconds that torchrun gives a rank to stop
    agents = start_training(tmp_path, per_node, "train.steps=1000000", "train.checkpoint_every=2", "comm.timeout_s=6")
    try:
        wait_for_checkpoint(tmp_path / "run", *agents)
        ranks = processes_of(*agents)
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
