"""Resuming, the folder of a run, SIGTERM: what would change or remove a run is named, and what was saved goes on."""

import io
import json
import os
import pkgutil
import shutil
import signal
import time
from contextlib import chdir, redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from launch_jobs import TIMEOUT_S, processes_of, start, training
from ranks import in_ranks, run_ranks
from refusals import dry_run, refusal
from tiers import slow
from training_cases import MODEL, Rank, losses, make_job, make_text

from comet.jobs.config import SweepJob
from comet.launch.cli import PROGRAM
from comet.launch.config import compose
from comet.launch.config import make_job as job_of_command
from comet.training import trainer
from comet.training.checkpoint_folder import checksum, find_checkpoints
from comet.training.run_folder import LOCK, OWNER, RunFolder
from comet.training.saved_settings import read_settings
from comet.training.trainer import train
from comet.tuner.sweep import sweep_job

TINY = ["model=tiny", "model.hidden_size=32", "model.moe.hidden_size=32", "model.moe.ffn_size=32", "model.context=32"]
SIZES = ["model.num_layers=1", "model.dense_layers=0", "train.eval_batches=1", "train.sample_bytes=0"]
RUN = [*TINY, *SIZES, "train.lr=0.01", "train.seed=3", "train.batch_size=2", "train.steps=6", "nproc=1"]


