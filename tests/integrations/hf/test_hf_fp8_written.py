"""Block FP8 folders that transformers itself wrote: experts one by one with the scales of all of them in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import DECODE_TOKENS, Expected, make_group, same_state, tiny_config, tiny_model
from hf_fp8_cases import WHOLE, publish, published, stack_experts, stock, written_by_transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from comet.integrations import hf

# In each, some tensors are left as they are, because their sizes are no multiples of 128, beside scales of no meaning.
SIZES = dict(hidden_size=256, intermediate_size=384, head_dim=64)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize(
    ("family", "ffn_size"), [("qwen3_moe", 192), ("mixtral", 320), ("qwen3_moe", 256), ("mixtral", 16)]
)
def test_folders_equal_what_transformers_makes_of_them(
    tmp_path: Path, family: str, ffn_size: int, scale_fmt: str
) -> None:
    width = {"intermediate_size" if family == "mixtral" else "moe_intermediate_size": ffn_size}
    written_by_transformers(tmp_path, family, scale_fmt, **(SIZES | width))
    stored = load_file(tmp_path / "model.safetensors")
    kinds = {weight.dtype for name, weight in stored.items() if name.endswith("_scale_inv")}
    assert kinds == {torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu}
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in stored)
    assert not any(name.endswith("experts.gate_up_proj") for name in stored)
    model = stock(tmp_path)
    loaded = hf.load_pretrained(tmp_path, dtype=torch.float32, decode_tokens=DECODE_TOKENS)
    assert same_state(loaded, model)
    expected = Expected.of(model)
    expected.check(loaded, f"{family}, F = {ffn_size}")
    if ffn_size == 256:
        kept = hf.load_pretrained(tmp_path, dtype=torch.float32, decode_tokens=DECODE_TOKENS, keep_fp8=True)
        assert kept.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float8_e4m3fn
        expected.check(kept, "kept")
    else:
        with pytest.raises(ValueError, match=f"ffn_size={ffn_size} / tp=1 = {ffn_size} must be a multiple of 128"):
            hf.load_pretrained(tmp_path, keep_fp8=True)


def load_written(rank: int, world_size: int, folder: Path) -> None:
    """Every rank reads its part of the fused scales, which for TP = 2 begins inside a block, as up does."""
    expected = Expected.of(stock(folder))
    config = tiny_config("mixtral", **(SIZES | dict(intermediate_size=320)))
    for ep, tp in ((2, 1), (1, 2)):
        group = make_group(config, ep, tp)
        loaded = hf.load_pretrained(folder, group, decode_tokens=DECODE_TOKENS)
        expected.check(loaded, f"tp {tp}, rank {rank}")
        group.close()


def test_two_ranks_split_fused_scales(tmp_path: Path) -> None:
    written_by_transformers(tmp_path, "mixtral", **(SIZES | dict(intermediate_size=320)))
    run_ranks(load_written, 2, tmp_path, timeout=300)


@pytest.mark.parametrize("is_fused", [True, False])
def test_scales_that_may_mean_two_things_are_refused(tmp_path: Path, is_fused: bool) -> None:
    tiny_model("qwen3_moe", hidden_size=128, moe_intermediate_size=224, mlp_only_layers=[]).save_pretrained(tmp_path)
    publish(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts"
        for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            if is_fused:
                state[f"{name}.{part}"] = stack_experts(state, name, sources, "weight")
            state[f"{name}.{part}_scale_inv"] = stack_experts(state, name, sources, "weight_scale_inv")
    for name in [name for name in state if ".experts." in name and name.split(".")[5].isdigit()]:
        if is_fused or name.endswith("_scale_inv"):
            del state[name]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = r"experts\.gate_up_proj_scale_inv of shape \(8, 4, 1\) may hold .* ffn_size=224 their blocks differ"
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_broken_fused_scales(tmp_path: Path) -> None:
    written_by_transformers(tmp_path, "mixtral", **(SIZES | dict(intermediate_size=256)))
    name = "model.layers.1.block_sparse_moe.experts.gate_up_proj_scale_inv"
    for shape in ((4, 3, 2), (3, 4, 2), (4, 4, 1)):
        state = load_file(tmp_path / "model.safetensors") | {name: torch.ones(shape)}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"{name} of shape .* must be \(4, 4, 2\) for 4 experts"):
            hf.load_pretrained(tmp_path)
    save_file(state | {name: torch.full((4, 4, 2), -1.0)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} holds -1.0, must be finite and not negative"):
        hf.load_pretrained(tmp_path)
    del state[name]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing (\S+_scale_inv(, )?){3} and 5 more$"):
        hf.load_pretrained(tmp_path)


def test_narrow_weights_that_nothing_explains(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in state:
        if ".self_attn." in name:
            state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = r"k_proj\.weight of dtype F8_E4M3, .* and 5 more must be one of F32, F16, BF16: config.json has no quant"
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_a_refusal_of_many_tensors_is_short(tmp_path: Path) -> None:
    published(tmp_path, dict(WHOLE))
    whole = load_file(tmp_path / "model.safetensors")
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "_scale_inv": lambda scales: torch.ones(7, 7),
        "_proj.weight": lambda weight: weight.to(torch.float8_e5m2),
        "weight": lambda weight: torch.zeros(3, 3),
    }
    for ending, change in changes.items():
        state = {name: change(tensor) if name.endswith(ending) else tensor for name, tensor in whole.items()}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r" and \d+ more") as error:
            hf.load_pretrained(tmp_path)
        assert len(str(error.value)) < 1000, str(error.value)
    (tmp_path / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for ending in ("weight", "_proj.weight", "norm.weight"):
        state = {f"{name}.lost" if name.endswith(ending) else name: tensor for name, tensor in plain.items()}
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r" and \d+ more") as error:
            hf.load_pretrained(tmp_path)
        assert len(str(error.value)) < 1000, str(error.value)
