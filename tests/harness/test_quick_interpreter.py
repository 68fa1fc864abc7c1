"""The quick interpreter computes what Triton's own computes, and keeps nothing from launch to launch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from quick_interpreter import VERSION
from rank_server import OWN_INTERPRETER
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(VERSION), reason=f"Triton {triton.__version__} is left as it is"
)


@triton.jit
def scale(values, factor):
    return values.to(tl.float32) * factor


@triton.jit
def row_sums(x_ptr, out_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, N)
    values = scale(tl.load(x_ptr + row * N + columns), 0.5)
    running = tl.cumsum(values, axis=0)
    tl.store(out_ptr + row * 2, tl.sum(values, axis=0) + tl.max(running, axis=0))
    tl.store(out_ptr + row * 2 + 1, tl.sum((columns * 1_000_003).to(tl.float32), axis=0))


@triton.jit
def bad_index(x_ptr, out_ptr, N: tl.constexpr):
    tl.static_assert(N > 64, "too narrow")


def launches(rank: int, world_size: int) -> tuple[list[torch.Tensor], str, bool]:
    """Two launches with one that fails in between; the error; whether the language was put back."""
    before = dict(vars(tl))
    x, found = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half(), []
    for _ in range(2):
        found.append(torch.zeros(3, 2))
        row_sums[(3,)](x, found[-1], 64)
        with pytest.raises(Exception, match="too narrow") as caught:
            bad_index[(1,)](x, found[-1], 64)
    return found, str(caught.value), all(vars(tl)[name] is value for name, value in before.items())


def test_results_and_errors_are_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = run_ranks(launches, 1, interpret=True)[0]
    monkeypatch.setenv(OWN_INTERPRETER, "1")
    slow = run_ranks(launches, 1, interpret=True)[0]
    assert all(torch.equal(mine, own) for mine, own in zip(quick[0], slow[0], strict=True))
    assert quick[0][0].any()
    assert quick[1:] == slow[1:]
