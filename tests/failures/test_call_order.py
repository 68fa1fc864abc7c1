"""Calls that are open at once are right where all ranks begin and end them in one order, and else refused by number.

Several calls of a layer are open at once under pipeline schedules, and where micro-batches are left out.
"""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, train_call
from ranks import in_ranks
from tiers import slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comet.errors import CommTimeoutError, StepFailedError
from comet.layer.sharding import local
from comet.moe import MoE

CASES = (LayerCase("ep2", 2, 1, (40, 33)), LayerCase("tp2", 1, 2, (40, 40)))
SYMMETRIC = ("twin", "fused")


def begin(layer: MoE, case: LayerCase, rank: int, number: int, **checkpointed: bool) -> Callable[[], None]:
    """A call of the layer; what is returned runs its backward pass."""
    inputs = rank_inputs(case, rank, number)
    x = inputs.tokens.requires_grad_()
    if checkpointed:
        y = checkpoint(layer.routed_experts, x, *inputs.routed[1:], **checkpointed)
    else:
        y = layer.routed_experts(x, *inputs.routed[1:])
    return lambda: y.backward(inputs.grad_output)


def gradients(layers: Sequence[MoE]) -> list[Tensor]:
    """Taken off the layers."""
    found = [
        local(each.grad).clone() for layer in layers for each in layer.expert_parameters() if each.grad is not None
    ]
    for layer in layers:
        layer.zero_grad()
    return found


def refused(attempt: Callable[[], object], moe: MoE, path: str) -> str:
    """Return the message of a refused attempt; all ranks go on behind it."""
    try:
        attempt()
        moe.group.workspace.check()
    except (ValueError, StepFailedError) as error:
        said = str(error)
    else:
        raise AssertionError(f"{path}: not refused")
    dist.barrier()
    if path == "fused":  # GPUs need it, too
        moe.group.workspace.restart()
    moe.zero_grad()
    return said


@pytest.mark.parametrize("path", ["twin", slow("fused"), "plain", slow("reference")])
@in_ranks(2, interpret="path")
def test_calls_that_are_open_at_once_end_in_one_order_or_are_refused(rank: int, world_size: int, path: str) -> None:
    for case in CASES[:1] if path == "fused" else CASES:  # the interpreter is slow
        moe = build_layer(case, rank, path)
        other = MoE(case.config, moe.group, path=path)
        check_right_orders(case, rank, moe, other, path)
        for said, kinds in refusals(case, rank, moe, other, path):
            # A rank of the fused path may be the second to look, and then finds the note of the first.
            wanted = rf"rank \d {kinds[0]}.* while rank \d {kinds[-1]}.*: all ranks of a group must"
            assert re.search(wanted, said), said
            if "backward" in kinds[0] + kinds[-1] and path != "fused":
                assert said.endswith("left out on all of them, or on none"), said
            check_call(case, rank, 7, train_call(moe, case, rank, 7), f"{path} after {said}")
        moe.group.close()


def check_right_orders(case: LayerCase, rank: int, moe: MoE, other: MoE, path: str) -> None:
    """Schedules alike on all ranks leave the bits of one call after the other."""
    layers, numbers = (moe, other), [(0, moe), (1, moe), (2, other), (3, moe)][: 2 if path == "fused" else 4]
    for number, layer in numbers:
        begin(layer, case, rank, number)()
    wanted = gradients(layers)
    ends = [begin(layer, case, rank, number) for number, layer in numbers]
    for end in ends:  # GPipe's way, first in, first out
        end()
    assert all(map(torch.equal, gradients(layers), wanted))
    if path == "fused":
        return
    queue = [begin(moe, case, rank, 0)]
    for number, layer in numbers[1:]:  # one forward, one backward, with two open calls
        queue.append(begin(layer, case, rank, number))
        queue.pop(0)()
    queue.pop()()
    assert all(map(torch.equal, gradients(layers), wanted))
    for use_reentrant in (False, True):
        ends = [begin(layer, case, rank, number, use_reentrant=use_reentrant) for number, layer in numbers]
        for end in ends:
            end()
        assert all(map(torch.equal, gradients(layers), wanted)), f"{use_reentrant=}"


