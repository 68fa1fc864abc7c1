"""The ``sweep`` task: points, files, folders, resuming, failing points, the whole command, and a stopped one."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from launch_jobs import run
from refusals import dry_run
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import CommConfig, SweepConfig, SweepJob, TuneJob
from comet.launch.cli import PROGRAM
from comet.launch.config import compose, make_job
from comet.layer.backend import expert_capacity
from comet.schedule.choice import Machine, Problem
from comet.schedule.table import KEY_COLUMNS, Measured, Table, key_of
from comet.training.ranks import from_first_rank
from comet.tuner.sweep import (
    CSV_NAME,
    PLOT_NAME,
    job_columns,
    measure_problem,
    pending,
    plot_sweep,
    report,
    sweep_job,
    sweep_points,
    tune_job,
)
from comet.version import comet_version

CPU = torch.device("cpu")
MOE = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
PNG = b"\x89PNG"


def job_of(*overrides: str, world_size: int = 1) -> SweepJob:
    return make_job(compose(overrides, SweepJob), world_size, SweepJob)


PROBLEM = Problem(MOE, ParallelConfig(ep=1), 16, torch.float32, "small")


def setting(blocks: int = 8, panels: int = 4) -> OverlapConfig:
    return OverlapConfig(comm_blocks=blocks, num_panels=panels)


def test_points_are_the_product_of_the_lists():
    words = "sweep.tokens=[16,32]", "sweep.comm_blocks=[8,16,8,32]", "sweep.num_panels=[2,4]"
    assert len(sweep_points(job_of(*words, "sweep.models=[tiny,gpt_oss_20b]"), CPU)) == 4
    points = sweep_points(job_of(*words), CPU)
    assert [(problem.model, problem.num_tokens) for problem in points] == [("tiny", 16), ("tiny", 32)], "the job's own"
    for settings in points.values():
        blocks = [each.comm_blocks for each in settings if each]
        assert blocks == [8, 16, 32, 8, 16, 32], "8 appears twice in the list but is one point"


def test_an_empty_list_takes_the_value_of_the_job():
    job = job_of("sweep.comm_blocks=[]", "overlap.comm_blocks=7", "overlap.num_panels=2")
    ((problem, settings),) = sweep_points(job, CPU).items()
    assert settings == [setting(7, 2)]
    assert problem.num_tokens == job.train.batch_size * job.model.context
    assert problem.parallel == job.parallel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (0,)}, r"tokens=\[0\] must each be at least 1"),
        ({"comm_blocks": (8, -1)}, r"comm_blocks=\[8, -1\] must each be at least 0"),
        ({"layouts": ((4,),)}, r"layouts=\[\(4,\)\] must each be a pair \[ep, tp\]"),
        ({"layouts": ((4, 0),)}, r"layouts=\[\(4, 0\)\] must each be at least 1"),
        ({"rounds": 0}, r"rounds=0 must be at least 1"),
    ],
)
def test_wrong_lists_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SweepConfig(**changes)


JOB = dict(
    device="a device, with a comma", world_size=2, backend="cpu_shm", version="1.0", kernels="triton", rounds=20
)  # fmt: skip


def test_the_log_keeps_times_and_reasons_and_says_what_is_left(tmp_path):
    done, failed, new = setting(8), setting(16), setting(32)
    log = Table(tmp_path / CSV_NAME)
    reason = 'ValueError: "quoted", and commas'
    found = Measured(setting=done, ms=1.25), Measured(setting=failed, ms=None, failure=reason)
    log.put(key_of(PROBLEM.columns() | JOB), found)
    again = Table.load(log.path)
    assert again.rows == log.rows
    assert pending({PROBLEM: [done, failed, new]}, again, JOB) == {PROBLEM: [done, failed, new]}, "in one loop"
    assert pending({PROBLEM: [done, failed]}, again, JOB) == {PROBLEM: [failed]}, "what failed is tried again"
    assert pending({PROBLEM: [done]}, again, JOB) == {}
    for change in ({"ffn_size": 64}, {"activation": "geglu"}, {"expert_bias": True}, {"capacity_factor": 0.5}):
        other = replace(PROBLEM, moe=replace(MOE, **change))
        assert pending({other: [done]}, again, JOB) == {other: [done]}, "the same name, another layer"
    for name in JOB:
        assert pending({PROBLEM: [done]}, again, JOB | {name: "another"}) == {PROBLEM: [done]}
    assert Table.load(tmp_path / "none.csv").rows == {}


def test_table_and_picture(tmp_path, capsys):
    slow, fast = Measured(setting=setting(16), ms=2.0), Measured(setting=setting(8), ms=1.0)
    broken, plain = Measured(setting=setting(8, 2), ms=None, failure="RuntimeError: no"), Measured(setting=None, ms=9.0)
    alone = [Measured(setting=setting(8), ms=None, failure="ValueError: never")]
    results = {PROBLEM: [slow, fast, broken, plain], replace(PROBLEM, num_tokens=99): alone}
    facts = report("sweep", results, {"output_dir": "out"}, 0)
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert (json.loads(last), empty) == (facts, "")
    assert (facts["points"], facts["failed"], facts["first_failure"]) == (5, 2, "RuntimeError: no")
    assert [best["ms"] for best in facts["best"]] == [1.0]
    assert facts["measured"][1] == {
        "model": "small", "ep": 1, "tp": 1, "tokens": 16, "ms": 1.0, "failure": "",
        "setting": {"comm_blocks": 8, "num_panels": 4},
    }  # fmt: skip
    assert [line.split()[-1] for line in lines] == ["ms", "2.0000", "*", "no", "9.0000", "never"]
    assert "  8 comm blocks, 2 panels   failed  RuntimeError: no" in lines[3]
    ends = {line.index(word) + len(word) for line, word in zip(lines, ["ms", "2.0000", "1.0000"], strict=False)}
    assert len(ends) == 1
    plot_sweep(results, tmp_path / PLOT_NAME)
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(PNG)
    report("tune", {PROBLEM: [slow]}, {}, 1)
    assert not capsys.readouterr().out


def test_a_second_sweep_measures_shapes_that_have_a_new_setting(tmp_path, capsys):
    words = ("sweep.tokens=[16]", "sweep.num_panels=[2,4]", "sweep.rounds=1", "sweep.layouts=[[1,1],[2,1]]")
    job = job_of(*words, "sweep.comm_blocks=[8]", f"output_dir={tmp_path}")
    facts = sweep_job(job, Rank())
    assert (facts["points"], facts["measured_now"], facts["failed"]) == (4, 4, 2)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == facts
    before = (tmp_path / CSV_NAME).read_text()
    assert "world_size=1 must be divisible by ep x tp = 2 x 1" in before

    longer = job_of(*words, "sweep.comm_blocks=[8]", "sweep.tokens=[16,32]", f"output_dir={tmp_path}")
    facts = sweep_job(longer, Rank())
    assert (facts["points"], facts["measured_now"]) == (8, 6), "4 of a new shape, 2 that failed"
    assert (tmp_path / CSV_NAME).read_text().startswith(before), "old rows are kept as they were"
    more = job_of(*words, "sweep.comm_blocks=[8,16]", f"output_dir={tmp_path}")
    facts = sweep_job(more, Rank())
    assert (facts["points"], facts["measured_now"], facts["output_dir"]) == (8, 8, str(tmp_path)), "in one loop"


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / CSV_NAME).read_text().splitlines()))


def test_times_of_another_job_in_the_folder_are_kept_and_not_taken(tmp_path, monkeypatch):
    """The other job has other ranks, communicator, version of Comet, kernels or rounds."""
    words = (
        "sweep.tokens=[16]",
        "sweep.comm_blocks=[8]",
        "sweep.rounds=1",
        "parallel=single",
        f"output_dir={tmp_path}",
    )
    job = job_of(*words)
    assert sweep_job(job, Rank())["measured_now"] == 1
    same = sweep_job(job_of(*words, "comm.backend=cpu_shm"), Rank())
    assert same["measured_now"] == 0, "which auto is on a CPU"
    old = (tmp_path / CSV_NAME).read_text()
    monkeypatch.setattr("comet.tuner.sweep.comet_version", lambda: "another")
    assert sweep_job(job, Rank())["measured_now"] == 1
    assert (tmp_path / CSV_NAME).read_text().startswith(old)
    assert [row["version"] for row in rows_of(tmp_path)] == [comet_version(), "another"]
    assert sweep_job(job_of(*words, "sweep.rounds=2"), Rank())["measured_now"] == 1
    monkeypatch.setattr("comet.layer.group.why_no_cuda", lambda device: "")
    assert sweep_job(job, Rank())["measured_now"] == 1
    of_jobs = [tuple(row[name] for name in KEY_COLUMNS[-3:]) for row in rows_of(tmp_path)]
    assert of_jobs[1:] == [("another", "triton", "1"), ("another", "triton", "2"), ("another", "auto", "1")]
    assert job_columns(job, 1, Rank(world_size=4))["world_size"] == 4
    assert job_columns(replace(job, comm=CommConfig(backend="nvshmem")), 1, Rank())["backend"] == "nvshmem"


def test_expert_capacities_follow_from_a_shapes_own_tokens(tmp_path, monkeypatch):
    """The row of 128 tokens stays the same for every sweep: 32 of 256 rows for each of 8 experts."""
    capacities = []

    def fake(problem, settings, group, **named):
        capacities.append(expert_capacity(problem.moe, group))
        return [Measured(setting=setting, ms=1.0) for setting in settings]

    monkeypatch.setattr("comet.tuner.sweep.measure_layer", fake)
    words = "model.moe.capacity_factor=1.0", "sweep.tokens=[128,2048]", f"output_dir={tmp_path}"
    sweep_job(job_of(*words), Rank())
    assert capacities == [32, 512]


def test_a_failed_point_is_measured_again_and_keeps_its_reason_until_then(tmp_path, monkeypatch, capsys):
    """The cause of its failure is gone in the second run."""

    def fail(*arguments):
        raise RuntimeError("no resources")

    words = ("sweep.tokens=[16,32]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={tmp_path}")
    monkeypatch.setattr("comet.tuner.layers.make_path", fail)
    with pytest.raises(NothingMeasuredError, match=r"^sweep: none of 2 points ran, the first: RuntimeError: no resou"):
        sweep_job(job_of(*words), Rank())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 2
    monkeypatch.undo()

    def crash_at_32(problem, *others):
        if problem.num_tokens == 32:
            raise KeyError("a bug")
        return measure_problem(problem, *others)

    monkeypatch.setattr("comet.tuner.sweep.measure_problem", crash_at_32)
    with pytest.raises(KeyError):
        sweep_job(job_of(*words), Rank())
    first, second = Table.load(tmp_path / CSV_NAME).rows.values()
    assert first.ms
    assert not first.failure
    assert (second.ms, second.failure) == (None, "RuntimeError: no resources")
    monkeypatch.undo()
    facts = sweep_job(job_of(*words), Rank())
    assert (facts["points"], facts["measured_now"], facts["failed"]) == (2, 1, 0)


def test_an_error_of_the_first_rank_reaches_the_user():
    def fail():
        raise OSError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        from_first_rank(fail)


@pytest.mark.slow
def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    words = ("sweep", "nproc=2", "sweep.comm_blocks=[8,16]", "sweep.num_panels=[2,9]", "sweep.rounds=2")
    words += ("sweep.tokens=[16]", "sweep.layouts=[[2,1],[1,2],[4,1]]", f"output_dir={tmp_path}")
    status, lines, errors = run(*words, program=PROGRAM)
    assert status == 0, errors
    facts = json.loads(lines[-1])
    assert (facts["task"], facts["points"], facts["measured_now"], facts["failed"]) == ("sweep", 12, 12, 8)
    assert [(best["ep"], best["tp"]) for best in facts["best"]] == [(2, 1), (1, 2)]
    assert sum(line.endswith("*") for line in lines) == 2
    rows = rows_of(tmp_path)
    assert len(rows) == 12
    assert {row["failure"].split("=")[0] for row in rows if not row["ms"]} == {
        "ValueError: num_panels",
        "ValueError: world_size",
    }
    assert {path.name for path in tmp_path.iterdir()} == {".comet.lock", CSV_NAME, PLOT_NAME}


def never(*arguments: object, **named: object) -> NoReturn:
    raise AssertionError("measured before the folder was tried")


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "x")
    monkeypatch.setattr("comet.tuner.layers.make_expert_group", never)
    monkeypatch.setattr("comet.tuner.sweep.Machine.of", lambda device: Machine(name="fake"))  # A CPU stores nothing.
    tune = make_job(compose(["model=tiny", "tune.tokens=[32]", f"tune.profiles={folder}"], TuneJob), 1, TuneJob)
    message = f"={folder!r} must be a folder that can be written: .*Not a directory"
    with pytest.raises(ValueError, match=f"^tune.profiles{message}"):
        tune_job(tune, Rank())
    with pytest.raises(ValueError, match=f"^output_dir{message}"):
        sweep_job(job_of(f"output_dir={folder}"), Rank())


def test_progress_and_how_it_goes_on_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "sweep.tokens=[16,32]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={tmp_path}"]
    sweep_job(job_of(*words), Rank())
    first, *shapes, last = capfd.readouterr().err.splitlines()
    goes_on = "stopped, it goes on by the same command with"
    assert first == f"comet: sweep of 2 points, 2 to measure in {tmp_path}; {goes_on} output_dir={tmp_path}"
    told = "tiny EP1 TP1, {} tokens: 1 setting timed in one loop, rows at its end"
    assert [line.partition("left; ")[2] for line in shapes] == [told.format(16), told.format(32)]
    assert last.startswith("comet: 2 of 2 shapes measured, ")
    sweep_job(job_of(*words), Rank())
    line = capfd.readouterr().err.splitlines()[0]
    assert line == f"comet: sweep of 2 points, 0 to measure in {tmp_path}; {goes_on} output_dir={tmp_path}"


def test_the_default_folder_is_named_after_the_task(capfd: pytest.CaptureFixture[str]) -> None:
    for words, folder in [
        (["sweep"], "outputs/sweep-2"), (["train"], "outputs/train-2"), (["sweep", "output_dir=mine"], "mine"),
    ]:  # fmt: skip
        assert f"\noutput_dir: {folder}" in dry_run(capfd, *words)[0]
