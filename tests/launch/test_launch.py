"""The command line as users run it: help, dry run, mistakes, where it listens, and every way a job can end."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
import torch
from launch_jobs import (
    APP,
    TIMEOUT_S,
    TINY,
    all_gone,
    environment,
    processes_of,
    rank_pids,
    run,
    run_two_agents,
    start,
    train_as_rank,
    training,
    wait_for_checkpoint,
)
from ranks import run_ranks
from refusals import refusal, run_without_gpu
from terminal import Terminal
from tiers import slow
from training_cases import Rank, losses

from comet.errors import CapacityError, CommTimeoutError, NothingMeasuredError
from comet.kernels.runtime import process
from comet.launch.cli import PROGRAM, main
from comet.launch.config import compose, make_job
from comet.launch.distributed import LaunchContext, rank_environment
from comet.launch.failures import is_peer_error, report
from comet.launch.local import run_local_ranks
from comet.launch.messages import OF_TORCHRUN, is_user_error, one_line
from comet.launch.rank import share_config
from comet.launch.tasks.registry import TASKS
from comet.training.checkpoint_folder import find_checkpoints
from comet.training.trainer import train


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.settings])
def test_every_task_with_settings_takes_the_common_options(name, capfd):
    status, out, _ = run_without_gpu(capfd, name, "--help")
    assert out.startswith(f"usage: comet {name} [options] [settings]\n\n{TASKS[name].summary}\n")
    assert status == 0
    status, _, err = run_without_gpu(capfd, name, "--traceback", "parallel.ep=3")
    assert status == 2
    assert "Traceback" in err
    assert "num_experts=8 must be divisible by ep=3" in err.splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], ["train", "--dry-run"], ["add_ranks"], ["write_lines"]])
def test_a_reader_that_leaves_early_is_no_mistake(words, tmp_path):
    of_ranks = [f"output_dir={tmp_path}"] if "_" in words[0] else []
    process = start(*words, *of_ranks, program=(APP,) if of_ranks else PROGRAM)
    process.stdout.close()  # `head` does so once it has its lines.
    err = process.stderr.read()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


TASK_NAMES = "must be one of train, generate, tune, sweep, modular, place, export, compile"


@pytest.mark.parametrize(("words", "message"), [
    (["bake"], f"task='bake' {TASK_NAMES}"),
    (["trian"], f"task='trian' {TASK_NAMES}; did you mean train?"),
    (["explain", "tune.tokens=[8]"], "task='explain' is no longer a task: comet train says"),
    (["train", "output_dir=\udcff"], r"the argument b'output_dir=\xff' must be text in UTF-8"),
    (["train", "output_dir=/proc/x"], "output_dir must be a folder to write in (No such file or directory): '/proc/x'"),
    (["sweep", "output_dir=/dev/null/x/y"], "output_dir must be a folder to write in (Not a directory): "),
    (["compile", "--filter", "a\udcc3"], r"the argument b'a\xc3' must be text in UTF-8"),
    (["train", "--fast"], "unrecognized arguments: --fast"),
    (["generate", "train.dtype=float32"], "override 'train.dtype=float32': train.dtype must be left out: it is a set"),
    (["tune", "output_dir=x", "train.lr=1"], "override 'output_dir=x': output_dir must be left out: it is a setting "),
])  # fmt: skip
def test_a_mistake_ends_with_status_2_and_one_line(words, message, capfd):
    assert refusal(capfd, *words).startswith(message)


def test_ranks_run_by_a_file_end_without_shutdown_and_the_last_line_is_rank_0s(tmp_path):
    """Ranks leave notes in the file's folder; the command's own output comes first."""
    file = tmp_path / "my.yaml"
    file.write_text(f"output_dir: {tmp_path}\ntrain: {{steps: 40, warmup_steps: 0}}\nnproc: 2\n")
    status, out, err = run("add_ranks", "--config", str(file), "train.steps=50")
    assert (status, err) == (0, [])
    assert json.loads(out[-1]) == {"total": 3, "world_size": 2, "steps": 50, "ep": 2, "nodes": 1, "threads": 1}
    assert all_gone(rank_pids(tmp_path, 2))


def test_train_ends_with_its_result_in_one_json_line(tmp_path):
    """The job starts as a user's does, without a fork."""
    command = [sys.executable, *PROGRAM, *training(tmp_path, "train.steps=2", "parallel=ep2")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    result, err = json.loads(done.stdout.splitlines()[-1]), done.stderr.splitlines()
    assert (result["task"], result["steps"], result["world_size"], result["ep"]) == ("train", 2, 2, 2)
    assert not [line for line in err if "Traceback" in line or "Warning" in line]
    splits = [line for line in err if "split of layers" in line]
    assert splits == [
        "comet: split of layers with E=8 K=2 D=32 F=32 float32, EP2 TP1, about 64 tokens: 1 panel (default)"
    ], "once for all layers and ranks"


def kill_rank_1(launcher: subprocess.Popen[str], ranks: dict[int, int]) -> None:
    os.kill(ranks[1], signal.SIGKILL)


STOPPING = "comet: stopping: a rank that trains saves a checkpoint first, a second Ctrl-C ends it at once"


def press_ctrl_c(launcher: subprocess.Popen[str], ranks: dict[int, int]) -> None:
    """A terminal interrupts the whole process group in its foreground."""
    os.killpg(launcher.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [
        (kill_rank_1, 1, "comet: error: rank 1 (pid {pid}) was killed by SIGKILL; the other ranks were ended"),
        slow(press_ctrl_c, 130, "comet: stopped by SIGINT; all ranks were ended"),
    ],
)
def test_training_that_is_stopped_leaves_a_checkpoint_and_nothing_else(stop, status, message, tmp_path, capfd):
    folder = tmp_path / "run"
    task, *settings = training(tmp_path, "train.checkpoint_every=5")
    with Terminal(120) as terminal:
        job = start(task, *settings, "train.steps=1000000", "parallel=ep2", program=PROGRAM, stderr=terminal.descriptor)
        try:
            saved = wait_for_checkpoint(folder, job)
            ranks = processes_of(job)
            assert ranks.keys() == {0, 1}
            stop(job, ranks)
            out, _ = job.communicate(timeout=TIMEOUT_S)
        finally:
            job.kill()
        lines = terminal.lines()
    assert job.returncode == status, lines
    *earlier, bar, last, empty = lines
    assert (last, empty) == (message.format(pid=ranks[1]), ""), lines
    assert "/1000000 [" in bar, lines
    said = [line for line in earlier if "comet:" in line and line != STOPPING]
    assert len(said) == 2, f"more than split and data at the start: {earlier}"
    assert (STOPPING in earlier) == (stop is press_ctrl_c)
    assert not any("Traceback" in line for line in lines)
    assert all_gone(list(ranks.values()))
    newest = find_checkpoints("auto", str(folder))[0][0]
    assert newest.step >= saved
    told = f"after step {newest.step}, checkpoint {newest.path}; comet train resume={folder} continues"
    assert (told in out) == (stop is press_ctrl_c), out
    words = [*settings, "resume=auto", f"train.steps={newest.step + 1}", "parallel=single"]
    words += ["resume_changes=[train.steps]"]
    assert train(make_job(compose(words), 1), Rank())["steps"] == newest.step + 1
    assert f"continuing {newest.path} from step {newest.step}" in capfd.readouterr().err


def test_a_task_without_ranks_gets_its_words():
    assert run("plain", "a", "--b") == (2, ["['a', '--b']"], [])


WAITED = "rank 1 waited 30.0 s for rank 0 (layer 0 dispatch, chunk 17, epoch 41, saw 40)"
FAILURES = {
    "refuse": (2, "seed=0 must please everyone"),
    "refuse_alone": (2, "backend=nvshmem needs a package: pip install comet-moe[nvshmem]"),
    "time_out": (1, f"{WAITED}; rank 0 is alive, in wait_forever (launch_app.py)"),
}


@pytest.mark.parametrize("task", [slow("refuse_alone"), slow("refuse"), slow("time_out")])
def test_a_failure_is_one_line_from_one_rank(task, tmp_path):
    found, out, err = run(task, f"output_dir={tmp_path}")
    status, message = FAILURES[task]
    assert [re.sub(r":\d+\)$", ")", line) for line in err] == [f"comet: error: {message}"]
    assert (found, out) == (status, [])
    assert all_gone(rank_pids(tmp_path, 2))


def test_a_bug_shows_one_traceback_and_names_the_rank(tmp_path):
    status, out, err = run("crash", f"output_dir={tmp_path}")
    assert (status, out) == (1, [])
    assert [line for line in err if line.startswith("Traceback")] == ["Traceback (most recent call last):"]
    assert err[-2:] == ["KeyError: 'a bug of ours'", "comet: error: rank 1 failed with KeyError"]
    assert all_gone(rank_pids(tmp_path, 2))


@pytest.mark.parametrize(
    ("task", "signum", "status"),
    [("deadlock", signal.SIGINT, 130), slow("sleep", signal.SIGTERM, 143)],
)
def test_a_signal_ends_every_rank(task, signum, status, tmp_path):
    process = start(task, f"output_dir={tmp_path}")
    pids = rank_pids(tmp_path, 2, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (status, "")
    *before, last = err.splitlines()
    assert last == f"comet: stopped by {signum.name}; all ranks were ended"
    assert before == ([STOPPING] if signum == signal.SIGINT else [])
    assert all_gone(pids)


SAVING_RANK = """
import os, signal, sys
ends = dict(full=lambda *_: sys.exit(2), killed=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
            saved=lambda *_: sys.exit(143), over=lambda *_: sys.exit(0))
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, ends[sys.argv[1]])
    os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("save", "num_ranks", "status"),
    [("full", 1, 2), ("full", 2, 2), ("killed", 2, 1), ("saved", 1, 143), ("saved", 2, 143), ("over", 1, 0)],
)
def test_a_save_that_fails_after_sigterm_does_not_end_as_one_that_was_written(save, num_ranks, status, capfd):
    """Rank 0 saves; another rank ends by the signal, as before its first step."""
    assert run_local_ranks(["-c", SAVING_RANK, save], num_ranks, {"launch": {"max_restarts": 1}}) == status
    assert ("stopped by SIGTERM" in capfd.readouterr().err) == (status == 143)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_job_whose_rank_does_not_save(tmp_path):
    """The rank ignores signals, as a rank in a long save does."""
    code = (
        f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]); open({str(tmp_path)!r} + '/up', 'w');"
    )
    job = subprocess.Popen([sys.executable, "-c", LAUNCH, code], stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "up").exists():
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        assert job.stderr.readline() == STOPPING + "\n"
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    assert (job.returncode, err) == (130, "comet: stopped by SIGINT; all ranks were ended\n")


LAUNCH = """
import sys
from comet.launch.local import run_local_ranks
sys.exit(run_local_ranks(["-c", sys.argv[1] + "signal.pause()"], 1, {"launch": {"max_restarts": 0}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.5, 4.0])
def test_ctrl_c_at_any_time_shows_no_traceback(seconds, tmp_path):
    """The job starts without a fork, so that the launcher or the ranks still import."""
    command = [sys.executable, *PROGRAM, *training(tmp_path, "train.steps=100000", "parallel=ep2")]
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(seconds)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=TIMEOUT_S)
    ended = job.returncode in (130, -signal.SIGINT)  # On a busy machine the interpreter may not have begun yet.
    assert (ended, "Traceback" in err) == (True, False), err


INTERRUPTED = """
import os, signal, sys
from comet.launch.__main__ import main
class Finder:
    def find_spec(self, name, *others):
        if name == "comet.launch.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--version"]
sys.exit(main())
"""


@pytest.mark.parametrize(("before", "status"), [("SIG_DFL", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_command_line_is_imported_shows_no_traceback(before, status):
    """A shell starts what runs in the background with SIGINT ignored."""
    start = (
        f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{before}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    words = [sys.executable, "-c", start, sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.slow
def test_two_agents_form_one_job_with_rank_0s_configuration(tmp_path):
    results = run_two_agents("report_context", f"output_dir={tmp_path}/${{now:%f}}")
    assert [status for status, _, _ in results] == [0, 0], results
    lines = [line for _, out, _ in results for line in out]
    everything = json.loads(lines[-1])
    assert [entry[:3] for entry in everything] == [[0, 0, 0], [1, 1, 0]]
    assert everything[0][3] == everything[1][3], "the time in output_dir is rank 0's on every rank"


def test_a_node_that_was_started_with_other_settings_is_refused(tmp_path):
    store = torch.distributed.HashStore()
    part = torch.distributed.PrefixStore("attempt", store)
    place = dict(world_size=2, device=torch.device("cpu"), local_rank=0, local_world_size=1, num_nodes=2)
    ranks = [LaunchContext(rank=rank, node=rank, **place) for rank in range(2)]
    words = [f"output_dir={tmp_path}", "train.lr=0.002"]

    def share(rank, overrides, task="train", config=None):
        return share_config(ranks[rank], store, part, TASKS[task], Namespace(overrides=overrides, config=config))

    assert share(0, words) == share(1, words)
    for other in (
        dict(overrides=words[:1]),
        dict(overrides=words, task="tune"),
        dict(overrides=words, config="a.yaml"),
    ):
        with pytest.raises(
            ValueError, match=r"rank 1 was started as '.*', but must be as rank 0, '.*train\.lr=0\.002'"
        ):
            share(1, **other)


@pytest.mark.slow
def test_two_agents_report_a_mistake_once():
    results = run_two_agents("report_context", "train.steps=-1", ranks=2)
    ours = [line for _, _, err in results for line in err if line.startswith("comet:")]
    assert ours == ["comet: error: train.steps=-1 must be at least 1"]
    assert all(status != 0 for status, _, _ in results)


ENVIRONMENT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_context_from_environment():
    context = LaunchContext.from_environment({**ENVIRONMENT, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, 4)
    assert (context.rank, context.world_size, context.node, context.num_nodes) == (5, 8, 1, 2)
    assert context.device == torch.device("cuda", 1)
    assert LaunchContext.from_environment(ENVIRONMENT, 0).device == torch.device("cpu")


def test_more_ranks_than_gpus_is_refused():
    with pytest.raises(ValueError, match=r"nproc=4 must be at most the 2 visible GPUs"):
        LaunchContext.from_environment(ENVIRONMENT, 2)


def test_kinds_of_errors(capsys):
    assert report(NothingMeasuredError("sweep: none of 1 points ran"), None) == 1
    assert capsys.readouterr().err == "comet: error: sweep: none of 1 points ran\n", "without a traceback"
    assert is_user_error(ValueError("x"))
    assert is_user_error(CapacityError("x"))
    assert is_user_error(FileNotFoundError(2, "No such file", "text.txt"))
    assert not is_user_error(ConnectionResetError("reset"))
    assert not is_user_error(KeyError("x"))
    assert is_peer_error(CommTimeoutError("rank 0 waited"))
    assert is_peer_error(RuntimeError("[gloo/pair.cc:1] Connection closed by peer [::1]:1"))
    assert not is_peer_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(MemoryError()).startswith("out of memory (MemoryError): use a smaller model")
    assert one_line(FileNotFoundError(2, "must be a folder", "nope")) == "must be a folder: 'nope'"
    assert one_line(OSError("no number")) == "no number"


def test_a_local_job_listens_on_the_loopback_interface_only_and_ends_with_its_launcher(tmp_path: Path) -> None:
    job = start("sleep", f"output_dir={tmp_path}")
    try:
        pids = rank_pids(tmp_path, 2, job)
        assert {child.pid for child in psutil.Process(job.pid).children()} == set(pids)
        sockets = [each for pid in (job.pid, *pids) for each in psutil.Process(pid).net_connections()]
        listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        assert len(listening) >= 3, "the store's and those of the process groups"
        assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        chosen = rank_environment(2, 0)  # a host may call itself 127.0.0.1, and there is no NCCL here
        assert {chosen["GLOO_SOCKET_IFNAME"], chosen["NCCL_SOCKET_IFNAME"]} <= {"lo", "lo0"}
    finally:
        job.kill()
        job.wait()
    if sys.platform == "linux":  # No other system has a death signal.
        assert all_gone(pids)


def test_ranks_share_the_cores_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(process, "PROC", Path("/nowhere"))  # there is no quota
    assert [rank_environment(ranks, 0)["OMP_NUM_THREADS"] for ranks in (1, 2, 4, 8)] == ["6", "3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank_environment(2, 0)["OMP_NUM_THREADS"] == "5", "the user's"


def test_half_of_torchruns_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["train"]) == 2
    assert capfd.readouterr().err.splitlines() == [
        "comet: error: RANK, WORLD_SIZE in the environment must come with LOCAL_RANK, LOCAL_WORLD_SIZE, as torchrun "
        "sets them: start the ranks with torchrun, or unset RANK WORLD_SIZE to start them here"
    ]
    assert main(["train", "--dry-run"]) == 0, "which starts nothing"


def test_a_rank_that_is_no_number_is_refused() -> None:
    environment = dict.fromkeys(OF_TORCHRUN, "1") | {"RANK": "one"}
    with pytest.raises(ValueError, match="RANK='one' in the environment must be a number"):
        LaunchContext.from_environment(environment, 0)


STEPS_PER_ATTEMPT = 6
SAVING = ("train.checkpoint_every=3", "train.eval_every=0", "parallel=ep2")


def draw_kills(seed: int, number: int) -> list[tuple[int, int, str]]:
    """Rank, call and place of each attempt's kill; the call comes before the attempt has taken six steps."""
    draw, kills = random.Random(seed), []
    for _ in range(number):
        rank, place = draw.randrange(2), draw.choice(["step", "step", "fsync", "rename"])
        place = "fsync" if rank == 1 and place == "rename" else place  # Rank 0 alone renames.
        most = {"step": STEPS_PER_ATTEMPT, "fsync": 1 if rank == 1 else 5, "rename": 2}[place]
        kills.append((rank, draw.randint(1, most), place))
    return kills


def train_in(folder: Path, kills: list[tuple[int, int, str]], command: list[str], *words: str) -> list[float]:
    folder.mkdir()
    (folder / "text.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "kills.json").write_text(json.dumps(kills))
    settings = [f"data.path={folder}/text.txt", f"output_dir={folder}/run-${{now:%f}}", *TINY, *SAVING, *words]
    status, _, err = run("train_and_be_killed", *settings, program=command, timeout_s=3600)
    assert status == 0, (kills, err)
    if command[0] == APP:
        died = re.findall(r"error: rank (\d) \(pid \d+\) was killed by SIGKILL", "\n".join(err))
        assert died == [str(rank) for rank, _, _ in kills], err
        assert sum("all ranks start anew, restart " in line for line in err) == len(kills), err
    (output,) = folder.glob("run-*")
    return losses(output)


@pytest.mark.timeout(3600)  # ten kills take minutes on a busy machine
@pytest.mark.parametrize(("launcher", "number"), [slow("comet", 10), slow("torchrun", 2)])
def test_killed_jobs_end_with_the_losses_of_an_undisturbed_one(launcher: str, number: int, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    kills = draw_kills(seed, number)
    print(f"seed {seed}: {kills}")
    steps = f"train.steps={STEPS_PER_ATTEMPT * (number + 1)}"
    command, words = [APP], [f"launch.max_restarts={number}"]
    if launcher == "torchrun":
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={number}"]
        command, words = ["-m", "torch.distributed.run", *options, APP], []
    disturbed = train_in(tmp_path / "disturbed", kills, command, steps, *words)
    calm = tmp_path / "calm"
    calm.mkdir()
    settings = [f"data.path={tmp_path}/disturbed/text.txt", f"output_dir={calm}", *TINY, *SAVING, steps]
    run_ranks(train_as_rank, 2, settings)
    assert disturbed == losses(calm)
    assert len(disturbed) == STEPS_PER_ATTEMPT * (number + 1)


DEADLINE_S = 6


@pytest.mark.slow
def test_a_rank_that_is_late_but_alive_is_named_with_what_it_does(tmp_path: Path) -> None:
    job = start("late", f"output_dir={tmp_path}", f"comm.timeout_s={DEADLINE_S}")
    try:
        _, err = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    (line,) = (line for line in err.splitlines() if "error" in line or "Traceback" in line)
    assert re.fullmatch(
        r"comet: error: rank 0 waited too long in .*; rank 1 is alive, in wait_forever \(launch_app.py:\d+\)", line
    )
    assert job.returncode == 1


@pytest.mark.slow
def test_a_rank_that_refuses_ends_the_others_of_another_node_at_once(tmp_path: Path) -> None:
    """The other rank waits in a call without a deadline."""
    results = run_two_agents("refuse_while_others_wait", f"output_dir={tmp_path}", "comm.timeout_s=1000")
    ours = [line for _, _, err in results for line in err if line.startswith("comet:")]
    assert ours == ["comet: error: tokens=7 must please everyone"]
    assert all_gone(rank_pids(tmp_path, 2))
