"""Which setting a layer call takes, and that all layers of a group take it."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import in_ranks, logged, run_ranks

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import CollectivePath
from comet.layer.routed_experts import SymmetricPath
from comet.moe import MoE
from comet.reference.plain import plain_experts
from comet.schedule.choice import Machine, Problem, Resolved, Resolver, check_setting, effective, setting_name
from comet.schedule.table import Measured, Profile, key_of

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
TINY = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)
H200 = Machine()


def problem_of(moe: MoEConfig = QWEN3, num_tokens: int = 8192, ep: int = 4) -> Problem:
    return Problem(moe, ParallelConfig(ep=ep), num_tokens, torch.bfloat16)


def resolver_of(folder: Path, machine: Machine = H200, **changes) -> Resolver:
    return Resolver(Profile(folder / "p.csv"), machine, "auto", **changes)


def store(resolver: Resolver, problem: Problem, setting: OverlapConfig | None) -> None:
    key = key_of(problem.columns() | {"device": resolver.machine.name, "kernels": resolver.kernels})
    resolver.profile.put(key, Measured(setting=setting, ms=1.0))


@pytest.mark.parametrize(("setting", "name"), [
    (None, "plain"), (OverlapConfig(num_panels=1), "1 panel"), (OverlapConfig(num_panels=99), "8 panels"),
    (OverlapConfig(comm_blocks=1), "1 comm block, 4 panels"),
    (OverlapConfig(comm_blocks=16, num_panels=2), "16 comm blocks, 2 panels"),
])  # fmt: skip
def test_names_say_what_runs(setting: OverlapConfig | None, name: str) -> None:
    assert setting_name(setting and effective(setting, problem_of())) == name


def test_a_machine_is_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Machine.of(torch.device("cuda", 0)) == Machine(name="NVIDIA H100", num_sms=114)
    assert Machine.of(torch.device("cpu")) == Machine(name="cpu")


def test_resolution_order(tmp_path: Path) -> None:
    problem, best = problem_of(), OverlapConfig(comm_blocks=24)
    resolve = resolver_of(tmp_path)
    assert resolve(problem) == Resolved(OverlapConfig(), "default")
    store(resolve, problem, best)
    assert resolve(problem) == Resolved(best, "profile")
    assert resolve(problem_of(num_tokens=6000)).source == "profile"
    assert resolve(problem_of(num_tokens=1500)) == Resolved(best, "nearest")
    assert resolve(problem_of(num_tokens=100)).source == "default"
    assert resolve(problem_of(ep=2)).source == "default"
    assert resolve(problem_of(ep=1)).setting == OverlapConfig(num_panels=1), "one rank hides nothing"
    forced = OverlapConfig(comm_blocks=3)
    assert resolve(problem, forced=forced) == Resolved(forced, "user")


def test_impossible_forced_settings_name_their_rule(tmp_path: Path) -> None:
    resolve, problem = resolver_of(tmp_path), problem_of()
    with pytest.raises(ValueError, match=r"comm_blocks=132 must be below the 132 SMs of NVIDIA H200: at least one"):
        resolve(problem, forced=OverlapConfig(comm_blocks=132))
    with pytest.raises(ValueError, match=r"num_panels=9 must be at most 16 and at most the 8 column blocks of hidden"):
        resolve(problem, forced=OverlapConfig(num_panels=9))
    check_setting(OverlapConfig(), problem_of(TINY, ep=1), H200)  # the defaults always pass


def test_each_choice_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comet.schedule")
    resolve = resolver_of(tmp_path)
    for num in (8192, 8000, 8192, 64, 64):
        resolve(problem_of(num_tokens=num))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert re.search(r"E=128 K=8 D=2048 F=768 bfloat16, EP4 TP1, about 8192 tokens: .* \(default\)", messages[0])


def test_an_impossible_measured_setting_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve = resolver_of(tmp_path)
    store(resolve, problem_of(), OverlapConfig(comm_blocks=1_000_000))
    rule = "comm_blocks=1000000 must be below the 132 SMs of NVIDIA H200: at least one block computes"
    assert [resolve(problem_of()) for _ in range(2)] == [Resolved(OverlapConfig(), "default")] * 2
    Resolver(resolve.profile, H200, "auto", logs=False)(problem_of())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"profile {tmp_path}/p.csv: best setting passed over: {rule}"]


MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=256, ffn_size=32)
BEST, FEW = OverlapConfig(comm_blocks=24, num_panels=2), OverlapConfig(comm_blocks=5, num_panels=4)


def write_profile(folder: Path, world_size: int, settings: dict[int, OverlapConfig | None]) -> None:
    """Leave a profile of this CPU: the fastest setting for each number of tokens."""
    resolver = Resolver(Profile.open(folder, "cpu", world_size), Machine(name="cpu"), "triton")
    for tokens, setting in settings.items():
        store(resolver, Problem(MOE, ParallelConfig(ep=world_size), tokens, torch.float32), setting)


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
    caplog.set_level(logging.INFO, "comet.schedule")
    write_profile(tmp_path, 1, {128: BEST, 16: FEW})
    path = symmetric(MoE(MOE, group_of(1, tmp_path)))
    assert (path.backend.settings.comm_blocks, path.backend.settings.num_panels) == (24, 2)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "24 comm blocks, 2 panels (profile)",
    ]


def test_auto_is_plain_where_that_was_faster(tmp_path: Path) -> None:
    write_profile(tmp_path, 1, {128: None})
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
    write_profile(tmp_path / "0", 2, {128: BEST, 16: FEW})
    write_profile(tmp_path / "1", 2, {128: None})
    found = run_ranks(choose_on_rank, 2, str(tmp_path))
    assert [rank[:2] for rank in found] == [(24, 2)] * 2
    alone = MoE(MOE, group_of(1, None), seed=1, path="reference")
    for (*_, output), num_tokens in zip(found, (128, 16), strict=True):
        expected = run_layer(alone, num_tokens)
        torch.testing.assert_close(torch.tensor(output).view_as(expected), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    (tmp_path / "cpu_x2.csv").write_text("{")
    return tmp_path


@in_ranks(2)
def test_the_first_rank_alone_warns_of_a_damaged_profile(rank: int, world_size: int, damaged: Path) -> None:
    told = logged("comet.schedule")
    group_of(world_size, damaged).close()
    assert ["cpu_x2.csv is ignored" in text for text in told] == [True] * (rank == 0)
