"""Layers over nodes whose tokens travel by kernels: orders of passes, failures of ranks, and what they send and refuse.

Ranks are interpreted. Only a wait for a rank that never comes has a short deadline.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, run_cases, train_call
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import comet.schedule.network
from comet.errors import CommTimeoutError, StepFailedError
from comet.kernels.network.legs import Leg, Message
from comet.kernels.runtime.activation import Activation
from comet.kernels.runtime.faults import Place
from comet.layer.nodes import NodesPath
from comet.layer.rails.legs import Legs
from comet.layer.rails.network import DeviceRails, DeviceTrip
from comet.layer.sharding import local
from comet.moe import MoE

TWO = LayerCase("two nodes of one rank", 2, 1, (5, 3), node_size=1, backend="cpu_shm", max_tokens=8)
FOUR = LayerCase("two nodes of two ranks", 4, 1, (5, 3, 4, 6), num_experts=8, node_size=2, backend="cpu_shm")
DEADLINE_S = 0.2  # 10,000 polls

RIGHT_CASES = [
    replace(
        TWO, name="32 experts of a token", num_experts=64, top_k=32, num_tokens=(2, 1), hidden_size=16, ffn_size=16
    ),
    replace(TWO, name="biases", activation=Activation("clamped_swiglu"), expert_bias=True, routing="masked"),
    replace(TWO, name="odd widths", hidden_size=48, ffn_size=80, top_k=1),
]
RIGHT_CASES_OF_FOUR = [
    LayerCase("ep2 x tp2", 2, 2, (4, 2, 0, 3), ffn_size=16, relabel=3, node_size=2, backend="cpu_shm"),
    replace(FOUR, name="no tokens on a node", num_tokens=(0, 0, 3, 5)),
    replace(FOUR, name="all tokens to one node, float16", routing="first_half", top_k=3, dtype=torch.float16),
    LayerCase("four nodes of one rank", 4, 1, (3, 0, 5, 2), num_experts=8, node_size=1, calls=2, backend="cpu_shm"),
]


@pytest.mark.parametrize("cases", [RIGHT_CASES, slow(RIGHT_CASES_OF_FOUR)], ids=["two", "four"])
def test_kernels_compute_what_the_oracle_does(cases: list[LayerCase]) -> None:
    run_ranks(run_cases, cases[0].world_size, cases, "fused", interpret=True)


RING = LayerCase("ring", 4, 1, (5, 0, 140, 2), num_experts=8, node_size=1, calls=3, delay_s=0.05, backend="cpu_shm")
RING_CASES = [RING, replace(RING, name="ring, all to one node", routing="first_half", num_tokens=(3, 7, 0, 1))]


def run_rings(rank: int, world_size: int, cases: list[LayerCase], path: str) -> None:
    """The cases with memory for two of three slots, which computes as many nodes do."""
    comet.schedule.network.RING, comet.schedule.network.RING_ROWS = 2, 0
    run_cases(rank, world_size, cases, path)


@pytest.mark.parametrize("path", ["twin", slow("fused")])
def test_slots_that_take_turns_in_memory_compute_what_the_oracle_does(path: str) -> None:
    cases = [replace(case, backend="auto") for case in RING_CASES] if path == "twin" else RING_CASES
    run_ranks(run_rings, 4, cases, path, interpret=path == "fused")


def rails_of(moe: MoE) -> DeviceRails:
    path = moe.experts
    assert isinstance(path, NodesPath)
    assert isinstance(path.rails, DeviceRails)
    return path.rails


def hurry(moe: MoE, legs_s: float, inner_s: float = 60.0) -> None:
    """Set the deadlines of waits for other nodes, and of waits inside the node, once all ranks are here."""
    dist.barrier()
    rails = rails_of(moe)
    out, home, room = (leg and replace(leg, timeout_ns=int(legs_s * 1e9)) for leg in rails.legs[:3])
    rails.legs = Legs(out, home, room, rails.legs.ranks)
    rails.nodes.inner.comm.timeout_s = inner_s


def begin(layer: MoE, rank: int, number: int, run: Callable[..., Tensor] | None = None) -> Callable[[], None]:
    """A call of the layer; what is returned runs its backward pass."""
    inputs = rank_inputs(TWO, rank, number)
    x = inputs.tokens.requires_grad_()
    call = layer.routed_experts
    y = call(x, *inputs.routed[1:]) if run is None else run(call, x, *inputs.routed[1:])
    return lambda: y.backward(inputs.grad_output)


def gradients(layers: Sequence[MoE]) -> list[Tensor]:
    """Taken off the layers."""
    found = [local(each.grad).clone() for layer in layers for each in layer.expert_parameters()]
    for layer in layers:
        layer.zero_grad()
    return found


@in_ranks(2, interpret=True)
def test_calls_that_are_open_at_once_leave_the_bits_of_one_after_the_other(rank: int, world_size: int) -> None:
    moe = build_layer(TWO, rank, "fused")
    other = MoE(TWO.config, moe.group, path="fused")
    layers, calls = (moe, other), ((0, moe), (1, other), (2, moe))
    for number, layer in calls:
        begin(layer, rank, number)()
    wanted = gradients(layers)
    ends = [begin(layer, rank, number) for number, layer in calls]
    with torch.no_grad():
        other.routed_experts(*rank_inputs(TWO, rank, 3).routed)
    for end in ends:
        end()
    assert all(map(torch.equal, gradients(layers), wanted))
    for reentrant in (False, True):
        for number, layer in calls:
            begin(layer, rank, number, lambda *given, kind=reentrant: checkpoint(*given, use_reentrant=kind))()
        assert all(map(torch.equal, gradients(layers), wanted)), f"{reentrant=}"
    moe.group.workspace.check()
    moe.group.close()
    with pytest.raises(RuntimeError, match=r"used after close\(\)"):
        begin(moe, rank, 0)


def recover(moe: MoE, case: LayerCase, rank: int) -> None:
    """Restart on all ranks, each of which has heard of the failure; the next calls are right."""
    dist.barrier()
    moe.group.workspace.restart()
    hurry(moe, 60.0)
    check_call(case, rank, 0, train_call(moe, case, rank, 0), "after a restart")
    moe.group.workspace.check()
    moe.zero_grad()


@in_ranks(2, interpret=True)
def test_nodes_that_begin_different_passes_say_which(rank: int, world_size: int) -> None:
    moe = build_layer(TWO, rank, "fused")
    other, routed = MoE(TWO.config, moe.group, path="fused"), rank_inputs(TWO, rank).routed

    def without_gradients() -> None:
        with torch.no_grad():
            moe.routed_experts(*routed)

    def refused(attempts: Sequence[Callable[[], object]], *began: str) -> None:
        attempts[rank]()
        mine, theirs = began[rank], began[1 - rank]
        words = (
            rf"rank {rank} {mine}.* while rank {1 - rank} {theirs}: all ranks of a group must call its layers in one"
        )
        assert re.match(words, said := moe.group.workspace.timeout()), said
        with pytest.raises(StepFailedError, match=r"while rank \d .*call group\.workspace\.restart"):
            moe.group.workspace.check()
        recover(moe, TWO, rank)

    def begun(number: int) -> str:
        return f"began the backward pass of call {number} of layer 1"

    epoch = rails_of(moe).legs.out.epoch
    attempts = [lambda layer=layer: begin(layer, rank, 0) for layer in (moe, other)]
    refused(attempts, "called layer 1 with gradients", "called layer 2 with gradients")
    refused((attempts[0], without_gradients), "called layer 1 with gradients", "called layer 1 without gradients")
    last, ends = int(epoch), [begin(moe, rank, number) for number in range(2)]
    refused(ends, begun(last + 1), begun(last + 2))
    last, end = int(epoch), begin(moe, rank, 0)
    refused((end, attempts[1]), begun(last + 1), "called layer 2 with gradients")
    last, end = int(epoch), begin(moe, rank, 0)
    refused((end, attempts[0]), begun(last + 1), "called layer 1 with gradients")
    moe.group.close()


@in_ranks(2, interpret=True)
def test_a_rank_of_another_node_that_does_not_come_is_named(rank: int, world_size: int) -> None:
    moe = build_layer(TWO, rank, "fused")
    rails, inputs, ends = rails_of(moe), rank_inputs(TWO, rank), []
    whole = rails.put

    def put_no_sums(leg: Leg, message: Message) -> None:
        if not leg.is_home:
            whole(leg, message)

    def missed(attempt: Callable[[], object], place: str) -> None:
        """Rank 0 misses rank 1, and checks first."""
        hurry(moe, 60.0 if rank else DEADLINE_S)
        attempt()
        said = moe.group.workspace.timeout()
        if rank == 0:
            assert re.match(rf"rank 0 waited \S+ s for rank 1 \({place} from node 1, chunk 0, ", said), said
            with pytest.raises(CommTimeoutError, match=f"^rank 0 waited .* for rank 1 .{place}"):
                moe.group.workspace.check()
            with pytest.raises(StepFailedError, match=r"failed on rank 0 .* for rank 1"):
                moe.routed_experts(*inputs.routed)
        dist.barrier()
        if rank == 1:
            with pytest.raises(StepFailedError, match=f"failed on rank 0 .* for rank 1 .{place}"):
                moe.group.workspace.check()
        recover(moe, TWO, rank)

    missed(lambda: rank == 1 or moe.routed_experts(*inputs.routed), "guests")
    rails.put = put_no_sums if rank == 1 else whole
    missed(lambda: (moe.routed_experts(*inputs.routed), setattr(rails, "put", whole)), "sums")
    ends.append(begin(moe, rank, 0))
    missed(lambda: rank == 1 or ends.pop()(), "guests")
    moe.group.close()


@in_ranks(4, interpret=True)
def test_no_rank_goes_on_without_what_a_peer_of_its_node_lacks(rank: int, world_size: int) -> None:
    """First rank 1 does not come. Then rank 3 has failed inside its node, and sends nothing to the other."""
    moe, inputs = build_layer(FOUR, rank, "fused"), rank_inputs(FOUR, rank)
    pool, flags = moe.group.workspace, rails_of(moe).legs.out.flags
    assert pool.inner is not None
    inside = "^rank 0 waited .* for rank 1 .exchange of top-k ids"

    # A wait for a rank that comes, and then fails, has a longer deadline.
    longer_s = 5 * DEADLINE_S
    hurry(moe, *((DEADLINE_S, DEADLINE_S), (60.0, 60.0), (longer_s, longer_s), (DEADLINE_S, 60.0))[rank])
    if rank != 1:
        moe.routed_experts(*inputs.routed)
        said = pool.timeout() if rank == 3 else pool.inner.timeout()
        assert re.match("^rank 3 waited .* for rank 1 .guests" if rank == 3 else inside, said), said
        assert (rank == 3) == (int(pool.inner.fault[1]) == Place.ELSEWHERE)
        assert rank != 3 or not pool.inner.timeout()
        with pytest.raises((CommTimeoutError, StepFailedError), match=r"rank 1|inside its node"):
            pool.check()
    dist.barrier()
    if rank == 1:
        with pytest.raises(StepFailedError, match="failed on rank"):
            pool.check()
    recover(moe, FOUR, rank)

    hurry(moe, *((longer_s, longer_s), (DEADLINE_S, 60.0), (DEADLINE_S, DEADLINE_S), (DEADLINE_S, 60.0))[rank])
    before = flags.clone()
    if rank == 3:
        pool.inner.fault[:7] = torch.tensor([1, 1, 0, 0, 5, 4, 1])  # its kernel waited for ids
    dist.barrier()
    moe.routed_experts(*inputs.routed)
    said = pool.timeout()
    if rank == 1:
        assert re.match("^rank 1 waited .* for rank 3 .guests", said), said
        assert torch.equal(flags, before)
    dist.barrier()
    with pytest.raises((CommTimeoutError, StepFailedError)):
        pool.check()
    recover(moe, FOUR, rank)
    moe.group.close()


@pytest.mark.slow
@in_ranks(4, interpret=True)
def test_a_rank_that_does_not_tell_of_room_is_named_and_gets_no_guests(rank: int, world_size: int) -> None:
    comet.schedule.network.RING, comet.schedule.network.RING_ROWS = 2, 0
    moe = build_layer(RING, rank, "fused")
    rails, flags = rails_of(moe), rails_of(moe).legs.out.flags
    whole, lost = rails.put, {"room": rank == 3}

    def put_no_room(leg: Leg, message: Message) -> None:
        if leg is not rails.legs.room or not lost["room"]:
            whole(leg, message)

    rails.put = put_no_room
    hurry(moe, DEADLINE_S * (2 if rank == 2 else 10))
    moe.routed_experts(*rank_inputs(RING, rank).routed)
    dist.barrier()
    said = moe.group.workspace.timeout()
    if rank == 2:
        assert re.match(r"rank 2 waited \S+ s for rank 3 \(room for guests on node 3, chunk 0, ", said), said
    if rank == 3:
        assert not flags[0, :, 0].any()
    with pytest.raises((CommTimeoutError, StepFailedError)):
        moe.group.workspace.check()
    lost["room"] = False
    recover(moe, RING, rank)
    moe.group.close()


def kill_rank_1(rank: int, world_size: int) -> str:
    moe = build_layer(TWO, rank, "fused")
    hurry(moe, DEADLINE_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    moe.routed_experts(*rank_inputs(TWO, rank).routed)
    with pytest.raises(CommTimeoutError) as raised:
        moe.group.workspace.check()
    with pytest.raises(CommTimeoutError, match="for rank 1"):
        moe.group.comm.board.meet(DEADLINE_S)  # a restart begins with it
    return str(raised.value)


def test_a_rank_that_is_killed_is_named() -> None:
    said, _ = run_ranks(kill_rank_1, 2, interpret=True, may_die=[1])
    assert re.match(r"rank 0 waited \S+ s for rank 1 \(guests from node 1", said), said


@in_ranks(2, interpret=True)
def test_a_host_that_breaks_off_stops_all_until_a_restart(rank: int, world_size: int) -> None:
    moe, inputs = build_layer(TWO, rank, "fused"), rank_inputs(TWO, rank)
    rails = rails_of(moe)
    hurry(moe, 60.0 if rank else DEADLINE_S)
    if rank == 1:
        with patch.object(DeviceTrip, "guests", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            moe.routed_experts(*inputs.routed)
        assert rails.sending, "what the pass had begun to send lives on"
    dist.barrier()
    if rank == 0:
        moe.routed_experts(*inputs.routed)
    with pytest.raises(StepFailedError, match=r"forward pass failed on rank 1 .KeyboardInterrupt"):
        moe.group.workspace.check()
    recover(moe, TWO, rank)
    assert not rails.sending
    moe.group.close()


def noted(starts: list[int], put: Callable[..., None], leg: Leg, message: Message) -> None:
    starts.append(message.x.data_ptr() % 16)
    put(leg, message)


@in_ranks(2, interpret=True)
def test_ids_of_no_expert_go_nowhere_and_rows_that_are_sent_start_at_16_bytes(rank: int, world_size: int) -> None:
    """Inside a node, too, kernels take an id that no expert has for a masked one."""
    inputs = rank_inputs(replace(TWO, routing="masked", num_tokens=(5, 4)), rank)
    starts: list[int] = []
    for case in (TWO, replace(TWO, node_size=None, backend="auto")):
        moe = build_layer(case, rank, "fused")
        ids = inputs.top_k_ids.clone()
        nowhere = torch.tensor([4, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ids[ids < 0] = nowhere.repeat(4)[: int((ids < 0).sum())]
        assert not torch.equal(ids, inputs.top_k_ids)
        odd = torch.cat([torch.zeros(1), inputs.tokens.flatten()])[1:].view_as(inputs.tokens)
        assert odd.data_ptr() % 16
        if case is TWO:
            rails_of(moe).put = partial(noted, starts, rails_of(moe).put)
        with torch.no_grad():
            found = moe.routed_experts(odd, ids, inputs.top_k_weights)
            assert torch.equal(found, moe.routed_experts(*inputs.routed))
        moe.group.workspace.check()
        moe.group.close()
    assert starts == [0] * 4
