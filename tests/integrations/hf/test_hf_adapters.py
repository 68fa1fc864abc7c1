"""gpt-oss with adapters of peft on its experts, refits by name, checkpoints of a Trainer: always the stock logits."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")
pytest.importorskip("peft", reason="needs pip install peft")

import accelerate
import peft
import transformers
from hf_cases import logits_with_cache, make_group, prompt, publish_mxfp4, tiny_model
from ranks import run_ranks
from tiers import slow

from comet.integrations import hf
from comet.integrations.hf import gpt_oss

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = [GATE_UP, DOWN]
WIDTHS = {"F = 2D": 64, "F = D": 32, "D = 2F": 16}
widths = pytest.mark.parametrize("width", WIDTHS)
Make = Callable[[Any, Path], Any]


def by_name(model: Any, folder: Path) -> Any:
    hf.register()
    model = copy.deepcopy(model)
    model.set_experts_implementation("comet")
    return model


def loaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return hf.load_pretrained(folder)


def converted(model: Any, folder: Path) -> Any:
    return hf.convert(copy.deepcopy(model))


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU steps read rows of weights, which are moved for that."""
    with ExitStack() as patches:
        if request.param == "as on a GPU":
            patches.enter_context(patch.object(gpt_oss, "is_step", lambda tokens, most: len(tokens) <= most))
        yield


WAYS: dict[str, Make] = {"by name": by_name, "loaded": loaded, "converted": converted}
ways = pytest.mark.parametrize("way", WAYS)
devices = pytest.mark.usefixtures("device")


@torch.no_grad()
def answers(model: Any) -> Tensor:
    """Logits of a prompt that takes steps of few tokens, and of one that takes grouped GEMMs."""
    many, few = model(prompt(1, 70), use_cache=False).logits, logits_with_cache(model, prompt(2, 5), 3)
    return torch.cat([many.flatten(), few.flatten()])


def assert_answers(model: Any, stock: Any, what: str) -> None:
    torch.testing.assert_close(answers(model), answers(stock), rtol=1e-4, atol=1e-3, msg=lambda text: f"{what}: {text}")


def adapted(model: Any, targets: list[str] = BOTH) -> Any:
    """A model with random adapters on its experts."""
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return peft.get_peft_model(model, settings).eval()


