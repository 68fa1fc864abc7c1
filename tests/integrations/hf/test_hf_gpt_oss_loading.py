"""Folders of gpt-oss, as transformers writes them and as published in MXFP4: the same tokens, refused if broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from hf_cases import Expected, make_group, publish_mxfp4, same_state, tiny_model
from host_cases import leave_all_to
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report, cores_of

STYLES = ("whole numbers", "MXFP4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    found = {}
    for style in STYLES:
        folder, model = tmp_path_factory.mktemp("gpt_oss"), tiny_model("gpt_oss")
        if style == "MXFP4":
            publish_mxfp4(model, folder)
        else:
            model.save_pretrained(folder, max_shard_size="30KB")
        found[style] = folder, model
    return found


@pytest.mark.parametrize("style", STYLES)
def test_a_rank_alone(style: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, model = folders[style]
    expected = Expected.of(model)
    loaded = hf.load_pretrained(folder)
    assert type(loaded) is type(model)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    expected.check(loaded, style)
    with pytest.raises(ValueError, match="experts are laid out as Comet multiplies them"):
        loaded.save_pretrained(folder)


def check_ranks(rank: int, world_size: int, ep: int, tp: int, folders: dict[str, Path]) -> None:
    for style, folder in folders.items():
        model = tiny_model("gpt_oss")
        if style == "MXFP4":
            publish_mxfp4(model, folder.parent / f"{folder.name} of rank {rank}")
        expected, group = Expected.of(model), make_group(model, ep, tp)
        loaded = hf.load_pretrained(folder, group, decode_tokens=6)
        expected.check(loaded, f"{style}, ep {ep}, tp {tp}, rank {rank}")
        assert same_state(loaded, hf.convert(model, group, decode_tokens=6)), style
        hf.check(loaded)
        group.close()


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 4)])
def test_ranks_read_their_parts(ep: int, tp: int, folders: dict[str, tuple[Path, Any]]) -> None:
    run_ranks(check_ranks, ep * tp, ep, tp, {style: folder for style, (folder, _) in folders.items()})


BUDGETS: dict[str, dict[str, Any]] = {
    "host": {},
    "file": {"expert_store": "file", "host_budget": 0.9},
    "mxfp4": {"expert_dtype": "mxfp4"},  # the numbers that the folder has
    "cores": {"host_cores": "1"},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_experts_beyond_memory(budget: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, model = folders["MXFP4"]
    loaded = hf.load_pretrained(folder, expert_budget=0.5, **BUDGETS[budget])
    cores = cores_of(loaded)
    if cores is not None:
        leave_all_to(cores)
    Expected.of(model).check(loaded, budget)
    report = cache_report(loaded)
    assert report is not None
    assert report.needed > report.slots
    assert report.fetched > 0
    assert (report.hosted > 0) == (cores is not None)
    if cores is not None:
        cores.close()


def check_budgets(rank: int, world_size: int, ep: int, tp: int, folder: Path) -> None:
    model = publish_mxfp4(tiny_model("gpt_oss"), folder.parent / f"{folder.name} of rank {rank}")
    for budget in ("file", "mxfp4"):
        group = make_group(model, ep, tp)
        loaded = hf.load_pretrained(folder, group, expert_budget=0.5 if ep == 1 else 1.0, **BUDGETS[budget])
        Expected.of(model).check(loaded, f"{budget}, ep {ep}, tp {tp}, rank {rank}")
        hf.check(loaded)
        group.close()


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2)])
def test_experts_beyond_memory_over_ranks(ep: int, tp: int, folders: dict[str, tuple[Path, Any]]) -> None:
    run_ranks(check_budgets, 2, ep, tp, folders["MXFP4"][0])


NAME = "model.layers.1.mlp.experts."
State = dict[str, Tensor]


@pytest.mark.parametrize(
    ("style", "change", "message"),
    [
        ("whole numbers", lambda state: state.pop(f"{NAME}down_proj_bias"), "missing in layer 1: down_proj_bias$"),
        (
            "whole numbers",
            lambda state: state.update({f"{NAME}gate_up_proj_bias": torch.zeros(4, 64)}),
            r"gate_up_proj_bias of shape \(4, 64\) must be \(4, 128\)$",
        ),
        (
            "MXFP4",
            lambda state: state.pop(f"{NAME}down_proj_scales"),
            f"surplus {NAME}down_proj_blocks; missing in layer 1: down_proj$",
        ),
        (
            "MXFP4",
            lambda state: state.update({f"{NAME}down_proj_scales": torch.zeros(4, 32, 3, dtype=torch.uint8)}),
            r"down_proj_blocks U8 of shape \(4, 32, 2, 16\) must be U8 of \(4, 32, 3, 16\): MXFP4",
        ),
        (
            "MXFP4",
            lambda state: state[f"{NAME}gate_up_proj_scales"].fill_(255),
            f"{NAME}gate_up_proj_scales: scales.* 255",
        ),
    ],
)
def test_broken_folders_are_refused(
    style: str, change: Callable[[State], object], message: str, folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    source, _ = folders["MXFP4"] if style == "MXFP4" else (tmp_path / "one", None)
    if style != "MXFP4":
        tiny_model("gpt_oss").save_pretrained(source)
    state = load_file(source / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_other_quantisations_are_refused(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    config = json.loads((folders["MXFP4"][0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="quant_method='awq' of quantization_config must be 'mxfp4': gpt-oss is read"):
        hf.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="keep_fp8=True must come with a block FP8 checkpoint"):
        hf.load_pretrained(folders["MXFP4"][0], keep_fp8=True)