def run_words(*words: str) -> dict:
    return train(job_of_command(compose(words), 1), Rank())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Output folder of a run with the checkpoints step-000003 and step-000006."""
    folder = tmp_path_factory.mktemp("run")
    run_words(*RUN, f"data.path={make_text(folder)}", f"output_dir={folder}/out", "train.checkpoint_every=3")
    return folder / "out"


def test_a_dry_run_looks_at_the_folder(run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text, _ = dry_run(capfd, "train", f"resume={run}/step-000003", "output_dir=more")
    assert f"\n# goes on from {run}/step-000003, if its files are whole\n" in text
    assert f"output_dir='{run}' holds a run: " in refusal(capfd, "train", "--dry-run", f"output_dir={run}")
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_as_it_would_have_gone_on(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free = ["train.checkpoint_every=5", "model.moe.max_imbalance=1.5"]
    run_words(f"resume={run}/step-000003", "output_dir=more", *free)
    assert losses(tmp_path / "more") == losses(run)
    assert read_settings(tmp_path / "more")["train"] == {**read_settings(run)["train"], "checkpoint_every": 5}


def test_what_is_not_named_comes_from_the_folder(run, tmp_path):
    found = compose([f"resume={run}", "train.eval_every=7"])
    assert (found["train"]["lr"], found["train"]["seed"], found["train"]["batch_size"]) == (0.01, 3, 2)
    assert found["train"]["eval_every"] == 7
    assert (found["model"]["hidden_size"], found["output_dir"]) == (32, str(run))
    assert (found["nproc"], found["parallel"]["ep"]) == (1, 1)
    other = compose([f"resume={run}/step-000003", "nproc=4", f"output_dir={tmp_path}"])
    assert (other["nproc"], other["parallel"]["ep"], other["output_dir"]) == (4, None, str(tmp_path))


@pytest.mark.parametrize("words", [["overwrite=true"], ["resume=FOLDER"]])
def test_a_job_that_cannot_begin_leaves_the_run_as_it_was(words, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "out")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}
    given = [word.replace("FOLDER", str(folder)) for word in words]
    again = [*RUN, f"data.path={make_text(tmp_path)}", f"output_dir={folder}"] if words == ["overwrite=true"] else []
    with pytest.raises(ValueError, match="cuda_graph='on' must be 'auto' or 'off' here"):
        run_words(*again, *given, "train.cuda_graph=on")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}
    assert after == before


def test_the_settings_of_a_run_start_it_again(run, tmp_path):
    saved = read_settings(run)
    assert saved["output_dir"] == str(run)
    again = job_of_command({**saved, "output_dir": str(tmp_path), "resume": None}, saved["nproc"])
    train(again, Rank())
    assert losses(tmp_path) == losses(run)


def test_settings_that_differ_are_named_until_the_user_insists(run, tmp_path):
    words = [f"resume={run}/step-000003", f"output_dir={tmp_path}/out", "train.lr=0.001", "train.seed=4", "nproc=1"]
    message = r"train\.lr=0\.001 differs from 0\.01, train\.seed=4 differs from 3 of the run .*step-000003"
    with pytest.raises(ValueError, match=message + r".*resume_changes=\[train\.lr,train\.seed\]"):
        run_words(*words)
    with pytest.raises(ValueError, match=r"resume: train\.seed=4 differs"):
        run_words(*words, "resume_changes=[train.lr]")
    assert read_settings(run)["train"]["dtype"] == "float32", "what auto was on a CPU"
    with pytest.raises(ValueError, match=r"resume: train\.dtype='bfloat16' differs from 'float32' of"):
        run_words(*words[:2], "train.dtype=bfloat16")
    with pytest.raises(ValueError, match=r"resume_changes=\['train\.lrr'\] must name settings"):
        run_words(*words, "resume_changes=[train.lrr]")
    assert not (tmp_path / "out").exists()
    run_words(*words, "resume_changes=[train.lr,train.seed]")
    assert losses(tmp_path / "out")[:3] == losses(run)[:3]
    assert losses(tmp_path / "out")[3:] != losses(run)[3:]
    assert read_settings(tmp_path / "out")["train"]["lr"] == 0.001


def test_another_text_is_noticed_wherever_it_is(run, tmp_path):
    words = [f"resume={run}/step-000003", f"output_dir={tmp_path}/out", f"data.path={make_text(tmp_path)}"]
    run_words(*words)
    (tmp_path / "text.txt").write_bytes(b"something else " * 500)
    words[1] = f"output_dir={tmp_path}/more"
    with pytest.raises(ValueError, match=r"the text of data\.path=.*text\.txt' differs.*resume_changes=\[data\.path\]"):
        run_words(*words)
    run_words(*words, "resume_changes=[data.path]")


def test_a_checkpoint_of_the_first_format_names_the_version_that_converts_it(run, tmp_path):
    old = shutil.copytree(run / "step-000003", tmp_path / "step-000003")
    manifest = json.loads((old / "comet.json").read_text())
    manifest["files"] = {name: file["bytes"] for name, file in manifest["files"].items() if name != "comet.yaml"}
    (old / "comet.json").write_text(json.dumps({**manifest, "format": 1}))
    (old / "comet.yaml").unlink()
    with pytest.raises(ValueError, match=r"format=1 must be 2: Comet 0\.1\.0 resumes format 1 and saves format 2"):
        run_words(*RUN, f"resume={old}", f"output_dir={tmp_path}/out")


def test_settings_that_no_longer_exist_are_left_out(run, tmp_path, capsys):
    old = tmp_path / "step-000003"
    shutil.copytree(run / old.name, old)
    settings = read_settings(old)
    settings["train"]["dtype"] = "auto"
    settings["overlap"] |= {"transport": "push", "comm_blocks": 16, "num_panels": 4, "beside": True}
    (old / "comet.yaml").write_text(yaml.safe_dump(settings))
    manifest = json.loads((old / "comet.json").read_text())
    manifest["files"]["comet.yaml"] = {
        "bytes": (old / "comet.yaml").stat().st_size,
        "blake2b": checksum(old / "comet.yaml"),
    }
    (old / "comet.json").write_text(json.dumps(manifest))
    run_words(f"resume={old}", f"output_dir={tmp_path}/out")
    assert losses(tmp_path / "out")[-1:] == losses(run)[-1:]
    said = f"{old} was written with settings that no longer exist: overlap.beside=True, overlap.transport=push left out"
    assert said in capsys.readouterr().err


def test_broken_settings_are_a_mistake_of_one_line(run, tmp_path):
    (tmp_path / "comet.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=r"comet\.yaml must be a YAML file of settings: "):
        compose([f"resume={tmp_path}"])


HOLD = """
import signal
import sys
from pathlib import Path
from comet.training.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]), "mine")
lock.acquire()
print("held", flush=True)
signal.pause()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_another_run_is_not_removed_unless_the_user_says_so(tmp_path):
    out = tmp_path / "out"
    train(make_job(tmp_path, steps=4, checkpoint_every=2), Rank())
    before = names(out)
    with pytest.raises(ValueError, match=rf"output_dir='{out}' holds a run: resume={out} continues it, overwrite=true"):
        train(make_job(tmp_path), Rank())
    with pytest.raises(ValueError, match=r"overwrite=true removes what resume=.*step-000002 is to continue"):
        train(make_job(tmp_path, resume=str(out / "step-000002"), overwrite=True), Rank())
    with pytest.raises(
        ValueError, match=r"resume=.*step-000002 must be the newest .*step-000004, which it would replace"
    ):
        train(make_job(tmp_path, resume=str(out / "step-000002"), steps=4), Rank())
    train(make_job(tmp_path, resume=str(out / "step-000004"), steps=4), Rank())
    assert names(out) == before
    assert len(losses(out)) == 4
    (out / "step-by-step").mkdir()
    (out / "step-by-step" / "notes.txt").write_text("mine")
    (out / "step-000004" / "notes.txt").write_text("mine")
    (out / "step-000077").write_text("mine")
    train(make_job(tmp_path, steps=3, overwrite=True), Rank())
    assert len(losses(out)) == 3
    left = {"step-by-step", "step-000004", "step-000077"}
    assert names(out) == (before - {"step-000002"}) | left | {"step-000003"}
    assert names(out / "step-000004") == {"notes.txt"}


