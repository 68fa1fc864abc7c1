"""The profile store: what is written is read, what is damaged is ignored with one warning, no writer loses entries,
and those that ship can be used.
"""

import json
import logging
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.tuner.choice import check_setting, resolve
from comet.tuner.problem import Machine, Problem
from comet.tuner.profile import (
    VERSION,
    Measured,
    ProfileEntry,
    ProfileKey,
    ProfileStore,
    profile_path,
    read_entries,
    token_bucket,
)

H200 = Machine()
DEVICE = H200.name
MOE = MoEConfig(num_experts=8, top_k=2, hidden_size=4096, ffn_size=14336)
SHAPE = dict(top_k=3, ffn_size=1024, num_experts=16, hidden_size=2048)


def problem_of(num_tokens: int, **changes) -> Problem:
    return replace(Problem(MOE, ParallelConfig(ep=4), num_tokens, torch.bfloat16), **changes)


def entry_of(num_tokens: int, comm_blocks: int | None = 8, device: str = DEVICE) -> ProfileEntry:
    setting = None if comm_blocks is None else OverlapConfig(comm_blocks=comm_blocks)
    measured = (
        Measured(setting=setting, ms=1.25),
        Measured(setting=OverlapConfig(comm_blocks=63), ms=None, failure="RuntimeError: no"),
        Measured(setting=OverlapConfig(comm_blocks=62), ms=2.5),
    )
    key = ProfileKey.create(problem_of(num_tokens), device)
    return ProfileEntry(key=key, measured=measured, commit="abc1234", date="2026-11-20")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def filled(path: Path) -> ProfileStore:
    store = ProfileStore.load(path, DEVICE)
    store.put(entry_of(2048))
    store.put(entry_of(8192, comm_blocks=None))
    return store


def test_round_trip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = profile_path(tmp_path / "not there yet", DEVICE, 4)
    assert path.name == "nvidia_h200_x4.json"
    store = filled(path)
    again = ProfileStore.load(path, DEVICE)
    entries = entry_of(2048), entry_of(8192, None)
    winners = {entry.key: replace(entry, measured=(entry.winner,)) for entry in entries}
    assert again.entries == store.entries == winners
    assert again.entries[entry_of(8192).key].winner.setting is None
    before = path.read_text()
    again.put(entry_of(2048))
    assert path.read_text() == before, "stable text"
    assert {item.name for item in path.parent.iterdir()} == {path.name, path.name + ".lock"}
    assert not warnings_of(caplog)


