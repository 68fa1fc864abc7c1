"""The ``generate`` task on Hugging Face folders: stock models' text, streamed through their tokenizers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from refusals import refusal

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import save_model, tiny_model
from hf_fp8_cases import publish, stock
from training_cases import Rank, make_generation

from comet.config import OverlapConfig
from comet.generation.hf import HFEngine, open_codec
from comet.generation.job import generate_job
from comet.generation.source import find_source, model_of
from comet.integrations.hf import convert, load_pretrained
from comet.jobs.generate import GenerateConfig
from comet.launch.memory import generation_needs

PROMPTS = ("def f(x):", "a", "the quick brown fox")
GREEDY = GenerateConfig(prompts=PROMPTS, max_new_tokens=6, temperature=0.0)
END = 256


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_model(folder, "qwen3_moe")


def stock_texts(model, folder) -> tuple[str, ...]:
    """Continue each prompt alone by transformers itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=END)
        texts.append(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return tuple(texts)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_padded_batch_is_what_the_stock_model_writes_and_is_reported(family, qwen, tmp_path, capsys):
    folder, model = qwen if family == "qwen3_moe" else (tmp_path, save_model(tmp_path, family))
    job = make_generation(model=model_of(find_source(str(folder))), generate=replace(GREEDY, source=str(folder)))
    result = generate_job(job, Rank())
    assert tuple(result["texts"]) == stock_texts(model, folder)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["source"] == str(folder)
    assert (result["model"], result["prompt_tokens"]) == (family, sum(map(len, PROMPTS)))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    save_model(folder, "deepseek_v3", hidden_size=160, moe_intermediate_size=256)
    publish(folder)
    return folder


def test_the_job_keeps_fp8_where_there_is_some(fp8, qwen, tmp_path, capsys):
    source = find_source(str(fp8))
    settings = replace(GREEDY, source=str(fp8), keep_fp8=True)
    job = make_generation(model=model_of(source), generate=settings)
    assert tuple(generate_job(job, Rank())["texts"]) == stock_texts(stock(fp8), fp8)
    kept, whole = (
        generation_needs(replace(job, generate=each), torch.bfloat16)
        for each in (settings, replace(settings, keep_fp8=False))
    )
    expert = (job.model.num_layers - 1) * 3 * 160 * 256  # the first layer has none
    assert whole["weights"] - kept["weights"] == 8 * expert
    pieces = [needs["shared experts in decode steps"] for needs in (kept, whole)]
    assert pieces == [2 * expert, 2 * expert * 2], "two pieces, of a byte per weight or of bfloat16"
    with pytest.raises(ValueError, match=r"keep_fp8=True must come with a block FP8 checkpoint: config\.json of"):
        generate_job(replace(job, generate=replace(settings, source=str(qwen[0]))), Rank())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dry_run_counts_the_weights_as_they_are_held(tmp_path, dtype):
    """The folder is in float32; a run in another type holds no weight in float32."""
    save_model(tmp_path, "qwen3_moe", mlp_only_layers=[])
    job = make_generation(model=model_of(find_source(str(tmp_path))), generate=replace(GREEDY, source=str(tmp_path)))
    held = sum(weight.nbytes for weight in load_pretrained(tmp_path, dtype=dtype).parameters())
    needs = generation_needs(job, dtype)
    assert needs["weights while loading"] == needs["weights"] == pytest.approx(held, rel=0.01)
    needs = generation_needs(replace(job, generate=GREEDY), dtype)
    assert needs["weights while loading"] == needs["weights"] * 4 // dtype.itemsize, "a checkpoint of the training job"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:100], r"config\.json must be JSON, is it complete\? "),
        (lambda text: "", r"config\.json must be JSON"),
        (lambda text: "[1]", r"config\.json must hold settings by name, not \[1\]$"),
        (lambda text: json.dumps({"model_type": "qwen3_moe"}), r"must hold whole numbers for hidden_size, .*, num_exp"),
        (lambda text: text.replace("hidden_size", "h_size", 1), r"must hold whole numbers for hidden_size, as that of"),
        (lambda text: json.dumps(json.loads(text) | {"model_type": [1]}), r"model_type=\[1\] must be one of transf"),
        (lambda text: json.dumps(json.loads(text) | {"rope_parameters": 3}), "a value that transformers does not take"),
        (lambda text: json.dumps(json.loads(text) | {"dtype": "float99"}), r"a value that transformers does not take"),
        (
            lambda text: text[:-2] + ', "quantization_config": {"quant_method": "gptq"}}',
            "'gptq' of .* must be 'fp8': only",
        ),
    ],
)
def test_a_broken_configuration_is_one_line(change, message, qwen, tmp_path, capsys):
    (tmp_path / "config.json").write_text(change((qwen[0] / "config.json").read_text()))
    assert re.search(
        message, refusal(capsys, "generate", "--dry-run", f"generate.source={tmp_path}", "generate.prompt=x")
    )