def test_another_layout_drops_others(tmp_path):
    """The rows that a full plan drops depend on which ranks share an expert's rows."""
    model = replace(MODEL, moe=replace(MODEL.moe, capacity_factor=0.5))
    train(make_job(tmp_path, model=model, steps=3), Rank())
    job, (checkpoint, *_) = (
        make_job(tmp_path, model=model, steps=3, dtype="float32"),
        find_checkpoints("auto", str(tmp_path / "out"))[0],
    )
    assert not trainer._require_same(job, checkpoint, checkpoint.text, 1)
    split = replace(checkpoint, layout={"world_size": 1, "ep": 2, "tp": 1})
    (note,) = trainer._require_same(job, split, checkpoint.text, 1)
    assert note == f"{split.path} was written with ep=2 tp=1: in another layout model.moe.capacity_factor drops others"


def test_an_attempt_is_the_first_if_those_before_it_never_began(tmp_path):
    """Earlier attempts may have run out of memory with the old run in the folder: its result is not the new job's."""
    out = tmp_path / "out"
    train(make_job(tmp_path, steps=5, checkpoint_every=2), Rank(job="old"))
    with pytest.raises(ValueError, match=rf"output_dir='{out}' holds a run: resume={out} continues it, overwrite=true"):
        train(make_job(tmp_path, steps=4), Rank(attempt=1, job="new"))
    assert len(losses(out)) == 5
    train(make_job(tmp_path, steps=4, overwrite=True), Rank(attempt=1, job="new"))
    assert len(losses(out)) == 4
    for job in ("new", ""):  # "": who cannot know removes nothing
        train(make_job(tmp_path, steps=4, overwrite=True), Rank(attempt=2, job=job))
        assert names(out) >= {"step-000004"}
        assert len(losses(out)) == 4
    train(make_job(tmp_path, steps=3, overwrite=True), Rank(attempt=3, job="newer"))
    assert len(losses(out)) == 3


def test_foreign_things_named_like_checkpoints_are_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "step-notes").write_text("mine")
    (out / "step-000004").write_text("mine")
    for name in ("step-000006", "step-000002.tmp", "step-x.tmp"):
        (out / name).mkdir()
        (out / name / "notes.txt").write_text("mine")
    result = train(make_job(tmp_path, checkpoint_every=2), Rank())
    assert Path(result["checkpoint"]) == out / "step-000006-2"
    assert names(out) >= {"step-notes", "step-000004", "step-000006", "step-000002.tmp", "step-x.tmp", "step-000004-2"}
    assert names(out / "step-000006") == names(out / "step-000002.tmp") == {"notes.txt"}
    assert train(make_job(tmp_path, resume="auto"), Rank())["checkpoint"] == result["checkpoint"]


@in_ranks(2)
def test_ranks_whose_folders_differ_are_named_before_the_first_step(rank: int, world_size: int, tmp_path: Path) -> None:
    job = replace(make_job(tmp_path, ep=2, steps=3), output_dir="out")
    (tmp_path / str(rank)).mkdir()
    message = r"output_dir='out' must be one folder of all ranks, but ranks \[1\] find another: give .* nodes share"
    with chdir(tmp_path / str(rank)), pytest.raises(ValueError, match=message):
        train(job, Rank(rank, world_size))


