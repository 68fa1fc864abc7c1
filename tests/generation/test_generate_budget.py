"""``comet generate`` with a budget for experts: what it writes, says beforehand, and refuses."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from ranks import run_ranks
from refusals import dry_run, refusal

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import save_model, tiny_config
from hf_fp8_cases import publish
from training_cases import MODEL, MOE, Rank, make_generation, make_job

from comet.experts.options import GRAPH_FALLBACK_REASON, StoreOptions
from comet.generation.job import generate_job
from comet.generation.source import find_source, model_of
from comet.integrations.hf import load_pretrained
from comet.integrations.hf.families import Family
from comet.integrations.hf.static import StaticDecoder
from comet.jobs.config import GenerateJob
from comet.jobs.generate import GenerateConfig
from comet.launch.config import compose, default_ranks
from comet.launch.dry_run import prefetch_told
from comet.launch.memory import generation_needs
from comet.training.trainer import train

GREEDY = GenerateConfig(prompts=("def f(x):", "a", "the quick brown fox"), max_new_tokens=6, temperature=0.0)
EXPERT = 3 * 32 * 32 * 4  # bytes in float32
FILE = {"expert_store": "file", "host_budget": 0.75}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "qwen3_moe")  # two layers of 8 experts, of which a token takes 4, and a dense one
    return folder


def job_of(folder, tmp_path, **settings):
    model = model_of(find_source(str(folder)))
    return make_generation(model=model, generate=replace(GREEDY, source=str(folder), **settings))


def test_the_job_writes_the_same(qwen, tmp_path, capsys):
    whole = generate_job(job_of(qwen, tmp_path), Rank())
    found = generate_job(job_of(qwen, tmp_path, expert_budget=0.5, **FILE), Rank())
    assert found["texts"] == whole["texts"]
    assert "expert_cache" not in whole
    cache = found["expert_cache"]
    assert (cache["store"], cache["slots"]) == ("file", 4)
    assert 0 < cache["hits"] < 1
    assert cache["hits"] == 1 - cache["fetched"] / cache["needed"]
    assert cache["fetched_bytes"] == cache["fetched"] * EXPERT
    assert cache["staged_bytes"] > 0
    assert cache["prefetch"] is False, "on a CPU, unless it is asked for"
    out = capsys.readouterr().out
    assert f"expert hits   {cache['hits']:.3f}" in out
    assert json.loads(out.splitlines()[-1])["expert_cache"] == cache


def test_steps_that_the_host_serves_are_no_graph(qwen):
    loaded = load_pretrained(qwen, expert_budget=0.5, **FILE)
    with pytest.raises(ValueError, match=f"cuda_graph='on' must be 'auto' or 'off' here: {GRAPH_FALLBACK_REASON}"):
        StaticDecoder(loaded, 1, 16, cuda_graph="on")


def test_a_dry_run_says_what_fits_where(qwen, tmp_path, capsys):
    words = [f"generate.source={qwen}", "generate.prompt=ab", "generate.expert_budget=0.5"]
    text, rows = dry_run(capsys, "generate", *words)
    assert "# experts on the device: 4 of 8 in each of 2 layers" in text
    assert rows["slots of experts"] == pytest.approx(2 * 4 * EXPERT / 2**20, abs=0.1)
    assert rows["all experts, in host memory"] == pytest.approx(2 * 8 * EXPERT / 2**20, abs=0.1)
    assert rows["memory of this host"] == pytest.approx(psutil.virtual_memory().total / 2**20, rel=1e-3)
    loaded = load_pretrained(qwen, expert_budget=0.5)
    needs = generation_needs(job_of(qwen, tmp_path, expert_budget=0.5), torch.float32, None)
    assert needs["weights"] / 2**20 - rows["weights"] == pytest.approx(2 * 8 * EXPERT / 2**20, abs=0.1)
    assert rows["weights"] == pytest.approx(sum(each.nbytes for each in loaded.parameters()) / 2**20, abs=0.1)
    files = [f"generate.{name}={value}" for name, value in FILE.items()]
    _, rows = dry_run(capsys, "generate", *words, *files)
    assert rows["12 of them in host memory as well"] == pytest.approx(12 * EXPERT / 2**20, abs=0.1)
    assert "all experts, in files" in rows


def test_a_dry_run_says_whether_experts_are_prefetched(qwen, capsys):
    words = [f"generate.source={qwen}", "generate.prompt=ab", "generate.expert_budget=0.5"]
    files = [f"generate.{name}={value}" for name, value in FILE.items()]
    for given, told in (
        ([], "off (expert_prefetch=auto)"),
        (["generate.expert_prefetch=true"], "on (expert_prefetch=true)"),
        (["generate.expert_prefetch=false"], "off (expert_prefetch=false)"),
        (files, "off (expert_prefetch=auto)"),
    ):
        assert f"\n# prefetch: {told}\n" in dry_run(capsys, "generate", *words, *given)[0]

    def told_of(**options):
        options = StoreOptions(expert_budget=0.5, **options)
        return prefetch_told(SimpleNamespace(options=options, num_slots=4, num_held=8), torch.device("cuda"))

    assert told_of() == "on, where host memory can be pinned (expert_prefetch=auto)"
    assert told_of(expert_prefetch=True) == "on, where host memory can be pinned (expert_prefetch=true)"
    assert told_of(**FILE) == "off (expert_prefetch=auto)"


def test_a_budget_in_bytes_holds_more_quantised_experts(qwen, tmp_path, capsys):
    words = [f"generate.source={qwen}", "generate.prompt=ab", f"generate.expert_budget={2 * 4 * EXPERT}"]
    found = {}
    for name, expert in (("null", EXPERT), ("mxfp8", 3168), ("mxfp4", 1632)):
        text, rows = dry_run(capsys, "generate", *words, f"generate.expert_dtype={name}")
        told = "" if name == "null" else f" in {name}"
        assert rows[f"all experts{told}, in host memory"] == pytest.approx(2 * 8 * expert / 2**20, abs=0.1)
        assert f"expert_dtype: {name}\n" in text
        settings = dict(prompts=("ab",), expert_budget=2.0 * 4 * EXPERT, max_new_tokens=3)
        job = job_of(qwen, tmp_path, **settings, expert_dtype=None if name == "null" else name)
        cache = generate_job(job, Rank())["expert_cache"]
        found[name] = int(re.search(r"# experts on the device: (\d+) of 8 in each", text)[1])
        assert (cache["store"], cache["staged_bytes"]) == ("host", 0)
        assert (cache["slots"], cache["fetched_bytes"]) == (found[name], cache["fetched"] * expert)
        assert cache["stored"] == (None if name == "null" else name)
    assert found == {"null": 4, "mxfp8": 8, "mxfp4": 8}


def test_block_fp8_in_files_is_counted_as_it_is_stored(tmp_path, capsys):
    save_model(tmp_path, "qwen3_moe", hidden_size=160, moe_intermediate_size=128)
    publish(tmp_path)
    files = {"keep_fp8": True, "expert_budget": 0.5, **FILE}
    words = [f"generate.source={tmp_path}", "generate.prompt=ab", *(f"generate.{k}={v}" for k, v in files.items())]
    _, rows = dry_run(capsys, "generate", *words)
    expert = 3 * 160 * 128 + 4 * (2 * 2 + 2 * 1)
    for name, count in (("all experts in fp8, in files", 16), ("12 of them in host memory as well", 12)):
        assert rows[name] == pytest.approx(count * expert / 2**20, abs=0.05)
    assert rows["slots of experts"] == pytest.approx(2 * 4 * expert / 2**20, abs=0.05)
    whole, found = (generate_job(job_of(tmp_path, tmp_path, **each), Rank()) for each in ({"keep_fp8": True}, files))
    assert found["texts"] == whole["texts"]
    cache = found["expert_cache"]
    assert (cache["store"], cache["stored"], cache["slots"]) == ("file", "fp8", 4)
    assert cache["fetched_bytes"] == cache["fetched"] * expert > cache["staged_bytes"] > 0


BUDGET = "generate.expert_budget"
FROM_FILES = "expert_store=file host_budget=0.75"
MISTAKES = [  # budget and other settings, and what is said
    ("0", "generate.expert_budget=0 must be above 0, or None"),
    (f"0.5 expert_prefetch=true {FROM_FILES}", "expert_prefetch=True must be auto or false with expert_store=file: "),
    ("0.5 expert_dtype=mxfp4 keep_fp8=true", "generate.expert_dtype=mxfp4 must be None"),
    ("0.5 host_budget=0.5", "generate.host_budget=0.5 must be None with expert_store=host"),
    ("0.5 expert_store=file host_budget=0.1", "generate.host_budget=0.1 holds 1 experts, and must hold the 4 that "),
    ("null host_cores=1", "generate.host_cores=1 must come with an expert_budget"),
    (f"0.5 host_cores=1 {FROM_FILES}", "generate.host_cores=1 must be off with expert_store=file"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line(words, message, qwen, capsys):
    settings = f"expert_budget={words} source={qwen}".split()
    said = refusal(capsys, "generate", "--dry-run", *(f"generate.{each}" for each in settings))
    assert said.startswith(message)


def test_a_budget_is_that_of_a_rank(qwen, capsys):
    words = [f"generate.source={qwen}", f"{BUDGET}=0.2", "parallel.ep=2"]
    said = refusal(capsys, "generate", "--dry-run", *words)
    assert said.startswith(f"{BUDGET}=0.2 holds 0 experts of each of 2 layers, and must hold 1")


def test_files_are_for_hugging_face(tmp_path):
    from comet.generation.job import plan_experts

    settings = GenerateConfig(source=str(tmp_path), prompt="x", expert_budget=0.5, **FILE)
    job = make_generation(model=MODEL, generate=settings)
    with pytest.raises(ValueError, match=r"generate\.expert_store='file' must be left out with a checkpoint of comet"):
        plan_experts(job, torch.float32)
    with pytest.raises(ValueError, match=r"generate\.keep_fp8=True must be left out with a checkpoint of comet train"):
        plan_experts(replace(job, generate=GenerateConfig(source=str(tmp_path), keep_fp8=True)), torch.float32)


def test_a_budget_without_a_group_is_one_rank(qwen):
    words = [f"generate.source={qwen}"]
    assert default_ranks(compose([*words, f"{BUDGET}=0.5"], GenerateJob), 4) == 1
    assert default_ranks(compose([*words, f"{BUDGET}=0.5", "parallel.ep=2"], GenerateJob), 4) == 4
    assert default_ranks(compose(words, GenerateJob), 4) == 4


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_layers_with_experts_are_counted(family):
    from transformers import AutoModelForCausalLM

    changes = {"num_hidden_layers": 7} | ({"decoder_sparse_step": 2} if "qwen" in family else {})
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        names = dict(AutoModelForCausalLM.from_config(config).named_modules())
    assert len(Family.of_config(config).experts) == sum(name.endswith(".experts") for name in names)


WIDE = replace(MODEL, moe=replace(MOE, num_experts=8))


def generated_by_a_rank(
    rank: int, world_size: int, folder: str, budget: float | None, expert_dtype=None, node_size=None
):
    settings = replace(GREEDY, source=folder, prompts=("1",), expert_budget=budget, expert_dtype=expert_dtype)
    job = make_generation(model=WIDE, ep=world_size, generate=settings)
    return generate_job(replace(job, parallel=replace(job.parallel, node_size=node_size)), Rank(rank, world_size))


def test_ranks_of_a_checkpoint_have_a_budget_each(tmp_path):
    train(make_job(tmp_path, model=WIDE, steps=3, eval_batches=1, sample_bytes=0), Rank())
    folder = str(tmp_path / "out")
    alone, wanted = generated_by_a_rank(0, 1, folder, 0.5), generated_by_a_rank(0, 1, folder, None)
    first, second = run_ranks(generated_by_a_rank, 2, folder, 0.5)
    for of_node in run_ranks(generated_by_a_rank, 2, folder, 0.5, None, 1):
        assert (of_node["text"], of_node["expert_cache"]["slots"]) == (first["text"], 2), "each rank is a node"
    assert first["text"] == second["text"] == alone["text"] == wanted["text"]
    cache = first["expert_cache"]
    assert second["expert_cache"] == cache
    assert (alone["expert_cache"]["slots"], cache["slots"]) == (4, 2)
    assert cache["needed"] == alone["expert_cache"]["needed"], "the experts of both ranks together"
    narrow = generated_by_a_rank(0, 1, folder, 0.5, "mxfp8")["expert_cache"]
    assert (cache["stored"], narrow["stored"]) == (None, "mxfp8")
    assert narrow["fetched_bytes"] == narrow["fetched"] * EXPERT * (1 + 1 / 32) / 4
