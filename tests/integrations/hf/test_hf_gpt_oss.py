"""transformers' own gpt-oss, tiny and random: by name, and folders as transformers writes them and in MXFP4."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor

pytest.importorskip("transformers", reason="needs pip install 'comet-moe[hf]'")

from cache_cases import leave_all_to
from hf_cases import Expected, edit_state, make_group, prompt, publish_mxfp4, same_state, tiny_model
from ranks import run_ranks

from comet.errors import HostComputeError
from comet.integrations import hf
from comet.integrations.hf.stored_experts import cache_report, cores_of
from comet.kernels.runtime.activation import Activation

Folders = dict[str, tuple[Path, Any]]
STYLES = ("whole numbers", "MXFP4")


@torch.no_grad()
def test_what_is_kept_of_experts_that_are_called_by_name_follows_them() -> None:
    model = tiny_model("gpt_oss", intermediate_size=48)
    hf.register()
    model.set_experts_implementation("comet")
    hf.check(model)
    model(prompt(1, 3))
    for parameter in model.model.layers[0].mlp.experts.parameters():
        parameter.mul_(0.5)
    changed = copy.deepcopy(model)
    changed.set_experts_implementation("eager")
    Expected.of(changed).check(model, "written to")


def test_the_shape_of_its_layers() -> None:
    config = hf.moe_config(tiny_model("gpt_oss", swiglu_alpha=2.0).config)
    assert config.activation == Activation("clamped_swiglu", alpha=2.0, limit=1.5)
    assert config.expert_bias
    assert (config.hidden_size, config.ffn_size, config.num_experts, config.top_k) == (32, 64, 4, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = {}
    for style in STYLES:
        folder, model = tmp_path_factory.mktemp("gpt_oss"), tiny_model("gpt_oss")
        if style == "MXFP4":
            publish_mxfp4(model, folder)
        else:
            model.save_pretrained(folder, max_shard_size="30KB")
        found[style] = folder, model
    return found


BUDGETS: dict[str, dict[str, Any]] = {
    "host": {},
    "file": {"expert_store": "file", "host_budget": 0.9},
    "mxfp4": {"expert_dtype": "mxfp4"},  # the numbers that the folder has
    "cores": {"host_cores": "1"},
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_experts_beyond_memory(budget: str, folders: Folders) -> None:
    folder, model = folders["MXFP4"]
    loaded = hf.load_pretrained(folder, expert_budget=0.5, **BUDGETS[budget])
    cores = cores_of(loaded)
    if cores is not None:
        leave_all_to(cores)
    Expected.of(model).check(loaded, budget)
    token = torch.tensor([[3]])
    with torch.no_grad():  # a step of one wave, of which the cores compute some
        torch.testing.assert_close(loaded(token).logits, model(token).logits, rtol=1e-4, atol=1e-4)
    report = cache_report(loaded)
    assert report is not None
    assert report.needed > report.slots
    assert report.fetched > 0
    assert (report.hosted > 0) == (cores is not None)
    if cores is not None:
        cores.process.kill()
        cores.process.wait()
        for call in (hf.check, lambda model: model(token)):
            with torch.no_grad(), pytest.raises(HostComputeError, match="the process ended with status -9"):
                call(loaded)
    with pytest.raises(ValueError, match="experts are in a store and no parameters; load the model without expert_bu"):
        loaded.save_pretrained(folder)


def check_ranks(rank: int, world_size: int, ep: int, tp: int, folders: dict[str, Path]) -> None:
    """Parts that ranks read, with all experts and beyond memory."""
    for style, folder in folders.items():
        model, settings = tiny_model("gpt_oss"), [{}]
        if style == "MXFP4":
            publish_mxfp4(model, folder.parent / f"{folder.name} of rank {rank}")
            if tp < 4:  # with 4 slices of F a slice is narrower than a block
                share = {"expert_budget": 0.5 if ep == 1 else 1.0}
                settings += [share | BUDGETS[budget] for budget in ("file", "mxfp4")]
        expected = Expected.of(model)
        for each in settings:
            group, what = make_group(model, ep, tp), f"{style}, {each}, ep {ep}, tp {tp}, rank {rank}"
            loaded = hf.load_pretrained(folder, group, decode_tokens=6, **each)
            expected.check(loaded, what)
            hf.check(loaded)
            if not each:
                assert type(loaded) is type(model)
                assert all(each.requires_grad for each in loaded.parameters()) == (ep * tp == 1)
                assert same_state(loaded, hf.convert(copy.deepcopy(model), group, decode_tokens=6)), what
            group.close()


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), slow(1, 2), slow(1, 4)])
def test_ranks_read_their_parts(ep: int, tp: int, folders: Folders) -> None:
    run_ranks(check_ranks, ep * tp, ep, tp, {style: folder for style, (folder, _) in folders.items()})


NAME = "model.layers.1.mlp.experts."
Change = Callable[[dict[str, Tensor]], object]


NARROW_SCALES = {f"{NAME}down_proj_scales": torch.zeros(4, 32, 3, dtype=torch.uint8)}
BROKEN: list[tuple[str, Change, str]] = [
    (
        "whole numbers",
        lambda state: state.pop(f"{NAME}down_proj_bias"),
        "missing in model.layers.1.mlp.experts: down_proj_bias$",
    ),
    ("whole numbers", lambda state: state.update({f"{NAME}gate_up_proj_bias": torch.zeros(4, 64)}), "must be .*128.$"),
    (
        "MXFP4",
        lambda state: state.pop(f"{NAME}down_proj_scales"),
        "surplus .*_blocks; missing in model.layers.1.mlp.experts: down_proj$",
    ),
    ("MXFP4", lambda state: state.update(NARROW_SCALES), r"must be U8 of \(4, 32, 3, 16\): MXFP4"),
    ("MXFP4", lambda state: state[f"{NAME}gate_up_proj_scales"].fill_(255), "gate_up_proj_scales: scales.* 255"),
]


@pytest.mark.parametrize(("style", "change", "message"), BROKEN)
def test_broken_folders_are_refused(style: str, change: Change, message: str, folders: Folders, tmp_path: Path) -> None:
    source = folders["MXFP4"][0]
    if style != "MXFP4":
        source = tmp_path / "one"
        tiny_model("gpt_oss").save_pretrained(source)
    edit_state(source, change, tmp_path)
    with pytest.raises(ValueError, match=message):
        hf.load_pretrained(tmp_path)


def test_other_quantisations_are_refused(folders: Folders, tmp_path: Path) -> None:
    config = json.loads((folders["MXFP4"][0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match="quant_method='awq' of quantization_config must be 'mxfp4': gpt-oss is read"):
        hf.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="keep_fp8=True must come with a block FP8 checkpoint"):
        hf.load_pretrained(folders["MXFP4"][0], keep_fp8=True)
