"""Recorded operations in the place of CUDA graphs, for the tests on CPUs."""

from __future__ import annotations

import pytest
from generate_cases import Captures
from graphed_cases import record_on_cpu


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return record_on_cpu(monkeypatch)
