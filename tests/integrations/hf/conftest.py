"""Folders in block FP8 that several files of tests read and none writes to."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint whose sizes are no multiples of a block."""
    from hf_fp8_cases import RAGGED, published

    return published(tmp_path_factory.mktemp("ragged"), **RAGGED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint whose experts are whole blocks."""
    from hf_fp8_cases import WHOLE, published

    return published(tmp_path_factory.mktemp("whole"), **WHOLE)
