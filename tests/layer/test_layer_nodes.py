"""Routed experts of groups over several nodes, on declared nodes of CPU ranks, against the one-process oracle."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, choose_runs, make_layer, open_group, run_case, run_cases, train_call
from ranks import in_ranks, logged, run_ranks
from torch.utils.checkpoint import checkpoint

import comet.comm.base
import comet.layer.nodes
import comet.layer.paths
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import AgreedError, StepFailedError
from comet.kernels.runtime.activation import Activation
from comet.layer.group import make_expert_group
from comet.layer.nodes import NodesPath, problem_over
from comet.layer.paths import CollectivePath, make_path, path_to_train
from comet.layer.sharding import local
from comet.layer.workspace import rank_pool_bytes
from comet.moe import MoE
from comet.schedule.choice import Problem
from comet.schedule.network import Runs, expected_rows, row_bytes
from comet.schedule.table import Measured, Profile, key_of
from comet.tuner.layers import recover, with_pool

EP4 = LayerCase("ep4 over 2 nodes", 4, 1, (20, 9, 0, 31), num_experts=8, node_size=2)
CASES = [
    EP4,
    replace(EP4, name="three calls, late ranks", calls=3, delay_s=0.05, seed=1),
    replace(EP4, name="no tokens on a node", num_tokens=(0, 0, 17, 5)),
    replace(EP4, name="no tokens at all", num_tokens=(0, 0, 0, 0)),
    replace(EP4, name="all tokens to one node", routing="first_half", top_k=3),
    replace(EP4, name="one expert takes all", routing="one"),
    replace(EP4, name="masked slots", routing="masked", top_k=4),
    replace(EP4, name="all slots masked", routing="none"),
    replace(EP4, name="strided, experts anywhere", strided=True, relabel=5, calls=2),
    replace(EP4, name="odd widths", hidden_size=48, ffn_size=80, num_panels=3),
    replace(EP4, name="bf16", dtype=torch.bfloat16),
    replace(EP4, name="float16", dtype=torch.float16),
    replace(EP4, name="biases", activation=Activation("clamped_swiglu"), expert_bias=True, routing="masked"),
    LayerCase("ep2 x tp2 of 8 columns", 2, 2, (14, 22, 0, 9), ffn_size=16, relabel=3, node_size=2),
    LayerCase("ep2 x tp2, biases", 2, 2, (14, 22, 0, 9), activation=Activation("geglu"), expert_bias=True, node_size=2),
    LayerCase("ep4 in FP8", 4, 1, (20, 9, 0, 31), num_experts=8, hidden_size=256, ffn_size=128, fp8=True, node_size=2),
    LayerCase("four nodes of one rank", 4, 1, (13, 150, 0, 31), num_experts=12, top_k=3, node_size=1, calls=2),
    LayerCase("more experts of a token than of a node", 4, 1, (13, 9, 0, 31), num_experts=4, top_k=3, node_size=1),
    replace(EP4, name="all experts", top_k=8, routing="masked"),
    replace(EP4, name="rows are dropped", capacity_factor=0.3, max_tokens=31, calls=2, delay_s=0.05),
    replace(EP4, name="one expert drops most", capacity_factor=0.1, max_tokens=31, routing="one", relabel=2),
    LayerCase("ep2 x tp2 drops rows", 2, 2, (14, 22, 0, 9), capacity_factor=0.4, max_tokens=22, node_size=2),
]
OPEN = dict(max_tokens=20, dtype=torch.float32, device="cpu", timeout_s=60.0)


def split_runs(rank: int, world_size: int, cases: list[LayerCase], path: str) -> None:
    """The cases with own tokens in two runs, as large pools have them, and weight gradients in one product."""
    comet.layer.nodes.MERGED_SIZE = 10**6
    choose_runs(Runs(2, is_split=True))
    run_cases(rank, world_size, cases, path)


def added_runs(rank: int, world_size: int, cases: list[LayerCase], path: str) -> None:
    """The cases with weight gradients that are added up run by run."""
    comet.layer.nodes.MERGED_SIZE = 0
    choose_runs(Runs(1, is_split=False))
    run_cases(rank, world_size, cases, path)


@pytest.mark.parametrize("runs", [added_runs, split_runs, run_cases], ids=["added", "split", "joined"])
def test_torch_over_nodes_computes_what_the_oracle_does(runs) -> None:
    run_ranks(runs, 4, CASES, "twin")


def test_kernels_over_nodes_in_the_interpreter() -> None:
    two = LayerCase("two nodes of one rank", 2, 1, (21, 13), node_size=1, routing="masked")
    run_ranks(split_runs, 2, [two, replace(two, name="float16", dtype=torch.float16)], "fused", interpret=True)


KERNEL_RAILS = LayerCase("two nodes of one rank", 2, 1, (21, 13), node_size=1, routing="masked", backend="cpu_shm")
RAIL_CASES = [
    KERNEL_RAILS,
    replace(KERNEL_RAILS, name="float16, three calls", dtype=torch.float16, calls=3),
    replace(KERNEL_RAILS, name="rows are dropped", capacity_factor=0.4, max_tokens=21, top_k=2, num_experts=2),
    replace(KERNEL_RAILS, name="more experts of a token than of a node", top_k=3, num_experts=4),
    replace(KERNEL_RAILS, name="many guests", num_tokens=(200, 0), top_k=1, num_experts=2, calls=2),
]
RAILS_OF_THREE = LayerCase(
    "three nodes of one rank", 3, 1, (13, 0, 31), num_experts=6, node_size=1, calls=2, backend="cpu_shm"
)


def test_kernels_carry_guests_in_the_interpreter() -> None:
    run_ranks(split_runs, 2, RAIL_CASES, "fused", interpret=True)
    run_ranks(added_runs, 3, [RAILS_OF_THREE], "fused", interpret=True)
    run_ranks(run_cases, 3, [RAILS_OF_THREE], "fused", interpret=True)


def outputs(rank: int, world_size: int, case: LayerCase) -> list[torch.Tensor]:
    return run_case(rank, world_size, case, "twin")


def test_late_ranks_change_no_bit() -> None:
    case = replace(EP4, dtype=torch.bfloat16, top_k=4, calls=2)
    first, second = (run_ranks(outputs, 4, replace(case, delay_s=delay)) for delay in (0.0, 0.1))
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))


@in_ranks(2)
def test_rows_that_travel_are_those_of_the_example_and_bytes_are_the_least(rank: int, world_size: int) -> None:
    """The docstring of ``comet.layer.nodes`` has the example; rank 1 has no tokens."""
    case = LayerCase("example", 2, 1, (3, 0), node_size=1)
    moe = build_layer(case, rank, "twin")
    path = moe.experts
    assert isinstance(path, NodesPath)
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]], dtype=torch.int32)[: case.num_tokens[rank]]
    rows = path.rails.rows_of(ids, trains=False)
    assert rows.tokens.tolist() == [[1, 2], []][rank]
    assert rows.send_counts == [(0, 2), (0, 0)][rank]
    assert rows.recv_counts == [(0, 0), (2, 0)][rank]
    assert path.rails.ids_in(1, ids).tolist() == [[[-1, -1], [-1, 1], [0, 1]], []][rank]
    with torch.no_grad():
        moe.routed_experts(torch.ones(len(ids), 32), ids, torch.ones(len(ids), 2))
    # Two tokens with two ids and two weights of four bytes each, and two partial sums home.
    assert path.rails.num_bytes == [2 * (32 * 4 + 2 * 8), 2 * 32 * 4][rank]
    x = torch.ones(len(ids), 32, requires_grad=True)
    moe.routed_experts(x, ids, torch.ones(len(ids), 2)).sum().backward()
    sent = [0, 0]
    dist.all_gather_object(sent, path.rails.num_bytes)
    forward, trained = (row_bytes(case.config, 4, trains=trains) for trains in (False, True))
    assert (forward, trained) == (272, 536)
    assert sum(sent) == 2 * (forward + trained)
    assert expected_rows(case.config, case.parallel, 3) == pytest.approx(2.5)
    moe.group.close()


@in_ranks(4)
def test_a_checkpoint_runs_the_forward_pass_again(rank: int, world_size: int) -> None:
    case = replace(EP4, calls=2)
    moe = build_layer(case, rank, "twin")
    for call in range(case.calls):
        inputs = rank_inputs(case, rank, call)
        x, weights = inputs.tokens.clone().requires_grad_(), inputs.top_k_weights.clone().requires_grad_()
        moe.zero_grad()
        y = checkpoint(moe.routed_experts, x, inputs.top_k_ids, weights, use_reentrant=False)
        y.backward(inputs.grad_output)
        found = dict(output=y.detach(), x=x.grad, top_k_weights=weights.grad)
        whole = train_call(moe, case, rank, call)
        assert torch.equal(found["output"], whole["output"])
        check_call(case, rank, call, whole)
        assert torch.equal(x.grad, next(iter(list(whole.values())[1:2])))
    moe.group.close()


@in_ranks(4)
def test_gradients_add_up_over_many_calls(rank: int, world_size: int) -> None:
    """Each call has a backward pass, and its gradients are those of a call alone."""
    case = replace(EP4, num_tokens=(3, 0, 5, 2), hidden_size=16, ffn_size=16)
    moe, totals = build_layer(case, rank, "twin"), [torch.zeros(())] * 2
    alone = []
    for number in range(2):
        inputs = rank_inputs(case, rank, number)
        moe.zero_grad()
        moe.routed_experts(*inputs.routed).backward(inputs.grad_output)
        alone.append([local(each.grad).clone() for each in moe.expert_parameters()])
    moe.zero_grad()
    for call in range(60):
        inputs = rank_inputs(case, rank, call % 2)
        moe.routed_experts(*inputs.routed).backward(inputs.grad_output)
        totals = [total + each for total, each in zip(totals, alone[call % 2], strict=True)]
    assert all(
        torch.equal(local(each.grad), total) for each, total in zip(moe.expert_parameters(), totals, strict=True)
    )
    moe.group.workspace.check()
    moe.group.close()


@in_ranks(4)
def test_what_cannot_run_inside_nodes_runs_plain_and_is_refused_by_name(rank: int, world_size: int) -> None:
    told = logged("comet.schedule.choice")
    config = MoEConfig(hidden_size=32, ffn_size=64, num_experts=4, top_k=2)
    refused = {
        "tp=4 must divide the 2 ranks of a node, and there are ranks 0 to 1 on": (
            config,
            ParallelConfig(tp=4, node_size=2),
        ),
    }
    for reason, (moe, parallel) in refused.items():
        group = make_expert_group(moe, parallel, **OPEN)
        with pytest.raises(ValueError, match=f"^path='twin' over nodes cannot be used: {reason}.*use path 'plain'"):
            make_path("twin", moe, group)
        assert isinstance(make_path("auto", moe, group), CollectivePath)
        assert len(told) == (rank == 0)
        assert all(reason in each and "path 'plain'" in each for each in told)
        told.clear()
        with pytest.raises(ValueError, match=f"^overlap=.*must be left out for path 'plain': {reason}"):
            make_path("auto", moe, group, OverlapConfig())
        with pytest.raises(ValueError, match=f"^capacity_factor=2.0 needs path 'fused' or 'twin'.*, and {reason}"):
            make_path("auto", replace(moe, capacity_factor=2.0), group)
        group.close()


@in_ranks(4)
def test_ids_calls_and_gradients_that_differ_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    group = make_expert_group(EP4.config, EP4.parallel, **OPEN)
    first, second = (MoE(EP4.config, group, seed=seed) for seed in (1, 2))
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    ids[:, 1] = 9 if rank == 3 else 5
    x = torch.ones(3, 32)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^top_k_ids of rank 3 contain .*\[0, num_experts=8\)"):
        first.routed_experts(x, ids, weights)
    ids[:, 1] = 5
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"^rank 0 called layer 1 without .* while rank 2 called layer"),
    ):
        (second if rank == 2 else first).routed_experts(x, ids, weights)
    wanted = pytest.raises(AgreedError, match=r"^requires_grad=\[True, False, True, True\] of tokens")
    with wanted, torch.set_grad_enabled(rank != 1):
        first.routed_experts(x, ids, weights)
    with torch.no_grad():
        output = first.routed_experts(x, ids, weights)
    assert output.isfinite().all()
    group.workspace.check()
    group.close()


@in_ranks(4)
def test_a_rank_that_breaks_off_is_named_on_both_nodes(rank: int, world_size: int) -> None:
    group = make_expert_group(EP4.config, EP4.parallel, **{**OPEN, "timeout_s": 5.0})
    moe = MoE(EP4.config, group)
    path = moe.experts
    assert isinstance(path, NodesPath)
    if rank == 3:
        path.rails.send = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with torch.no_grad(), pytest.raises(BaseException, match=r"rank 3|^$") as raised:
        moe(torch.ones(5, 32))
    assert raised.type is KeyboardInterrupt if rank == 3 else issubclass(raised.type, Exception)
    dist.barrier()
    with torch.no_grad(), pytest.raises(StepFailedError, match="the forward pass failed on rank 3"):
        moe(torch.ones(5, 32))
    with pytest.raises(StepFailedError, match="the forward pass failed on rank 3"):
        group.workspace.check()


@in_ranks(2)
def test_a_rank_whose_routing_is_refused_goes_on_at_once(rank: int, world_size: int) -> None:
    case = LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    moe, given = build_layer(case, rank, "twin"), rank_inputs(case, rank).routed
    ids, weights = given.top_k_ids, given.top_k_weights
    refused = {
        "dtype=torch.float64 of top_k_weights must be torch.float32": given._replace(top_k_weights=weights.double()),
        "dtype=torch.int64 of top_k_ids must be torch.int32": given._replace(top_k_ids=ids.long()),
        "shape=.* of top_k_weights must equal": given._replace(top_k_weights=weights[1:]),
        "shape=.* of top_k_ids must be": given._replace(top_k_ids=ids.repeat(1, 2), top_k_weights=weights.repeat(1, 2)),
    }
    for reason, wrong in refused.items():
        if rank == 1:
            with torch.no_grad(), pytest.raises(ValueError, match=f"^{reason}"):
                moe.routed_experts(*wrong)
        check_call(case, rank, 0, train_call(moe, case, rank, 0), reason)
    moe.group.workspace.check()
    moe.group.close()


@in_ranks(2)
def test_a_capture_that_fails_ends_nothing(rank: int, world_size: int) -> None:
    case = LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    moe = build_layer(case, rank, "twin")
    path = moe.experts
    assert isinstance(path, NodesPath)
    refused = pytest.raises(RuntimeError, match="capturing")
    with patch.object(comet.comm.base, "is_capturing", lambda device: True), refused, path.step("forward pass"):
        raise RuntimeError("operation not permitted when stream is capturing")
    check_call(case, rank, 0, train_call(moe, case, rank, 0))
    moe.group.close()


@in_ranks(2)
def test_times_of_one_node_choose_no_path_over_nodes(rank: int, world_size: int, tmp_path: Path) -> None:
    case = LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    problem = Problem(case.config, case.parallel, OPEN["max_tokens"], OPEN["dtype"])
    key = key_of(problem.columns() | {"device": "cpu", "kernels": "triton"})
    if rank == 0:
        Profile.open(tmp_path, "cpu", world_size).put(key, Measured(setting=None, ms=1.0))
    dist.barrier()
    for node_size, kind in ((2, CollectivePath), (1, NodesPath)):
        parallel = replace(case.parallel, node_size=node_size)
        group = make_expert_group(case.config, parallel, **OPEN, profiles=tmp_path)
        assert isinstance(make_path("auto", case.config, group), kind)
        group.close()


@in_ranks(2)
def test_few_tokens_train_plain_where_they_are_launched_over_nodes(rank: int, world_size: int) -> None:
    """Its group says that it is on GPUs; ``test_network`` has the times."""
    told, case = logged("comet.schedule.choice"), LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    config, group = case.config, open_group(case)
    assert path_to_train("auto", config, group, None, replays=False) == "auto"
    group.comm.device = torch.device("cuda")
    chosen = partial(path_to_train, "auto", config, group)
    assert [chosen(None, replays=replays) for replays in (False, True)] == ["plain", "plain"], "rails are collectives"
    assert len(told) == (rank == 0)
    assert chosen(OverlapConfig(), replays=False) == "auto"
    assert path_to_train("fused", config, group, None, replays=False) == "fused"
    assert path_to_train("auto", replace(config, capacity_factor=2.0), group, None, replays=False) == "auto"
    with patch.object(comet.layer.paths, "training_times", lambda *_: (1.0, 1.0)):
        assert chosen(None, replays=False) == "auto"
    group.comm.device = torch.device("cpu")
    group.close()


@in_ranks(2)
def test_a_deadline_inside_one_node_ends_the_step_of_all_until_a_restart(rank: int, world_size: int) -> None:
    case = LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    moe = build_layer(case, rank, "twin")
    pool = moe.group.workspace
    assert pool.inner is not None
    if rank == 1:
        pool.inner.fault[:6] = torch.tensor([1, 1, 0, 0, 5, 4])  # its kernel waited for ids
    for first in (1, 0):
        if rank == first:
            with pytest.raises(StepFailedError, match=r"inside its node, .* failed on rank 1 .*exchange of top-k ids"):
                pool.check()
        dist.barrier()
    pool.restart()
    check_call(case, rank, 0, train_call(moe, case, rank, 0))
    pool.check()
    moe.group.close()


@in_ranks(2)
def test_measured_layers_have_a_pool_of_their_own_in_each_node(rank: int, world_size: int) -> None:
    case = LayerCase("two nodes", 2, 1, (200, 190), node_size=1)
    small = make_expert_group(case.config, case.parallel, **OPEN)
    moe = make_layer(case, rank, "twin", with_pool(small, Problem(case.config, case.parallel, 200, torch.float32)))
    check_call(case, rank, 0, train_call(moe, case, rank, 0))
    path = moe.experts
    assert isinstance(path, NodesPath)
    path.nodes.inner.comm.board.note("forward pass", ValueError())
    recover(moe.group.workspace, moe.group.process_group)
    check_call(case, rank, 1, train_call(moe, case, rank, 1))
    small.close()


@in_ranks(2)
def test_a_group_over_nodes_looks_after_its_rails_and_its_pool(rank: int, world_size: int) -> None:
    case = LayerCase("two nodes", 2, 1, (7, 9), node_size=1)
    group = open_group(case)
    assert group.nodes is not None
    assert group.workspace.num_bytes == rank_pool_bytes(problem_over(case.config, group))
    # A node closes when its own ranks do; rails go, and are broken off, with the group.
    assert group.nodes.rails in group.process_groups
    assert group.nodes.rails in group.comm.process_groups
    assert group.nodes.rails not in group.nodes.inner.process_groups
    group.close()
    with patch.object(comet.comm, "kernel_obstacle", lambda device: "it runs no kernel"):
        group = make_expert_group(case.config, case.parallel, **OPEN)
    with pytest.raises(ValueError, match=r"^path='twin' over nodes .*: it runs no kernel; use path 'plain'"):
        make_path("twin", case.config, group)
    assert isinstance(make_path("auto", case.config, group), CollectivePath)
    group.close()
