"""The pool of symmetric memory: its size to the byte, its regions, and errors a user can cause or must understand."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from emulated import emulated_group
from plan_cases import plan_backend

from comet.comm import LocalCommunicator
from comet.comm.base import ALIGNMENT
from comet.config import MoEConfig, ParallelConfig
from comet.errors import CapacityError, CommTimeoutError
from comet.kernels.runtime import primitives
from comet.kernels.runtime.faults import ROWS_NEEDED, Place
from comet.layer.plan import PlanRules
from comet.layer.workspace import (
    Workspace,
    WorkspaceShape,
    leg_regions,
    rank_pool_bytes,
    workspace_bytes,
)
from comet.layout import ExpertLayout, round_up
from comet.router.router import watch_finite
from comet.schedule.choice import Problem

CPU = torch.device("cpu")


def make_shape(**changes) -> WorkspaceShape:
    fields = {"world_size": 1, "max_tokens": 100, "hidden_size": 64, "top_k": 2, "dtype": torch.float32}
    return WorkspaceShape(**(fields | changes))


def make_workspace(timeout_s: float = 30.0, **changes) -> Workspace:
    return Workspace(LocalCommunicator(CPU, timeout_s), make_shape(**changes))


def test_worked_example_of_the_memory_between_nodes() -> None:
    shape = make_shape(world_size=4)
    moe = MoEConfig(hidden_size=64, ffn_size=16, num_experts=4, top_k=2)
    problem = Problem(moe, ParallelConfig(ep=4, node_size=2), 100, torch.float32)
    regions = leg_regions(shape, 2)
    assert {name: dims for name, (dims, _) in regions.items() if name.startswith("home")} == {
        "home_words": (1, 528), "home_rows": (1, 128, 64), "home_flags": (1, 2, 2),
    }  # fmt: skip
    inside = workspace_bytes(replace(shape, world_size=2, max_tokens=256))  # tokens of both nodes are one run
    network = 2 * (2304 + 32768 + 256)
    assert [rank_pool_bytes(problem, backend) - inside for backend in ("auto", "cpu_shm", "nvshmem")] == [
        0, network, 2 * network,
    ]  # fmt: skip


def test_worked_example_of_workspace_bytes() -> None:
    shape = make_shape(world_size=2)
    assert shape.padded_tokens == 128
    sizes = {
        name: round_up(math.prod(dims) * dtype.itemsize, ALIGNMENT) for name, (dims, dtype) in shape.regions().items()
    }
    assert (sizes.pop("ids"), sizes.pop("weights")) == (4096, 4096)
    assert (sizes.pop("recv_rows"), sizes.pop("combine_rows")) == (65536, 65536)
    assert sizes.pop("combine_grads") == 2048
    assert list(sizes.values()) == [256, 256, 2048, 256, 256]
    assert workspace_bytes(shape) == 144384


def test_shape_of_a_layer() -> None:
    moe = MoEConfig(hidden_size=64, ffn_size=16, num_experts=4, top_k=2)
    assert WorkspaceShape.create(moe, 2, 100, torch.float32) == make_shape(world_size=2)


@pytest.mark.parametrize("seed", range(8))
def test_regions_fill_the_pool_without_overlap(seed: int) -> None:
    draw = random.Random(seed)
    world_size = draw.randint(1, 4)
    shape = make_shape(
        world_size=world_size,
        max_tokens=draw.randint(1, 400),
        hidden_size=16 * draw.randint(1, 9),
        top_k=draw.randint(1, 32),
        dtype=draw.choice([torch.float32, torch.float16, torch.bfloat16]),
    )
    print(f"seed {seed}: {shape}")
    workspaces = [Workspace(comm, shape) for comm in emulated_group(world_size, CPU)]
    for rank, workspace in enumerate(workspaces):
        ends = []
        for name, (dims, dtype) in shape.regions().items():
            region = getattr(workspace, name)
            assert (region.local.shape, region.local.dtype) == (dims, dtype)
            assert region.local.data_ptr() == int(region.pointers[rank])
            assert all(
                region.peers[peer].data_ptr() == getattr(workspaces[peer], name).local.data_ptr()
                for peer in range(world_size)
            )
            ends.append((region.local.data_ptr(), region.local.data_ptr() + region.local.nbytes))
        assert ends == sorted(ends)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert ends[-1][1] - ends[0][0] <= workspace.num_bytes == workspace_bytes(shape)
    workspaces[0].recv_rows.local.fill_(3)
    assert all(not getattr(workspaces[0], name).local.any() for name in shape.regions() if name != "recv_rows")


def test_epoch_and_deadline() -> None:
    workspace = make_workspace(timeout_s=1.5)
    assert workspace.max_tokens == 128
    assert workspace.timeout_ns == 1_500_000_000
    layout = ExpertLayout(num_experts=1, top_k=1, ep=1, tp=1, rank=0)
    backend = plan_backend(layout, workspace, PlanRules.create(16, None, 1024), use_kernels=False)
    plan = backend.plan(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    for _ in range(2):
        backend.barrier(plan)
    assert (workspace.epoch.tolist(), plan.status[3]) == ([3], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens=0 must be at least 1"),
        ({"max_tokens": -5}, r"max_tokens=-5 must be at least 1"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64 must be one of \(torch\.float32, "),
    ],
)
def test_bad_shapes_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(**changes)


def test_another_world_size_is_named() -> None:
    with pytest.raises(ValueError, match="world_size=3 of the workspace must equal the communicator's 2"):
        Workspace(emulated_group(2, CPU)[0], make_shape(world_size=3))


def test_a_pool_that_does_not_fit_says_how_much_it_needs_and_what_to_lower() -> None:
    shape = make_shape(max_tokens=2**38, hidden_size=4096)
    needed = workspace_bytes(shape)
    message = (
        rf"^max_tokens=274877906944 with hidden_size=4096, top_k=2 and world_size=1 needs {needed} bytes of symmetric "
        rf"memory per rank: num_bytes={needed} must fit cpu: 1 x {needed} bytes needed, .*; lower max_tokens$"
    )
    with pytest.raises(ValueError, match=message):
        Workspace(LocalCommunicator(CPU), shape)


def test_ranks_that_ask_for_different_pools_are_named() -> None:
    first, second = emulated_group(2, CPU)
    Workspace(first, make_shape(world_size=2))
    with pytest.raises(
        ValueError, match=r"^max_tokens=129 .* of rank 1 must equal the 144384 bytes of the other ranks"
    ):
        Workspace(second, make_shape(world_size=2, max_tokens=129))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place.BARRIER, "barrier"),
        (Place.EXCHANGE, "exchange of top-k ids"),
        (Place.LAYER0, "layer 0 dispatch"),
        (Place.PANEL, "layer 1 panel"),
        (Place.LAYER1, "layer 1 combine"),
    ],
)
def test_a_fault_record_becomes_a_sentence(place: Place, words: str) -> None:
    workspace = make_workspace(timeout_s=2.5)
    workspace.check()
    workspace.fault.copy_(torch.tensor([1, place, 3, 17, 41, 40, 1, 0]))
    late = rf"^rank 0 waited 2\.5 s for rank 3 \({words}, chunk 17, epoch 41, saw 40\)"
    message = late + ("; a rank that makes fewer calls than others looks like this" if place < 2 else "$")
    with pytest.raises(CommTimeoutError, match=message):
        workspace.check()


def test_places_of_the_record_are_those_of_the_kernels() -> None:
    """All constants are made by one statement, in the order of the enumeration."""
    assert all(getattr(primitives, f"PLACE_{place.name}").value == place for place in Place)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported(value: float) -> None:
    workspace = make_workspace()
    watch_finite(torch.tensor([[1e30, -3.0]]), workspace.largest_logit)
    watch_finite(torch.empty(0, 2), workspace.largest_logit)
    workspace.check()
    assert workspace.largest_logit == 1e30
    watch_finite(torch.tensor([[0.0, 1.0], [-value, 2.0]]), workspace.largest_logit)
    watch_finite(torch.ones(1, 2), workspace.largest_logit)
    with pytest.raises(
        ValueError, match=rf"router logits on rank 0, {value} among them, must be finite: look for NaN or"
    ):
        workspace.check()
    workspace.check()
    watch_finite(torch.tensor([[2.0]]), workspace.largest_logit)
    workspace.check()
    assert workspace.largest_logit == 2
    watch_finite(torch.tensor([[value]]), workspace.largest_logit)
    with pytest.raises(ValueError, match="must be finite"):
        workspace.check()


def test_what_came_together_is_told_one_after_the_other_and_rows_after_a_timeout() -> None:
    workspace = make_workspace()
    workspace.fault[ROWS_NEEDED] = 4321
    watch_finite(torch.tensor([[float("nan")]]), workspace.largest_logit)
    message = "rank 0 needs 4321 routed rows, .*; raise max_imbalance or leave it unset, and let no token name an"
    with pytest.raises(CapacityError, match=message):
        workspace.check()
    with pytest.raises(ValueError, match="router logits"):
        workspace.check()
    workspace.check()
    workspace.fault[0], workspace.fault[ROWS_NEEDED] = 1, 4321
    for _ in range(2):
        with pytest.raises(CommTimeoutError):
            workspace.check()
    assert workspace.fault[ROWS_NEEDED] == 4321
