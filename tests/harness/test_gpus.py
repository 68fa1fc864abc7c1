"""Which GPU a rank of a test has, where there are as many and where they share."""

from __future__ import annotations

import pytest
from gpus import SHARING, backend_of, gpu_of, need_gpus, num_gpus


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SHARING, raising=False)
    return lambda count: monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def test_each_rank_has_its_own(has) -> None:
    has(2)
    assert num_gpus() == num_gpus(own=True) == 2
    assert [gpu_of(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert backend_of(2) == "cpu:gloo,cuda:nccl"
    need_gpus(2)
    with pytest.raises(pytest.skip.Exception, match="needs 3 CUDA GPUs, this machine has 2"):
        need_gpus(3)


def test_ranks_share_where_that_is_allowed(has, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARING, "1")
    has(2)
    assert (num_gpus(), num_gpus(own=True)) == (4, 2)
    assert [gpu_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert (backend_of(2), backend_of(3)) == ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")
    need_gpus(4)
    has(0)
    assert num_gpus() == 0
