"""Which cases of a test `make test` runs, and which it leaves to `make test-slow`."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow_but(quick: Sequence[str], cases: Sequence[Any]) -> list[Any]:
    """The cases as parameters of a test, ids their names; all but those named in ``quick`` are slow."""
    assert set(quick) <= {case.name for case in cases}, f"no such case: {set(quick) - {case.name for case in cases}}"
    return [pytest.param(case, id=case.name, marks=[] if case.name in quick else [pytest.mark.slow]) for case in cases]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
