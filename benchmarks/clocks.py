"""SM and memory clock, power and temperature of a GPU, and what limits its clocks, sampled while something runs on it.

A child process, ``nvidia-smi``, prints a line every ``INTERVAL_MS``; a thread stamps the lines as they come. The child
ends with the ``Watch``, and by itself, of its broken pipe, if this process is killed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from threading import Thread

import torch

from comet.config import require

FIELDS = ("clocks.sm", "clocks.mem", "power.draw.instant", "temperature.gpu", "clocks_event_reasons.active")
# What drivers call the fields that came later. Theirs of power may be a mean over the last second.
OLDER = {"power.draw.instant": "power.draw", "clocks_event_reasons.active": "clocks_throttle_reasons.active"}
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
OTHER = "other"  # reasons of later drivers
LIMITS = (*REASONS.values(), OTHER)
INTERVAL_MS = 20
START_S = 60.0  # nvidia-smi initialises all GPUs of a host first
END_S = 5.0
UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of ``nvidia-smi``; ``None`` is a value that this GPU does not tell."""

    sm_mhz: float | None
    memory_mhz: float | None
    watts: float | None
    celsius: float | None
    reasons: int | None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Medians over the samples of a time, and each of ``LIMITS`` that was active in any of them, in their order."""

    sm_mhz: float | None
    memory_mhz: float | None
    watts: float | None
    celsius: float | None
    limits: tuple[str, ...]


def parse_sample(line: str) -> Sample:
    """Read one line, whose fields are ``FIELDS``.

    Example: ``1410, 3201, 698.52, 61, 0x0000000000000004`` is 1410 MHz, 3201 MHz, 698.52 W, 61 degrees, reasons 4; in
    ``1410, [N/A], ...`` the memory clock is ``None``.

    Args:
        line: As ``nvidia-smi --format=csv,noheader,nounits`` prints it.

    Returns:
        The values; ``None`` for words in brackets and ``N/A``.

    Raises:
        ValueError: If the line is none of a sample.
    """
    words = [word.strip() for word in line.split(",")]
    require(len(words) == len(FIELDS), f"line={line.strip()!r} of nvidia-smi must have {len(FIELDS)} fields")
    *numbers, reasons = (None if word.startswith("[") or word == "N/A" else word for word in words)
    try:
        sm, memory, watts, celsius = (None if number is None else float(number) for number in numbers)
        return Sample(sm, memory, watts, celsius, None if reasons is None else int(reasons, 16))
    except ValueError as error:
        raise ValueError(f"line={line.strip()!r} of nvidia-smi must hold numbers: {error}") from error


def limits_of(reasons: int) -> tuple[str, ...]:
    """The words of a bit mask; 0x24 is ``("software power cap", "software thermal")``, a bit of no name ``other``."""
    found = tuple(word for bit, word in REASONS.items() if reasons & bit)
    return found if reasons == reasons & sum(REASONS) else (*found, OTHER)


def summarize(samples: Sequence[Sample]) -> Clocks:
    """Medians of at least one sample, ``None`` where none of them has the value; raises ``ValueError`` without any."""
    require(len(samples) > 0, f"samples={len(samples)} of nvidia-smi must be at least 1: it printed none in that time")

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    reasons = 0
    for sample in samples:
        reasons |= sample.reasons or 0
    return Clocks(
        sm_mhz=middle([sample.sm_mhz for sample in samples]),
        memory_mhz=middle([sample.memory_mhz for sample in samples]),
        watts=middle([sample.watts for sample in samples]),
        celsius=middle([sample.celsius for sample in samples]),
        limits=limits_of(reasons),
    )


def watch_command(device: torch.device, *, speaks: bool = True) -> tuple[str, ...]:
    """What to start for samples of a GPU; asks the driver once for the names that it knows.

    Args:
        device: The GPU; it is named by its UUID, because ``CUDA_VISIBLE_DEVICES`` renumbers.
        speaks: Whether to say on standard error which names are older ones.

    Returns:
        The command line for ``Watch``.

    Raises:
        ValueError: If ``device`` is no GPU, ``nvidia-smi`` is missing or does not tell what is asked.
    """
    require(device.type == "cuda", f"clocks=True needs an NVIDIA GPU: device={device} is none")
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ValueError("clocks=True needs nvidia-smi: PATH has no program of that name")
    return known_fields((program, "-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"), speaks=speaks)


def known_fields(program: Sequence[str], *, speaks: bool) -> tuple[str, ...]:
    """``watch_command`` for a program with its choice of a GPU; each unknown name of ``OLDER`` is replaced."""
    fields = list(FIELDS)
    while True:
        query = (*program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        done = subprocess.run(query, capture_output=True, text=True, timeout=START_S, check=False)
        answer = (done.stdout + done.stderr).strip()
        unknown = UNKNOWN_FIELD.search(answer)
        if unknown is None or unknown[1] not in fields or unknown[1] not in OLDER:
            break
        fields[fields.index(unknown[1])] = OLDER[unknown[1]]
        if speaks:
            print(f"clocks: this driver has no {unknown[1]}: {OLDER[unknown[1]]}", file=sys.stderr, flush=True)
    require(done.returncode == 0, f"clocks=True: nvidia-smi must answer, exit status {done.returncode}: {answer!r}")
    parse_sample(done.stdout)
    return (*query, "-lms", str(INTERVAL_MS))


class Watch(AbstractContextManager["Watch"]):
    """Samples of one GPU for as long as it is open.

    Args:
        command: Prints a line of a sample again and again (see ``watch_command``).
        start_s: Seconds until the first of them.

    Raises:
        ValueError: On entry, if there is no sample in that time; on entry or later for a line that is no sample.
    """

    def __init__(self, command: Sequence[str], start_s: float = START_S) -> None:
        self._command, self._start_s = tuple(command), start_s
        self._lines: list[tuple[float, str]] = []

    def __enter__(self) -> Watch:
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._await_first()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def between(self, start: float, end: float) -> Clocks:
        """What was sampled from ``start`` to ``end``, of ``time.monotonic``; raises ``ValueError`` if nothing was."""
        return summarize([parse_sample(line) for at, line in list(self._lines) if start <= at <= end])

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.append((time.monotonic(), line))

    def _await_first(self) -> None:
        deadline = time.monotonic() + self._start_s
        while not self._lines and self._reader.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        require(bool(self._lines), f"start_s={self._start_s}: {self._command[0]} must print a sample in that time")
        parse_sample(self._lines[0][1])

    def _end(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()
