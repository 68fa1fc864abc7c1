"""Decode over declared nodes of CPU ranks, by gloo and by interpreted kernels, against all experts in one place."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from decode_cases import MATRIX, DecodeCase
from decode_ranks import assert_ranks_agree, compare_step, draw_counts, gathered_inputs, shard, step_inputs
from ranks import in_ranks, run_ranks
from tiers import slow

from comet.config import MoEConfig, ParallelConfig
from comet.decode import DataParallelDecode, DecodeWeights, RankDecode, ReplicatedRunner
from comet.decode.nodes import GuestDecode, NodesDecode, ReplicatedNodesDecode
from comet.errors import CommTimeoutError, StepFailedError
from comet.kernels.decode.step import Batch
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layout import RoutedTokens

MASKED = DecodeCase(name="masked", T=3, K=2, E=8, D=16, F=32, config=MATRIX, routing="masked", seed=3)
MORE = replace(MASKED, name="more experts a token than a node has", K=3, E=4, routing="uniform", seed=5)
ONE_NODE = replace(MASKED, name="all tokens to one node", routing="to the first node", seed=7)
CASES = [MASKED, MORE, ONE_NODE]
STEPS = 3, 0, 1, 7, 64
FEW_STEPS = 3, 0, 1
OWN = 3  # most tokens of a rank's own


def open_group(case: DecodeCase, world_size: int, tp: int, **changes: Any) -> tuple[MoEConfig, ExpertGroup]:
    """Two nodes, unless ``node_size`` says otherwise."""
    moe = MoEConfig(hidden_size=case.D, ffn_size=case.F, num_experts=case.E, top_k=case.K)
    node_size = changes.pop("node_size", world_size // 2)
    parallel = ParallelConfig(ep=world_size // tp, tp=tp, node_size=node_size)
    settings: dict[str, Any] = dict(max_tokens=64, dtype=torch.float32, device="cpu", timeout_s=60.0)
    return moe, make_expert_group(moe, parallel, **(settings | changes))


def in_first_node(case: DecodeCase, batch: Sequence[torch.Tensor]) -> Batch:
    """The batch with all experts on the first of two nodes, where the case says so."""
    tokens, ids, weights = batch
    if case.routing == "to the first node":
        half = case.E // 2
        ids = (torch.arange(case.K)[None] + torch.arange(len(ids))[:, None]).int() % half
    return Batch(tokens, ids, weights)


def replicated_steps(
    rank: int, world_size: int, cases: Sequence[DecodeCase], tp: int, counts: Sequence[int], settings: dict[str, Any]
) -> list[torch.Tensor]:
    outputs = []
    dtype = settings.get("dtype", torch.float32)
    for case in cases:
        moe, group = open_group(case, world_size, tp, **settings)
        weights = shard(case, group.layout(moe), dtype, "cpu")
        by_kernels = "backend" in settings
        decode = ReplicatedNodesDecode(moe, group, max_tokens=max(counts), use_kernels=by_kernels)
        assert decode.collectives != by_kernels
        for step, count in enumerate(counts):
            inputs = in_first_node(case, step_inputs(case, step, count, dtype))
            outputs.append(decode(*inputs, weights, config=case.config if by_kernels else None))
            compare_step(case, outputs[-1], inputs, dtype, f"{case.name}, step {step}, rank {rank}")
        decode.check()
        group.close()
    return outputs


def own_steps(
    rank: int, world_size: int, cases: Sequence[DecodeCase], tp: int, settings: dict[str, Any]
) -> list[torch.Tensor]:
    dtype = settings.get("dtype", torch.float32)
    for case in cases:
        moe, group = open_group(case, world_size, tp, **settings)
        weights = shard(case, group.layout(moe), dtype, "cpu")
        by_kernels = "backend" in settings
        decode = GuestDecode(moe, group, max_tokens=OWN, use_kernels=by_kernels)
        counts = ((0,) * world_size, (OWN, *(0,) * (world_size - 1)), *draw_counts(world_size, OWN, 3, case.seed))
        for step, of_ranks in enumerate(counts):
            inputs = in_first_node(case, gathered_inputs(case, step, of_ranks, dtype)[rank])
            output = decode(*inputs, weights, config=case.config if by_kernels else None)
            compare_step(case, output, inputs, dtype, f"{case.name}, tokens {of_ranks}, rank {rank}")
        decode.check()
        group.close()
    return []


@pytest.mark.parametrize(("world_size", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_replicated_tokens_by_collectives(world_size: int, tp: int) -> None:
    assert_ranks_agree(run_ranks(replicated_steps, world_size, CASES, tp, STEPS, {}))


def test_four_nodes_add_up_in_their_order() -> None:
    assert_ranks_agree(run_ranks(replicated_steps, 4, [MASKED], 1, STEPS, {"node_size": 1}))


KERNELS: dict[str, Any] = {"backend": "cpu_shm"}


@pytest.mark.parametrize(
    ("world_size", "cases", "settings"),
    [
        (2, CASES, KERNELS),
        (2, [MASKED], KERNELS | {"dtype": torch.float16}),
        (4, [MASKED], KERNELS),
        slow(3, [replace(MASKED, E=6)], KERNELS | {"node_size": 1}),
    ],
)
def test_replicated_tokens_by_kernels(world_size: int, cases: list[DecodeCase], settings: dict[str, Any]) -> None:
    counts = (64, 3) if "dtype" in settings else FEW_STEPS  # 64 take all rows of a leg
    assert_ranks_agree(run_ranks(replicated_steps, world_size, cases, 1, counts, settings, interpret=True))


@pytest.mark.parametrize(("world_size", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_own_tokens_by_collectives(world_size: int, tp: int) -> None:
    run_ranks(own_steps, world_size, CASES, tp, {})


@pytest.mark.parametrize(
    ("world_size", "cases", "settings"),
    [(2, CASES, KERNELS), (2, [MASKED], KERNELS | {"dtype": torch.float16}), (4, [MASKED], KERNELS)],
)
def test_own_tokens_by_kernels(world_size: int, cases: list[DecodeCase], settings: dict[str, Any]) -> None:
    run_ranks(own_steps, world_size, cases, 1, settings, interpret=True)


def example(rank: int, world_size: int) -> torch.Tensor:
    """The docstring of ``comet.decode.nodes``: in the first column experts 1 and 2 give 32 and 3."""
    case = DecodeCase(name="example", T=1, K=2, E=4, D=16, F=16)
    moe, group = open_group(case, world_size, 1)
    gives = torch.tensor([0.0, 32.0, 3.0, 0.0])[2 * rank : 2 * rank + 2]
    w1, w2 = torch.zeros(2, 32, 16), torch.zeros(2, 16, 16)
    w1[:, 0, 0], w1[:, 16, 0] = 32.0, 1.0  # silu(32) is 32 in float32
    w2[:, 0, 0] = gives / 32
    slots = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]][rank], dtype=torch.int32)
    token, ids, weights = torch.zeros(1, 16), torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.5, 2.0]])
    token[0, 0] = 1.0
    decode = ReplicatedNodesDecode(moe, group, max_tokens=1)
    given = token, ids, weights, DecodeWeights(w1=w1, w2=w2, slots=slots)
    assert float(decode.inner(*given)[0, 0]) == (16.0, 6.0)[rank]
    output = decode(*given)
    group.close()
    return output


def test_example() -> None:
    for output in run_ranks(example, 2):
        assert output[0].tolist() == [22.0] + [0.0] * 15


@in_ranks(4)
def test_runners_take_these_steps_and_the_layer_more_tokens(rank: int, world_size: int) -> None:
    moe, group = open_group(MASKED, world_size, 1)
    weights = shard(MASKED, group.layout(moe), torch.float32, "cpu")
    runner, own = ReplicatedRunner(moe, group, 4), DataParallelDecode(moe, group)
    assert (runner.decode.max_tokens, runner.captured_tokens, own.decode_tokens) == (4, 0, 16)
    assert isinstance(runner.decode_on_ranks, NodesDecode)
    for count in (3, 5):
        inputs = step_inputs(MASKED, count, count, torch.float32)
        compare_step(MASKED, runner(RoutedTokens(*inputs), weights.w1, weights.w2), inputs, torch.float32, "replicated")
    for counts in ((3, 0, 16, 1), (0, 17, 0, 2)):
        batch = gathered_inputs(MASKED, counts[0], counts, torch.float32)[rank]
        compare_step(MASKED, own(RoutedTokens(*batch), weights.w1, weights.w2), batch, torch.float32, "own")
    with pytest.raises(ValueError, match="decode_tokens=17 must be at least 0 and at most 16"):
        DataParallelDecode(moe, group, 17)
    for each in (runner, own):
        each.check()
        each.restart()
    group.close()


@in_ranks(2)
def test_what_is_refused_breaks_nothing(rank: int, world_size: int) -> None:
    moe, group = open_group(MASKED, world_size, 1)
    weights = shard(MASKED, group.layout(moe), torch.float32, "cpu")
    for decode in (ReplicatedNodesDecode(moe, group, max_tokens=3), GuestDecode(moe, group, max_tokens=3)):
        tokens, ids, routing = inputs = step_inputs(MASKED, 0, 3, torch.float32)
        with pytest.raises(ValueError, match="T=4 tokens must be at most max_tokens=3"):
            decode(*step_inputs(MASKED, 0, 4, torch.float32), weights)
        with pytest.raises(ValueError, match=r"tokens of shape \(3, 8\) must be"):
            decode(tokens[:, :8], ids, routing, weights)
        with pytest.raises((ValueError, StepFailedError), match=r"top_k_ids .*contain (8|6 bad ids)"):
            decode(tokens, torch.full_like(ids, 8).long(), routing, weights)
        compare_step(MASKED, decode(*inputs, weights), inputs, torch.float32, "after what was refused")
    group.close()


def hurry(decode: NodesDecode) -> None:
    """Shorten the deadline of waits for other nodes to 2,500 polls, once all ranks are here."""
    dist.barrier()
    if decode.legs is not None:
        short = [replace(leg, timeout_ns=5 * 10**7) for leg in (decode.legs.out, decode.legs.home)]
        if isinstance(decode, GuestDecode):
            decode.rails.legs = decode.legs._replace(out=short[0], home=short[1])
        else:
            decode._sums.out, decode._sums.home = short


@pytest.mark.parametrize("replicated", [True, False])
@in_ranks(2, interpret=True)
def test_a_rank_whose_node_has_failed_sends_no_sums(rank: int, world_size: int, replicated: bool) -> None:
    """Rank 0 goes on, as a GPU does whose host has not looked yet."""
    moe, group = open_group(MASKED, world_size, 1, **KERNELS)
    weights, inputs = shard(MASKED, group.layout(moe), torch.float32, "cpu"), step_inputs(MASKED, 0, 3, torch.float32)
    decode = (ReplicatedNodesDecode if replicated else GuestDecode)(moe, group, max_tokens=3, use_kernels=True)
    decode(*inputs, weights, config=MATRIX)
    hurry(decode)
    if rank == 0:
        decode.fault[0] = 1
        with patch.object(RankDecode, "check"), patch.object(NodesDecode, "check"):
            decode(*inputs, weights, config=MATRIX)
    else:
        with pytest.raises(CommTimeoutError, match=r"rank 1 waited \S+ s for rank 0 \((guests|sums)"):
            decode(*inputs, weights, config=MATRIX)
    dist.barrier()
    group.workspace.restart()
    compare_step(MASKED, decode(*inputs, weights, config=MATRIX), inputs, torch.float32, "after a restart")
    group.close()


def kill_rank_1(rank: int, world_size: int, replicated: bool, settings: dict[str, Any]) -> str:
    moe, group = open_group(MASKED, world_size, 1, timeout_s=3.0, **settings)
    weights = shard(MASKED, group.layout(moe), torch.float32, "cpu")
    kind = ReplicatedNodesDecode if replicated else GuestDecode
    decode = kind(moe, group, max_tokens=3, use_kernels="backend" in settings)
    inputs = step_inputs(MASKED, 0, 3, torch.float32)
    decode(*inputs, weights)
    hurry(decode)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommTimeoutError) as caught:
        decode(*inputs, weights)
    with pytest.raises(StepFailedError):
        decode(*inputs, weights)
    return str(caught.value)


@pytest.mark.parametrize("settings", [{}, KERNELS], ids=["collectives", "kernels"])
@pytest.mark.parametrize("replicated", [True, False])
def test_a_killed_rank_of_the_other_node_is_named(replicated: bool, settings: dict[str, Any]) -> None:
    said, _ = run_ranks(kill_rank_1, 2, replicated, settings, interpret=bool(settings), may_die=[1])
    assert re.match(r"rank 0 waited .*for rank 1 \((decode step|guests from node 1)", said), said
