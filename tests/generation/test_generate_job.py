"""The ``generate`` task on checkpoints of the training job: every layout, every mistake, and the command itself."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import launch_jobs
import pytest
import torch
from ranks import in_ranks
from refusals import refusal
from training_cases import MODEL, MOE, Rank, make_generation, make_job, make_model

from comet.generation import job as generation_job
from comet.generation.engine import GPTEngine
from comet.generation.job import generate_job
from comet.generation.source import find_source, model_of
from comet.generation.text import table
from comet.jobs.config import GenerateJob
from comet.jobs.generate import GenerateConfig
from comet.launch.cli import PROGRAM, main
from comet.launch.config import compose
from comet.launch.config import make_job as job_of_command
from comet.launch.dry_run import resolved_yaml
from comet.launch.memory import generation_needs
from comet.models.cache import KeyValueCache
from comet.training.trainer import train

TRAINED = replace(MODEL, dense_layers=1, moe=replace(MOE, shared_ffn_size=16))
PROMPTS = ("17 times 4 is ", "3 ti")
GREEDY = GenerateConfig(prompts=PROMPTS, max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Output folder of a training run on one rank, with the checkpoints step-000020 and step-000040."""
    folder = tmp_path_factory.mktemp("run")
    job = make_job(folder, model=TRAINED, steps=40, checkpoint_every=20, eval_batches=1, sample_bytes=0)
    train(job, Rank())
    return folder / "out"


def truncate(checkpoint: Path) -> None:
    victim = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-10])


def test_the_command_on_two_ep_ranks_writes_what_one_process_writes(trained):
    words = [f"generate.source={trained}", "generate.prompt=17 times 4 is ", "generate.max_new_tokens=12"]
    words += ["generate.temperature=0", "parallel=ep2"]
    status, out, err = launch_jobs.run("generate", *words, program=PROGRAM)
    assert status == 0, err
    result = json.loads(out[-1])
    settings = replace(GREEDY, source=str(trained), prompts=PROMPTS[:1])
    (text,) = generate_job(make_generation(model=TRAINED, generate=settings), Rank())["texts"]
    assert (result["task"], result["text"], result["texts"]) == ("generate", text, [text])
    assert (result["world_size"], result["ep"], result["tp"], result["device"]) == (2, 2, 1, "cpu")
    assert (result["prompt_tokens"], result["new_tokens"]) == (14, 12)
    assert result["source"] == str(trained / "step-000040")
    assert "\n".join(out).startswith(f"17 times 4 is {text}\n----\nprompt ")
    assert min(result["time_to_first_token_s"], result["tokens_per_second"]) > 0
    assert (result["cuda_graph"], result["graph_fallback_reason"]) == (False, "the model is on the device 'cpu'")
    assert "tokens/s, without a CUDA graph (the model is on the device 'cpu')" in "\n".join(out)
    assert "output_dir" not in result, "nothing is written"


def test_a_source_that_does_not_exist_ends_before_a_rank_starts(capsys):
    message = "generate.source='no/such/run' must be an existing folder: a checkpoint, "
    assert message in refusal(capsys, "generate", "generate.source=no/such/run")


def test_broken_checkpoints_are_told_apart(trained, tmp_path, capsys):
    run = copytree(trained, tmp_path / "run")
    truncate(run / "step-000040")
    source = find_source(str(run))
    assert source.path == run / "step-000020", "the newest complete one is taken"
    assert "step-000040 is truncated" in source.skipped[0]
    assert main(["generate", f"generate.source={run}/step-000040"]) == 2
    truncate(run / "step-000020")
    assert main(["generate", f"generate.source={run}"]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["generate", f"generate.source={tmp_path}/empty"]) == 2
    one, both, empty = capsys.readouterr().err.splitlines()
    assert "step-000040 is truncated" in one
    assert "step-000040 is truncated" in both
    assert "step-000020 is truncated" in both
    assert empty.endswith("it holds neither")


