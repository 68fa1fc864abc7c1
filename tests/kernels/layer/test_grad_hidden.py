"""Gradients of hidden: the launches in Triton of ranks emulated in one process, and the memory of one in CUDA C++."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from emulated_cases import SMALL_LAYER0, TWO
from emulated_ranks import EPOCH
from grad_hidden_launches import Gradients, check, run_grad_hidden
from ranks import run_ranks
from torch import Tensor

from comet.kernels.gemm.gather_rows import OwnRows, gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.layer import dispatch_gemm as module
from comet.kernels.layer.triton.dispatch import DispatchConfig, DispatchLists, dispatch
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.arguments import SymmBuffer, TileTable


def play(rank: int, world_size: int) -> None:
    for case in SMALL_LAYER0:
        check(case, run_grad_hidden(case, "triton"), "Triton")
    found = run_grad_hidden(TWO, "triton")
    off = [Gradients(each.rows, each.hidden * (1 + 2**-12)) for each in found]
    with pytest.raises(AssertionError, match="off: gradient of hidden, rank 0"):
        check(TWO, off, "off")
    off = [Gradients(each.rows.roll(1, 0), each.hidden) for each in found]
    with pytest.raises(AssertionError, match="off: gradients of outputs, rank 0"):
        check(TWO, off, "off")


def stand_in(grad_y: Tensor, w2: Tensor, out: Tensor, symm: SymmBuffer, sends: DispatchLists, table: TileTable) -> None:
    """In the place of the launch in CUDA C++, which leaves this rank's own rows where they are."""
    phases = table.tiles[: int(table.num_tiles), 3]
    assert bool((phases.diff() >= 0).all()), "tiles go by phase"
    dispatch(grad_y, symm, sends, table.counters, DispatchConfig(push_cols=64))
    symm.rows[symm.rank * symm.max_tokens :][: symm.max_tokens] = torch.nan
    symm.flags[symm.rank] = EPOCH - 1
    grads = grad_y.new_zeros(len(out), w2.shape[1])
    own = OwnRows(rows=grad_y, first=symm.rank * symm.max_tokens)
    gather_rows(symm.rows, grads, table.row_ids, table, own)
    group_gemm(grads, w2, out, table, gather=False, layout="kn", config=GemmConfig.select(out.dtype))


def play_beside(rank: int, world_size: int) -> None:
    for case in SMALL_LAYER0:
        with (
            patch.object(module, "can_run", lambda *arguments, **options: True),
            patch.object(module, "fc2_dgrad_cuda", stand_in),
        ):
            found = run_grad_hidden(case, "cuda")
        check(case, found, "beside")


@pytest.mark.parametrize("emulated", [play, play_beside])
def test_ranks_played_in_one_process(emulated: Callable[[int, int], None]) -> None:
    run_ranks(emulated, 1, interpret=True, timeout=240)


def test_memory_of_a_block() -> None:
    variant = module.Variant(weights=torch.bfloat16, output=torch.bfloat16, world_size=4, is_dgrad=True)
    assert variant.shared_bytes(32) == 1024 + 4 * 53248 + 2 * 4096 + 64 + 512 + 4 * 97 == 223172
    assert variant.shared_bytes(33) - variant.shared_bytes(32) == 3 * 4
    assert variant.shared_bytes(256) <= HOPPER.shared_bytes