def test_an_entry_that_does_not_name_its_kernels_was_measured_in_triton(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    filled(path)
    content = json.loads(path.read_text())
    assert [entry.pop("kernels") for entry in content["entries"]] == ["auto", "auto"]
    content["entries"][1]["kernels"] = "auto"
    path.write_text(json.dumps(content))
    entries, trouble = read_entries(path, DEVICE)
    assert {key.tokens: entry.kernels for key, entry in entries.items()} == {2048: "triton", 8192: "auto"}
    assert not trouble


def test_times_of_tritons_kernels_say_nothing_of_those_in_cuda(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, shipped = tmp_path / "own.json", tmp_path / "shipped.json"
    ProfileStore.load(own, DEVICE).put(replace(entry_of(2048, comm_blocks=None), kernels="triton"))
    filled(shipped)
    assert resolve(problem_of(2048), ProfileStore.load(own, DEVICE, shipped), H200).setting is None, "plain was faster"
    assert not warnings_of(caplog)
    store = ProfileStore.load(own, DEVICE, shipped, in_cuda=True)
    assert resolve(problem_of(2048), store, H200).setting == entry_of(2048).winner.setting
    (warning,) = warnings_of(caplog)
    assert "own.json: has 1 entries of Triton's kernels, where CUDA C++ runs; ignored, to be measured again" in warning


def test_shipped_entries_serve_where_the_users_file_has_none(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped.json", tmp_path / "own.json"
    filled(shipped)
    store = ProfileStore.load(own, DEVICE)
    store.put(entry_of(2048, comm_blocks=48))
    both = ProfileStore.load(own, DEVICE, shipped)
    assert resolve(problem_of(2048), both, H200).setting == OverlapConfig(comm_blocks=48)
    assert resolve(problem_of(8192), both, H200).setting is None
    both.put(entry_of(512))
    assert len(ProfileStore.load(own, DEVICE).entries) == 2, "shipped entries are not copied"


@pytest.mark.parametrize(("stored", "tokens", "expected"), [
    ((512, 8192), 8192, (8192, True)), ((512, 8192), 1024, (512, False)),
    ((512, 8192), 2048, (8192, False)),  # equally near: the larger
    ((512, 8192), 2047, (8192, False)), ((512, 8192), 64, (512, False)), ((512, 8192), 32, None),
    ((512, 8192), 65536, (8192, False)), ((512, 8192), 10**6, None), ((512,), 0, None), ((), 512, None),
])  # fmt: skip
def test_nearest(tmp_path: Path, stored: tuple[int, ...], tokens: int, expected: tuple[int, bool] | None) -> None:
    store = ProfileStore.load(tmp_path / "p.json", DEVICE)
    for num in stored:
        store.put(entry_of(num))
    found = store.lookup(problem_of(tokens))
    assert (found and (found[0].key.tokens, found[1])) == expected


@pytest.mark.parametrize("other", [
    *(dict(moe=replace(MOE, **{name: value})) for name, value in SHAPE.items()), dict(dtype=torch.float16),
    dict(parallel=ParallelConfig(ep=2, tp=2)), dict(parallel=ParallelConfig(ep=2)),
])  # fmt: skip
def test_another_shape_is_never_near(tmp_path: Path, other: dict[str, object]) -> None:
    store = filled(tmp_path / "p.json")
    assert store.lookup(problem_of(2048)) is not None
    assert store.lookup(problem_of(2048, **other)) is None


def test_token_buckets() -> None:
    assert [token_bucket(num) for num in (0, 1, 2, 3, 2896, 2897, 8192)] == [1, 1, 2, 4, 2048, 4096, 8192]


def edited(change: Callable[[dict, dict], object]) -> Callable[[str], bytes]:
    """A change of the content of a file and of its first entry."""

    def damage(text: str) -> bytes:
        content = json.loads(text)
        change(content, content["entries"][0])
        return json.dumps(content).encode()

    return damage


def setting(**changes: object) -> Callable[[str], bytes]:
    return edited(lambda _, raw: raw["measured"][0]["setting"].update(changes))


def winner(**changes: object) -> Callable[[str], bytes]:
    return edited(lambda _, raw: raw["measured"][0].update(changes))


WHOLE_FILE: dict[str, Callable[[str], bytes]] = {
    "other version": edited(lambda content, _: content.update(version=VERSION - 1)),
    "newer version": edited(lambda content, _: content.update(version=VERSION + 1)),
    "other device": edited(lambda content, _: content.update(device="NVIDIA H100")),
    "entries is a mapping": edited(lambda content, _: content.update(entries={})),
    "a list": lambda text: f"[{text}]".encode(),
    "half-written": lambda text: text[: len(text) // 2].encode(),
    "deep": lambda text: b"[" * 100_000,
    "binary": lambda text: b"\xff\xfe\x00 binary",
    "empty": lambda text: b"",
}
ONE_ENTRY: dict[str, Callable[[str], bytes]] = {
    "entry of another device": edited(lambda _, raw: raw["key"].update(device="NVIDIA H100")),
    "setting breaks a rule": setting(num_panels=0),
    "setting of a wrong type": setting(comm_blocks="8"),
    "boolean": setting(comm_blocks=True),
    "unknown knob": setting(speed=1),
    "removed knob": winner(setting={"transport": "push"}),
    "missing knob": edited(lambda _, raw: raw["measured"][0]["setting"].pop("num_panels")),
    "negative time": winner(ms=-1.0),
    "huge time": winner(ms=10**400),
    "time as text": winner(ms="1.0"),
    "not a number": winner(ms=math.nan),
    "no candidate ran": edited(lambda _, raw: raw.update(measured=[])),
    "tokens are no bucket": edited(lambda _, raw: raw["key"].update(tokens=0)),
    "entry is a list": edited(lambda content, _: content["entries"].__setitem__(0, [])),
    "unknown kernels": edited(lambda _, raw: raw.update(kernels="ptx")),
}


@pytest.mark.parametrize("how", [*WHOLE_FILE, *ONE_ENTRY])
def test_damage_is_ignored_with_one_warning_and_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = tmp_path / "p.json"
    filled(path)
    path.write_bytes((WHOLE_FILE | ONE_ENTRY)[how](path.read_text()))
    store = ProfileStore.load(path, DEVICE)
    store.put(entry_of(512))
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    rule = "transport is no longer a setting: leave it out: rows are always pushed, as by transport=push"
    assert how != "removed knob" or f"(first: {rule})" in warning
    wanted = {512} if how in WHOLE_FILE else {512, 8192}
    assert {key.tokens for key in store.entries} == wanted
    caplog.clear()
    rebuilt = ProfileStore.load(path, DEVICE)
    assert rebuilt.entries == store.entries
    assert not warnings_of(caplog)
    assert path.with_name("p.json.ignored").exists(), "what was ignored is kept"


def test_cut_anywhere_never_raises_and_never_invents(tmp_path: Path) -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    path = tmp_path / "p.json"
    entries = filled(path).entries
    data = path.read_bytes()
    for _ in range(60):
        damage = bytearray(data[: rng.randrange(len(data))])
        if rng.random() < 0.5:
            damage = bytearray(data)
            damage[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damage)
        for key, entry in ProfileStore.load(path, DEVICE).entries.items():
            for item in entry.measured:
                assert item.setting is None or OverlapConfig(**asdict(item.setting)) == item.setting
            assert key.tokens == token_bucket(key.tokens)
            assert key.device == DEVICE
    assert entries


def test_unreadable_path_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ProfileStore.load(tmp_path, DEVICE).entries == {}
    assert [f"{tmp_path}: cannot be read (IsADirectoryError" in text for text in warnings_of(caplog)] == [True]


def test_a_good_file_that_cannot_be_read_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file of another user: who runs these tests as root could read it all the same."""
    path = tmp_path / "p.json"
    entries, before = filled(path).entries, path.read_text()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        store = ProfileStore.load(path, DEVICE)
        assert store.entries == {}
        with pytest.raises(PermissionError):
            store.put(entry_of(512))
    assert path.read_text() == before
    assert {item.name for item in tmp_path.iterdir()} == {"p.json", "p.json.lock"}
    assert ProfileStore.load(path, DEVICE).entries == entries


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        filled(tmp_path / "p.json")
    finally:
        os.umask(before)
    assert (tmp_path / "p.json").stat().st_mode & 0o777 == mode


def test_entry_of_another_device_is_refused(tmp_path: Path) -> None:
    store = ProfileStore.load(tmp_path / "p.json", DEVICE)
    with pytest.raises(ValueError, match=r"device='NVIDIA H100' must be the store's device 'NVIDIA H200'"):
        store.put(entry_of(512, device="NVIDIA H100"))


def write_or_read(rank: int, world_size: int, path: Path) -> int:
    """Two ranks write entries of their own, a third reads what is there until they are done: how often it could."""
    if rank < 2:
        store = ProfileStore.load(path, DEVICE)
        for step in range(12):
            store.put(entry_of(2 ** (2 * step + rank)))
    done, reads = dist.barrier(async_op=True), 0
    while not done.is_completed():
        if rank == 2 and path.exists():
            assert json.loads(path.read_text())["version"] == VERSION, "a reader never sees a part"
            reads += 1
    return reads


def test_two_writing_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    *_, reads = run_ranks(write_or_read, 3, path)
    assert {key.tokens for key in ProfileStore.load(path, DEVICE).entries} == {2**power for power in range(24)}
    assert reads > 0
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_writer_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    store = filled(path)
    before = path.read_text()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        store.put(entry_of(512))
    assert path.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


# ---- shipped ----

SHIPPED = sorted((Path(str(files("comet.configs"))) / "profiles").glob("*.json"))


def problem_of_entry(entry: ProfileEntry) -> Problem:
    key = entry.key
    moe = MoEConfig(num_experts=key.num_experts, top_k=key.top_k, hidden_size=key.hidden_size, ffn_size=key.ffn_size)
    return Problem(moe, ParallelConfig(ep=key.ep, tp=key.tp), key.tokens, getattr(torch, key.dtype))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_entry_is_read_and_used(path: Path) -> None:
    device = json.loads(path.read_text())["device"]
    entries, trouble = read_entries(path, device)
    assert entries
    assert not trouble
    assert {entry.kernels for entry in entries.values()} == {"auto"}, "times of Triton's kernels are not shipped"
    for key, entry in entries.items():
        world_size = key.ep * key.tp
        assert path.name == profile_path(Path(), device, world_size).name
        problem, store = problem_of_entry(entry), ProfileStore.open(None, device, world_size)
        chosen = resolve(problem, store, H200)
        assert chosen.source == "profile"
        assert [chosen.setting] == [item.setting for item in entry.measured], "profiles hold winners"
        assert chosen.setting is not None, "the plain path is slower on every shape that was measured"
        check_setting(chosen.setting, problem, H200)
