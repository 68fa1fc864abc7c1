"""transformers' Trainer with Comet's experts by name, as the example runs it: losses and folders of the stock model."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hf_cases import prompt, tiny_model
from tiers import slow
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
peft = pytest.importorskip("peft", reason="needs pip install peft")
pytest.importorskip("accelerate", reason="needs pip install 'comet-moe[hf]'")

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "trainer.py"
CLOSE = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stock(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(prompt(2, 12)).logits
    return found


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3_moe", slow("gpt_oss"), slow("olmoe")])
def test_losses_and_saved_folders_are_those_of_the_stock_model(
    family: str, kind: str, example: Any, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path / "base")
    losses, saved = [], []
    for experts in ("eager", "comet"):
        model, output = example.load(str(tmp_path / "base"), experts=experts), tmp_path / experts
        model = example.with_lora(model) if kind == "lora" else model
        losses.append(example.fine_tune(model, str(output)))
        again = peft.PeftModel.from_pretrained(stock(tmp_path / "base"), output) if kind == "lora" else stock(output)
        torch.testing.assert_close(logits(model), logits(again), **CLOSE)
        saved.append(logits(again))
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    torch.testing.assert_close(saved[1], saved[0], **CLOSE)
    assert not torch.allclose(saved[1], logits(stock(tmp_path / "base")), atol=1e-2), "nothing was trained"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_losses_and_saved_folders_over_two_ranks(family: str, tmp_path: Path) -> None:
    """The example runs as its first lines say, once with transformers' own experts."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    losses, saved = [], []
    for experts in ("eager", "comet"):
        given = (str(EXAMPLE), str(tmp_path / "base"), str(tmp_path / experts), "full", "2", experts)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        ended = subprocess.run([*torchrun, *given], capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        told = [line.removeprefix("losses ") for line in ended.stdout.splitlines() if line.startswith("losses ")]
        losses.append(ast.literal_eval(told[0]))
        saved.append(logits(stock(tmp_path / experts)))
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)
    torch.testing.assert_close(saved[1], saved[0], **CLOSE)
