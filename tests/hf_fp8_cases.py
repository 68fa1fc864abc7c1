"""Block FP8 checkpoints made, and dequantised again, block by block without Comet's quantiser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PUBLISHED = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


def blocks_of(weight: Tensor) -> list[tuple[int, int, Tensor]]:
    """Row and column of each 128 x 128 block, and a view of it."""
    rows, columns = (range(-(-size // 128)) for size in weight.shape)
    return [
        (row, column, weight[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128])
        for row in rows
        for column in columns
    ]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix block by block: elements and scales."""
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


def stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the dequantised weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=dtype, experts_implementation="eager").eval()


def fp8_expert_bytes(folder: Path, *kinds: torch.dtype) -> int:
    state = load_file(folder / "model.safetensors")
    return sum(weight.nbytes for name, weight in state.items() if ".experts." in name and weight.dtype in kinds)
