"""``--dry-run`` and ``--config``: what is printed before anything starts, and a user's YAML file, there and back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from refusals import dry_run, refusal
from tiers import slow

from comet.config import MoEConfig, ParallelConfig
from comet.jobs.config import GenerateJob, SweepJob, TrainJob, TuneJob
from comet.launch.config import compose, default_ranks, make_job
from comet.launch.dry_run import describe_nodes
from comet.launch.memory import layer_bytes
from comet.launch.tasks.registry import TASKS, imported
from comet.layer.workspace import WorkspaceShape, workspace_bytes
from comet.schedule.choice import Problem


def test_layer_bytes_example():
    moe = MoEConfig(hidden_size=64, ffn_size=128, num_experts=8, top_k=2)
    problem = Problem(moe, ParallelConfig(ep=2), 100, torch.float32)
    assert layer_bytes(problem, 2) == (144384, 393216)
    with pytest.raises(ValueError, match="world_size=3 must be divisible by ep x tp = 2 x 1 = 2"):
        layer_bytes(problem, 3)


NODES = ("parallel=ep4", "parallel.node_size=2")
SPLIT = "comm_blocks=500 must be below the 132 SMs of "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "overlap.comm_blocks=500"], SPLIT),
        (["train", "data.path=nope"], "data.path must be an existing file or folder, or a pattern of some: 'nope'"),
        (["train", "resume=nope"], "resume must be 'auto', a checkpoint or a folder of checkpoints: 'nope'"),
        (
            ["train", "resume=auto"],
            "resume='auto' must come with the output_dir of the run, as output_dir=outputs/run: ",
        ),
        (["tune", "tune.models=[tiny,nope]"], "tune.models=[tiny,nope]: 'nope' must be one of "),
        (
            ["tune", "tune.tokens=[8,8,1500,2048]"],
            "tune.tokens=(8, 8, 1500, 2048) must not hold both 1500 and 2048: a profile keeps one entry, of bucket ",
        ),
        (["modular", "modular.pair=[AllToAll]"], "modular.pair=['AllToAll'] must be two names, "),
        (["modular", "modular.pair=[AllToAl,FusedExperts]"], "modular.pair: 'AllToAl' must be one of SingleRank, "),
        (["sweep", "sweep.models=['~x']"], "sweep.models=[~x]: '~x' must be one of "),
        (["sweep", "sweep.models=[nope]"], "sweep.models=[nope]: 'nope' must be one of "),
        (["sweep", "sweep.comm_blocks=[-1]"], "sweep.comm_blocks=[-1] must each be at least 0"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(words, message, capfd):
    assert refusal(capfd, *words, "--dry-run").startswith(message)


@pytest.mark.parametrize(
    ("given", "stands_in_for", "idle"),
    [
        ("sweep.models=[tiny]", "model", "model.moe.top_k=4"),
        slow("sweep.models=[tiny]", "model", "model=mixtral_8x7b"),
        slow("sweep.tokens=[16,8]", "train.batch_size", "train.batch_size=2"),
        slow("sweep.comm_blocks=[0,4,8,16,32,64]", "overlap.comm_blocks", "overlap.comm_blocks=7"),
        ("sweep.num_panels=[2]", "overlap.num_panels", "++overlap={num_panels:4}"),
        slow("tune.models=[tiny]", "model", "model.moe={top_k:4}"),
        ("tune.tokens=[16]", "train.batch_size", "train.batch_size=2"),
    ],
)
def test_what_a_list_stands_in_for_is_refused_if_it_was_typed(given, stands_in_for, idle, tmp_path, capfd):
    setting, path = given.partition("=")[0], tmp_path / "my.yaml"
    task = setting.partition(".")[0]
    told = f"{given} stands in for {stands_in_for}: {idle} must be left out, or {setting}=[] be given\n"
    assert refusal(capfd, task, "--dry-run", given, idle) == told
    path.write_text(given.replace("=", ": "))
    assert refusal(capfd, task, "--dry-run", "--config", str(path), idle) == told
    dry_run(capfd, "train", "--config", str(path), idle)
    path.write_text(dry_run(capfd, task, f"{setting}=[]", idle)[0])
    dry_run(capfd, task, "--config", str(path), given)


@pytest.mark.parametrize("task", ["tune", "sweep"])
def test_ranks_must_fit_the_first_model_that_is_measured_and_not_the_default(task, capfd):
    models = f"{task}.models=[deepseek_v3,tiny]"
    out, _ = dry_run(capfd, task, models, "parallel.ep=8", "parallel.tp=2")
    assert yaml.safe_load(out)["nproc"] == 16
    assert "deepseek_v3 EP8 TP2, 512 tokens " in out, "of a step of the job"
    assert refusal(capfd, task, "--dry-run", models, "parallel.ep=3").startswith("num_experts=256 must be divisible by")
    if task == "sweep":
        dry_run(capfd, task, models, "parallel.ep=16")


@pytest.mark.parametrize("task", ["train", "generate"])
def test_a_dry_run_counts_the_symmetric_memory_of_a_node(task, capfd):
    found, outputs = {}, {}
    for node_size in (2, 4):
        words = ["parallel=ep4", f"parallel.node_size={node_size}", "model.moe.shared_ffn_size=128"]
        outputs[node_size], found[node_size] = dry_run(capfd, task, *words)
        out = outputs[node_size]
        assert yaml.safe_load(out)["parallel"] == {"ep": 4, "tp": 1, "node_size": node_size}
    # Few tokens are one run, for which a node has room for the tokens of both nodes.
    assert found[2]["symmetric memory"] == pytest.approx(found[4]["symmetric memory"], rel=0.1)
    told = ["over 2 nodes of 2 ranks; nodes of the first group: ranks 0 to 1; ranks 2 to 3" in outputs[node_size]
            for node_size in (2, 4)]  # fmt: skip
    assert told == [task == "train", False]
    same = found[2].keys() - {"symmetric memory", "total"}
    assert [found[2][name] for name in same] == [found[4][name] for name in same]


def test_a_dry_run_over_nodes_says_what_travels_through_which_memory_and_what_is_hidden(capfd):
    six = ("parallel.ep=6", "parallel.node_size=1", "model.moe.num_experts=48")
    said = [dry_run(capfd, "train", *six, *words)[0] for words in ((), ("comm.backend=cpu_shm",))]
    for out, carriers in zip(said, ("collectives, which hide less", r"kernels, through [\d,.]+ MiB"), strict=True):
        assert (
            "6 nodes of 1 ranks; nodes of the first group: rank 0; rank 1; rank 2; rank 3; and so on to rank 5" in out
        )
        assert re.search(rf"sends [\d,]+ tokens a step .* and [\d,.]+ MiB over the network, by {carriers}", out)
        assert re.search(r"50 GB/s .* pass takes [\d.]+ ms, and \d+% of the [\d.]+ ms of its network are hidden", out)
    assert "of 1 ranks;" not in dry_run(capfd, "train", *six, "moe_path=plain")[0]
    job = make_job(compose([*six]), 6)
    few = describe_nodes(job, 128, torch.bfloat16, torch.device("cuda"))
    assert len(few) == 1
    assert few[0].startswith("# layers of 128 tokens over nodes train on path 'plain': a forward and a backward pass")


def test_a_dry_run_takes_what_the_run_would(capfd):
    """Another path has no split, a sweep notes a point that fails, and each setting tried is a point's own."""
    dry_run(capfd, "train", "moe_path=plain", "overlap.comm_blocks=500")
    out, _ = dry_run(capfd, "sweep", "sweep.comm_blocks=[500]", "sweep.layouts=[[2,1],[3,1]]")
    *_, good, bad = out.splitlines()
    assert bad.split()[1:7] == ["tiny", "EP3", "TP1,", "512", "tokens", "fails:"]
    assert bad.endswith("num_experts=8 must be divisible by ep=3")
    assert "fails" not in good


