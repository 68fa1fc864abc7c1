"""From predictions and measurements to a choice, its cost over the best one, and what all layers of a group take."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import CollectivePath
from comet.layer.routed_experts import SymmetricPath
from comet.measure.explain import Explained, explain_facts, explain_text, regret_text, regrets
from comet.measure.layers import reason
from comet.moe import MoE
from comet.reference.plain import plain_experts
from comet.tuner.choice import Resolved, Resolver, check_setting, resolve
from comet.tuner.model import predict, propose
from comet.tuner.problem import H200, Problem
from comet.tuner.profile import Measured, ProfileEntry, ProfileKey, ProfileStore

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, ffn_size=768)


EMPTY = ProfileStore(Path(), H200.name, {})


def problem_of(moe: MoEConfig = QWEN3, num_tokens: int = 8192, ep: int = 4) -> Problem:
    return Problem.create(moe, ParallelConfig(ep=ep), num_tokens, torch.bfloat16)


def entry_of(problem: Problem, *times: tuple[OverlapConfig | None, float | None]) -> ProfileEntry:
    measured = tuple(Measured(setting=setting, ms=ms, failure="" if ms else "died") for setting, ms in times)
    return ProfileEntry(key=ProfileKey.create(problem, H200.name), measured=measured, commit="abc", date="2026-11-20")


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
    tiny = MoEConfig(num_experts=8, top_k=2, hidden_size=64, ffn_size=64)
    check_setting(OverlapConfig(), problem_of(tiny, ep=1), H200)  # the defaults always pass


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
    entry, predictions = store.entries[ProfileKey.create(problem_of(), H200.name)], propose(problem_of(), H200)
    explained = Explained(problem=problem_of(), machine=H200, predictions=predictions, resolved=choice, entry=entry)
    *_, chosen = explain_text(explained).splitlines()
    assert chosen.endswith(f"; its best setting is passed over: {rule}")
    assert explain_facts(explained)["passed_over"] == rule


def test_the_winner_is_the_fastest_that_ran() -> None:
    broken = OverlapConfig(comm_blocks=64)
    entry = entry_of(problem_of(), (broken, None), (OverlapConfig(comm_blocks=8), 1.2), (OverlapConfig(), 1.1))
    assert entry.winner == Measured(setting=OverlapConfig(), ms=1.1)
    assert reason(RuntimeError("out of shared memory\nlong story")) == "RuntimeError: out of shared memory long story"
    assert len(reason(RuntimeError("word " * 1000))) <= 300


def test_explanation_is_aligned_and_fits_json() -> None:
    problem, broken = problem_of(), OverlapConfig(comm_blocks=64)
    split = OverlapConfig(comm_blocks=8)
    settings = [OverlapConfig(), split, broken, None]
    predictions = [predict(problem, setting, H200) for setting in settings]
    entry = entry_of(problem, (OverlapConfig(), 2.0), (split, 1.5), (broken, None), (None, 9.0))
    resolved = Resolved(setting=entry.winner.setting, source="profile")
    explained = Explained(problem=problem, machine=H200, predictions=predictions, resolved=resolved, entry=entry)
    title, header, *rows, chosen = explain_text(explained).splitlines()
    assert title.startswith("num_experts=128, top_k=8, hidden_size=2048, ffn_size=768, ep=4, tp=1, tokens=8192")
    assert header.split("  ")[0] == "candidate"
    assert rows[0].startswith("8 comm blocks, 4 panels, both layers in CUDA C++ <- chosen")
    assert rows[1].startswith("4 panels, both layers in CUDA C++ ")
    end = header.index(heading := "measured ms at 8192 tokens") + len(heading)
    assert [row[:end].split()[-1] for row in rows] == ["1.500", "2.000", "9.000", "-"]
    assert {row[end : end + 2] for row in rows} == {"  "}, "aligned"
    assert header[end + 2 :] == "why"
    assert rows[0][end + 2 :].startswith("plan 0.0")
    assert rows[3][end + 2 :] == "failed: died"
    assert chosen == (
        "chosen: 8 comm blocks, 4 panels, both layers in CUDA C++ (source: profile); measured at 8192 tokens, "
        "2026-11-20, version abc"
    )
    content = json.loads(json.dumps(explain_facts(explained)))
    assert content["chosen"] == dict(comm_blocks=8, num_panels=4)
    assert content["candidates"][2]["setting"] == content["candidates"][2]["name"] == "plain"
    assert content["candidates"][3]["measured_ms"] is content["candidates"][3]["measured_tokens"] is None
    assert content["candidates"][0]["measured_tokens"] == 8192
    favourite = min(predictions, key=lambda item: item.ms).setting
    assert content["model_regret"] == {OverlapConfig(): 2.0, split: 1.5, None: 9.0}[favourite] / 1.5
    assert content["regret"] == 1.0, "of the choice, whatever the model likes"
    forced = replace(explained, resolved=Resolved(setting=OverlapConfig(), source="user"))
    assert explain_facts(forced)["regret"] == 2.0 / 1.5
    unmeasured = replace(explained, resolved=Resolved(setting=None, source="nearest"), entry=None)
    assert explain_facts(unmeasured)["regret"] is None


def explained_of(tokens: int, entry: ProfileEntry) -> Explained:
    """At EP4 on H200, with all that was measured among the predictions."""
    problem = problem_of(num_tokens=tokens)
    predictions = [predict(problem, item.setting, H200) for item in entry.measured]
    resolved = Resolved(setting=OverlapConfig(), source="default")
    return Explained(problem=problem, machine=H200, predictions=predictions, resolved=resolved, entry=entry)


def test_times_stand_beside_the_kernels_they_are_of() -> None:
    """Both layers run in CUDA C++ at 8192 tokens."""
    split = OverlapConfig(comm_blocks=8)
    times = ((OverlapConfig(), 1.9), (split, 2.5), (None, 9.0))
    entry = entry_of(problem_of(), *times)
    in_triton = replace(entry, kernels="triton")
    names = ["4 panels, both layers in CUDA C++", "8 comm blocks, 4 panels, both layers in CUDA C++", "plain"]

    def measured(explained: Explained) -> dict[str, float | None]:
        candidates = explain_facts(explained)["candidates"]
        assert len({item["name"] for item in candidates}) == len(candidates) == 3, "equal candidates are one"
        return {item["name"]: item["measured_ms"] for item in candidates}

    assert measured(explained_of(8192, entry)) == dict(zip(names, (1.9, 2.5, 9.0), strict=True))
    assert measured(explained_of(8192, in_triton)) == dict(zip(names, (None, None, 9.0), strict=True))
    assert "; measured at 8192 tokens, in Triton alone, 2026-11-20" in explain_text(explained_of(8192, in_triton))
    without = replace(explained_of(8192, in_triton), machine=replace(H200, cuda_kernels=False))
    assert {item["measured_ms"] for item in explain_facts(without)["candidates"]} == {1.9, 2.5, 9.0}


def test_times_of_other_tokens_say_so_and_those_of_other_kernels_are_left_out() -> None:
    entry = entry_of(problem_of(), (OverlapConfig(), 2.0))
    explained = explained_of(1024, entry)
    assert "measured ms at 8192 tokens" in explain_text(explained).splitlines()[1]
    found = {
        item["name"]: (item["measured_ms"], item["measured_tokens"]) for item in explain_facts(explained)["candidates"]
    }
    assert found == {"4 panels, both layers in CUDA C++": (2.0, 8192)}
    only = explained_of(1024, replace(entry, kernels="triton"))
    assert only.comparable() is None
    assert explain_facts(only)["regret"] is None


def test_what_cannot_run_here_is_no_candidate() -> None:
    many = OverlapConfig(comm_blocks=1_000_000)
    entry = entry_of(problem_of(), (OverlapConfig(), 2.0), (many, 1.0))
    (candidate,) = explain_facts(explained_of(8192, entry))["candidates"]
    assert (candidate["setting"]["comm_blocks"], candidate["measured_ms"]) == (0, 2.0)


# ---- regret ----

DEFAULT, SIX = OverlapConfig(), OverlapConfig(num_panels=6)


def tuned(num_tokens: int, favourite: OverlapConfig | None, times: dict[OverlapConfig | None, float]) -> Explained:
    """A point at which the model likes ``favourite`` best."""
    point = explained_of(num_tokens, entry_of(problem_of(num_tokens=num_tokens), *times.items()))
    predictions = [replace(item, ms=1.0 if item.setting == favourite else 2.0) for item in point.predictions]
    return replace(point, predictions=predictions)


def store_of(tmp_path: Path, *points: Explained) -> ProfileStore:
    store = ProfileStore.load(tmp_path / "p.json", H200.name)
    for point in points:
        store.put(point.entry)
    return store


def test_each_way_to_choose_over_all_points(tmp_path: Path) -> None:
    small = tuned(4096, SIX, {DEFAULT: 1.0, SIX: 1.25, None: 4.0})
    large = tuned(8192, SIX, {DEFAULT: 2.2, SIX: 2.0, None: 8.0})
    found = regrets([small, large], store_of(tmp_path, small, large))
    assert found == {
        "default": {"mean": pytest.approx(1.05), "worst": pytest.approx(1.1), "points": 2},
        "model": {"mean": pytest.approx(1.125), "worst": 1.25, "points": 2},
        "nearest": {"mean": pytest.approx(1.175), "worst": 1.25, "points": 2},
    }
    assert regret_text(found).splitlines() == [
        "regret: time of the choice over the best measured",
        "default  mean 1.050, worst 1.100, 2 points",
        "model    mean 1.125, worst 1.250, 2 points",
        "nearest  mean 1.175, worst 1.250, 2 points",
    ]


def test_what_was_not_measured_does_not_count(tmp_path: Path) -> None:
    eight = OverlapConfig(num_panels=8)
    point, far = tuned(8192, SIX, {SIX: 1.0, None: 4.0}), tuned(512, SIX, {SIX: 1.0})
    other = tuned(4096, eight, {eight: 1.0})
    found = regrets([point], store_of(tmp_path, point, other))
    assert {name: values["points"] for name, values in found.items()} == {"default": 0, "model": 1, "nearest": 0}
    assert found["default"]["mean"] is found["default"]["worst"] is None
    assert "default" not in regret_text(found)
    assert regrets([far], store_of(tmp_path / "far", far))["nearest"]["points"] == 0, "its own is left out"


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
