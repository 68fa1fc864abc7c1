"""Tables and profiles: what is written is read, what breaks a rule is refused or ignored with one warning, no writer
loses rows, and the profiles that ship can be used.
"""

import logging
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
from comet.schedule.choice import Machine, Problem, Resolver, check_setting
from comet.schedule.table import COLUMNS, Key, Measured, Profile, Table, fastest, key_of, token_bucket

H200 = Machine()
DEVICE = H200.name
MOE = MoEConfig(num_experts=8, top_k=2, hidden_size=4096, ffn_size=14336)
SHAPE = dict(top_k=3, ffn_size=1024, num_experts=16, hidden_size=2048)
NAME = "nvidia_h200_x4.csv"


def problem_of(num_tokens: int, **changes) -> Problem:
    return replace(Problem(MOE, ParallelConfig(ep=4), num_tokens, torch.bfloat16), **changes)


def key(num_tokens: int, kernels: str = "auto", **changes) -> Key:
    return key_of(problem_of(num_tokens, **changes).columns() | {"device": DEVICE, "kernels": kernels})


def best_of(comm_blocks: int | None = 8, ms: float = 1.25) -> Measured:
    return Measured(setting=None if comm_blocks is None else OverlapConfig(comm_blocks=comm_blocks), ms=ms)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def shipped(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles that ship, an empty one."""
    root = tmp_path_factory.mktemp("configs")
    monkeypatch.setattr("comet.schedule.table.files", lambda _: root)
    (root / "profiles").mkdir()
    return root / "profiles"


def opened(folder: Path | None) -> Profile:
    return Profile.open(folder, DEVICE, 4)


def filled(folder: Path) -> Profile:
    profile = opened(folder)
    profile.put(key(2048), best_of())
    profile.put(key(8192), best_of(None))
    return profile


def test_round_trip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "not there yet"
    profile = filled(folder)
    assert profile.path == folder / NAME
    assert opened(folder).best == profile.best
    assert profile.lookup(key(8192)) == (best_of(None), True)
    before = profile.path.read_text()
    assert len(before.splitlines()) == 3
    opened(folder).put(key(8192), best_of(None))
    assert profile.path.read_text() == before, "stable text"
    assert {item.name for item in folder.iterdir()} == {NAME, NAME + ".lock"}
    assert not warnings_of(caplog)


def test_a_new_time_replaces_that_of_similar_calls(tmp_path: Path) -> None:
    filled(tmp_path)
    opened(tmp_path).put(key(2000, moe=replace(MOE, expert_bias=True)), best_of(16))
    assert sorted(item.setting.comm_blocks for item in opened(tmp_path).best.values() if item.setting) == [16]
    assert len(Table.load(tmp_path / NAME).rows) == 2


def test_of_the_table_of_a_sweep_the_fastest_rows_count(tmp_path: Path) -> None:
    failed = Measured(setting=OverlapConfig(comm_blocks=63), ms=None, failure="RuntimeError: no")
    rows = [best_of(16, 2.0), best_of(8, 1.0), best_of(32, 3.0), failed]
    assert fastest(rows) == rows[1]
    assert fastest([failed]) is None
    Table(tmp_path / NAME).put(key(64), rows)
    assert list(opened(tmp_path).best.values()) == [rows[1]]


def test_times_of_tritons_kernels_say_nothing_of_those_in_cuda(tmp_path: Path) -> None:
    profile = opened(tmp_path)
    profile.put(key(2048, "triton"), best_of(None))
    assert Resolver(profile, H200, "triton")(problem_of(2048)).setting is None, "plain was faster"
    assert Resolver(profile, H200, "auto")(problem_of(2048)).source == "default"


def test_shipped_rows_serve_where_the_users_file_has_none(tmp_path: Path, shipped: Path) -> None:
    filled(shipped)
    assert opened(None).lookup(key(2048)) == (best_of(), True)
    Table(tmp_path / NAME).put(key(2048), [best_of(48, 9.0)])
    both = opened(tmp_path)
    assert both.lookup(key(2048)) == (best_of(48, 9.0), True)
    assert both.lookup(key(8192)) == (best_of(None), True)
    both.put(key(512), best_of())
    assert len(Table.load(tmp_path / NAME).rows) == 2, "shipped rows are not copied"


@pytest.mark.parametrize(("stored", "tokens", "expected"), [
    ((512, 8192), 8192, (8192, True)), ((512, 8192), 1024, (512, False)),
    ((512, 8192), 2048, (8192, False)),  # equally near: the larger
    ((512, 8192), 2047, (8192, False)), ((512, 8192), 64, (512, False)), ((512, 8192), 32, None),
    ((512, 8192), 65536, (8192, False)), ((512, 8192), 10**6, None), ((512,), 0, None), ((), 512, None),
])  # fmt: skip
def test_nearest(tmp_path: Path, stored: tuple[int, ...], tokens: int, expected: tuple[int, bool] | None) -> None:
    profile = opened(tmp_path)
    for num in stored:
        profile.put(key(num), best_of(ms=float(num)))
    found = profile.lookup(key(tokens))
    assert (found and (found[0].ms, found[1])) == expected


@pytest.mark.parametrize("other", [
    *(dict(moe=replace(MOE, **{name: value})) for name, value in SHAPE.items()), dict(dtype=torch.float16),
    dict(parallel=ParallelConfig(ep=2, tp=2)), dict(parallel=ParallelConfig(ep=2)),
])  # fmt: skip
def test_another_shape_is_never_near(tmp_path: Path, other: dict[str, object]) -> None:
    profile = filled(tmp_path)
    assert profile.lookup(key(2048)) is not None
    assert profile.lookup(key(2048, **other)) is None


def test_token_buckets() -> None:
    assert [token_bucket(num) for num in (0, 1, 2, 3, 2896, 2897, 8192)] == [1, 1, 2, 4, 2048, 4096, 8192]


def changed(**values: str) -> Callable[[str], bytes]:
    """Return a change of the last row of a file."""

    def change(text: str) -> bytes:
        *lines, last = text.splitlines()
        cells = dict(zip(COLUMNS, last.split(","), strict=True)) | values
        return "\n".join([*lines, ",".join(cells.values()), ""]).encode()

    return change


DAMAGE: dict[str, tuple[Callable[[str], bytes], str]] = {
    "another table": (lambda text: text.replace("num_panels", "speed").encode(), "must start with the columns model,"),
    "half-written": (lambda text: text[:-40].encode(), f"{NAME}:3 must have {len(COLUMNS)} columns, not "),
    "binary": (lambda text: b"\xff\xfe\x00 binary", "must be a CSV file"),
    "empty": (lambda text: b"", "must start with the columns"),
    "setting breaks a rule": (changed(comm_blocks="0", num_panels="0"), f"{NAME}:3: num_panels=0 must be"),
    "setting of a wrong type": (changed(comm_blocks="x"), f"{NAME}:3: invalid literal"),
    "missing panels": (changed(comm_blocks="8"), f"{NAME}:3: invalid literal"),
    "negative time": (changed(ms="-1"), f"{NAME}:3: ms=-1.0 must be above 0"),
    "not a number": (changed(ms="nan"), f"{NAME}:3: ms=nan must be a finite number"),
    "tokens of a wrong type": (changed(tokens="many"), f"{NAME}:3: invalid literal"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_or_ignored_with_one_warning_and_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path, (damage, message) = filled(tmp_path).path, DAMAGE[how]
    path.write_bytes(damage(path.read_text()))
    with pytest.raises(ValueError, match=message):
        Table.load(path)
    profile = opened(tmp_path)
    assert not profile.best
    profile.put(key(512), best_of())
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"profile {path} is ignored, run `comet tune` again: {path}")
    caplog.clear()
    assert opened(tmp_path).best == profile.best
    assert not warnings_of(caplog)
    assert path.with_name(f"{NAME}.ignored").exists(), "what was ignored is kept"


def test_a_profile_of_an_older_version_is_answered_by_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nvidia_h200_x4.json").write_text("{}")
    profile = opened(tmp_path)
    (warning,) = warnings_of(caplog)
    assert "nvidia_h200_x4.json is ignored, run `comet tune` again: older versions" in warning
    profile.put(key(512), best_of())
    opened(tmp_path)
    assert len(warnings_of(caplog)) == 1


def test_cut_anywhere_never_raises_and_never_invents(tmp_path: Path) -> None:
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    path = filled(tmp_path).path
    data = path.read_bytes()
    for _ in range(60):
        damage = bytearray(data[: rng.randrange(len(data))])
        if rng.random() < 0.5:
            damage = bytearray(data)
            damage[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damage)
        for item in opened(tmp_path).best.values():
            assert item.ms
            assert item.setting is None or OverlapConfig(**asdict(item.setting)) == item.setting


def test_unreadable_path_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).mkdir()
    assert opened(tmp_path).best == {}
    assert ["Is a directory" in text for text in warnings_of(caplog)] == [True]


def test_a_good_file_that_cannot_be_read_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user; root could read it, so the test refuses by itself."""
    profile = filled(tmp_path)
    before = profile.path.read_text()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(profile.path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        unread = opened(tmp_path)
        assert unread.best == {}
        with pytest.raises(PermissionError):
            unread.put(key(512), best_of())
    assert profile.path.read_text() == before
    assert {item.name for item in tmp_path.iterdir()} == {NAME, NAME + ".lock"}
    assert opened(tmp_path).best == profile.best


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        filled(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == mode


def write_or_read(rank: int, world_size: int, folder: Path) -> int:
    """Two ranks write rows of their own, a third reads what is there until they are done: how often it could."""
    if rank < 2:
        profile = opened(folder)
        for step in range(12):
            profile.put(key(2 ** (2 * step + rank)), best_of())
    done, reads = dist.barrier(async_op=True), 0
    while not done.is_completed():
        if rank == 2 and (folder / NAME).exists():
            assert Table.load(folder / NAME).rows, "a reader never sees a part"
            reads += 1
    return reads


def test_two_writing_processes_lose_nothing(tmp_path: Path) -> None:
    *_, reads = run_ranks(write_or_read, 3, tmp_path)
    assert {bucket for _, bucket in opened(tmp_path).best} == {2**power for power in range(24)}
    assert reads > 0
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_writer_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = filled(tmp_path)
    before = profile.path.read_text()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        profile.put(key(512), best_of())
    assert profile.path.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


# ---- shipped ----

SHIPPED = sorted((Path(str(files("comet.configs"))) / "profiles").glob("*.csv"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_row_is_read_and_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = Table.load(path).rows
    assert rows
    for (columns, setting), item in rows.items():
        row = dict(zip(COLUMNS, columns, strict=False))
        sizes = {name: int(row[name]) for name in ("num_experts", "top_k", "hidden_size", "ffn_size")}
        parallel = ParallelConfig(ep=int(row["ep"]), tp=int(row["tp"]))
        dtype = getattr(torch, row["dtype"].removeprefix("torch."))
        problem = Problem(MoEConfig(**sizes), parallel, int(row["tokens"]), dtype)
        profile = Profile.open(None, row["device"], parallel.world_size)
        assert profile.path == path
        chosen = Resolver(profile, replace(H200, name=row["device"]), "auto")(problem)
        assert chosen == (setting, "profile")
        assert item.setting is not None, "the plain path is slower on every shape that was measured"
        check_setting(item.setting, problem, H200)
        assert row["kernels"] == "auto", "times of Triton's kernels are not shipped"
    assert len(profile.best) == len(rows), "profiles hold winners"
