"""A candidate that meets a deadline while it is measured fails alone: the ranks recover and measure the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from late import hurry
from ranks import run_ranks
from torch import Tensor
from training_cases import Rank

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.launch.config import compose, make_job
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.paths import ExpertPath, make_path
from comet.measure import layers as measure
from comet.measure.layers import measure_layer
from comet.measure.tune import tune_job
from comet.tuner.problem import Problem
from comet.tuner.profile import ProfileStore

MOE = MoEConfig(num_experts=4, top_k=2, hidden_size=32, ffn_size=32)
TOKENS = 40
DEADLINE_S = 0.3  # from the harm on, not before: a rank may be slow
BAD = OverlapConfig(comm_blocks=16, num_panels=1)
SETTINGS = [None, OverlapConfig(comm_blocks=8), OverlapConfig(comm_blocks=32), BAD]  # often plain comes after BAD


def leave_fault(group: ExpertGroup) -> None:
    """What kernels leave whose wait met its deadline: rank 3 was waited for, at the layer 1 combine, chunk 5."""
    group.workspace.fault.copy_(torch.tensor([1, 4, 3, 5, 9, 8, 1, 0]))


def no_harm(group: ExpertGroup) -> None:
    """To the ranks that are not broken."""


def raise_timeout(group: ExpertGroup) -> None:
    """As the twin does; before the path ran, this rank's epoch stays behind, and the others wait for it in vain."""
    raise RuntimeError("rank 1 was asleep")


def break_call(number: int, harm: Callable[[ExpertGroup], None], *, after: bool) -> list[int]:
    """Do ``harm`` before or after call ``number`` of the path with ``BAD``; the list fills with its calls."""

    def harm_in_a_hurry(group: ExpertGroup) -> None:
        hurry(group.comm, DEADLINE_S)
        harm(group)

    calls: list[int] = []

    def broken(name: str, moe: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None) -> ExpertPath:
        path = make_path(name, moe, group, overlap)

        def run(*arguments: Tensor) -> Tensor:
            calls.append(len(calls))
            if calls[-1] == number and not after:
                harm_in_a_hurry(group)
            output = path(*arguments)
            if calls[-1] == number and after:
                harm_in_a_hurry(group)
            return output

        return run if overlap == BAD else path

    measure.make_path = broken
    return calls


def measure_with_harm(
    rank: int, world_size: int, number: int, harm: str
) -> tuple[list[float | str | None], int, list[int], bool]:
    """Times or reasons; calls of ``BAD``; epoch and fault; and whether the layer still computes what plain computes."""
    do_harm = leave_fault if harm == "fault" else raise_timeout
    calls = break_call(number, do_harm if rank == world_size - 1 else no_harm, after=harm != "raise before")
    parallel = ParallelConfig(ep=world_size)
    group = make_expert_group(MOE, parallel, max_tokens=TOKENS, dtype=torch.float32, device="cpu", timeout_s=60.0)
    problem = Problem(MOE, parallel, TOKENS, torch.float32)
    found = [item.failure or item.ms for item in measure_layer(problem, SETTINGS, group, rounds=3)]
    group.comm.timeout_s = 60.0
    state = [int(group.workspace.epoch), *group.workspace.fault.tolist()]
    inputs = measure.make_inputs(problem, group, seed=7)
    outputs = [inputs.run(make_path(name, MOE, group, OverlapConfig()), 0) for name in ("twin", "plain")]
    group.workspace.check()
    group.close()
    return found, len(calls), state, bool(torch.allclose(*outputs, atol=1e-5))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("harm", "number"),
    [("fault", 0), ("fault", 1), ("fault", 4), ("raise before", 0), ("raise before", 4), ("raise after", 2)],
)
def test_only_the_candidate_that_failed_is_out(world_size: int, harm: str, number: int) -> None:
    ranks = run_ranks(measure_with_harm, world_size, number, harm)
    found, num_calls, state, right = ranks[0]
    waited = "CommTimeoutError: rank {} waited 0.3 s for rank {}"
    reason = "RuntimeError: rank 1 was asleep"
    if harm == "fault":
        reason = waited.format(world_size - 1, 3) + " (layer 1 combine, chunk 5, epoch 9, saw 8)"
    elif harm == "raise before" and world_size == 2:
        reason = waited.format(0, 1) + " (exchange of top-k"
    assert str(found[3]).startswith(reason), "of the first rank that failed in this call"
    assert all(isinstance(found[place], float) for place in range(3)), found
    assert all(other[0] == found for other in ranks), "all ranks know alike"
    assert all(other[2] == state for other in ranks), "epochs agree again"
    assert state[1:] == [0] * 8
    assert all(other[3] for other in ranks), "the ranks have recovered"
    assert num_calls <= 1 + 3 + 3, "one to try it, then no more than the loop in which it failed"
    assert right


def test_tune_goes_on_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_path", make_path)  # undoes what ``break_call`` sets
    calls = break_call(3, leave_fault, after=True)
    config = make_job(compose(["model=tiny", f"tune.profiles={tmp_path}", "tune.rounds=3", "tune.tokens=[16,4]"]), 1)
    facts = tune_job(config, Rank())
    assert len(calls) > 4
    failed = [[item for item in point["candidates"] if item["measured_ms"] is None] for point in facts["points"]]
    assert [[item["setting"]["comm_blocks"] for item in items] for items in failed] == [[16], []]
    entries = ProfileStore.load(tmp_path / "cpu_x1.json", "cpu").entries
    assert {key.tokens for key in entries} == {16, 4}
