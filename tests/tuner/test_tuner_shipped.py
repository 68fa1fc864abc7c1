"""The profiles that ship with Comet: winners, each of which can be used, and no surprise to the model."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from comet.config import MoEConfig, ParallelConfig
from comet.tuner.choice import check_setting, resolve
from comet.tuner.model import predict, propose
from comet.tuner.problem import H200, Problem
from comet.tuner.profile import ProfileEntry, ProfileStore, profile_path, read_entries

SHIPPED = sorted((Path(str(files("comet.configs"))) / "profiles").glob("*.json"))
MOST_REGRET = 1.2  # of a winner over what the model likes best, in the model's eyes


def problem_of(entry: ProfileEntry) -> Problem:
    key = entry.key
    moe = MoEConfig(num_experts=key.num_experts, top_k=key.top_k, hidden_size=key.hidden_size, ffn_size=key.ffn_size)
    return Problem.create(moe, ParallelConfig(ep=key.ep, tp=key.tp), key.tokens, getattr(torch, key.dtype))


def test_times_of_four_h200_are_tritons_and_the_others_those_of_todays_kernels() -> None:
    devices = {path.stem: json.loads(path.read_text())["device"] for path in SHIPPED}
    found = {path.stem: read_entries(path, devices[path.stem])[0].values() for path in SHIPPED}
    assert {name: {entry.kernels for entry in entries} for name, entries in found.items()} == {
        "nvidia_h100_80gb_hbm3_x1": {"auto"}, "nvidia_h200_x2": {"auto"}, "nvidia_h200_x4": {"triton"}
    }  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_entry_is_read_and_used(path: Path) -> None:
    device = json.loads(path.read_text())["device"]
    entries, trouble = read_entries(path, device)
    assert entries
    assert not trouble
    for key, entry in entries.items():
        world_size = key.ep * key.tp
        assert path.name == profile_path(Path(), device, world_size).name
        problem, store = problem_of(entry), ProfileStore.open(None, device, world_size)
        chosen = resolve(problem, store, H200)
        assert chosen.source == "profile"
        assert [chosen.setting] == [item.setting for item in entry.measured], "profiles hold winners"
        assert chosen.setting is not None, "the plain path is slower on every shape that was measured"
        check_setting(chosen.setting, problem, H200)
        measured_on = replace(H200, cuda_kernels=entry.kernels == "auto")
        winner = predict(problem, entry.winner.setting, measured_on)
        assert winner.ms <= MOST_REGRET * propose(problem, measured_on)[0].ms, key
