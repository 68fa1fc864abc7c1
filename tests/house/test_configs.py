"""Configuration: groups, schema, defaults, and mistakes that must be answered in one line that names field and rule."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Literal

import pytest
import torch
from pages import PAGES, commands

import comet
from comet.config import OverlapConfig, ParallelConfig
from comet.jobs.config import GenerateJob, SweepJob, TrainJob, TuneJob
from comet.launch.config import as_typed, compose, default_ranks, make_job
from comet.launch.dry_run import resolved_yaml
from comet.launch.memory import rank_parameters, training_needs
from comet.launch.schema import build, check_settings, defaults_of
from comet.launch.tasks.registry import TASKS, config_groups, imported
from comet.layer.group import make_expert_group
from comet.layer.workspace import WorkspaceShape, workspace_bytes
from comet.limits import Limited
from comet.models.gpt import GPT

ROOT = Path(__file__).parents[2]
SHAPES = {  # E, K, D, F
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "qwen2_moe": (64, 4, 2048, 1408),
    "phi35_moe": (16, 2, 4096, 6400),
    "qwen3_30b_a3b": (128, 8, 2048, 768),
    "deepseek_v3": (256, 8, 7168, 2048),
    "gpt_oss_20b": (32, 4, 2880, 2880),
}


def job_of(*overrides: str, world_size: int = 2) -> TrainJob:
    return make_job(compose(overrides), world_size)


@pytest.mark.parametrize("name", SHAPES)
def test_models_have_their_published_shape(name):
    moe = job_of(f"model={name}").model.moe
    assert (moe.num_experts, moe.top_k, moe.hidden_size, moe.ffn_size) == SHAPES[name]


def test_deepseek_routes_with_sigmoid_groups_bias_and_a_shared_expert():
    moe = job_of("model=deepseek_v3").model.moe
    assert (moe.score, moe.num_groups, moe.top_groups, moe.balance) == ("sigmoid", 8, 4, "bias")
    assert (moe.routed_scale, moe.shared_ffn_size) == (2.5, 2048)


def test_every_choice_of_every_group_is_valid():
    groups = config_groups()
    assert {"model", "parallel"} <= groups.keys()
    assert groups["model"] == sorted([*SHAPES, "moe_600m", "tiny"])
    jobs = [job_of(f"model={model}", world_size=8) for model in groups["model"]]
    assert [job.model.name for job in jobs] == groups["model"]
    for parallel in groups["parallel"]:
        layout = job_of(f"parallel={parallel}", world_size=8).parallel
        for job in jobs:
            assert dataclasses.replace(job, parallel=layout).model == job.model  # it checks itself


def test_settings_that_are_left_out_follow_from_others():
    assert job_of(world_size=4).parallel == ParallelConfig(ep=4, tp=1)
    assert job_of().overlap is None
    assert job_of("overlap.num_panels=2").overlap == OverlapConfig(num_panels=2)
    assert job_of("model.hidden_size=64").model.moe.hidden_size == 64


def test_composing_twice_gives_equal_jobs_and_no_state():
    first, second = compose(["train.steps=7", "train.warmup_steps=1", "output_dir=x"]), compose(["output_dir=x"])
    assert first["train"]["steps"] == 7
    assert second["train"]["steps"] != 7
    assert compose(["output_dir=x"]) == second


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=foo", r"^model=foo must be one of deepseek_v3, .*tiny$"),
        ("parallel=ep3", r"^parallel=ep3 must be one of auto, "),
        ("train.stepz=3", r"train\.stepz is no setting; did you mean train\.steps\?$"),
        ("parallell=ep2", r"did you mean parallel\?$"),
        ("train.steps=abc", r"^train\.steps='abc' must be a whole number and at least 1$"),
        ("train.steps=3.5", r"^train\.steps=3\.5 must be a whole number and at least 1$"),
        ("train.steps=true", r"^train\.steps=True must be a whole number and at least 1$"),
        ("train.steps=[3]", r"^train\.steps=\[3\] must be a whole number and at least 1$"),
        ("train.lr=abc", r"^train\.lr='abc' must be a finite number and above 0$"),
        ("train.grad_clip=abc", r"^train\.grad_clip='abc' must be a number and above 0$"),
        ("train=1", r"^train=1 must name one of the settings in train, such as train\.\w+$"),
        ("model.moe.activation=geglu", r" in model\.moe\.activation, such as model\.moe\.activation\.name$"),
        ("model.moe=null", r"^model\.moe=null must name one of the settings in model\.moe, such as model\.moe\.\w+$"),
        ("model.moe={foo:1}", r"Key 'foo' is not in struct"),
        ("output_dir", r"^override 'output_dir' must have the form name=value$"),
        ("output_dir=[a]", r"^output_dir=\['a'\] must be a text and the name of a folder: put quotes around it$"),
        ("resume_changes=[7,1_0,true]", r"^resume_changes=\[7, 10, True\] must each be a text: put quotes around it$"),
        ("parallel.ep={}", r"^parallel\.ep=\{\} must be a whole number and at least 1$"),
        ("nproc={}", r"^nproc=\{\} must be a whole number and at least 1, or None$"),
        ("data.path={}", r"^data\.path=\{\} must be a text and the name of a file or folder, or None: put quotes"),
        ("data=[]", r"^data=\[\] must name one of the settings in data, such as data\.path$"),
        ("resume_changes={}", r"^resume_changes=\{\} must be a list: write resume_changes=\[\{\}\]$"),
        ("resume_changes=null", r"^resume_changes=None must be a list$"),
        ("resume_changes=[[a]]", r"^resume_changes=\[\['a'\]\] must each be a text: put quotes around it$"),
        ("foo", r"^override 'foo' must have the form name=value$"),
        ("+x=1", r"^override '\+x=1': x is no setting$"),
        ("~train", r"^override '~train' must have the form train=value: no setting can be added or removed$"),
        ("model@x=tiny", r"^override 'model@x=tiny' must have the form model=value"),
        ("hydra.run.dir=x", r"hydra\.run\.dir is no setting"),
        ("a=[", r"^override 'a=\[' must have the form name=value$"),
        ("model.moe.top_k=2,4", r"^model\.moe\.top_k=2,4 must be one value: a job has one, so start it once for each"),
        ("train.steps=???", r"^train\.steps must be given$"),
        ("overlap.transport=copy", r"^override 'overlap\.transport=copy': overlap\.transport is no longer a setting: "),
        ("overlap.block_rows=64", r"overlap\.block_rows is no longer a setting: leave it out: tiles have 128 rows"),
        ("overlap.beside=true", r"overlap\.beside is no longer a setting: comm_blocks=0 is beside=true"),
        ("sweep.transport=[push]", r"sweep\.transport is no longer a setting: leave it out: rows are always pushed"),
        (
            "sweep.rounds=1",
            r"^override .*: sweep\.rounds must be left out: it is a setting of comet sweep$",
        ),
        ("generate.prompt=a", r"generate\.prompt must be left out: it is a setting of comet generate$"),
    ],
)
def test_compose_answers_a_mistake_in_one_line(override, message):
    with pytest.raises(ValueError, match=message) as caught:
        compose([override])
    assert "\n" not in str(caught.value)
    assert str(ROOT) not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "override", "message"),
    [
        (GenerateJob, "generate.prompts=[7]", r"^generate\.prompts=\[7\] must each be a text and at least one char"),
        (TuneJob, "tune.tokens=[[1]]", r"^tune\.tokens=\[\[1\]\] must each be a whole number and at least 1$"),
        (TuneJob, "tune.tokens=64", r"^tune\.tokens=64 must be a list: write tune\.tokens=\[64\]$"),
        (SweepJob, "sweep.layouts=[2,1]", r"^sweep\.layouts=\[2,1\] must be a list: write sweep\.layouts=\[\[2,1\]\]$"),
        (SweepJob, "sweep.layouts=2", r"write sweep\.layouts=\[\[2\]\]$"),
        (SweepJob, "sweep.layouts=[[2,1],3]", r"^sweep\.layouts=\[\[2,1\],3\] must be a list: write "),
        (SweepJob, "resume=auto", r"resume must be left out: .* of comet train; output_dir=FOLDER continues a sweep$"),
        (SweepJob, "train.steps=2", r"train\.steps must be left out: it is a setting of comet train$"),
        (
            GenerateJob,
            "train.dtype=auto",
            r"train\.dtype must be left out: .* of comet train, tune, sweep, ",
        ),
    ],
)
def test_settings_of_each_task_are_its_own(settings, override, message):
    with pytest.raises(ValueError, match=message):
        compose([override], settings)


@pytest.mark.parametrize(
    "typed",
    ["2026_11_26", "1e3", "true", "007", "./~/x", "a(b)=c#d", "d\u00e9j\u00e0 vu", "a,b", "it's", "a\\", "range(1,5)"],
)
def test_texts_are_what_was_typed(typed):
    overrides = [f"{name}={typed}" for name in ("output_dir", "data.path", "model.name", "tune.profiles")]
    found = compose(overrides)
    assert [found["output_dir"], found["data"]["path"], found["model"]["name"], found["tune"]["profiles"]] == [
        typed
    ] * 4


def test_folders_may_be_below_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "my.yaml").write_text("tune: {profiles: ~/p}\n")
    given = ["output_dir=~/runs/1", "data.path=~/text", "resume=auto", "model.name=~/x"]
    found = compose(given, file=str(tmp_path / "my.yaml"))
    assert (found["output_dir"], found["data"]["path"]) == ("/home/me/runs/1", "/home/me/text")
    assert (found["tune"]["profiles"], found["resume"], found["model"]["name"]) == ("/home/me/p", "auto", "~/x")


def test_texts_that_hydra_reads_stay_so():
    found = compose(["data.path='a b'", "output_dir=${model.name}", "resume=null", "resume_changes=['7','1_0']"])
    assert [found["data"]["path"], found["output_dir"], found["resume"]] == ["a b", "tiny", None]
    assert found["resume_changes"] == ["7", "1_0"]
    assert as_typed("train.steps=1_0") == "train.steps=1_0"


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.ep=3"], 3, r"num_experts=8 must be divisible by ep=3"),
        (["parallel=ep2"], 3, r"world_size=3 must be a multiple of parallel\.ep=2 x parallel\.tp=1 = 2"),
        (["parallel.tp=2"], 3, r"world_size=3 must be a multiple of parallel\.tp=2"),
        (["parallel.tp=0"], 2, r"parallel\.tp=0 must be at least 1"),
        (["parallel.ep=0"], 2, r"ep=0 must be at least 1"),
        (["model.moe.top_k=9"], 2, r"^model\.moe\.top_k=9 must be .* at most num_experts=8 and at most 32$"),
        (["train.lr=inf"], 2, r"^train\.lr=inf must be a finite number and above 0$"),
        (["train.seed=9223372036854775808"], 2, r"^train\.seed=9.* must be at least 0 and below 9223372036854775808$"),
        (["comm.timeout_s=inf"], 2, r"^comm\.timeout_s=inf must be a finite number and above 0 and at most 1000000$"),
        (["train.steps=-1"], 2, r"^train\.steps=-1 must be at least 1$"),
        (
            ["train.steps=6", "train.warmup_steps=6"],
            2,
            r"^train\.warmup_steps=6 must be .* and below steps=6, or None$",
        ),
        (["train.lr=0.0"], 2, r"^train\.lr=0\.0 must be above 0$"),
        (["train.lr=nan"], 2, r"^train\.lr=nan must be a finite number and above 0$"),
        (["train.min_lr_ratio=1.5"], 2, r"^train\.min_lr_ratio=1\.5 must be at least 0 and at most 1$"),
        (["train.grad_clip=-1.0"], 2, r"^train\.grad_clip=-1\.0 must be above 0$"),
        (["train.weight_decay=-0.1"], 2, r"^train\.weight_decay=-0\.1 must be at least 0$"),
        (["train.weight_decay=inf"], 2, r"^train\.weight_decay=inf must be a finite number and at least 0$"),
        (["train.checkpoint_every=-1"], 2, r"^train\.checkpoint_every=-1 must be at least 0$"),
        *(
            (["data.heldout_fraction=" + value], 2, f"{value} must be .*above 0 and below 1$")
            for value in "0.0 1.0 nan".split()
        ),
        (["parallel.ep=2", "parallel.node_size=3"], 2, "node_size=3 must be a multiple or a divisor of ep x tp = 2"),
        (["parallel=ep4", "parallel.tp=2", "parallel.node_size=3"], 8, "node_size=3 .* a divisor of ep x tp = 8"),
        (["parallel.node_size=0"], 2, "node_size=0 must be at least 1"),
        (["parallel.tp=5"], 5, r"ffn_size=\d+ must be divisible by tp=5$"),
        (["resume="], 2, r"^resume='' must be auto, a checkpoint or an output folder, or None$"),
        (["comm.timeout_s=0"], 2, r"^comm\.timeout_s=0 must be above 0 and at most 1000000$"),
        (["overlap.comm_blocks=-1"], 2, r"^overlap\.comm_blocks=-1 must be at least 0$"),
        (["moe_path=fsed"], 2, r"^moe_path='fsed' must be one of auto, fused, twin, plain, reference$"),
        (["train.dtype=float8"], 2, r"^train\.dtype='float8' must be one of auto, float32, bfloat16$"),
        (["train.cuda_graph=maybe"], 2, r"^train\.cuda_graph='maybe' must be one of auto, on, off$"),
        (["comm.backend=tcp"], 2, r"^comm\.backend='tcp' must be one of auto, nvshmem, symm_mem, cpu_shm$"),
        (["output_dir="], 2, r"^output_dir='' must be the name of a folder$"),
        (
            ["data.path=books", "output_dir=books/runs/1"],
            2,
            r"^output_dir='books/runs/1' must not be in data.path='books'",
        ),
        (["overlap.num_panels=0"], 2, r"^overlap\.num_panels=0 must be at least 1"),
    ],
)
def test_make_job_names_field_value_and_rule(overrides, world_size, message):
    with pytest.raises(ValueError, match=message):
        make_job(compose(overrides), world_size)


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "ranks"),
    [
        ([], 0, 2),
        ([], 1, 1),
        ([], 4, 4),
        ([], 6, 4),
        ([], 8, 8),
        (["parallel=ep2"], 5, 4),
        (["parallel=ep2_tp2"], 0, 4),
        (["parallel=single"], 0, 1),
        (["parallel=single"], 4, 4),
        (["parallel.tp=4"], 0, 4),
        (["nproc=3", "parallel=single"], 0, 3),
        (["nproc=2"], 8, 2),
    ],
)
def test_default_ranks(overrides, num_gpus, ranks):
    container = compose(overrides)
    assert default_ranks(container, num_gpus) == ranks
    assert ranks % make_job(container, ranks).parallel.world_size == 0


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "message"),
    [
        (["nproc=0"], 0, r"nproc=0 must be at least 1"),
        (["nproc=9"], 8, r"nproc=9 must be at most the 8 visible GPUs"),
        (["parallel=ep4"], 2, r"parallel\.ep=4 x parallel\.tp=1 must be at most the 2 visible GPUs"),
        (["parallel.ep=0"], 0, r"parallel\.ep=0 must be at least 1"),
        (["parallel.tp=4"], 2, r"parallel\.tp=4 must be at most the 2 visible GPUs"),
    ],
)
def test_default_ranks_refuses_what_the_machine_has_not(overrides, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        default_ranks(compose(overrides), num_gpus)


@dataclasses.dataclass(frozen=True)
class Inner(Limited):
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Outer(Limited):
    width: int
    inner: Inner = dataclasses.field(default_factory=Inner)
    mode: Literal["x", "y"] | None = None
    spare: Inner | None = None


def test_defaults_and_build_are_inverse():
    assert defaults_of(Outer) == {
        "width": "???", "inner": {"kind": "a", "sizes": (1, 2)}, "mode": None, "spare": {"kind": None, "sizes": None}
    }  # fmt: skip
    values = {"width": 3, "inner": {"kind": "a", "sizes": [4, 5, 6]}, "mode": "y", "spare": {"kind": "b"}}
    check_settings(Outer, values)
    assert build(Outer, values) == Outer(3, Inner(sizes=(4, 5, 6)), "y", Inner(kind="b"))
    assert build(Outer, {**defaults_of(Outer), "width": 1}) == build(Outer, {"width": 1, "spare": None}) == Outer(1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 1, "inner": {"kind": "c"}}, r"^inner\.kind='c' must be one of a, b$"),
        ({"width": 1, "mode": "z"}, r"^mode='z' must be one of x, y, or None$"),
        ({"width": 1, "depth": 2}, r"^depth is no setting; did you mean width\?$"),
        ({"width": 1, "inner": {"size": 2}}, r"^inner\.size is no setting; did you mean inner\.sizes\?$"),
        ({"width": 1, "inner": 2}, r"^inner=2 must name one of the settings in inner, such as inner\.kind$"),
        ({"width": None}, r"^width=None must be a whole number$"),
        ({"width": 1, "inner": {"sizes": [1, "a"]}}, r"^inner\.sizes=\[1, 'a'\] must each be a whole number$"),
    ],
)
def test_values_that_nothing_can_make_right_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check_settings(Outer, values)


def test_build_names_the_section():
    with pytest.raises(ValueError, match=r"^inner\.kind='c' must be one of a, b$"):
        build(Outer, {"width": 1, "inner": {"kind": "c"}})


def test_rank_parameters_example():
    model = job_of().model
    moe = dataclasses.replace(model.moe, hidden_size=128, ffn_size=128, num_experts=8, top_k=2, shared_ffn_size=0)
    model = dataclasses.replace(
        model, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=4, dense_layers=0, head_dim=None, moe=moe
    )
    assert rank_parameters(model, 2, 1) == 1119360
    experts = 4 * 3 * 128 * 128 * 8
    assert rank_parameters(model, 1, 1) - rank_parameters(model, 2, 1) == experts // 2
    assert rank_parameters(model, 2, 2) == rank_parameters(model, 4, 1)


def test_memory_needs_count_symmetric_memory_exactly():
    job = job_of("train.batch_size=3", "model.context=100")
    needs = training_needs(job, 1, torch.float32)
    assert needs["symmetric memory"] == workspace_bytes(WorkspaceShape.create(job.model.moe, 2, 300, torch.float32))
    assert needs["optimizer states"] == 2 * needs["gradients"] == 2 * needs["parameters"]
    job = job_of("train.batch_size=3", "model.context=100", "train.fsdp=true", "train.gradient_accumulation_steps=2")
    shared = training_needs(job, 4, torch.float32)
    experts = rank_parameters(job.model, 1, 1) - rank_parameters(job.model, 2, 1)
    assert shared["parameters"] == experts * 4 + (needs["parameters"] - experts * 4) // 4
    assert shared["gradients"] == 2 * shared["parameters"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.dense_layers=1",),
        ("model.num_kv_heads=2", "model.head_dim=48"),
        ("model.moe.shared_ffn_size=64", "model.moe.balance=bias", "model.moe.score=sigmoid"),
    ],
)
def test_rank_parameters_are_those_of_the_model(overrides):
    job = job_of("model.hidden_size=64", "model.num_layers=2", "parallel=single", *overrides, world_size=1)
    group = make_expert_group(
        job.model.moe, job.parallel, max_tokens=128, dtype=torch.float32, device=torch.device("cpu")
    )
    model = GPT(job.model, group)
    assert rank_parameters(job.model, 1, 1) == sum(parameter.numel() for parameter in model.parameters())
    group.close()


def test_a_dry_run_is_yaml_that_composes_to_the_same_job(tmp_path):
    container = compose(["model=qwen3_30b_a3b", "output_dir=x"])
    job = make_job(container, 4)
    (tmp_path / "x.yaml").write_text(resolved_yaml(container, job, 4))
    loaded = compose([], file=f"{tmp_path}/x.yaml")
    assert loaded["nproc"] == 4
    assert make_job(loaded, 4) == dataclasses.replace(job, nproc=4)


EXAMPLES = [f"comet {name} {words}".strip() for name, task in TASKS.items() for words in task.examples]
EXAMPLE_LINES = [
    re.sub(r".* -m comet\.launch ", "comet ", line.split("#")[0].strip())
    for line in [*EXAMPLES, *(line for page in PAGES for line in commands(page))]
    if re.search(r"\bcomet(?:\.launch)? (train|generate|tune|sweep|modular)\b", line)
]


@pytest.mark.parametrize("line", EXAMPLE_LINES)
def test_examples_of_help_and_of_pages_are_valid(line):
    _, task, *words = shlex.split(re.split(r"\s{2,}", line)[0])
    settings = imported(TASKS[task].settings)
    # Options, a file, a folder and an activation that are not here.
    elsewhere = ("--", "my.yaml", "generate.source=", "model.moe.activation.name=relu2")
    container = compose([word for word in words if not word.startswith(elsewhere)], settings)
    make_job(container, default_ranks(container, 0), settings)


def test_there_are_examples():
    tasks = [line.split()[1] for line in EXAMPLE_LINES]
    assert len(tasks) >= 17
    assert {"train", "generate", "tune", "sweep", "modular"} == set(tasks)


def test_every_public_name_loads_and_no_other():
    for name in comet.__all__:
        assert getattr(comet, name).__name__ == name
        assert name in dir(comet)
    with pytest.raises(AttributeError, match="module 'comet' has no attribute 'make_coffee'"):
        _ = comet.make_coffee
