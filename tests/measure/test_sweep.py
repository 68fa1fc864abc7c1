"""The ``sweep`` task: points, files, folders, resuming, failing points, the whole command, and a stopped one."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from launch_jobs import run
from refusals import dry_run
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import NothingMeasuredError
from comet.jobs.config import CommConfig, JobConfig, SweepConfig
from comet.launch.cli import PROGRAM
from comet.launch.config import compose, make_job
from comet.layer.backend import expert_capacity
from comet.measure.sweep import (
    COLUMNS,
    CSV_NAME,
    JOB_COLUMNS,
    PLOT_NAME,
    Shape,
    SweepLog,
    fastest,
    job_key,
    measure_shape,
    pending,
    plot_sweep,
    row_key,
    sweep_grid,
    sweep_job,
    sweep_lines,
    sweep_table,
)
from comet.measure.tune import tune_job
from comet.training.ranks import from_first_rank
from comet.tuner.problem import Machine
from comet.tuner.profile import Measured
from comet.version import comet_version

MOE = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
PNG = b"\x89PNG"


def job_of(*overrides: str, world_size: int = 1) -> JobConfig:
    return make_job(compose(["model=tiny", *overrides]), world_size)


SHAPE = Shape(model="small", moe=MOE, parallel=ParallelConfig(ep=1), tokens=16)


def setting(blocks: int = 8, panels: int = 4) -> OverlapConfig:
    return OverlapConfig(comm_blocks=blocks, num_panels=panels)


def test_points_are_the_product_of_the_lists():
    words = "sweep.tokens=[16,32]", "sweep.comm_blocks=[8,16,8,32]", "sweep.num_panels=[2,4]"
    assert len(sweep_grid(job_of(*words, "sweep.models=[tiny,gpt_oss_20b]"))[0]) == 4
    shapes, settings = sweep_grid(job_of(*words))
    assert [(shape.model, shape.tokens) for shape in shapes] == [("tiny", 16), ("tiny", 32)], "the job's own model"
    blocks = [each.comm_blocks for each in settings]
    assert blocks == [8, 16, 32, 8, 16, 32], "8 appears twice in the list but is one point"


def test_an_empty_list_takes_the_value_of_the_job():
    job = job_of("sweep.comm_blocks=[]", "overlap.comm_blocks=7", "overlap.num_panels=2")
    (shape,), settings = sweep_grid(job)
    assert settings == [setting(7, 2)]
    assert shape.tokens == job.train.batch_size * job.model.context
    assert shape.parallel == job.parallel


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


def test_the_log_keeps_times_and_reasons_and_says_what_is_left(tmp_path):
    done, failed, new = setting(8), setting(16), setting(32)
    log = SweepLog(tmp_path / CSV_NAME)
    key = ("torch.float32", "a device, with a comma", "2", "cpu_shm", "1.0", "triton", "20")
    reason = 'ValueError: "quoted", and commas'
    found = Measured(setting=done, ms=1.25), Measured(setting=failed, ms=None, failure=reason)
    log.put({row_key(SHAPE, item.setting, key): item for item in found})
    again = SweepLog.load(log.path)
    assert again.rows == log.rows
    assert pending([SHAPE], [done, failed, new], again, key) == {SHAPE: [done, failed, new]}, "in one loop"
    assert pending([SHAPE], [done, failed], again, key) == {SHAPE: [failed]}, "what failed is tried again"
    assert pending([SHAPE], [done], again, key) == {}
    for change in ({"ffn_size": 64}, {"activation": "geglu"}, {"expert_bias": True}, {"capacity_factor": 0.5}):
        other = replace(SHAPE, moe=replace(MOE, **change))
        assert pending([other], [done], again, key) == {other: [done]}, "the same name, another layer"
    for place in range(len(JOB_COLUMNS)):
        assert pending([SHAPE], [done], again, (*key[:place], "another", *key[place + 1 :])) == {SHAPE: [done]}
    assert SweepLog.load(tmp_path / "none.csv").rows == {}


def test_a_file_that_is_no_log_is_refused(tmp_path):
    path = tmp_path / CSV_NAME
    header = ",".join(COLUMNS)
    for text, message in [
        ("", "must start with the columns model,"),
        (header.replace("tokens,", ""), "take another output_dir, or move this file away$"),
        (f"{header}\ntiny,1\n", r"sweep\.csv:2 must have 20 columns, not 2"),
        (f"{header}\n" + "x," * 18 + "1.0,\n", r"sweep\.csv:2: invalid literal"),
        (f"{header}\n" + "1," * 16 + "8,2,nan,\n", r"sweep\.csv:2: ms=nan must be positive"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            SweepLog.load(path)


def test_table_lines_and_picture(tmp_path):
    slow, fast = Measured(setting=setting(16), ms=2.0), Measured(setting=setting(8), ms=1.0)
    broken = Measured(setting=setting(8, 2), ms=None, failure="RuntimeError: no")
    alone = [Measured(setting=setting(8), ms=None, failure="ValueError: never")]
    results = {SHAPE: [slow, fast, broken], replace(SHAPE, tokens=99): alone}
    assert (fastest(results[SHAPE]), fastest(alone)) == (fast, None)
    lines = sweep_table(results).splitlines()
    assert [line.split()[-1] for line in lines] == ["ms", "2.0000", "*", "no", "never"]
    assert (
        len({line.index(word) + len(word) for line, word in zip(lines, ["ms", "2.0000", "1.0000"], strict=False)}) == 1
    )
    assert sweep_lines(results[SHAPE]) == {4: [(8, 1.0), (16, 2.0)]}
    plot_sweep(results, tmp_path / PLOT_NAME)
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(PNG)


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
    more = job_of(*words, "sweep.comm_blocks=[8,16]", f"resume={tmp_path}", "output_dir=unused")
    facts = sweep_job(more, Rank())
    assert (facts["points"], facts["measured_now"], facts["output_dir"]) == (8, 8, str(tmp_path)), "in one loop"
    with pytest.raises(ValueError, match=r"resume='.*/none' must be a folder with sweep\.csv"):
        sweep_job(job_of(f"resume={tmp_path}/none"), Rank())


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / CSV_NAME).read_text().splitlines()))


def test_times_of_another_job_in_the_folder_are_kept_and_not_taken(tmp_path, monkeypatch):
    """Ranks that differ in number or communicator, another version of Comet, other kernels or rounds, an older file."""
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
    monkeypatch.setattr("comet.measure.sweep.comet_version", lambda: "another")
    assert sweep_job(job, Rank())["measured_now"] == 1
    assert (tmp_path / CSV_NAME).read_text().startswith(old)
    assert [row["version"] for row in rows_of(tmp_path)] == [comet_version(), "another"]
    assert sweep_job(job_of(*words, "sweep.rounds=2"), Rank())["measured_now"] == 1
    monkeypatch.setattr("comet.layer.group.why_no_cuda", lambda device: "")
    assert sweep_job(job, Rank())["measured_now"] == 1
    of_jobs = [tuple(row[name] for name in JOB_COLUMNS[-3:]) for row in rows_of(tmp_path)]
    assert of_jobs[1:] == [("another", "triton", "1"), ("another", "triton", "2"), ("another", "auto", "1")]
    names = [name for name in COLUMNS if name not in JOB_COLUMNS[-2:]]
    older = [",".join(row[name] for name in names) for row in rows_of(tmp_path)[-1:]]
    (tmp_path / CSV_NAME).write_text("\n".join([",".join(names), *older, ""]))
    assert sweep_job(job, Rank())["measured_now"] == 1
    assert [row["kernels"] for row in rows_of(tmp_path)] == ["", "auto"]
    assert dict(zip(JOB_COLUMNS, job_key(job, Rank(world_size=4)), strict=True))["world_size"] == "4"
    assert job_key(replace(job, comm=CommConfig(backend="nvshmem")), Rank())[-4] == "nvshmem"


def test_expert_capacities_follow_from_a_shapes_own_tokens(tmp_path, monkeypatch):
    """The row of 128 tokens is the same whatever else is swept: 32 of 256 rows for each of 8 experts."""
    capacities = []

    def fake(problem, settings, group, **named):
        capacities.append(expert_capacity(problem.moe, group))
        return [Measured(setting=setting, ms=1.0) for setting in settings]

    monkeypatch.setattr("comet.measure.sweep.measure_layer", fake)
    words = "model.moe.capacity_factor=1.0", "sweep.tokens=[128,2048]", f"output_dir={tmp_path}"
    sweep_job(job_of(*words), Rank())
    assert capacities == [32, 512]


def test_a_failed_point_is_measured_again_and_keeps_its_reason_until_then(tmp_path, monkeypatch, capsys):
    """The cause of its failure is gone in the second run."""

    def fail(*arguments):
        raise RuntimeError("no resources")

    words = ("sweep.tokens=[16,32]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={tmp_path}")
    monkeypatch.setattr("comet.measure.layers.make_path", fail)
    with pytest.raises(NothingMeasuredError, match=r"^sweep: none of 2 points ran, the first: RuntimeError: no resou"):
        sweep_job(job_of(*words), Rank())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 2
    monkeypatch.undo()

    def crash_at_32(job, shape, *others):
        if shape.tokens == 32:
            raise KeyError("a bug")
        return measure_shape(job, shape, *others)

    monkeypatch.setattr("comet.measure.sweep.measure_shape", crash_at_32)
    with pytest.raises(KeyError):
        sweep_job(job_of(*words), Rank())
    first, second = SweepLog.load(tmp_path / CSV_NAME).rows.values()
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
    assert {path.name for path in tmp_path.iterdir()} == {".comet.lock", CSV_NAME, f"{CSV_NAME}.lock", PLOT_NAME}


def never(*arguments: object, **named: object) -> NoReturn:
    raise AssertionError("measured before the folder was tried")


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "x")
    monkeypatch.setattr("comet.measure.layers.make_expert_group", never)
    monkeypatch.setattr("comet.measure.tune.Machine.of", lambda device: Machine(name="fake"))  # A CPU stores nothing.
    config = make_job(compose(["model=tiny", "tune.tokens=[32]", f"tune.profiles={folder}", f"output_dir={folder}"]), 1)
    message = f"={folder!r} must be a folder that can be written: .*Not a directory"
    with pytest.raises(ValueError, match=f"^tune.profiles{message}"):
        tune_job(config, Rank())
    with pytest.raises(ValueError, match=f"^output_dir{message}"):
        sweep_job(config, Rank())
    SweepLog(tmp_path / CSV_NAME).put({})
    (tmp_path / f"{CSV_NAME}.lock").unlink(missing_ok=True)
    (tmp_path / f"{CSV_NAME}.lock").mkdir()
    with pytest.raises(ValueError, match=f"^resume='{tmp_path}' must be a folder that can be written"):
        sweep_job(replace(config, resume=str(tmp_path)), Rank())


def test_progress_and_how_it_goes_on_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "sweep.tokens=[16,32]", "sweep.comm_blocks=[8]", "sweep.rounds=1", f"output_dir={tmp_path}"]
    sweep_job(make_job(compose(words), 1), Rank())
    first, *shapes, last = capfd.readouterr().err.splitlines()
    goes_on = "stopped, it goes on by the same command with"
    assert first == f"comet: sweep of 2 points, 2 to measure in {tmp_path}; {goes_on} output_dir={tmp_path}"
    told = "tiny EP1 TP1, {} tokens: 1 setting timed in one loop, rows at its end"
    assert [line.partition("left; ")[2] for line in shapes] == [told.format(16), told.format(32)]
    assert last.startswith("comet: 2 of 2 shapes measured, ")
    sweep_job(make_job(compose([*words, f"resume={tmp_path}", "output_dir=unused"]), 1), Rank())
    line = capfd.readouterr().err.splitlines()[0]
    assert line == f"comet: sweep of 2 points, 0 to measure in {tmp_path}; {goes_on} resume={tmp_path}"


def test_the_default_folder_is_named_after_the_task(capfd: pytest.CaptureFixture[str]) -> None:
    for words, folder in [
        (["sweep"], "outputs/sweep-2"), (["train"], "outputs/train-2"), (["sweep", "output_dir=mine"], "mine"),
    ]:  # fmt: skip
        assert f"\noutput_dir: {folder}" in dry_run(capfd, *words)[0]