@pytest.mark.parametrize("settings", [{}, {"resume": "auto"}, {"overwrite": True}])
def test_files_that_no_run_wrote_are_not_replaced(settings, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mine = [out / name for name in ("metrics.jsonl", "result.json", "sample.txt")]
    for path in mine:
        path.write_text("mine")
    rule = r"must not hold metrics\.jsonl, result\.json, sample\.txt, which no run wrote and this one would replace"
    with pytest.raises(ValueError, match=rf"output_dir='.*out' {rule}: choose another output_dir, or move them away$"):
        train(make_job(tmp_path, **settings), Rank())
    assert [path.read_text() for path in mine] == ["mine"] * 3
    mine[0].unlink()
    (out / "comet.yaml").write_text("{}")  # a run that failed before its first step leaves this file
    train(make_job(tmp_path, **settings, steps=3), Rank())
    assert (out / "result.json").read_text() != "mine"


@pytest.mark.parametrize("mark", ["comet.yaml", ".comet.job", "step-000004/comet.json"])
def test_what_a_run_left_is_removed_whichever_of_its_marks_is_left(mark, tmp_path):
    out, job = tmp_path / "out", make_job(tmp_path, overwrite=True)
    (out / mark).parent.mkdir(parents=True)
    for name in ("metrics.jsonl", "sample.txt", mark):
        (out / name).write_text("{}")
    with RunFolder(job, attempt=0, job="new") as folder:
        assert folder.find_checkpoints() == ([], [])
        folder.begin("{}")
    assert names(out) == {LOCK, ".comet.job", "comet.yaml"}


def test_two_jobs_in_one_folder_at_once_are_refused_until_the_first_is_killed(tmp_path):
    out, script = tmp_path / "out", tmp_path / "hold.py"
    script.write_text(HOLD)
    owner = start(str(out), program=[str(script)])
    try:
        assert owner.stdout.readline() == "held\n"
        message = rf"output_dir='{out}' is in use by another job \(pid {owner.pid} on .+\): wait"
        for resume in (None, "auto"):
            with pytest.raises(ValueError, match=message):
                train(make_job(tmp_path, resume=resume), Rank())
        words = ("sweep.tokens=[16]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={out}")
        with pytest.raises(ValueError, match=message):
            sweep_job(job_of_command(compose(["model=tiny", *words], SweepJob), 1, SweepJob), Rank())
        assert names(out) == {LOCK, OWNER}
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert train(make_job(tmp_path), Rank())["steps"] == 6
        assert OWNER not in names(out)
    finally:
        owner.kill()
        owner.communicate()


def stop_in_a_step(rank, world_size, job, told, stop):
    """Train while some ranks get SIGTERM in step ``stop``, counted from 0; the handler is restored."""

    class Told(trainer.TrainStep):
        def _backward(self, step, told_to_stop):
            if step == stop and rank in told:
                os.kill(os.getpid(), signal.SIGTERM)
            return super()._backward(step, told_to_stop)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "TrainStep", Told)
        result = train(job, Rank(rank, world_size))
    assert signal.getsignal(signal.SIGTERM) == before
    return result


def stop_and_go_on(rank, world_size, job, told, whole):
    """The results of a run that is stopped in step 3, of the same one afterwards, and of ``whole``."""
    stopped = stop_in_a_step(rank, world_size, job, told, 3)
    dist.barrier()
    saved = json.loads((Path(job.output_dir) / "result.json").read_text())
    dist.barrier()  # all have read what the next run removes
    resumed = train(replace(job, resume=job.output_dir), Rank(rank, world_size))
    return stopped, saved, resumed, train(whole, Rank(rank, world_size))


@pytest.mark.parametrize(("world_size", "told"), [slow(1, 0), (2, 1)])
def test_all_ranks_stop_after_the_same_step_and_go_on_bitwise(world_size, told, tmp_path):
    job = make_job(tmp_path, ep=world_size, steps=9, eval_every=3)
    whole = replace(job, output_dir=str(tmp_path / "whole"))
    ends = run_ranks(stop_and_go_on, world_size, job, [told], whole)
    assert ends == [ends[0]] * world_size
    stopped, saved, resumed, undisturbed = ends[0]
    assert (stopped["stopped"], stopped["steps"]) == ("SIGTERM", 5)  # SIGTERM came in step 4
    assert stopped["checkpoint"] == str(tmp_path / "out" / "step-000005")
    assert saved == stopped
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert resumed["heldout_nats_per_byte"] == undisturbed["heldout_nats_per_byte"]
    assert "stopped" not in resumed


