"""Memory that a job needs and the machine has: refused at the start, and named when a rank was killed for it."""

import re
import resource
import signal
import subprocess
import sys

import pytest
import torch
from launch_jobs import environment
from refusals import refusal

from comet.launch import failures, local, memory
from comet.launch.config import compose, make_job
from comet.launch.local import run_local_ranks
from comet.launch.memory import LIBRARY_BYTES, oom_kills, require_memory, train_bytes
from comet.launch.tasks.registry import TASKS


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["train", "model=deepseek_v3"], "lower model.num_layers, model.moe.num_experts, model.context or train."),
        (["train", "train.batch_size=100000"], "lower model.num_layers, "),
        (["train", "nproc=5000", "parallel.ep=1"], "lower model.num_layers, "),
        (
            ["train", "nproc=34", "parallel.ep=1", "model.num_layers=1", "train.batch_size=1"],
            "lower model.num_layers, ",
        ),
        (["generate", "model=mixtral_8x7b"], "give generate.expert_budget, lower generate.max_new_tokens, or take"),
        (["tune", "model=deepseek_v3"], "lower tune.tokens, or take a smaller model"),
        (["sweep", "sweep.models=[tiny,deepseek_v3]"], "lower sweep.tokens, or take smaller models"),
        (["modular", "modular.tokens=10000000"], "lower modular.tokens, or take a smaller model"),
    ],
)
def test_a_job_that_cannot_fit_is_refused_before_a_rank_starts(words, remedy, capfd, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 2**30)
    monkeypatch.setattr(local, "run_local_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr("comet.launch.config.find_source", lambda source: source)  # None stands for the job's model.
    told = refusal(capfd, *words)
    found = re.match(r"memory: ([\d,]+) bytes for (\d+) ranks must be at most the 8,589,934,592 that the ranks", told)
    assert found, told
    assert int(found[1].replace(",", "")) > 8 * 2**30
    assert f": {remedy}" in told
    assert told.endswith(", or start fewer ranks (nproc); --dry-run prints what takes the memory\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sweep.layouts=[[3,1]]"], "num_experts=8 must be divisible by ep=3"),
        (["sweep.layouts=[[4,1],[8,1]]"], "world_size=2 must be divisible by ep x tp = 8 x 1 = 8"),
    ],
)
def test_a_sweep_of_which_no_layer_fits_starts_no_rank(words, reason, capfd, monkeypatch):
    monkeypatch.setattr(local, "run_local_ranks", lambda *_: pytest.fail("ranks were started"))
    ways = "give other ranks (nproc), parallel.ep or sweep.layouts"
    assert refusal(capfd, "sweep", *words) == f"no layer fits: {reason}; {ways}\n"


def test_needs_of_a_host_are_those_of_its_ranks_and_of_a_gpu_those_of_one(monkeypatch):
    job, cpu, gpu = make_job(compose(["parallel=ep2"]), 4), torch.device("cpu"), torch.device("cuda", 0)
    one = train_bytes(job, 4, cpu) + LIBRARY_BYTES
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * one)
    require_memory(TASKS["train"], job, 4, 2, cpu)
    with pytest.raises(ValueError, match=f"memory: {3 * one:,} bytes for 3 ranks must be at most the {2 * one:,} "):
        require_memory(TASKS["train"], job, 4, 3, cpu)
    on_gpu = train_bytes(job, 4, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, on_gpu))
    require_memory(TASKS["train"], job, 4, 4, gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, on_gpu - 1))
    with pytest.raises(ValueError, match=f"memory: {on_gpu:,} bytes for 1 rank must be .* of NVIDIA H200: lower"):
        require_memory(TASKS["train"], job, 4, 4, gpu)


def test_a_limit_of_the_process_counts_as_memory_does():
    code = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_DATA, ({4 * 2**30},) * 2)
sys.argv = ["comet", "train", "model=mixtral_8x7b", "model.num_layers=1", "nproc=1"]
runpy.run_module("comet.launch", run_name="__main__")
"""
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert " for 1 rank must be at most the " in done.stderr


def test_a_rank_that_is_out_of_memory_is_named():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
    assert failures._line(error, 3, "step (x.py:1)", failures.Inquiry({}, {})).startswith(
        "error: rank 3: out of memory ("
    )


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(("kills", "is_oom"), [((3, 3), False), ((3, 4), True)])
def test_a_rank_that_the_kernel_killed_was_probably_out_of_memory(kills, is_oom, capfd, monkeypatch):
    counts = iter(kills)
    monkeypatch.setattr(local, "oom_kills", lambda: next(counts))
    assert run_local_ranks(["-c", KILLED], 1, {"launch": {"max_restarts": 0}}) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert f"was killed by {signal.SIGKILL.name}" in line
    assert (", probably out of memory: use a smaller model" in line) == is_oom
    assert line.endswith("; the other ranks were ended")


def test_kills_of_the_kernel_are_counted_where_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text("pgfault 5\noom_kill 12\nnr_oom_kill 3\n")
    assert oom_kills() == 12
