"""TRL's SFTTrainer with Comet's experts by name, as the example runs it; TRL is in build/trl (``make trl``)."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import prompt, tiny_model

pytest.importorskip("peft", reason="needs pip install peft")
transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
ROOT = Path(__file__).parents[3]
TRL = ROOT / "build" / "trl"
WORDS = "the red fox and a slow dog ran over blue hills while two old cats slept".split()


def save_tokenizer(folder: Path) -> None:
    """A tokenizer that knows ``WORDS``, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif(not (TRL / "ready").exists(), reason="needs make trl")
def test_the_example_trains_adapters_with_the_losses_of_stock_experts(tmp_path: Path) -> None:
    base, texts = tmp_path / "base", tmp_path / "texts.txt"
    tiny_model("qwen3_moe").save_pretrained(base)
    save_tokenizer(base)
    texts.write_text("\n".join(" ".join(WORDS[index % 7 : 5 + index % 9]) for index in range(32)))
    losses, logits = [], []
    for experts in ("eager", "comet"):
        words = [sys.executable, ROOT / "docs/examples/sft.py", base, texts, tmp_path / experts, experts]
        environment = os.environ | {"PYTHONPATH": str(TRL)}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        told = next(line for line in ended.stdout.splitlines() if line.startswith("losses "))
        losses.append(ast.literal_eval(told.removeprefix("losses ")))
        logits.append(adapted_logits(base, tmp_path / experts))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert losses[0][-1] != losses[0][0]


@torch.no_grad()
def adapted_logits(base: Path, adapters: Path) -> Any:
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapters).eval()(prompt(2, 12)).logits
