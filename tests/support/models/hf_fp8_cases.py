"""Block FP8 checkpoints made, and dequantised again, block by block without Comet's quantiser."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from hf_cases import (
    DECODE_TOKENS,
    CountedReads,
    Expected,
    assert_ranks_agree,
    make_group,
    tiny_config,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from comet.integrations import hf
from comet.integrations.hf.modules import CometExperts

PUBLISHED = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
# D and, for TP = 2, a rank's part of F end inside a block; F = 256 gives each rank whole ones.
RAGGED = dict(hidden_size=160, moe_intermediate_size=288, intermediate_size=144)
WHOLE = RAGGED | dict(moe_intermediate_size=256)


def blocks_of(weight: Tensor) -> list[tuple[int, int, Tensor]]:
    rows, columns = (range(-(-size // 128)) for size in weight.shape)
    return [
        (row, column, weight[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128])
        for row in rows
        for column in columns
    ]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    elements = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for (row, column, block), (_, _, target) in zip(blocks_of(weight), blocks_of(elements), strict=True):
        scales[row, column] = block.abs().max().clamp(min=1e-12) / 448
        target.copy_((block / scales[row, column]).clamp(-448, 448))
    return elements, scales


def dequantized(elements: Tensor, scales: Tensor) -> Tensor:
    weight = elements.float()
    for row, column, block in blocks_of(weight):
        block *= scales[row, column]
    return weight


def is_quantized(name: str) -> bool:
    """Published checkpoints leave router, norms, embedding and head as they are."""
    return "_proj" in name and name.endswith(".weight")


def publish(folder: Path, scale_dtype: torch.dtype = torch.float32) -> None:
    """Turn a saved model into block FP8; the same one with the dequantised weights is left in ``folder / "plain"``."""
    plain = folder / "plain"
    plain.mkdir()
    shutil.copy(folder / "config.json", plain)
    state, fp8 = load_file(folder / "model.safetensors"), {}
    for name, weight in state.items():
        fp8[name] = weight
        if is_quantized(name):
            fp8[name], scales = quantized(weight)
            fp8[f"{name}_scale_inv"] = scales.to(scale_dtype)
            state[name] = dequantized(fp8[name], fp8[f"{name}_scale_inv"].float())
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(fp8, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": PUBLISHED}))


def published(
    folder: Path, family: str = "deepseek_v3", *, scale_dtype: torch.dtype = torch.float32, **sizes: Any
) -> Path:
    """The folder of a random model of these sizes, as it would be published."""
    tiny_model(family, **sizes).save_pretrained(folder)
    publish(folder, scale_dtype)
    return folder


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the dequantised weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=dtype, experts_implementation="eager").eval()


def fp8_by_name(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The dequantised model, but its experts are transformers' FP8 ones under Comet's name, as on a GPU."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    hf.register()
    model, state = stock(folder, dtype), load_file(folder / "model.safetensors")
    names = [name for name, _ in model.named_modules()]
    others = [name for name in names if not name.endswith(".experts") and not any(f"{name}." in each for each in names)]
    settings = FineGrainedFP8Config(weight_block_size=(128, 128))
    replace_with_fp8_linear(model, modules_to_not_convert=others, quantization_config=settings, pre_quantized=True)
    for name in (name for name in names if name.endswith(".experts")):
        experts = model.get_submodule(name)
        for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for suffix in ("", "_scale_inv"):
                value = stack_experts(state, name, sources, f"weight{suffix}")
                assert value.shape == getattr(experts, f"{part}{suffix}").shape
                setattr(experts, f"{part}{suffix}", torch.nn.Parameter(value, requires_grad=False))
    model.set_experts_implementation("comet")
    return model.eval()


def stack_experts(state: dict[str, Tensor], name: str, sources: tuple[str, ...], what: str) -> Tensor:
    """The matrices of all experts of a layer in one tensor, those of ``sources`` one below the other."""
    count = sum(each.startswith(f"{name}.") and each.endswith(f".{sources[0]}.{what}") for each in state)
    parts = [
        torch.cat([state[f"{name}.{expert}.{source}.{what}"].float() for source in sources]) for expert in range(count)
    ]
    return torch.stack(parts).to(state[f"{name}.0.{sources[0]}.{what}"].dtype)


def fp8_expert_bytes(folder: Path, *kinds: torch.dtype) -> int:
    state = load_file(folder / "model.safetensors")
    return sum(weight.nbytes for name, weight in state.items() if ".experts." in name and weight.dtype in kinds)


def experts_of(model: Any) -> list[CometExperts]:
    return [module for module in model.modules() if isinstance(module, CometExperts)]


def check_kept(loaded: Any, folder: Path, share: int) -> None:
    """A rank's experts are its share of the folder's bytes, and no gradient is wanted for them."""
    experts = {name: weight for name, weight in loaded.named_parameters() if ".experts." in name}
    found = [(module.layout.experts_local, module.parameters(recurse=False)) for module in experts_of(loaded)]
    routed = [weight[:count] for count, weights in found for weight in weights]
    assert sum(weight.nbytes for weight in routed) * share == fp8_expert_bytes(
        folder, torch.float8_e4m3fn, torch.float32
    )
    assert not any(weight.requires_grad for weight in experts.values())
    assert {weight.dtype for weight in experts.values()} == {torch.float8_e4m3fn, torch.float32}


def load_on_ranks(rank: int, world_size: int, folders: dict[str, Path], ep: int, tp: int, device: str = "cpu") -> None:
    """Each folder, dequantised and if possible kept, on one layout; every rank reads its experts only."""
    for label, folder in folders.items():
        expected = Expected.of(stock(folder))
        config = tiny_config("deepseek_v3", **(RAGGED if label == "ragged" else WHOLE))
        for keep_fp8 in (False, True) if label == "whole" else (False,):
            what = f"{label}, keep_fp8 {keep_fp8}, ep {ep}, tp {tp}, rank {rank}"
            group = make_group(config, ep, tp, device=device)
            with CountedReads() as counted:
                loaded = hf.load_pretrained(folder, group, decode_tokens=DECODE_TOKENS, keep_fp8=keep_fp8)
            elements = sum(size for name, size in counted.reads if ".experts." in name and name.endswith("weight"))
            assert elements * world_size == fp8_expert_bytes(folder, torch.float8_e4m3fn), what
            held = sum(module.down_proj[: module.layout.experts_local].numel() for module in experts_of(loaded))
            assert held * world_size == 2 * 8 * config.hidden_size * config.moe_intermediate_size, what
            if keep_fp8:
                check_kept(loaded, folder, share=world_size)
            logits = expected.check(loaded, what)
            if world_size > 1:
                assert_ranks_agree(logits, what)
            hf.check(loaded)
            group.close()
