"""The numbers of ``golden.json`` are still what this tree computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden import differences

SCRIPT = Path(__file__).parents[1] / "golden.py"


@pytest.mark.slow
def test_nothing_differs_from_what_was_recorded() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " tensors on cpu, 0 differ" in run.stdout


def test_what_differs_is_named() -> None:
    kept = {"a/float32/x": [2.0, 1.0, "00"], "a/float16/x": [2.0, 1.0, "00"], "gone": [0.0, 0.0, "00"]}
    found = {"a/float32/x": [2.001, 1.0, "01"], "a/float16/x": [2.001, 1.0, "01"], "new": [0.0, 0.0, "00"]}
    assert differences(found, kept, bits=False) == [
        "gone: is gone", "new: is new", "a/float32/x: norm 2.001 and product 1.0, recorded 2.0 and 1.0",
    ]  # fmt: skip
    assert differences(found, kept, bits=True)[2] == "a/float16/x: other bits"
    assert differences({"a": [float("nan"), 0.0, "00"]}, {"a": [0.0, 0.0, "00"]}, bits=False), "NaN is no agreement"
