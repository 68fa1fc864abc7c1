"""What the layers of a group take from stored measurements: one choice for all ranks, whatever their files hold."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import CollectivePath
from comet.layer.routed_experts import SymmetricPath
from comet.moe import MoE
from comet.reference.plain import plain_experts
from comet.tuner.problem import Problem
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=256, ffn_size=32)
BEST, FEW = OverlapConfig(comm_blocks=24, num_panels=2), OverlapConfig(comm_blocks=5, num_panels=4)


def write_profile(folder: Path, world_size: int, times: dict[int, tuple[OverlapConfig | None, float]]) -> None:
    """A profile of this CPU: for each number of tokens one measured setting, beside a slower default."""
    store = ProfileStore.open(folder, "cpu", world_size)
    for tokens, (setting, ms) in times.items():
        problem = Problem.create(MOE, ParallelConfig(ep=world_size), tokens, torch.float32)
        measured = (Measured(setting=OverlapConfig(), ms=9.0), Measured(setting=setting, ms=ms))
        store.put(ProfileEntry(key=ProfileKey.create(problem, "cpu"), measured=measured, commit="c", date="d"))


def group_of(world_size: int, profiles: Path | None, max_tokens: int = 128) -> ExpertGroup:
    parallel = ParallelConfig(ep=world_size)
    return make_expert_group(MOE, parallel, max_tokens=max_tokens, dtype=torch.float32, device="cpu", profiles=profiles)


def run_layer(moe: MoE, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return moe(torch.randn(num_tokens, MOE.hidden_size, generator=generator))[0].detach()


def symmetric(moe: MoE) -> SymmetricPath:
    assert isinstance(moe.experts, SymmetricPath)
    return moe.experts


def test_a_layer_takes_what_was_measured(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "comet.tuner")
    write_profile(tmp_path, 1, {128: (BEST, 1.0), 16: (FEW, 1.0)})
    path = symmetric(MoE(MOE, group_of(1, tmp_path)))
    assert (path.backend.settings.comm_blocks, path.backend.settings.num_panels) == (24, 2)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "24 comm blocks, 2 panels, in Triton (profile)",
    ]


def test_without_measurements_the_default_and_a_given_setting_always(tmp_path: Path) -> None:
    path = symmetric(MoE(MOE, group_of(1, tmp_path / "none")))
    assert path.backend.settings.comm_blocks == OverlapConfig().comm_blocks
    write_profile(tmp_path, 1, {128: (BEST, 1.0)})
    given = symmetric(MoE(MOE, group_of(1, tmp_path), overlap=OverlapConfig(comm_blocks=7)))
    assert given.backend.settings.comm_blocks == 7
    with pytest.raises(
        ValueError, match="comm_blocks=132 must be below the 132 SMs of cpu: at least one block computes"
    ):
        MoE(MOE, group_of(1, tmp_path), overlap=OverlapConfig(comm_blocks=132))


def test_auto_is_plain_where_that_was_faster(tmp_path: Path) -> None:
    write_profile(tmp_path, 1, {128: (None, 1.0)})
    group = group_of(1, tmp_path)
    path = MoE(MOE, group).experts
    assert isinstance(path, CollectivePath)
    assert path.compute is plain_experts
    assert symmetric(MoE(MOE, group, path="twin")).backend.settings.comm_blocks == OverlapConfig().comm_blocks
    assert symmetric(MoE(MOE, group, overlap=BEST)).backend.settings.comm_blocks == 24, (
        "a given setting is never overruled"
    )


def choose_on_rank(rank: int, world_size: int, folder: str) -> tuple[int, int, list[float]]:
    """Each rank looks into a folder of its own, as on two nodes, and has other tokens."""
    group = group_of(world_size, Path(folder) / str(rank))
    moe = MoE(MOE, group, seed=1)
    path, num_tokens = symmetric(moe), (128, 16)[rank]
    output = run_layer(moe, num_tokens)
    group.close()
    return path.backend.settings.comm_blocks, path.backend.settings.num_panels, output.flatten().tolist()


def test_two_ranks_choose_alike_from_different_files(tmp_path: Path) -> None:
    write_profile(tmp_path / "0", 2, {128: (BEST, 1.0), 16: (FEW, 1.0)})
    write_profile(tmp_path / "1", 2, {128: (None, 1.0)})
    found = run_ranks(choose_on_rank, 2, str(tmp_path))
    assert [rank[:2] for rank in found] == [(24, 2)] * 2
    alone = MoE(MOE, group_of(1, None), seed=1, path="reference")
    for (*_, output), num_tokens in zip(found, (128, 16), strict=True):
        expected = run_layer(alone, num_tokens)
        torch.testing.assert_close(torch.tensor(output).view_as(expected), expected, rtol=1e-5, atol=1e-5)


def warn_on_rank(rank: int, world_size: int, folder: str) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("comet.tuner").addHandler(handler)
    group_of(world_size, Path(folder)).close()
    return [record.getMessage() for record in records]


def test_the_first_rank_alone_warns_of_a_damaged_profile(tmp_path: Path) -> None:
    (tmp_path / "cpu_x2.json").write_text("{")
    first, second = run_ranks(warn_on_rank, 2, str(tmp_path))
    assert ["cpu_x2.json: cannot be parsed" in text for text in first] == [True]
    assert second == []
