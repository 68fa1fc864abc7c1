"""transformers' Trainer with Comet's experts by name, as the example runs it: losses and folders of the stock model."""

import ast
import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hf_cases import prompt, tiny_model
from ranks import in_ranks
from tiers import slow
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from comet.integrations import hf

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


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [*start, str(EXAMPLE), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


# The last two have a mesh of two dimensions: FSDP2 over four ranks and pairs that share experts, or two replicas.
@pytest.mark.parametrize(
    ("family", "kind", "ranks", "replicas"),
    [
        ("qwen3_moe", "lora", 2, 1),
        slow("qwen3_moe", "full", 2, 1),
        slow("gpt_oss", "lora", 2, 1),
        slow("gpt_oss", "full", 2, 1),
        slow("olmoe", "full", 2, 1),
        slow("qwen3_moe", "full", 4, 1),
        slow("qwen3_moe", "lora", 4, 2),
    ],
)
def test_ranks_that_share_experts_train_as_one_process(
    family: str, kind: str, ranks: int, replicas: int, example: Any, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    tiny_model(family).save_pretrained(base)
    model = example.load(str(base), experts="eager")
    wanted = example.fine_tune(example.with_lora(model) if kind == "lora" else model, str(tmp_path / "stock"))
    ended = torchrun(ranks, str(base), str(tmp_path / "comet"), kind, str(ranks), "2", str(replicas))
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [line.removeprefix("losses ") for line in ended.stdout.splitlines() if line.startswith("losses ")]
    torch.testing.assert_close(ast.literal_eval(told[0]), wanted, **CLOSE)
    made = (tmp_path / name for name in ("comet", "stock"))
    saved = [
        logits(peft.PeftModel.from_pretrained(stock(base), each) if kind == "lora" else stock(each)) for each in made
    ]
    torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_adapters_of_experts_that_fsdp_divides_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    ended = torchrun(4, str(tmp_path / "base"), str(tmp_path / "comet"), "lora", "4", "2")
    assert "ValueError: ep_size=2 must equal fsdp_size * tp_size = 4" in ended.stderr


def test_adapters_on_one_rank_need_not_be_shared(example: Any) -> None:
    with pytest.raises(ValueError, match="must have LoRA adapters of experts that are divided over ranks"):
        hf.share_adapters(example.with_lora(tiny_model("qwen3_moe")))


@in_ranks(2)
def test_ranks_bring_as_many_tokens_as_they_have(rank: int, world_size: int) -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    hf.register()
    kind = EPImplementationInterface()["comet"]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    for family in ("qwen3_moe", "gpt_oss"):
        experts = tiny_model(family).model.layers[0].mlp.experts.requires_grad_(True)
        part = copy.deepcopy(experts)
        for name, weight in experts.named_parameters():
            setattr(part, name, torch.nn.Parameter(weight.detach().chunk(2)[rank].clone()))
        part.num_experts //= 2
        with pytest.raises(ValueError, match=r"tp_size=2 must be 1 with ep_implementation='comet'"):
            kind(part, mesh["tp"], mesh["ep"])
        compute = kind(part, mesh["ep"], mesh["tp"])
        for num_tokens in ((1, 7), (5, 0), (40, 70)):
            # All ranks draw all tokens, so that each knows the gradients that the other's tokens add.
            generator = torch.Generator().manual_seed(sum(num_tokens))
            tokens = torch.randn(sum(num_tokens), tiny_model(family).config.hidden_size, generator=generator)
            ids = torch.rand(len(tokens), 2 * part.num_experts, generator=generator).topk(2).indices
            weights = torch.rand(len(tokens), 2, generator=generator)
            own = slice(num_tokens[0]) if rank == 0 else slice(num_tokens[0], None)
            wanted = experts(tokens, ids, weights)
            for learns in (True, False):
                with torch.set_grad_enabled(learns):
                    found = compute(tokens[own], ids[own], weights[own])
                torch.testing.assert_close(found, wanted[own], rtol=1e-4, atol=1e-4)
                if learns:
                    grads = torch.autograd.grad(found.square().sum(), list(part.parameters()))
            whole = torch.autograd.grad(wanted.square().sum(), list(experts.parameters()))
            for mine, each in zip(grads, whole, strict=True):
                torch.testing.assert_close(mine, each.chunk(2)[rank], rtol=1e-3, atol=1e-3)