def test_the_result_of_an_earlier_end_is_gone_where_a_run_goes_on(tmp_path, monkeypatch):
    train(job := make_job(tmp_path), Rank())
    history = (tmp_path / "out" / "metrics.jsonl").read_text()
    train(replace(job, resume="auto"), Rank())
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == history, "nothing was trained"
    result, more = tmp_path / "out" / "result.json", replace(job.train, steps=9)
    assert json.loads(result.read_text())["steps"] == 6

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.TrainStep, "_backward", killed)
    with pytest.raises(KeyboardInterrupt):
        train(replace(job, train=more, resume="auto", resume_changes=("train.steps",)), Rank())
    assert not result.exists()


def stop_in(rank, world_size, job, name, whole):
    """The results of a run that is stopped in ``name``, of the same one afterwards, and of ``whole``."""
    numbers = [signal.SIGINT] if rank == world_size - 1 else []
    target, called = f"comet.training.trainer.{name}", pkgutil.resolve_name(f"comet.training.trainer:{name}")

    def told(*arguments, **keywords):
        if numbers:
            signal.raise_signal(numbers.pop())
        return called(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, told)
        stopped = train(job, Rank(rank, world_size))
    dist.barrier()
    resumed = train(replace(job, resume=job.output_dir), Rank(rank, world_size))
    return stopped, resumed, train(whole, Rank(rank, world_size))


@pytest.mark.parametrize(
    ("name", "every", "step"),
    [("heldout_loss", 2, 2), slow("heldout_loss", 0, 6), ("sample_text", 0, 6), ("Trainer._save", 0, 6)],
)
def test_ctrl_c_stops_evaluation_sampling_and_saving_and_nothing_is_lost(name, every, step, tmp_path):
    job = make_job(tmp_path, ep=2, eval_every=every, sample_bytes=3)
    whole = replace(job, output_dir=str(tmp_path / "whole"))
    for stopped, resumed, undisturbed in run_ranks(stop_in, 2, job, name, whole):
        assert (stopped.get("stopped"), stopped["steps"]) == ("SIGTERM", step)
        assert stopped["checkpoint"] == str(tmp_path / "out" / f"step-{step:06d}")
        assert resumed["heldout_nats_per_byte"] == undisturbed["heldout_nats_per_byte"]


def go_on(rank, world_size, words):
    with redirect_stderr(io.StringIO()) as said:
        return train(job_of_command(compose(words), world_size), Rank(rank, world_size)), said.getvalue()


@pytest.mark.parametrize(
    ("whom", "number", "status"),
    [
        ("the launcher", signal.SIGHUP, 129),
        slow("the launcher", signal.SIGTERM, 143),
        slow("rank 1", signal.SIGTERM, 143),
    ],
)
def test_the_command_saves_when_it_is_told_to_stop(whom, number, status, tmp_path):
    out, steps = tmp_path / "run", ["train.steps=100000", "train.eval_every=0"]
    job = start(*training(tmp_path, *steps, "parallel=ep2"), program=PROGRAM)
    try:
        while not (out / "metrics.jsonl").exists() or not losses(out):
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)
        ranks = processes_of(job)
        os.kill(ranks[1] if whom == "rank 1" else job.pid, number)
        printed, errors = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    assert job.returncode == status, errors
    *_, words, last = printed.splitlines()
    result = json.loads(last)
    assert result["stopped"] == "SIGTERM"
    step, checkpoint = result["steps"], result["checkpoint"]
    resume = f"comet train resume={out} continues"
    assert words == f"stopped by SIGTERM after step {step}, checkpoint {checkpoint}; {resume}"
    assert "Traceback" not in errors
    assert "error" not in errors
    words = [f"resume={out}", f"train.steps={step + 2}", "train.sample_bytes=0", "resume_changes=[train.steps]"]
    (result, said), _ = run_ranks(go_on, 2, words)
    assert result["steps"] == step + 2
    assert f"continuing {checkpoint} from step {step}" in said
