"""Checks of decode steps in which each rank brings its own tokens, eagerly and from a CUDA graph."""

from typing import Any

import torch
from decode_cases import DecodeCase
from decode_ranks import compare_step, gathered_inputs, on_device, shard
from gpus import captured
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.decode import DataParallelDecode, ReplicatedRunner
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layout import RoutedTokens

LIMIT = 5
# Tokens of even and of odd ranks: none, few, as many as decode takes, and more on one rank alone.
COUNTS = ((0, 0), (1, 0), (2, 3), (LIMIT, LIMIT), (LIMIT + 1, 0), (1, 2 * LIMIT))
REPLAYS = 30


class CountedDecode:
    """Stands in for a runner's decode over ranks, and notes this rank's tokens of every step."""

    def __init__(self, runner: DataParallelDecode) -> None:
        assert runner.decode_on_ranks is not None, "the runner decodes"
        self.decode, self.steps = runner.decode_on_ranks, []
        self.check = self.decode.check
        runner.decode_on_ranks = self

    def __call__(self, tokens: Tensor, *others: Any, **settings: Any) -> Tensor:
        self.steps.append(len(tokens))
        return self.decode(tokens, *others, **settings)


def open_group(
    case: DecodeCase, world_size: int, tp: int, dtype: torch.dtype, device: str, node_size: int | None = None
) -> tuple[MoEConfig, ExpertGroup]:
    """Nodes are joined by kernels."""
    moe = MoEConfig(hidden_size=case.D, ffn_size=case.F, num_experts=case.E, top_k=case.K)
    parallel = ParallelConfig(ep=world_size // tp, tp=tp, node_size=node_size)
    backend = "symm_mem" if node_size else "auto"
    return moe, make_expert_group(moe, parallel, max_tokens=64, dtype=dtype, device=device, backend=backend)


def check_own_tokens(
    rank: int, world_size: int, case: DecodeCase, tp: int, dtype: torch.dtype, device: str = "cpu",
    node_size: int | None = None,
) -> None:  # fmt: skip
    """Few tokens take decode and equal one process that holds all experts, more take the path of the group."""
    moe, group = open_group(case, world_size, tp, dtype, device, node_size)
    runner, weights = DataParallelDecode(moe, group, LIMIT), shard(case, group.layout(moe), dtype, device)
    steps = CountedDecode(runner).steps
    for number, counts in enumerate(COUNTS):
        of_ranks = tuple(counts[each % 2] for each in range(world_size))
        inputs = on_device(gathered_inputs(case, number, of_ranks, dtype)[rank], device)
        who = f"{case.name}, {dtype}, rank {rank} of {world_size}, tp {tp}, tokens {of_ranks}"
        bound = max(of_ranks) + number % 2  # a bound that all ranks know spares them from asking
        for most_tokens in (None, bound):
            steps.clear()
            output = runner(RoutedTokens(*inputs), weights.w1, weights.w2, most_tokens=most_tokens)
            decodes = (max(of_ranks) if most_tokens is None else most_tokens) <= LIMIT
            assert steps == [len(inputs.tokens)] * decodes, f"{who}: decode steps {steps}"
            if decodes:
                compare_step(case, output, inputs, dtype, who)
            else:
                assert torch.equal(output, runner.path(RoutedTokens(*inputs), weights.w1, weights.w2)), who
    runner.check()
    group.close()


def check_replays(
    rank: int, world_size: int, case: DecodeCase, tp: int, dtype: torch.dtype, device: str,
    node_size: int | None = None, *, replicated: bool = False,
) -> None:  # fmt: skip
    """A captured step with other tokens and other routing each time, against steps outside of the graph."""
    moe, group = open_group(case, world_size, tp, dtype, device, node_size)
    weights = shard(case, group.layout(moe), dtype, device)
    runner: Any = ReplicatedRunner(moe, group) if replicated else DataParallelDecode(moe, group, LIMIT)
    counts = tuple(each % (LIMIT + 1) for each in range(1, world_size + 1))
    own, bound = (0, {}) if replicated else (rank, {"most_tokens": LIMIT})
    given = on_device(gathered_inputs(case, 0, counts, dtype)[own], device)

    def run() -> Tensor:
        return runner(RoutedTokens(*given), weights.w1, weights.w2, **bound)

    graph, output = captured(run)
    for replay in range(REPLAYS):
        inputs = gathered_inputs(case, replay + 1, counts, dtype)[own]
        for tensor, new in zip(given, inputs, strict=True):
            tensor.copy_(new)
        graph.replay()
        assert torch.equal(output, run()), f"rank {rank}, replay {replay}: other bits than without a graph"
    compare_step(case, output, inputs, dtype, f"the last replay, rank {rank}")
    runner.check()
    group.close()
