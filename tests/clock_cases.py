"""A stand-in for ``nvidia-smi`` in tests of the clocks: it answers once, or prints samples every few milliseconds."""

from __future__ import annotations

import sys
from pathlib import Path

ANSWER = "1410, 3201, 698.52, 61, 0x0000000000000004"
PROGRAM = """
import sys, time
answer, unknown, option = sys.argv[1], sys.argv[2].split(), " ".join(sys.argv[3:])
for field in unknown:
    if field in option:
        print(f'Field "{field}" is not a valid field to query.')
        sys.exit(2)
print(answer, flush=True)
while "-lms" in option:
    time.sleep(0.005)
    print(answer, flush=True)
"""


def fake_smi(folder: Path, answer: str = ANSWER, unknown: str = "") -> tuple[str, ...]:
    """The program, which tells ``answer`` and no fields of ``unknown``, before its options."""
    path = folder / "fake_smi.py"
    path.write_text(PROGRAM)
    return (sys.executable, str(path), answer, unknown)


def fake_watch(folder: Path, answer: str = ANSWER) -> tuple[str, ...]:
    """A command for ``Watch``."""
    return (*fake_smi(folder, answer), "-lms", "20")