UNKNOWN = json.dumps({"version": "1.0", "model": {"type": "Unheard"}, "added_tokens": []})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "", "must hold a tokenizer that can be read: "),
        ("tokenizer.json", "{", "must hold a tokenizer that can be read: "),
        ("tokenizer.json", "[1]", "must hold a tokenizer that can be read: "),
        ("tokenizer.json", "{}", "must hold a tokenizer that can be read: "),
        ("tokenizer.json", UNKNOWN, "must hold a tokenizer that can be read: "),
        ("tokenizer_config.json", "[1]", "must hold a tokenizer that can be read: "),
        ("tokenizer_config.json", '{"tokenizer', "must hold a tokenizer that can be read: "),
        ("tokenizer_config.json", '{"tokenizer_class": 3}', "must hold a tokenizer that can be read: "),
        ("generation_config.json", "", r"generation_config\.json must be JSON, is it complete\? "),
        ("generation_config.json", '{"eos', r"generation_config\.json must be JSON, is it complete\? "),
        ("generation_config.json", "[1]", r"generation_config\.json must hold settings by name, not \[1\]$"),
        ("generation_config.json", '{"eos_token_id": "<end>"}', "eos_token_id='<end>' of .* must be a token's number"),
        ("generation_config.json", '{"watermarking_config": 3}', "a value that transformers does not take: "),
        ("model.safetensors", "cut", r"is damaged: model\.safetensors cannot be read"),
        ("adapter_config.json", '{"base_model_name_or_path": "q"}', r"is an adapter of 'q' \(adapter_config\.json\): "),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_refuse_in_one_line(name, text, message, qwen, tmp_path, capsys):
    for path in qwen[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(text)
    words = ("generate", "--dry-run", f"generate.source={tmp_path}", "generate.prompt=x")
    assert re.search(message, refusal(capsys, *words))
    if name == "adapter_config.json":
        (tmp_path / "config.json").unlink()  # peft saves none
        assert re.search(message, refusal(capsys, *words))
    if name != "model.safetensors":
        with pytest.raises(ValueError, match=message):
            open_codec(tmp_path)


def test_end_tokens_of_the_configuration_are_checked_as_well(qwen, tmp_path):
    for path in qwen[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    settings = json.loads((tmp_path / "config.json").read_text())
    for value in ("<end>", -1, True, [3.5]):
        (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": value}))
        with pytest.raises(ValueError, match=r"eos_token_id|config\.json has a value"):
            open_codec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": [7, END]}))
    assert open_codec(tmp_path).end_ids == {7, END}


def test_a_dry_run_refuses_prompts_that_do_not_fit(qwen, capsys):
    words = ("generate", "--dry-run", f"generate.source={qwen[0]}", f"generate.prompt={'x' * 128}")
    assert "of 128 tokens must be shorter than the model's context of 128" in refusal(capsys, *words)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_scaling": YARN}, 96),  # model cards add this
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),  # of max_position_embeddings
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 64),
        ({"rope_parameters": YARN | {"rope_theta": 1e4}}, 96),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 8}}, 32),  # extended already
        ({"rope_scaling": None}, 32),
        ({}, 32),
    ],
)
def test_the_context_is_what_rope_scaling_extends_it_to(rope, context, tmp_path):
    model = save_model(tmp_path, "qwen3_moe", max_position_embeddings=32)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 10000.0} | rope))
    shape = model_of(find_source(str(tmp_path)))
    assert shape.context == context
    if context < 96:
        return
    model = type(model).from_pretrained(tmp_path, experts_implementation="eager")
    settings = replace(GREEDY, source=str(tmp_path), prompts=(PROMPTS[2] * 3,))  # 57 tokens, more than 32
    result = generate_job(make_generation(model=shape, generate=settings), Rank())
    ids = open_codec(tmp_path).encode(PROMPTS[2] * 3)
    made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=END)
    assert result["texts"][0] == open_codec(tmp_path).tokenizer.decode(made[0, len(ids) :])