def test_a_checkpoint_of_an_unknown_kind_of_model(trained, tmp_path):
    run = copytree(trained, tmp_path / "run")
    manifest = json.loads((run / "step-000040" / "comet.json").read_text())
    manifest["model"]["moe.flavour"] = 1
    (run / "step-000040" / "comet.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"holds a model this version does not know: .*flavour"):
        compose([f"generate.source={run}/step-000040"], GenerateJob)


def test_a_source_must_be_given(tmp_path):
    job = make_generation(model=TRAINED, generate=GenerateConfig(prompt="x"))
    with pytest.raises(ValueError, match=r"generate\.source must be given"):
        generate_job(job, Rank())


def test_the_table_says_how_steps_were_launched():
    result = dict(prompt_tokens=1, new_tokens=1, tokens_per_second=0.5, time_to_first_token_s=0.1)
    result |= {"cuda_graph": True, "graph_fallback_reason": None}
    assert "0.5 tokens/s, each step replayed from a CUDA graph" in table(result)
    assert "tokens/s, without a CUDA graph (on another rank)" in table({**result, "cuda_graph": False})
    assert "(too hot)" in table({**result, "cuda_graph": False, "graph_fallback_reason": "too hot"})
    assert "decode" not in table({**result, "tokens_per_second": None}), "what was not measured is left out"


def test_the_job_prints_every_sequence_and_warns_about_skipped_checkpoints(trained, tmp_path, capsys, caplog):
    run = copytree(trained, tmp_path / "run")
    truncate(run / "step-000040")
    settings = GenerateConfig(source=str(run), prompts=PROMPTS, max_new_tokens=3, seed=4)
    result = generate_job(make_generation(model=TRAINED, generate=settings), Rank())
    out, err = capsys.readouterr()
    assert (result["stopped_by"], err) == (("length", "length"), "")
    assert out.startswith(f"{PROMPTS[0]}{result['texts'][0]}\n\n{PROMPTS[1]}{result['texts'][1]}\n----\n")
    assert json.loads(out.splitlines()[-1]) == {
        **result, "texts": list(result["texts"]), "stopped_by": ["length", "length"]
    }  # fmt: skip
    assert "skipped: checkpoint" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_text_cut_at_the_context_says_so(trained, tmp_path, capsys):
    long = "b" * (TRAINED.context - 3)
    for prompts, which in (("a", long), "text 2 of 2"), ((long, "a", long), "texts 1, 3 of 3"):
        settings = GenerateConfig(source=str(trained), prompts=prompts, max_new_tokens=4)
        result = generate_job(make_generation(model=TRAINED, generate=settings), Rank())
        assert result["stopped_by"] == tuple("length" if prompt == "a" else "context" for prompt in prompts)
        told = f"comet: {which} ended at the model's context of {TRAINED.context} tokens, prompt included\n"
        assert capsys.readouterr().err == told


def test_the_source_decides_the_model(trained):
    job = job_of_command(compose([f"generate.source={trained}"], GenerateJob), 2, GenerateJob)
    assert job.model == TRAINED
    with pytest.raises(ValueError, match=r"stands in for model: model=tiny, \+\+model\.name=x must be left out$"):
        compose([f"generate.source={trained}", "model=tiny", "++model.name=x"], GenerateJob)


def test_a_text_does_not_depend_on_others_through_the_capacity_of_experts(trained):
    source = find_source(str(trained))
    dropping = replace(source.checkpoint, model={**source.checkpoint.model, "moe.capacity_factor": 1.0})
    assert model_of(replace(source, checkpoint=dropping)) == TRAINED
    model, group = make_model(replace(TRAINED, moe=replace(TRAINED.moe, capacity_factor=1.0)))
    with pytest.raises(ValueError, match=r"capacity_factor=1\.0 must be left out in generation: sequences would drop"):
        GPTEngine(model, group)


@in_ranks(2)
def test_ranks_take_the_checkpoint_and_the_tokens_of_rank_0(rank, world_size, trained, tmp_path):
    """A newer checkpoint was saved when rank 0 looked, and rank 1 has another tokenizer."""
    generation_job.find_source = lambda _: find_source(f"{trained}/step-0000{20 if rank else 40}")
    generation_job.encode_prompts = lambda *_: [[rank + 1] * (rank + 1)]
    settings = GenerateConfig(source=str(trained), prompt="x", max_new_tokens=2)
    result = generate_job(make_generation(model=TRAINED, ep=2, generate=settings), Rank(rank, world_size))
    assert (result["source"], result["prompt_tokens"]) == (f"{trained}/step-000040", 1)


TYPED = " [x=${y\n \\${z} \\\\${z}, 'a' \"b\" \\ null # \t~\\"


def test_texts_reach_the_job_as_they_were_typed(tmp_path):
    words = ["model=tiny", "generate.prompt=a, b ", f"generate.prompt={TYPED}", "generate.stop='}"]
    container = compose(words, GenerateJob)
    job = job_of_command(container, 2, GenerateJob)
    assert (job.generate.prompt, job.generate.stop) == (TYPED, "'}")
    (tmp_path / "again.yaml").write_text(resolved_yaml(container, job, 2))
    again = compose([], GenerateJob, file=f"{tmp_path}/again.yaml")
    assert again["generate"] == container["generate"], "a dry run prints text that is no interpolation"


def test_memory_of_a_dry_run_is_that_of_the_run(trained):
    settings = GenerateConfig(source=str(trained), prompts=("abc", "x" * 30), max_new_tokens=20)
    words = [f"generate.source={trained}", "parallel=single"]
    job = replace(job_of_command(compose(words, GenerateJob), 1, GenerateJob), generate=settings)
    wide = replace(TRAINED, moe=replace(TRAINED.moe, shared_ffn_size=2 * TRAINED.moe.ffn_size))
    cache = KeyValueCache(TRAINED, num_sequences=2, length=32, dtype=torch.float32, device=torch.device("cpu"))
    for config in (TRAINED, wide):
        needs, (model, group) = generation_needs(replace(job, model=config), torch.float32), make_model(config)
        assert needs["weights"] == sum(weight.nbytes for weight in model.parameters())
        assert needs["keys and values"] == cache.keys.nbytes + cache.values.nbytes
        GPTEngine(model, group).prefill(torch.tensor([[1]]), torch.tensor([1]), 3)
        experts = [weight for layer in model.moe_layers() for weight in layer.expert_parameters()]
        twice = sum(weight.untyped_storage().nbytes() - weight.nbytes for weight in experts)
        assert needs["shared experts in decode steps"] == twice
        assert (twice > 0) == (config is wide)
        group.close()