def changed(model: Any) -> Any:
    """A copy with other weights in its layers."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        for weight in new.model.layers.parameters():
            weight.copy_(weight * (torch.rand(weight.shape) + 0.5))
    return new


@devices
@widths
@ways
def test_adapters_of_the_stock_model(way: str, width: str, tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", intermediate_size=WIDTHS[width])
    stock = adapted(copy.deepcopy(model), [GATE_UP] if width == "F = 2D" else BOTH)
    assert (answers(stock) - answers(model)).abs().max() > 0.5
    stock.save_pretrained(tmp_path / "adapter")
    own = WAYS[way](model, tmp_path / "model")
    assert_answers(own, model, "before")
    mine = peft.PeftModel.from_pretrained(own, tmp_path / "adapter")
    assert_answers(mine, stock, "with adapters")
    with mine.disable_adapter():
        assert_answers(mine, model, "disabled")
    assert_answers(mine.merge_and_unload(), stock, "merged after the model was evaluated")


def test_adapters_of_a_model_published_in_mxfp4(tmp_path: Path) -> None:
    model = publish_mxfp4(tiny_model("gpt_oss"), tmp_path / "model")
    stock = adapted(copy.deepcopy(model))
    stock.save_pretrained(tmp_path / "adapter")
    mine = hf.load_pretrained(tmp_path / "model")
    mine.load_adapter(tmp_path / "adapter")  # transformers has this method
    assert_answers(mine, stock, "with adapters")


@devices
@widths
def test_adapters_first_and_then_convert(width: str) -> None:
    model = tiny_model("gpt_oss", intermediate_size=WIDTHS[width])
    stock = adapted(copy.deepcopy(model))
    mine = hf.convert(copy.deepcopy(stock))
    assert_answers(mine, stock, "with adapters")
    assert_answers(mine.unload(), model, "unloaded")


@ways
def test_adapters_trained_on_comet_are_those_of_the_stock_model(way: str, tmp_path: Path) -> None:
    model, ids = tiny_model("gpt_oss", intermediate_size=32), prompt(2, 9)
    mine = adapted(WAYS[way](model, tmp_path / "model"))
    optimizer = torch.optim.AdamW([each for each in mine.parameters() if each.requires_grad], lr=0.03)
    losses = []
    for _ in range(3):
        loss = mine(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    mine.save_pretrained(tmp_path / "adapter")
    assert_answers(mine, peft.PeftModel.from_pretrained(model, tmp_path / "adapter"), "trained")


def adapt_ranks(rank: int, world_size: int, ep: int, tp: int, folder: Path) -> None:
    model = tiny_model("gpt_oss", intermediate_size=32)
    group = make_group(model, ep, tp)
    with_adapters = adapted(copy.deepcopy(model))
    kinds = [type(module) for module in with_adapters.modules()]
    with pytest.raises(ValueError, match=r"adapters of .* must be merged \(merge_and_unload\) before"):
        hf.convert(with_adapters, group)
    assert [type(module) for module in with_adapters.modules()] == kinds
    mine = hf.convert(copy.deepcopy(model), group)
    with pytest.raises(RuntimeError, match=r"size mismatch for .*mlp.experts"):
        peft.PeftModel.from_pretrained(copy.deepcopy(mine), folder)
    with pytest.raises(RuntimeError, match=r"size mismatch for .*mlp.experts"):
        mine.load_state_dict(model.state_dict(), strict=False)
    assert_answers(mine, model, f"rank {rank}")
    merged = with_adapters.merge_and_unload()
    assert_answers(hf.convert(copy.deepcopy(merged), group), merged, f"merged, rank {rank}")
    group.close()


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), slow(1, 2)])
def test_ranks_with_parts_of_experts_refuse_adapters_and_states_of_all(ep: int, tp: int, tmp_path: Path) -> None:
    adapted(tiny_model("gpt_oss", intermediate_size=32)).save_pretrained(tmp_path)
    run_ranks(adapt_ranks, ep * tp, ep, tp, tmp_path)


def load_copies(model: Any, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state, strict=False)


def load_assigned(model: Any, state: dict[str, Tensor]) -> None:
    model.load_state_dict({name: weight.clone() for name, weight in state.items()}, assign=True)


def copy_data(model: Any, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def replace_data(model: Any, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


@torch.no_grad()
def copy_parameters(model: Any, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(state[name])


REFITS = (copy_parameters, load_copies, copy_data, replace_data, load_assigned)


@devices
@pytest.mark.parametrize("mode", [False, True], ids=["made outside", "made in inference mode"])
@ways
def test_refits_by_name(way: str, mode: bool, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = tiny_model("gpt_oss", intermediate_size=32)
    with torch.inference_mode(mode):
        mine = WAYS[way](model, tmp_path)
    for number, refit in enumerate((*REFITS, *REFITS)):
        new, infers = changed(model), mode or number >= len(REFITS)
        with torch.inference_mode(infers):
            refit(mine, new.state_dict())
        with torch.inference_mode(infers):
            assert_answers(mine, new, f"{refit.__name__}, number {number}")


@devices
@ways
def test_a_state_taken_before_the_first_step_is_that_of_the_model(way: str, tmp_path: Path) -> None:
    """A reinforcement learner takes a state once and writes to it after each of its updates."""
    torch.manual_seed(8)
    model = tiny_model("gpt_oss", intermediate_size=32)
    mine = WAYS[way](model, tmp_path)
    state = mine.state_dict()
    assert_answers(mine, model, "before")
    new = changed(model)
    for name, weight in new.state_dict().items():
        state[name].copy_(weight)
    assert_answers(mine, new, "written to")


@torch.no_grad()
@pytest.mark.parametrize("device", ["as on a GPU"], indirect=True)
@ways
def test_steps_read_the_parameters_where_they_are(way: str, device: None, tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", intermediate_size=32)
    mine = WAYS[way](model, tmp_path)
    mine(prompt(1, 3))
    places = {name: weight.data_ptr() for name, weight in mine.named_parameters()}
    mine(prompt(1, 80))
    mine(prompt(1, 2))
    for name, weight in mine.named_parameters():
        assert weight.data_ptr() == places[name]
        assert torch.equal(weight, model.get_parameter(name))
        if name.endswith(("gate_up_proj", "down_proj")):
            assert weight.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", ["as on a GPU"], indirect=True)
@pytest.mark.parametrize("first", ["trained", "held"])
@ways
def test_a_state_that_is_held_while_a_model_trains_leaves_its_optimizer_right(
    way: str, first: str, device: None, tmp_path: Path
) -> None:
    """A fused optimizer would update other numbers than those of its state if only one of them were moved."""
    model, ids = tiny_model("gpt_oss", intermediate_size=32), prompt(2, 9)
    mine = WAYS[way](model, tmp_path)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (mine, model)]

    def train() -> None:
        for each, optimizer in zip((mine, model), optimizers, strict=True):
            each(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if first == "trained":
        train()
    answers(mine)
    state = mine.state_dict()
    if first == "held":
        train()
        answers(mine)
    del state
    for _ in range(2):
        answers(mine)
        train()
    assert_answers(mine, model, first)
    if first == "trained":
        state = mine.state_dict()
        with pytest.raises(ValueError, match=r"of gpt-oss must lie in memory as it was trained before, but a state_"):
            mine(ids, labels=ids).loss.backward()
        del state


@torch.no_grad()
@ways
def test_a_flat_vector_and_an_optimizer_find_parameters_in_the_order_of_the_stock_model(
    way: str, tmp_path: Path
) -> None:
    """Both go by position, and would cut or fill other tensors than those of the same place."""
    model = tiny_model("gpt_oss", intermediate_size=32)
    mine = WAYS[way](model, tmp_path)
    mine(prompt(1, 3))
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in model.named_parameters()]
    new = changed(model)
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(new.parameters()), mine.parameters())
    assert_answers(mine, new, "from a vector")


@torch.no_grad()
@ways
def test_on_a_cpu_the_parameters_stay_as_they_are(way: str, tmp_path: Path) -> None:
    """Gloo would send memory in its order and ignore strides."""
    mine = WAYS[way](tiny_model("gpt_oss", intermediate_size=32), tmp_path)
    mine(prompt(1, 3))
    assert all(weight.is_contiguous() for weight in mine.parameters())


def trained(model: Any, folder: Path, *, resume: Path | None = None) -> list[float]:
    """Losses of four steps with evaluations of few tokens, after each second of which a checkpoint is saved."""
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=1, logging_steps=1,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=0.01, optim="adamw_torch_fused",
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in prompt(16, 9)]
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    model.eval()
    return [each[name] for each in trainer.state.log_history for name in ("loss", "eval_loss") if name in each]


@devices
def test_checkpoints_of_a_trainer_are_those_of_the_stock_model(tmp_path: Path) -> None:
    """Published names and layout, and an optimizer's state for them: stock and Comet resume each other's."""
    model = tiny_model("gpt_oss", intermediate_size=32)
    wanted = torch.tensor(trained(copy.deepcopy(model), tmp_path / "stock"))
    for way in ("loaded", "converted"):
        mine, folder = WAYS[way](model, tmp_path / way), tmp_path / f"{way}, trained"
        assert_answers(mine, model, "before")
        torch.testing.assert_close(torch.tensor(trained(mine, folder)), wanted, rtol=1e-4, atol=1e-4)
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
        assert_answers(mine, saved, f"{way}, trained")
        last = folder / "checkpoint-2"
        stock = transformers.AutoModelForCausalLM.from_pretrained(last)
        for resumed, from_folder in ((stock, last), (hf.load_pretrained(tmp_path / "stock/checkpoint-2"), None)):
            found = trained(resumed, tmp_path / "resumed", resume=from_folder or tmp_path / "stock/checkpoint-2")
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


def test_experts_offloaded_to_disk_leave_no_copies_in_memory(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", intermediate_size=32)
    wanted, mine = answers(model), by_name(model, tmp_path)
    size = mine.model.layers[0].mlp.experts.gate_up_proj.nbytes
    accelerate.disk_offload(mine, tmp_path, execution_device=torch.device("cpu"))
    del model
    torch.testing.assert_close(answers(mine), wanted, rtol=1e-4, atol=1e-3)
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, Tensor) and not each.is_meta]
    assert not [each.shape for each in held if each.dim() == 3 and each.nbytes == size]
