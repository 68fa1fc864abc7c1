"""Decode steps of kept block FP8 experts that include the shared expert, in block FP8 as it is stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import DECODE_TOKENS, Expected, logits_with_cache, make_group, prompt, tiny_config, tiny_model
from hf_fp8_cases import WHOLE, dequantized, publish, published, stock
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from comet.decode import held_pieces
from comet.integrations import hf
from comet.integrations.hf.fp8.experts import FP8Experts
from comet.integrations.hf.fp8.shared import FP8JoinedExperts, FP8SharedSlots
from comet.layout import ExpertLayout

BLOCK = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("whole"), WHOLE)


def kept(folder: Path, **settings: Any) -> Any:
    return hf.load_pretrained(folder, decode_tokens=DECODE_TOKENS, keep_fp8=True, **settings)


def experts_of(model: Any) -> list[FP8Experts]:
    return [module for module in model.modules() if isinstance(module, FP8Experts)]


def dequantized_pieces(experts: Any, name: str) -> Tensor:
    elements, scales = (experts.pieces.get_parameter(f"{name}{suffix}") for suffix in ("", "_scale_inv"))
    return torch.stack([dequantized(*pair) for pair in zip(elements, scales, strict=True)])


def test_steps_read_the_stored_pieces_and_prefills_the_module(whole: Path) -> None:
    model, expected = kept(whole), Expected.of(stock(whole))
    experts, shared = experts_of(model)[0], model.get_submodule(f"{BLOCK}.shared_experts")
    state = load_file(whole / "plain" / "model.safetensors")
    gate, up, down = (state[f"{BLOCK}.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    gate_up = torch.stack([torch.cat(pair) for pair in zip(gate.chunk(2), up.chunk(2), strict=True)])
    assert torch.equal(dequantized_pieces(experts, "gate_up_proj"), gate_up)
    assert torch.equal(dequantized_pieces(experts, "down_proj"), torch.stack(down.chunk(2, dim=1)))
    called: list[int] = []
    (own,) = shared._own
    own.register_forward_pre_hook(lambda _, inputs: called.append(inputs[0].shape[:-1].numel()))
    expected.check(model, "joined")
    assert called, "a prefill of more tokens than a step has"
    assert all(count > DECODE_TOKENS for count in called), called
    gates = logits_with_cache(copy.deepcopy(model), expected.ids, 1)
    torch.testing.assert_close(gates, logits_with_cache(model, expected.ids, 1), rtol=0, atol=0)


def test_joined_tensors_are_there_once(whole: Path) -> None:
    model = kept(whole)
    held = {name: weight.clone() for name, weight in model.named_parameters() if ".experts." in name}
    model(prompt(2, 9))  # more tokens than a step has
    with torch.no_grad():
        model(prompt(1, 2))
    for experts in experts_of(model):
        own, pieces = (dict(module.named_parameters(recurse=False)) for module in (experts, experts.pieces))
        for name, weight in own.items():
            storage = weight.untyped_storage()
            assert storage.data_ptr() == pieces[name].untyped_storage().data_ptr()
            assert storage.nbytes() == weight.nbytes + pieces[name].nbytes
        assert experts._decoded is None, "what was there before the join is let go"
    for name, weight in held.items():
        assert torch.equal(model.get_parameter(name), weight), name


def test_a_shared_expert_that_is_written_to_is_refused(whole: Path) -> None:
    model = kept(whole)
    with torch.no_grad():
        model(prompt(1, 2))
        model.get_parameter(f"{BLOCK}.shared_experts.up_proj.weight").mul_(2)
        with pytest.raises(
            ValueError, match=r"the shared expert was written to, .* load the model with keep_fp8=False"
        ):
            model(prompt(1, 2))


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_a_shared_expert_that_is_stored_otherwise_runs_by_itself(whole: Path, tmp_path: Path, part: str) -> None:
    state = load_file(whole / "model.safetensors")
    name = f"model.layers.2.mlp.shared_experts.{part}.weight"
    state[name] = dequantized(state[name], state.pop(f"{name}_scale_inv"))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    model = kept(tmp_path)
    assert {type(experts) for experts in experts_of(model)} == {FP8Experts}
    Expected.of(stock(whole)).check(model, part)


def test_a_gate_weighs_it(tmp_path: Path) -> None:
    sizes = dict(hidden_size=160, moe_intermediate_size=128, intermediate_size=144, shared_expert_intermediate_size=384)
    tiny_model("qwen2_moe", **sizes).save_pretrained(tmp_path)
    publish(tmp_path)
    model = kept(tmp_path)
    assert all(isinstance(experts.shared, FP8SharedSlots) for experts in experts_of(model))
    Expected.of(stock(tmp_path)).check(model, "qwen2_moe")


def on_ranks(rank: int, world_size: int, folder: Path, sizes: dict[str, int], ep: int, tp: int) -> Tensor:
    """One piece on two ranks, of which one has none, or two of a slice."""
    group = make_group(tiny_config("deepseek_v3", **sizes), ep, tp)
    model = kept(folder, group=group)
    pieces = 1 if tp == 2 else 1 - rank
    for experts in experts_of(model):
        assert isinstance(experts, FP8JoinedExperts)
        assert [len(weight) for weight in experts.pieces.parameters()] == [pieces] * 4 * bool(pieces)
    logits = Expected.of(stock(folder)).check(model, f"ep {ep}, tp {tp}, rank {rank}")
    hf.check(model)
    group.close()
    return logits


@pytest.mark.parametrize(("ep", "tp"), [slow(2, 1), (1, 2)])
def test_ranks_hold_pieces_in_turn(tmp_path: Path, ep: int, tp: int) -> None:
    sizes = WHOLE | dict(n_shared_experts=1)
    first, second = run_ranks(on_ranks, 2, published(tmp_path, sizes), sizes, ep, tp)
    assert torch.equal(first, second)


def test_the_example_of_held_pieces() -> None:
    layouts = [ExpertLayout(num_experts=2, top_k=1, ep=2, tp=1, rank=rank) for rank in range(2)]
    assert [list(held_pieces(layout, 16, 48)) for layout in layouts] == [[0, 2], [1]]
