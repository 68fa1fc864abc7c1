"""``comet export``: stock transformers loads the folder and has the logits of the checkpoint's model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pages import program
from torch.testing import assert_close
from training_cases import CPU, GPT_OSS, MODEL, MOE, Rank, make_job

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from comet.config import ParallelConfig  # noqa: E402
from comet.generation.export import export, main  # noqa: E402
from comet.generation.source import find_source, model_of  # noqa: E402
from comet.layer.group import make_expert_group  # noqa: E402
from comet.models.gpt import GPT  # noqa: E402
from comet.training.checkpoint import load_weights  # noqa: E402
from comet.training.trainer import train  # noqa: E402

SIGMOID = replace(MOE, score="sigmoid", balance="bias", bias_update_rate=0.1, routed_scale=2.5)
MODELS = {
    "softmax": replace(MODEL, dense_layers=1, num_layers=3, num_kv_heads=2, rope_base=5000.0),
    "not renormalised": replace(MODEL, head_dim=8, moe=replace(MOE, renormalize=False, balance="none")),
    "sigmoid": replace(MODEL, moe=SIGMOID),
    "groups and shared": replace(
        MODEL, dense_layers=1, moe=replace(SIGMOID, num_experts=8, num_groups=4, top_groups=2, shared_ffn_size=64)
    ),
}


def trained(folder, model, **changes):
    train(make_job(folder, model=model, steps=3, **changes), Rank())
    return str(folder / "out")


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_has_the_logits_of_the_checkpoint(name, tmp_path):
    source = trained(tmp_path, MODELS[name])
    assert main([source, str(tmp_path / "more" / "hf")]) == 0
    stock, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "more" / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    found = find_source(source)
    model = model_of(found)
    group = make_expert_group(model.moe, ParallelConfig(), max_tokens=64, dtype=torch.float32, device=CPU)
    own = GPT(model, group, path="plain", seed=9)
    load_weights(own, found.checkpoint)
    ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(stock(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "more" / "hf")
    text = "A text: \n\t\u00e9 \u20ac."
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [path.name for path in (tmp_path / "more").iterdir()] == ["hf"], "no part is left"


def test_the_program_of_the_page_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export(trained(tmp_path, MODEL), Path("outputs/book-hf"))
    exec(program("docs/howto/own-text.md"), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("It was a ")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            GPT_OSS,
            r"model\.moe\.activation=.*clamped_swiglu.* must be swiglu; model\.moe\.expert_bias=True must be false",
        ),
        (
            replace(MODEL, moe=replace(MOE, shared_ffn_size=32)),
            r"model\.moe\.shared_ffn_size=32 must be .* 0 with score",
        ),
        (replace(MODEL, moe=replace(MOE, balance="bias")), r"model\.moe\.balance=bias must be aux or none, with score"),
    ],
)
def test_a_model_that_transformers_does_not_know_is_refused(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(trained(tmp_path, model), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_exported_is_named(tmp_path, monkeypatch):
    source = trained(tmp_path, MODEL)
    with pytest.raises(ValueError, match=r"output_dir='.*out' must not be there yet: name a new folder"):
        export(source, tmp_path / "out")
    with pytest.raises(ValueError, match=r"generate\.source='.*nowhere' must be an existing folder"):
        export(str(tmp_path / "nowhere"), tmp_path / "hf")

    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        export(source, tmp_path / "more" / "hf")
    assert not list((tmp_path / "more").iterdir()), "nothing half-written"
    monkeypatch.undo()
    export(source, tmp_path / "hf")
    with pytest.raises(ValueError, match=r"source='.*hf' must be a checkpoint of comet train: transformers loads"):
        export(str(tmp_path / "hf"), tmp_path / "again")