def refusals(case: LayerCase, rank: int, moe: MoE, other: MoE, path: str):
    """Yield the message of each attempt, and what its ranks began."""
    ends = [begin(moe, case, rank, number) for number in range(2)]
    yield refused(ends[rank], moe, path), ["began the backward pass of call"]
    ends = [begin(moe, case, rank, number) for number in range(3)]
    del ends[rank]  # each rank's own bad micro-batch
    yield refused(lambda: [end() for end in ends], moe, path), ["began the backward pass of call"]
    ends = [begin(layer, case, rank, 0) for layer in (moe, other)]
    yield refused(ends[rank], moe, path), [r"began the backward pass of call \d+ of layer [12]"]
    if path == "fused":
        return
    yield refused(lambda: begin((moe, other)[rank], case, rank, 0), moe, path), ["called layer"]
    if path not in SYMMETRIC:  # those find out at the deadline
        end = begin(moe, case, rank, 0)
        attempt = end if rank == 0 else lambda: begin(other, case, rank, 1)
        yield refused(attempt, moe, path), ["began the backward pass of call", "called layer"]


@pytest.mark.parametrize("path", ["twin", slow("fused")])
@in_ranks(2, interpret="path")
def test_checkpointed_calls_that_ranks_end_in_other_orders_are_right(rank: int, world_size: int, path: str) -> None:
    """Each backward pass runs one of its own calls again, and ranks have different tokens then."""
    for case in CASES[1:] if path == "fused" else CASES:
        moe = build_layer(case, rank, path)
        for number in range(2):
            begin(moe, case, rank, number)()
        wanted = gradients([moe])
        ends = [begin(moe, case, rank, number, use_reentrant=False) for number in range(2)]
        for end in ends if rank else ends[::-1]:
            end()
        moe.group.workspace.check()
        for mine, theirs in zip(gradients([moe]), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        moe.group.close()


@pytest.mark.parametrize("path", ["twin", "plain", slow("reference")])
@in_ranks(2)
def test_a_rank_that_fails_before_it_sends_goes_on_at_once(rank: int, world_size: int, path: str) -> None:
    """Its next call meets the other rank's call, and each rank gets the outputs of its own tokens."""
    case = CASES[0]
    moe, inputs = build_layer(case, rank, path), rank_inputs(case, rank, rank)
    if rank == 1:
        nan, ids, weights = torch.full_like(inputs.tokens, torch.nan), *inputs.routed[1:]
        wrong = [(lambda: moe(nan), "must be finite"), (lambda: moe.routed_experts(nan[:5], ids, weights), "5")]
        wrong.append((lambda: moe.routed_experts(inputs.tokens, ids, weights[:, :1]), "top_k"))
        wrong.append((lambda: moe.routed_experts(inputs.tokens, ids[:, :1], weights[:, :1]), "top_k"))
        for attempt, message in wrong:
            with pytest.raises(ValueError, match=message):
                attempt()
    for number in range(rank, rank + 2):
        output = moe.routed_experts(*rank_inputs(case, rank, number).routed).detach()
        check_call(case, rank, number, {"output": output}, path)
    moe.group.workspace.check()
    moe.group.close()


@pytest.mark.parametrize("path", ["plain", "reference"])
@pytest.mark.parametrize("error", [ValueError("a hook"), RuntimeError("a hook"), KeyboardInterrupt()])
@in_ranks(2)
def test_a_rank_that_fails_inside_of_a_pass_by_collectives_stops_all(
    rank: int, world_size: int, path: str, error: BaseException
) -> None:
    """The others wait for this rank in a collective, which its next call must not join."""
    moe, inputs = build_layer(CASES[0], rank, path), rank_inputs(CASES[0], rank)

    def fail(*_: object) -> Tensor:
        raise error

    if rank == 1:
        moe.experts.compute = fail
        with pytest.raises(type(error)):
            moe.routed_experts(*inputs.routed)
    for _ in range(2):
        with pytest.raises((StepFailedError, CommTimeoutError), match=r"failed on rank 1 |left|waited in vain"):
            moe.routed_experts(*inputs.routed)
    with pytest.raises(StepFailedError, match="new process groups"):
        moe.group.workspace.restart()
