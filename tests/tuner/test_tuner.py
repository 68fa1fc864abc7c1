"""Which settings are tried, which one a layer call takes, and what all layers of a group take."""

import logging
import random
import re
from dataclasses import replace
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
from comet.tuner.choice import Resolved, Resolver, check_setting, resolve
from comet.tuner.problem import Machine, Problem, candidate_name, candidates, default_setting, effective
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)
TINY = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)
H200 = Machine()
EMPTY = ProfileStore(Path(), H200.name, {})


def problem_of(moe: MoEConfig = QWEN3, num_tokens: int = 8192, ep: int = 4) -> Problem:
    return Problem(moe, ParallelConfig(ep=ep), num_tokens, torch.bfloat16)


def entry_of(problem: Problem, *times: tuple[OverlapConfig | None, float | None]) -> ProfileEntry:
    measured = tuple(Measured(setting=setting, ms=ms) for setting, ms in times)
    return ProfileEntry(key=ProfileKey.create(problem, H200.name), measured=measured, commit="abc", date="2026-11-20")


def test_candidates_are_legal_distinct_launches_with_plain_and_the_default() -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    for _ in range(40):
        moe = replace(QWEN3, hidden_size=rng.choice([64, 512, 2048, 7168]))
        problem = problem_of(moe, rng.choice([0, 1, 2048]), rng.choice([1, 2, 4]))
        machine = replace(H200, num_sms=rng.choice([2, 20, 132]))
        plain, default, *others = tried = candidates(problem, machine)
        assert plain is None
        assert default == effective(default_setting(problem), problem)
        assert len(set(tried)) == len({candidate_name(setting, problem) for setting in tried}) == len(tried) <= 11
        for setting in (default, *others):
            assert effective(setting, problem) == setting
            check_setting(setting, problem, machine)
        assert {setting.comm_blocks for setting in (default, *others)} == {
            blocks for blocks in (0, 8, 16, 32) if blocks < machine.num_sms
        }
    assert sorted(item.num_panels for item in candidates(problem_of(), H200)[1:] if not item.comm_blocks) == [
        1, 2, 3, 4, 6, 8
    ]  # fmt: skip


@pytest.mark.parametrize(("setting", "name"), [
    (None, "plain"), (OverlapConfig(num_panels=1), "1 panel"), (OverlapConfig(num_panels=99), "8 panels"),
    (OverlapConfig(comm_blocks=1), "1 comm block, 4 panels"),
    (OverlapConfig(comm_blocks=16, num_panels=2), "16 comm blocks, 2 panels"),
])  # fmt: skip
def test_names_say_what_runs(setting: OverlapConfig | None, name: str) -> None:
    assert candidate_name(setting, problem_of()) == name


def test_a_machine_is_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Machine.of(torch.device("cuda", 0)) == Machine(name="NVIDIA H100", num_sms=114)
    assert Machine.of(torch.device("cpu")) == Machine(name="cpu")
    with pytest.raises(ValueError, match=r"num_tokens=-1 must be at least 0"):
        problem_of(num_tokens=-1)


def test_resolution_order(tmp_path) -> None:
    problem, best = problem_of(), OverlapConfig(comm_blocks=24)
    store = ProfileStore.load(tmp_path / "p.json", H200.name)
    assert resolve(problem, store, H200) == Resolved(setting=OverlapConfig(), source="default")
    store.put(entry_of(problem, (OverlapConfig(), 2.0), (best, 1.5), (None, 3.0)))
    assert resolve(problem, store, H200) == Resolved(setting=best, source="profile")
    assert resolve(problem_of(num_tokens=6000), store, H200).source == "profile"
    assert resolve(problem_of(num_tokens=1500), store, H200) == Resolved(setting=best, source="nearest")
    assert resolve(problem_of(num_tokens=100), store, H200).source == "default"
    assert resolve(problem_of(ep=2), store, H200).source == "default"
    assert resolve(problem_of(ep=1), store, H200).setting == OverlapConfig(num_panels=1), "one rank hides nothing"
    forced = OverlapConfig(comm_blocks=3)
    assert resolve(problem, store, H200, forced=forced) == Resolved(setting=forced, source="user")
    impossible = resolve(problem, store, replace(H200, num_sms=20))
    assert impossible.source == "default"
    assert impossible.passed_over.startswith("comm_blocks=24 must be below the 20 SMs of NVIDIA H200: ")


def test_impossible_forced_settings_name_their_rule() -> None:
    problem = problem_of()
    with pytest.raises(ValueError, match=r"comm_blocks=132 must be below the 132 SMs of NVIDIA H200: at least one"):
        resolve(problem, EMPTY, H200, forced=OverlapConfig(comm_blocks=132))
    with pytest.raises(ValueError, match=r"num_panels=9 must be at most 16 and at most the 8 column blocks of hidden"):
        resolve(problem, EMPTY, H200, forced=OverlapConfig(num_panels=9))
    check_setting(OverlapConfig(), problem_of(TINY, ep=1), H200)  # the defaults always pass


def test_resolver_follows_tokens_and_logs_each_shape_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comet.tuner")
    resolver = Resolver(EMPTY, H200)
    choices = [resolver(problem_of(num_tokens=num)) for num in (8192, 8000, 8192, 64, 64)]
    assert choices[0] is choices[2] is choices[1]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert re.search(r"E=128 K=8 D=2048 F=768 bfloat16, EP4 TP1, about 8192 tokens: .* \(default\)", messages[0])
    with pytest.raises(ValueError, match="comm_blocks=500"):
        resolver(problem_of(), forced=OverlapConfig(comm_blocks=500))


def test_an_impossible_measured_setting_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProfileStore.load(tmp_path / "p.json", H200.name)
    store.put(entry_of(problem_of(), (OverlapConfig(), 2.0), (OverlapConfig(comm_blocks=1_000_000), 1.0)))
    resolver = Resolver(store, H200)
    rule = "comm_blocks=1000000 must be below the 132 SMs of NVIDIA H200: at least one block computes"
    choice = [resolver(problem_of()) for _ in range(2)][1]
    assert choice == Resolved(setting=OverlapConfig(), source="default", passed_over=rule)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"profile {tmp_path}/p.json: best setting passed over: {rule}"]
    Resolver(store, H200, logs=False)(problem_of())
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=256, ffn_size=32)
BEST, FEW = OverlapConfig(comm_blocks=24, num_panels=2), OverlapConfig(comm_blocks=5, num_panels=4)


def write_profile(folder: Path, world_size: int, times: dict[int, tuple[OverlapConfig | None, float]]) -> None:
    """A profile of this CPU: for each number of tokens one measured setting, beside a slower default."""
    store = ProfileStore.open(folder, "cpu", world_size)
    for tokens, (setting, ms) in times.items():
        problem = Problem(MOE, ParallelConfig(ep=world_size), tokens, torch.float32)
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
        "24 comm blocks, 2 panels (profile)",
    ]


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


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    (tmp_path / "cpu_x2.json").write_text("{")
    return tmp_path


@in_ranks(2)
def test_the_first_rank_alone_warns_of_a_damaged_profile(rank: int, world_size: int, damaged: Path) -> None:
    told = logged("comet.tuner")
    group_of(world_size, damaged).close()
    assert ["cpu_x2.json: cannot be parsed" in text for text in told] == [True] * (rank == 0)
