"""Shared by every test: the GPU markers, and ``tests/`` on the import path (``from ranks import run_ranks``)."""

from __future__ import annotations

import gc
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
    config.addinivalue_line(
        "markers", "multi_gpu(n=2, own=False): needs n CUDA GPUs of one host, which ranks may share but for own=True"
    )


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, every test that needs more GPUs than there are."""
    from gpus import num_gpus  # found since the path is extended

    for item in items:
        markers = list(item.iter_markers("multi_gpu"))
        needed = max((each.kwargs.get("n", 2) for each in markers), default=bool(item.get_closest_marker("gpu")))
        found = num_gpus(own=any(each.kwargs.get("own") for each in markers))
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {int(needed)} CUDA GPUs, this machine has {found}"))
