"""Launches whose other ranks never come, or whose own rank has failed, on one GPU: in CUDA C++ and in Triton."""

from __future__ import annotations

import pytest
from emulated_faults import LAUNCHES, SENDING, check_alone, check_failed
from emulated_ranks import EmulatedCase, Kind

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["cuda", "triton"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_rank_that_never_comes_is_named(name: str, kind: Kind) -> None:
    """All spins of all blocks give up at nearly the same time."""
    case = EmulatedCase("deadline", 2, 1, (900, 200), 8, 4, 768, 128, num_panels=3)
    check_alone(name, case, kind, deadline_ns=20_000_000, times=10)


@pytest.mark.parametrize("kind", ["cuda", "triton"])
@pytest.mark.parametrize("name", SENDING)
def test_a_rank_that_failed_sends_nothing(name: str, kind: Kind) -> None:
    check_failed(name, EmulatedCase("failed", 4, 1, (900, 200, 0, 300), 8, 4, 768, 128, num_panels=3), kind)
