"""Captures of CUDA graphs, as far as no GPU is needed."""

import gc
from contextlib import nullcontext

import pytest
import torch

from comet.utils import graphs


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_cycle_is_collected_during_a_capture(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle may hold a graph, which must not be destroyed while another one is captured."""
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: type("Graph", (), {"replay": None})())
    monkeypatch.setattr(graphs, "release_random_numbers", lambda _: None)

    def fails() -> None:
        assert not gc.isenabled()
        raise RuntimeError("of the function")

    if not was_enabled:
        gc.disable()
    try:
        assert graphs.capture(gc.isenabled, None, [])[1] is False
        assert gc.isenabled() == was_enabled
        with pytest.raises(RuntimeError, match="of the function"):
            graphs.capture(fails, None, [])
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
