"""Block FP8 folders that transformers itself wrote: experts one by one with the scales of all of them in one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import DECODE_TOKENS, Expected, make_group, same_state, tiny_config
from hf_fp8_cases import stock, written_by_transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from comet.integrations import hf

# In each, some tensors are left as they are, because their sizes are no multiples of 128, beside scales of no meaning.
SIZES = dict(hidden_size=256, intermediate_size=384, head_dim=64)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize(("family", "ffn_size"), [("qwen3_moe", 192), ("mixtral", 320), ("qwen3_moe", 256)])
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
