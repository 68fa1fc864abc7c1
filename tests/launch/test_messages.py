"""Mistakes of a newcomer: each message has the setting, its value, the rule and a remedy, before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refusal, run_without_gpu

from comet.jobs.config import TuneJob
from comet.kernels.aot.compile import main as compile_main
from comet.launch.config import compose, make_job
from comet.training.saved_settings import SETTINGS_FILE, read_settings, require_same, settings_of


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=1,2", "train.steps=1,2 must be one value: a job has one, so start it once for each"),
        ("train.lr=choice(1,2)", "train.lr=choice(1,2) must be one value"),
        ("train.steps=range(1,5)", "train.steps=range(1,5) must be one value"),
        ("model=tiny,mixtral_8x7b", "model=tiny,mixtral_8x7b must be one value"),
        ("model=null", "model=null must be one of deepseek_v3, "),
        ("parallel=null", "parallel=null must be one of auto, "),
        ("model=5", "model=5 must be one of deepseek_v3, "),
        ("train.steps=${foo}", "train.steps must be a value, or refer to another setting by its whole name"),
        ("model.moe.top_k=${train.stepz}", "model.moe.top_k must be a value, or refer to another setting"),
        ("output_dir=${foo.bar}", "output_dir must be a value, or refer to another setting by its whole name"),
        ("train.lr=${oc.env:NOT_THERE}", "train.lr must be a value, or refer to another setting by its whole name"),
        ("train.steps=null", "train.steps=None must be a whole number and at least 1"),
        ("model.moe=null", "model.moe=null must name one of the settings in model.moe"),
        ("lr=5", "override 'lr=5': lr is no setting; did you mean train.lr?"),
        (
            "seed=5",
            "override 'seed=5': seed is no setting; did you mean train.seed",
        ),
    ],
)
def test_a_bad_value_is_named_with_its_setting(override, message):
    with pytest.raises(ValueError) as caught:
        compose([override])
    assert str(caught.value).startswith(message)
    assert "--multirun" not in str(caught.value)


def test_a_list_that_lacks_its_brackets_is_not_taken_for_several_jobs():
    with pytest.raises(ValueError, match=r"^tune\.tokens=1,2 must be a list: write tune\.tokens=\[1,2\]$"):
        compose(["tune.tokens=1,2"], TuneJob)


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (["train", "--steps", "5"], "write train.steps=5"),
        (["train", "--lr=1e-3"], "write train.lr=1e-3"),
        (["train", "--train.batch-size", "5"], "write train.batch_size=5"),
        (["train", "model=tiny", "--num_layers"], "write model.num_layers="),
        (["generate", "--seed", "3"], "write generate.seed=3"),
        (["train", "--seed", "3"], "write train.seed=3"),
        (["tune", "--rounds", "model=tiny"], "write tune.rounds="),
        (["train", "-v"], "write name=value"),
    ],
)
def test_a_setting_with_dashes_is_told_as_it_is_written(words, ways, capfd):
    told = refusal(capfd, *words)
    assert told.startswith("unrecognized arguments: -")
    assert told.endswith(f"; settings have no dashes: {ways}\n")


@pytest.mark.parametrize("words", [["nproc=5000"], ["nproc=6"], ["nproc=10", "parallel.tp=2"]])
def test_a_number_of_ranks_that_experts_do_not_divide_over_is_blamed_itself(words, capfd):
    told = refusal(capfd, "train", *words)
    assert told.startswith(f"{words[0]} makes parallel.ep=")
    assert "must divide model.moe.num_experts=8" in told


def test_the_sms_of_a_split_are_not_said_to_be_a_cpus(capfd):
    told = refusal(capfd, "train", "--dry-run", "overlap.comm_blocks=500")
    assert told.startswith("comm_blocks=500 must be below the 132 SMs of an H200, which a CPU stands in for")


def test_a_filter_that_no_kernel_has_lists_them(capfd):
    assert compile_main(["--filter", "router"]) == 2
    assert "kernels: activation_backward_kernel, " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        ("train: {steps: 3}\nmodel: tiny\ntrain: {lr: 1}\n", "found duplicate key train"),
        ("train:\n  steps: 3\n  lr: 1\n  steps: 4\n", "found duplicate key steps"),
        ("model: {moe: {top_k: 1, top_k: 2}}\n", "found duplicate key top_k"),
        ("model: tiny\nmodel: tiny\n", "found duplicate key model"),
        ("train: {steps: 3}\ntrain.steps: 4\n", "train.steps is given twice, with dots and in its section"),
        ("model.moe.top_k: 3\nmodel: {moe.top_k: 4}\n", "model.moe.top_k is given twice, with dots and in its section"),
        ("generate.prompt: a\ngenerate: {prompt: b}\n", "generate.prompt is given twice"),
        ("model: {moe.top_k: 3, moe: {top_k: 4}}\n", "model.moe.top_k is given twice"),
    ],
)
def test_a_setting_that_a_file_gives_twice_is_refused_by_name(text, twice, tmp_path, capfd):
    (tmp_path / "my.yaml").write_text(text)
    told = refusal(capfd, "train", "--dry-run", "--config", f"{tmp_path}/my.yaml")
    assert told.startswith(f"--config={tmp_path}/my.yaml")
    assert twice in told


def test_settings_of_a_run_that_were_edited_may_not_be_there_twice_either(tmp_path):
    (tmp_path / SETTINGS_FILE).write_text("train: {steps: 3}\ntrain: {steps: 4}\n")
    with pytest.raises(
        ValueError,
        match=r"(?s)comet\.yaml must be a YAML file of settings: .*line 1.*found duplicate key train.*line 2",
    ):
        read_settings(tmp_path)


def test_the_advice_of_resume_changes_keeps_those_that_are_there():
    before = make_job(compose([]), 2)
    after = make_job(compose(["train.lr=1", "train.seed=3", "resume_changes=[train.lr]"]), 2)
    with pytest.raises(ValueError, match=r"resume_changes=\[train\.lr,train\.seed\]$"):
        require_same(settings_of(before, 2), after, Path("run"), same_text=True)


WITHOUT_TORCH = """
import sys
from comet.launch.cli import main
main(sys.argv[1:])
sys.exit(3 if "torch" in sys.modules or "matplotlib" in sys.modules else 0)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["trian"],
        ["train", "train.stepz=1"],
        ["train", "train.steps=0"],
        ["train", "--steps", "5"],
        ["train", "model.moe.top_k=99"],
        ["generate", "generate.source=nope"],
        ["generate"],
        ["train", "nproc=3", "parallel.ep=2"],
        ["train", "data.path=nope"],
        ["train", "resume=nope"],
        ["sweep", "sweep.models=[tiny,nope]"],
        ["sweep", "sweep.comm_blocks=[-1]"],
        ["tune", "tune.tokens=[8,8,1500,2048]"],
        ["train", "--help"],
    ],
)
def test_a_mistake_is_told_before_torch_is_imported(words):
    done = subprocess.run([sys.executable, "-P", "-c", WITHOUT_TORCH, *words], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout or done.stderr.startswith("comet: error: ")


def test_running_out_of_memory_is_one_line(capfd, monkeypatch):
    import torch

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB.\nmore\nlines")

    monkeypatch.setattr("comet.launch.dry_run.describe_train", run_out)
    told = refusal(capfd, "train", "--dry-run")
    assert told.startswith("out of memory (CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB.): use a ")
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("comet.launch.dry_run.describe_train", fail)
        status, _, err = run_without_gpu(capfd, "train", "--dry-run")
        assert (status, len(err.splitlines())) == (2, 1)
        assert err.startswith("comet: error: out of memory (")
