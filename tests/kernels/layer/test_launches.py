"""The launches of emulated ranks in Triton, which the GPU tests compare with; who emulates them notices mistakes."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from emulated_cases import SMALL, SMALL_CASES, SMALL_FP8, SMALL_FP8_CASES
from emulated_faults import LAUNCHES, SENDING, check_alone, check_failed
from emulated_layer import EmulatedCase, EmulatedRanks, check_layer0_events, check_layer1_events
from offset_cases import check_rows_return
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor

from comet.kernels.gemm.gather_rows import OwnRows, gather_rows
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.layer import dispatch_gemm as module
from comet.kernels.layer.triton.dispatch import DispatchLists, dispatch
from comet.kernels.runtime.arguments import SymmBuffer, TileTable

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "cases",
    [SMALL_CASES[::3], slow(SMALL_CASES[1:3]), slow(SMALL_FP8_CASES)],
    ids=["32 bits", "16 and 32 bits", "block FP8"],
)
@in_ranks(1, interpret=True, timeout=400)
def test_all_steps_are_right(rank: int, world_size: int, cases: list[EmulatedCase]) -> None:
    for case in cases:
        EmulatedRanks(case, CPU).run()


@in_ranks(1, interpret=True)
def test_mistakes_are_noticed(rank: int, world_size: int) -> None:
    """The check finds numbers that are a little off, rows in another order, a row too many, and wrong events."""
    ranks = EmulatedRanks(replace(SMALL, num_tokens=(40, 5), hidden_size=144, num_panels=2), CPU, record=True)
    found = ranks.results("triton")
    for name, tensors in found.items():
        if name in ("hidden", "gate | up", "grad_rows", "grad_hidden"):  # the other tensors are computed from these
            continue
        for off in ([each * (1 + 2**-10) for each in tensors], [each.roll(1, 0) for each in tensors]):
            with pytest.raises(AssertionError, match=f"two: {name}"):
                ranks.check(found | {name: off})
    plan, recorder, epoch = ranks.plans[0], ranks.pools[0].recorder, int(ranks.pools[0].epoch)
    assert recorder is not None
    with pytest.raises(AssertionError):
        check_layer0_events(plan, recorder, epoch)
    check_layer1_events(plan, recorder, epoch, num_cols=3, num_panels=2)
    for cols, panels in ((4, 2), (3, 3)):
        with pytest.raises(AssertionError):
            check_layer1_events(plan, recorder, epoch, num_cols=cols, num_panels=panels)
    ranks.pools[0].recv_rows.local[-1] = 1
    with pytest.raises(AssertionError, match="rows of rank 0"):
        ranks.check_received(lambda sent: sent)


def stand_in(
    grad_y: Tensor, w2: Tensor, out: Tensor, symm: SymmBuffer, sends: DispatchLists, table: TileTable, comm_blocks: int
) -> None:
    """In the place of hidden's gradient in CUDA C++, which leaves this rank's own rows where they are."""
    phases = table.tiles[: int(table.num_tiles), 3]
    assert bool((phases.diff() >= 0).all()), "tiles go by phase"
    dispatch(grad_y, symm, sends, table.counters)
    symm.rows[symm.rank * symm.max_tokens :][: symm.max_tokens] = torch.nan
    grads = grad_y.new_zeros(len(out), w2.shape[1])
    own = OwnRows(rows=grad_y, first=symm.rank * symm.max_tokens)
    gather_rows(symm.rows, grads, table.row_ids, table, own)
    group_gemm(grads, w2, out, table, gather=False, layout="kn", config=GemmConfig.select(out.dtype))


def beside(rank: int, world_size: int) -> None:
    for case in SMALL_CASES[1:3]:
        wanted = EmulatedRanks(case, CPU).results("triton")
        with (
            patch.object(module, "can_run", lambda *_, is_dgrad=False: is_dgrad),
            patch.object(module, "fc2_dgrad_cuda", stand_in),
        ):
            ranks = EmulatedRanks(case, CPU)
            ranks.apart = ()
            found = ranks.forward()
        for name, tensors in wanted.items():
            assert all(map(torch.equal, tensors, found[name])), f"{name} of {case}"


def alone(rank: int, world_size: int) -> None:
    for name in LAUNCHES:
        case = replace(SMALL_FP8 if "FP8" in name else SMALL, num_tokens=(20, 5), num_panels=1)
        check_alone(name, case, "cpu", "triton", timeout_s=0.002)


def failed(rank: int, world_size: int) -> None:
    case = replace(SMALL, ep=3, num_tokens=(60, 40, 50), num_experts=6, top_k=4, routing="uniform")
    for name in SENDING:
        check_failed(name, case, "cpu", "triton")


@pytest.mark.parametrize("check", [slow(beside), alone, failed])
def test_own_rows_apart_and_ranks_that_do_not_come(check: Callable[[int, int], None]) -> None:
    run_ranks(check, 1, interpret=True, timeout=240)


# ---- the case of ``test_large_offsets_gpu.py``, small: what it does was seen to work, and to notice, here


@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(379, 64), (128, 48), (1, 16)])
@in_ranks(1, interpret=True)
def test_rows_come_and_go(rank: int, world_size: int, num_tokens: int, hidden_size: int) -> None:
    check_rows_return(num_tokens, hidden_size, torch.float16, "cpu", block_rows=16)
