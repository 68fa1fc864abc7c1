"""Epochs near the end of their range, and their restart: a rank waits for late ranks before and after."""

import time
from dataclasses import replace

import pytest
import torch
from decode_cases import FOLD, DecodeCase
from decode_ranks import compare_step, gathered_inputs, open_rank
from emulated import emulated_group
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, poison, results
from ranks import in_ranks
from tiers import slow

from comet.comm import LocalCommunicator
from comet.comm.signals import MOST_EPOCHS, check_epoch
from comet.decode import DataParallelDecode, LocalRunner, RankDecode, ReplicatedRunner
from comet.errors import CapacityError, CommTimeoutError, EpochError
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.moe import MoE

LATE_S = {"twin": 0.1, "fused": 0.3}  # the other rank has reached its wait by then
SHAPE = WorkspaceShape(world_size=2, max_tokens=200, hidden_size=16, top_k=2, dtype=torch.float32)
EACH_ONE = DecodeCase(name="fold", T=1, K=2, E=4, D=16, F=16, config=FOLD, routing="masked", seed=3)


def test_worked_example_of_the_limit() -> None:
    check_epoch(torch.tensor([2**30], dtype=torch.int32), 0)
    with pytest.raises(EpochError, match=r"^epoch=1073741825 of rank 3 must be at most 1073741824, .*call restart\(\)"):
        check_epoch(torch.tensor([1073741825], dtype=torch.int32), 3)


def test_a_pool_says_when_it_is_due_and_restarts_all_flags_and_nothing_else() -> None:
    pools = [Workspace(comm, SHAPE) for comm in emulated_group(2, "cpu")]
    for pool in pools:
        pool.epoch.fill_(MOST_EPOCHS)
        pool.check()
        pool.epoch += 1
        with pytest.raises(EpochError, match=f"epoch={MOST_EPOCHS + 1} of rank {pool.comm.rank}"):
            pool.check()
    for pool in pools:
        for name in SHAPE.regions():
            getattr(pool, name).local.fill_(7)
    epoch = pools[0].epoch
    pools[0].restart()
    pools[0].check()
    assert pools[0].epoch is epoch, "graphs have its address"
    for name in SHAPE.regions():
        mine, theirs = (getattr(pool, name).local for pool in pools)
        assert (mine == (0 if name.endswith("_flags") else 7)).all(), name
        assert (theirs == 7).all(), "each rank zeroes its own, which it knows nobody reads"
    flags = [name for name, (_, dtype) in SHAPE.regions().items() if dtype == torch.int32]
    assert flags == ["ids", "ids_flags", "recv_flags", "combine_flags", "barrier_flags", "calls"]


def test_what_went_wrong_before_comes_first_and_a_restart_forgets_it_but_not_a_capacity() -> None:
    pool = Workspace(LocalCommunicator(torch.device("cpu")), replace(SHAPE, world_size=1))
    pool.epoch.fill_(MOST_EPOCHS + 1)
    pool.fault.copy_(torch.tensor([1, 0, 3, 17, 41, 40, 1, 99]))
    for _ in range(2):
        with pytest.raises(CommTimeoutError):
            pool.check()
    pool.restart()
    with pytest.raises(CapacityError, match="needs 99 routed rows"):
        pool.check()
    pool.check()


def call_late(moe: MoE, case: LayerCase, rank: int, late: int, late_s: float, *, between: bool) -> None:
    """One call, forward and backward, with one late rank over poisoned buffers; perhaps a restart in between."""
    poison(moe.group)
    inputs = rank_inputs(case, rank)
    x, weights = inputs.tokens.requires_grad_(), inputs.top_k_weights.requires_grad_()
    if rank == late:
        time.sleep(late_s)
    moe.zero_grad()
    y = moe.routed_experts(x, inputs.top_k_ids, weights)
    if between:
        moe.group.workspace.restart()
    poison(moe.group)
    if rank == late:
        time.sleep(late_s)
    y.backward(inputs.grad_output)
    check_call(case, rank, 0, results(moe, y, x, weights))


@pytest.mark.parametrize("path", ["twin", slow("fused")])
@in_ranks(2, interpret="path")
def test_layers_before_and_after(rank: int, world_size: int, path: str) -> None:
    """Epochs are checked after a call that passes the limit, after a restart and after two more calls."""
    case = LayerCase("ep2", 2, 1, (40, 33))
    moe = build_layer(case, rank, path)
    pool = moe.group.workspace
    pool.epoch.fill_(MOST_EPOCHS - 1)
    call_late(moe, case, rank, 0, LATE_S[path], between=False)
    assert pool.epoch == MOST_EPOCHS + 1
    with pytest.raises(EpochError):
        pool.check()
    pool.restart()
    assert pool.epoch == 0
    for late in range(2):
        call_late(moe, case, rank, late, LATE_S[path], between=late == 0)
    pool.check()
    assert pool.epoch == 3
    moe.group.close()


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("replicated", [False, True])
@in_ranks(2, interpret="use_kernels")
def test_decode_before_and_after(rank: int, world_size: int, use_kernels: bool, replicated: bool) -> None:
    """Steps run before and after a restart, with one rank late in each in turn."""
    comm, weights = open_rank(rank, world_size, EACH_ONE, 1, torch.float32, "cpu")
    decode = RankDecode(comm, hidden_size=16, max_tokens=1, replicated=replicated, use_kernels=use_kernels)
    decode.epoch.fill_(MOST_EPOCHS - 3)
    epoch, words = decode.epoch, [decode.words, *([] if decode.gather is None else [decode.gather.words])]
    for step in range(6):
        if step == 3:
            decode.check()
            decode.epoch += 1
            with pytest.raises(EpochError, match=f"epoch={MOST_EPOCHS + 1} of rank {rank}"):
                decode.check()
            decode.restart()
            assert decode.epoch is epoch
            assert not epoch.any()
            assert not any(each.local.any() for each in words)
            comm.barrier()
        inputs = gathered_inputs(EACH_ONE, step, (1, 1), torch.float32)[0 if replicated else rank]
        if step % 2 == rank:
            time.sleep(0.1)
        output = decode(*inputs, weights, config=FOLD if use_kernels else None)
        compare_step(EACH_ONE, output, inputs, torch.float32, f"step {step}, rank {rank}")
    decode.check()
    assert epoch.tolist() == [3]
    comm.barrier()
    comm.close()


@in_ranks(2)
def test_runners_restart_all_they_check(rank: int, world_size: int) -> None:
    case = LayerCase("ep2", 2, 1, (8, 8))
    moe = build_layer(case, rank, "twin")
    for runner in (ReplicatedRunner(case.config, moe.group), DataParallelDecode(case.config, moe.group)):
        assert runner.decode_on_ranks is not None
        for epoch in (moe.group.workspace.epoch, runner.decode_on_ranks.epoch):
            epoch.fill_(MOST_EPOCHS + 1)
            with pytest.raises(EpochError):
                runner.check()
            runner.restart()
            runner.check()
    moe.group.close()
    LocalRunner(2).restart()
