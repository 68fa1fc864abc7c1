"""Shared by every test: the GPU markers, and ``tests/`` on the import path (``from ranks import run_ranks``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; side by side, test processes share the cores."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    config.addinivalue_line("markers", "gpu: needs one CUDA GPU")
    config.addinivalue_line("markers", "multi_gpu(n=2): needs n CUDA GPUs of one host")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, every test that needs more GPUs than there are."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        needed = 1 if item.get_closest_marker("gpu") else 0
        if (marker := item.get_closest_marker("multi_gpu")) is not None:
            needed = marker.kwargs.get("n", marker.args[0] if marker.args else 2)
        if num_gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPUs, this machine has {num_gpus}"))