@pytest.mark.parametrize("changes", [dict(moe_path="plain"), dict(overlap=OverlapConfig(num_panels=2))])
def test_choices_that_a_folder_does_not_take_are_refused(changes, qwen, tmp_path):
    source = str(qwen[0])
    job = make_generation(model=model_of(find_source(source)), generate=replace(GREEDY, source=source))
    with pytest.raises(ValueError, match=r"(moe_path|overlap)=.* must be left out with a Hugging Face folder"):
        generate_job(replace(job, **changes), Rank())


def test_tokens_become_text_when_they_form_characters(qwen):
    codec = open_codec(qwen[0])
    ids = codec.encode("x \u00e9\u20ac!")
    assert (codec.num_tokens, codec.end_ids, len(ids)) == (257, frozenset(), 8)
    stream = codec.stream(ids[:1])
    assert [stream.push(token) for token in ids[1:]] == [" ", "", "\u00e9", "", "", "\u20ac", "!"]
    assert (stream.push(ids[2]), stream.push(END), stream.finish()) == ("", "", "\ufffd")


def test_end_tokens_are_those_of_the_generation_config(qwen, tmp_path):
    save_model(tmp_path, "qwen3_moe", eos_token_id=END)
    assert open_codec(tmp_path).end_ids == {END}


@pytest.mark.parametrize(("end", "vocab_size", "num_tokens"), [(300, 304, 301), (256, 100, 100)])
def test_tokens_are_those_that_tokenizer_and_model_know(end, vocab_size, num_tokens, qwen, tmp_path):
    for path in qwen[0].glob("*token*"):
        (tmp_path / path.name).write_text(path.read_text().replace(f'"id": {END}', f'"id": {end}'))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<end>"] = end  # behind a gap, or beyond the model's tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny_model("qwen3_moe", vocab_size=vocab_size, eos_token_id=end).save_pretrained(tmp_path)
    codec = open_codec(tmp_path)
    assert (codec.num_tokens, codec.end_ids) == (num_tokens, {end})
    assert len(codec.encode("a")) == 1
    if end > num_tokens:
        with pytest.raises(
            ValueError, match=r"generate\.prompt='a<end>' must be tokens below 100, .* but holds \[256\]"
        ):
            codec.encode("a<end>")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_are_refused(rope_type):
    widths = dict.fromkeys(("short_factor", "long_factor"), [1.0] * 4) if rope_type == "longrope" else {}
    rope = dict(rope_type=rope_type, factor=4.0, rope_theta=1e4, original_max_position_embeddings=16, **widths)
    model = convert(tiny_model("qwen3_moe", rope_parameters=rope))
    with pytest.raises(
        ValueError, match=f"rope_type='{rope_type}' of the model must be another: it turns all sequences"
    ):
        HFEngine(model)


def test_a_folder_without_a_tokenizer(qwen, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((qwen[0] / name).read_bytes())
    with pytest.raises(ValueError, match=r"generate\.source=.* must hold a tokenizer: one of tokenizer\.json, "):
        open_codec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"generate\.source=.* must hold a tokenizer that can be read: "):
        open_codec(tmp_path)
