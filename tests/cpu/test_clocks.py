"""Clocks of a GPU while something runs on it: what is read, from a program that stands in for ``nvidia-smi``."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import clocks
import psutil
import pytest
import torch
from clock_cases import ANSWER, fake_smi, fake_watch
from clocks import FIELDS, INTERVAL_MS, LIMITS, Clocks, Sample, Watch, known_fields, limits_of, parse_sample, summarize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_parse_sample_example() -> None:
    assert parse_sample(f"{ANSWER}\n") == Sample(1410, 3201, 698.52, 61, 4)
    assert parse_sample("1410, [N/A], 698.52, 61, 0x0000000000000004").memory_mhz is None
    assert parse_sample("[N/A], N/A, [Not Supported], [Unknown Error], [N/A]") == Sample(*[None] * 5)
    assert parse_sample("1980,2619,75.10,30,0x1") == Sample(1980, 2619, 75.1, 30, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"line='' of nvidia-smi must have 5 fields"),
        ("1410, 3201", r"line='1410, 3201' of nvidia-smi must have 5 fields"),
        ("1410 MHz, 3201, 698.52, 61, 0x4", r"line='1410 MHz.*' of nvidia-smi must hold numbers: could not convert"),
        ("1410, 3201, 698.52, 61, Active", r"must hold numbers: invalid literal"),
        ("No devices were found", r"must have 5 fields"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sample(line)


def test_limits_example() -> None:
    assert limits_of(0) == ()
    assert limits_of(0x24) == ("software power cap", "software thermal")
    assert limits_of(0x204) == ("software power cap", "other")
    words = [limits_of(1 << bit) for bit in range(9)]
    assert [word for (word,) in words] == list(LIMITS[:-1])
    assert limits_of(0x8 | 0x40 | 0x80) == ("hardware slowdown", "hardware thermal", "hardware power brake")


def test_medians_leave_out_what_is_not_told() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        rows = [
            [draw.choice([None, float(draw.randrange(2000))]) for _ in FIELDS[:-1]]
            for _ in range(draw.randrange(1, 12))
        ]
        reasons = [draw.choice([None, draw.randrange(2**10)]) for _ in rows]
        found = summarize([Sample(*row, reason) for row, reason in zip(rows, reasons, strict=True)])
        known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        wanted = [median(column) if column else None for column in known]
        assert [found.sm_mhz, found.memory_mhz, found.watts, found.celsius] == wanted, f"seed {seed}"
        assert set(found.limits) == {word for reason in reasons for word in limits_of(reason or 0)}, f"seed {seed}"
    with pytest.raises(ValueError, match="samples=0 of nvidia-smi must be at least 1"):
        summarize([])


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unknown", [(), ("power.draw.instant",), ("clocks_event_reasons.active", "power.draw.instant")]
)
def test_names_of_older_drivers_are_found_and_said_once(
    unknown: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = fake_smi(tmp_path, unknown=" ".join(unknown))
    command = known_fields(program, speaks=True)
    fields = [clocks.OLDER[field] if field in unknown else field for field in FIELDS]
    query = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    assert command == (*program, *query, "-lms", str(INTERVAL_MS))
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"clocks: this driver has no {name}: {clocks.OLDER[name]}" for name in unknown)
    assert known_fields(program, speaks=False) == command
    assert capsys.readouterr().err == ""


def test_a_driver_that_does_not_tell_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'must answer, exit status 2: \'Field "clocks.sm" is not a valid'):
        known_fields(fake_smi(tmp_path, unknown="clocks.sm"), speaks=True)
    older = "power.draw.instant power.draw"
    with pytest.raises(ValueError, match=r'exit status 2: \'Field "power.draw" is not a valid'):
        known_fields(fake_smi(tmp_path, unknown=older), speaks=False)
    with pytest.raises(ValueError, match="line='No devices were found' of nvidia-smi must have 5 fields"):
        known_fields(fake_smi(tmp_path, answer="No devices were found"), speaks=True)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="clocks=True needs an NVIDIA GPU: device=cpu is none"):
        clocks.watch_command(torch.device("cpu"))
    monkeypatch.setattr(clocks.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="clocks=True needs nvidia-smi: PATH has no program of that name"):
        clocks.watch_command(torch.device("cuda"))


def test_the_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(clocks.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "6f-01"}))
    monkeypatch.setattr(clocks, "known_fields", lambda program, speaks: asked.append((*program, speaks)))
    clocks.watch_command(torch.device("cuda:1"), speaks=False)
    assert asked == [("/bin/nvidia-smi", "-i", "GPU-6f-01", False)]


# ---- the child -------------------------------------------------------------------------------------------------------


def soon(happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happens()


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_samples_of_a_time(tmp_path: Path) -> None:
    before = children()
    with Watch(fake_watch(tmp_path)) as watch:
        (child,) = set(children()) - set(before)
        start = time.monotonic()
        assert soon(lambda: any(at > start for at, _ in list(watch._lines)))
        assert watch.between(start, time.monotonic()) == Clocks(1410, 3201, 698.52, 61, ("software power cap",))
        with pytest.raises(ValueError, match="samples=0"):
            watch.between(start + 1e6, start + 2e6)
    assert not psutil.pid_exists(child)
    assert not watch._reader.is_alive()


def test_only_samples_of_that_time_count() -> None:
    watch = Watch(("none",))
    watch._lines = [(float(at), f"{1000 + at}, 1, 1, 1, {hex(1 << at)}\n") for at in range(6)]
    found = watch.between(2, 4)
    assert (found.sm_mhz, found.limits) == (1003, LIMITS[2:5])


def test_the_child_ends_when_the_caller_raises(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(KeyboardInterrupt), Watch(fake_watch(tmp_path)):
        raise KeyboardInterrupt
    assert children() == before


@pytest.mark.parametrize(
    ("script", "start_s", "message"),
    [
        ("print('Failed to initialize NVML')", 60.0, "line='Failed to initialize NVML' of nvidia-smi must have 5"),
        ("import sys; sys.exit(3)", 60.0, "must print a sample in that time"),
        ("import time; time.sleep(600)", 0.1, "start_s=0.1: .* must print a sample in that time"),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(600)", 60, "'x'"),
    ],
)
def test_a_child_that_tells_nothing_is_ended(
    script: str, start_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "END_S", 0.1)
    before = children()
    with pytest.raises(ValueError, match=message), Watch((sys.executable, "-c", script), start_s):
        pytest.fail("no sample came")
    assert children() == before


def test_a_child_that_ends_early_gives_no_samples(tmp_path: Path) -> None:
    with Watch(fake_smi(tmp_path)) as watch:
        assert soon(lambda: not watch._reader.is_alive())
        with pytest.raises(ValueError, match="samples=0"):
            watch.between(time.monotonic(), time.monotonic())


def test_the_child_ends_when_this_process_is_killed(tmp_path: Path) -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r}); import clocks\n"
        f"with clocks.Watch({fake_watch(tmp_path)!r}) as watch:\n"
        "    print(watch._child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    assert soon(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