@pytest.mark.parametrize("task", ["tune", "sweep"])
def test_a_dry_run_of_layers_counts_each_shape(task, capfd):
    models, tokens = f"{task}.models=[tiny,mixtral_8x7b]", f"{task}.tokens=[64,2048]"
    out, _ = dry_run(capfd, task, models, tokens, "parallel=ep2")
    assert yaml.safe_load(out)["nproc"] == 2
    rows = [line.split()[1:] for line in out.splitlines() if " EP2 TP1, " in line]
    assert [(row[0], row[3]) for row in rows] == [
        ("tiny", "64"), ("tiny", "2048"), ("mixtral_8x7b", "64"), ("mixtral_8x7b", "2048"),
    ]  # fmt: skip
    for name, _, _, num, _, *sizes in rows:
        moe = make_job(compose([f"model={name}"]), 1).model.moe
        pool = workspace_bytes(WorkspaceShape.create(moe, 2, int(num), torch.float32))
        weights = 4 * 3 * moe.hidden_size * moe.ffn_size * moe.num_experts // 2
        assert sizes == [f"{size / 2**20:,.1f}" for size in (pool, weights, pool + weights)]


FILE = r"""
model: mixtral_8x7b
model.num_layers: 2
parallel: ep4
train: {steps: 20, lr: 1e-3, cuda_graph: "off"}
generate: {prompt: 'a \${b} [c, ', prompts: ['\${x', y], stop: "7"}
sweep.layouts: [[4, 1], [2, 2]]
output_dir: here
tune.profiles: "2026_11_26"
data: {path: "1e3"}
overwrite: true
train.eval_every: 1_000
resume: ~
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(FILE)
    return str(path)


def test_the_file_counts_more_than_defaults_and_less_than_overrides(file: str) -> None:
    job = compose(["train.steps=70"], file=file)
    assert (job["model"]["name"], job["model"]["num_layers"]) == ("mixtral_8x7b", 2)
    assert (job["parallel"]["ep"], job["parallel"]["tp"]) == (4, 1)
    assert (job["train"]["steps"], job["train"]["lr"], job["train"]["cuda_graph"]) == (70, 1e-3, "off")
    assert (job["output_dir"], job["tune"]["profiles"], job["data"]["path"]) == ("here", "2026_11_26", "1e3")
    assert (job["overwrite"], job["train"]["eval_every"], job["resume"]) == (True, 1000, None)
    settings = compose(["generate.stop=z"], GenerateJob, file=file)["generate"]
    assert (settings["prompt"], settings["prompts"], settings["stop"]) == ("a ${b} [c, ", ["${x", "y"], "z")
    assert compose([], GenerateJob, file=file)["generate"]["stop"] == "7"
    assert compose([], SweepJob, file=file)["sweep"]["layouts"] == [[4, 1], [2, 2]]


def test_an_override_of_a_group_replaces_what_the_file_says_of_it(file: str) -> None:
    job = compose(["model=tiny", "parallel=ep2", "generate.prompts=[q]"], GenerateJob, file=file)
    assert job["model"] == compose([])["model"]
    assert (job["parallel"]["ep"], job["parallel"]["tp"]) == (2, 1)
    assert job["generate"]["prompts"] == ["q"]


@pytest.mark.parametrize("task", ["train", "generate"])
def test_a_resolved_configuration_is_the_same_job_again(task: str, file: str, tmp_path, capsys, monkeypatch) -> None:
    overrides, again = ["overlap.num_panels=2"], tmp_path / "again.yaml"
    overrides += {"train": ["train.steps=70"], "generate": ["generate.seed=70"]}[task]
    monkeypatch.chdir(tmp_path)
    Path("1e3").write_text("to learn from " * 100_000)
    resolved, _ = dry_run(capsys, task, "--config", file, *overrides)
    again.write_text(resolved)
    assert dry_run(capsys, task, "--config", str(again))[0] == resolved
    settings = imported(TASKS[task].settings)
    wanted = make_job(compose(overrides, settings, file=file), 4, settings)
    assert make_job(compose([], settings, file=str(again)), 4, settings) == replace(wanted, nproc=4)
    assert isinstance(wanted, TrainJob) or wanted.generate.prompt == "a ${b} [c, "
    assert yaml.safe_load(resolved).get("output_dir") == {"train": "here"}.get(task)


@pytest.mark.parametrize(
    "text", ["{source: none}", "{expert_budget: 0.5}", "{speculate: conservative, draft_experts: [3]}"]
)
@pytest.mark.parametrize("task", ["train", slow("tune"), slow("sweep"), slow("modular")])
def test_what_a_file_says_of_generate_changes_no_other_task(task: str, text: str, tmp_path) -> None:
    (tmp_path / "all.yaml").write_text(f"model: mixtral_8x7b\ngenerate: {text}")
    settings = imported(TASKS[task].settings)
    found = compose([], settings, file=f"{tmp_path}/all.yaml")
    assert (found["model"]["name"], default_ranks(found, 4)) == ("mixtral_8x7b", 4)
    make_job(found, 4, settings)


def test_only_tasks_that_resume_take_the_settings_of_the_run_and_none_those_of_another_task(tmp_path) -> None:
    (tmp_path / "comet.yaml").write_text("{model: {num_layers: 9}, generate: {source: none}}")
    (tmp_path / "all.yaml").write_text(f"resume: {tmp_path}")
    train, tune = (compose([], settings, file=f"{tmp_path}/all.yaml") for settings in (TrainJob, TuneJob))
    assert train["model"]["num_layers"] == 9 != tune["model"]["num_layers"]
    assert (train["output_dir"], "generate" in train) == (str(tmp_path), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overlap: {transport: copy}", "overlap.transport is no longer a setting: leave it out"),
        ("train: {stepz: 3}", "train.stepz is no setting; did you mean train.steps?"),
        ("model: foo", "model='foo' must be one of deepseek_v3, "),
        ("model: {moe: {top: 3}}", "model.moe.top is no setting; did you mean model.moe.top_k?"),
        ("a: [", " must be a YAML file of settings: "),
        ("a: &x [*x]", " must have no alias inside what it names, nor hundreds of levels"),
        ("train:\n  lr: &x\n    b: {c: *x}", " must have no alias inside what it names"),
        (3000 * "[", " must have no alias inside what it names, nor hundreds of levels"),
        ("5", " must be a file that can be read: Invalid loaded object type: int"),
        (
            "data.path: ${x",
            " must be a YAML file of settings: no viable alternative at input '${x' full_key: data.path",
        ),
        ("- 1", " must hold settings, name: value, not [1]"),
        ("1: 2", "1 is no setting"),
        ("defaults: [x]", "defaults is no setting"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, message: str, tmp_path, capsys) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    said = refusal(capsys, "train", "--dry-run", f"--config={path}")
    assert said.startswith(f"--config={path}")
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: abc}", "train.steps='abc' must be a whole number and at least 1"),
        ("train: 3", "train=3 must name one of the settings in train, such as train."),
        ("train: []", "train=[] must name one of the settings in train, such as train."),
        ("train: {lr: [1]}", "train.lr=[1] must be a finite number and above 0"),
        (
            "train: {cuda_graph: off}",
            "train.cuda_graph=False must be a text and one of auto, on, off: put quotes around",
        ),
        ("overwrite: maybe", "overwrite='maybe' must be True or False"),
        ("tune.profiles: 2026_11_26", "tune.profiles=20261126 must be a text and the name of a folder: put quotes"),
        ("resume: 5", "resume=5 must be a text and auto, a checkpoint or an output folder, or None: put quotes"),
        ("data.path: ${x}", "data.path must be a value, or refer to another setting by its whole name, as "),
    ],
)
def test_a_wrong_value_in_the_file_is_named_as_on_the_command_line(text: str, message: str, tmp_path, capsys) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert refusal(capsys, "train", "--dry-run", f"--config={path}").startswith(message)


def test_only_tasks_that_resume_ask_for_the_folder_of_a_run(tmp_path, capsys) -> None:
    (tmp_path / "a.yaml").write_text("resume: auto\n")
    words = ["--dry-run", "--config", f"{tmp_path}/a.yaml", "model=tiny"]
    assert refusal(capsys, "train", *words).startswith("resume='auto' must come with the output_dir of the run")
    dry_run(capsys, "train", *words, f"output_dir={tmp_path}/out")
    dry_run(capsys, "tune", *words)


def test_a_missing_file_is_named(tmp_path, capsys) -> None:
    path, rule = tmp_path / "none.yaml", "must be a file that can be read: No such file or directory"
    assert refusal(capsys, "tune", "--config", str(path)) == f"--config={path} {rule}\n"
