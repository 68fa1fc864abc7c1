"""Shared by every test: GPU markers, threads of tests on CPUs, and the helpers of ``support`` on the import path."""

import gc
from collections.abc import Iterator

import pytest
import support  # noqa: F401 - puts the helpers on the import path
import torch

import comet  # noqa: F401 - pytest imports the clone's __init__.py: this keeps it from being taken for the package


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; side by side, test processes share the cores."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    config.addinivalue_line("markers", "gpu: needs one CUDA GPU")
    config.addinivalue_line(
        "markers", "multi_gpu(n=2, own=False): needs n CUDA GPUs of one host, which ranks may share but for own=True"
    )


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported by now, because all of it stays."""
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


@pytest.fixture(autouse=True, scope="module")
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests without a GPU, and the programs that they start, compute in one thread, as their ranks do.

    Several threads make tensors of these sizes slower, and far slower while other processes compute. Files of tests
    that need GPUs end with ``_gpu``.
    """
    if request.path.stem.endswith("_gpu"):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test ask for kernels on a CPU that it does not launch: this process made them without the interpreter."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
