"""Expert groups over several nodes: what runs is bit for bit as on one, what cannot is refused by name."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
from training_cases import MODEL, TRAIN, Rank

import comet.comm.collective
import comet.comm.nodes
import comet.comm.nvshmem
import comet.layer.group
from comet.comm import Communicator, make_communicator
from comet.comm.collective import CollectiveCommunicator, StoreBoard, board_of
from comet.comm.handshake import Host
from comet.comm.link import MappedLink
from comet.comm.nodes import domains_of, nodes_of
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.decode import DataParallelDecode, RankDecode, ReplicatedRunner
from comet.errors import CommTimeoutError, StepFailedError, UnavailableError
from comet.graphed.moe import GraphedMoE
from comet.jobs.config import TuneConfig, TuneJob
from comet.launch.tasks.modular import pairs
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.nodes import NodesPath, problem_over
from comet.layer.paths import make_path
from comet.layer.routed_experts import SymmetricPath
from comet.layer.sharding import local
from comet.layer.workspace import rank_pool_bytes
from comet.layout import RoutedTokens
from comet.modular import AllToAll, FusedPrepareFinalize, GroupedContiguous, ModularMoE, SymmetricBatched
from comet.moe import MoE
from comet.tuner.sweep import tune_job

DRIVER = "cuda.bindings.driver"
CONFIG = MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=2, shared_ffn_size=32)
NODES = r"a group of 4 ranks spans several: ranks 0 to 1 on \S+ \(node 0\), ranks 2 to 3 on \S+ \(node 1\)"


def open_group(node_size: int | None, config: MoEConfig = CONFIG, **changes: Any) -> ExpertGroup:
    settings: dict[str, Any] = {"max_tokens": 20, "dtype": torch.float32, "device": "cpu", "timeout_s": 60.0}
    parallel = ParallelConfig(ep=2, tp=2, node_size=node_size)
    return make_expert_group(config, parallel, **(settings | changes))


def run_parts(rank: int, world_size: int, node_size: int | None, path: str) -> dict[str, torch.Tensor]:
    """Results of one rank by all that runs on such a group."""
    group = open_group(node_size)
    layer = MoE(CONFIG, group, path=path, seed=3)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(7 + rank, 32, generator=generator, requires_grad=True)
    found = {}
    output, stats = GraphedMoE(layer)(x)
    (output.square().sum() + stats.loss).backward()
    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient of {name}"] = local(parameter.grad)
    with torch.no_grad():
        routing = layer.router(x)
        routed = RoutedTokens(x, routing.top_k_ids, routing.top_k_weights)
        given = routed, *(each.flatten(1, -2) for each in layer.expert_weights())
        found["modular"] = ModularMoE(AllToAll(CONFIG, group), GroupedContiguous(CONFIG, group))(*given)
        own = DataParallelDecode(CONFIG, group, 0)
        assert own.decode_on_ranks is None
        torch.testing.assert_close(own(*given), make_path("plain", CONFIG, group)(*given))
        own.check()
    group.workspace.check()
    group.workspace.restart()
    group.comm.barrier()
    assert group.workspace.num_bytes == rank_pool_bytes(problem_over(CONFIG, group))
    group.close()
    return found | {"output": output.detach(), "gradient of x": x.grad}


@pytest.mark.parametrize("path", ["plain", "reference"])
def test_two_nodes_compute_what_one_computes_bit_for_bit(path: str) -> None:
    one, two = (run_ranks(run_parts, 4, node_size, path) for node_size in (None, 2))
    for rank, (expected, found) in enumerate(zip(one, two, strict=True)):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == [], f"rank {rank}"


@in_ranks(4)
def test_auto_runs_inside_nodes_and_what_needs_memory_of_all_ranks_is_refused_by_name(
    rank: int, world_size: int
) -> None:
    group = open_group(2)
    assert isinstance(group.comm, CollectiveCommunicator)
    assert isinstance(MoE(CONFIG, group).experts, NodesPath)
    assert isinstance(make_path("auto", CONFIG, group, OverlapConfig()), NodesPath)
    runner = ReplicatedRunner(CONFIG, group)
    assert (runner.decode.max_tokens, runner.captured_tokens) == (64, 0)
    refused: dict[str, Callable[[], object]] = {
        f"^warp decode over ranks needs symmetric memory, but {NODES}": partial(RankDecode, group.comm, hidden_size=32),
        f"^SymmetricBatched needs symmetric memory, but {NODES}; use AllToAll$": partial(
            SymmetricBatched, CONFIG, group
        ),
        "^FusedPrepareFinalize needs symmetric memory": partial(FusedPrepareFinalize, CONFIG, group),
        "^symmetric memory needs symmetric memory": partial(group.comm.alloc, 64),
    }
    for message, attempt in refused.items():
        with pytest.raises(UnavailableError, match=message):
            attempt()
    dropping = replace(CONFIG, capacity_factor=1.5)
    assert isinstance(make_path("auto", dropping, group), NodesPath)
    with pytest.raises(ValueError, match=r"^capacity_factor=1.5 needs path 'fused' or 'twin'; 'plain' is dropless$"):
        make_path("plain", dropping, group)
    reasons = {pair["prepare_finalize"]: pair["reason"] or "" for pair in pairs(CONFIG, group)}
    assert re.match(f"SymmetricContiguous needs symmetric memory, but {NODES}", reasons["SymmetricContiguous"])
    group.close()
    with pytest.raises(RuntimeError, match=r"used after close\(\)"):
        group.workspace.join_stream()


def hosts_of(size: int, rank: int) -> Callable[[], Host]:
    return lambda: Host(f"host-{rank // size}", f"boot-{rank // size}")


@in_ranks(4)
def test_hosts_are_nodes_where_none_are_declared(rank: int, world_size: int) -> None:
    """The kernels' boot ids tell hosts apart."""
    comet.comm.nodes.this_host = hosts_of(3, rank)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    with pytest.raises(UnavailableError, match="use backend='auto', or"):
        make_communicator("cpu_shm", group, "cpu")
    with make_communicator("auto", group, "cpu") as comm:
        said = "a group of 4 ranks spans several: ranks 0 to 2 on host-0, rank 3 on host-1"
        assert comm.memory_obstacle == said


@in_ranks(4)
def test_hosts_whose_gpus_map_each_others_memory_are_one_node(rank: int, world_size: int) -> None:
    """Fabric handles are those of the test: each rank can import what its domain exported."""
    group, gpu = dist.group.WORLD, torch.device("cuda", 0)
    assert isinstance(group, dist.ProcessGroup)

    def found(size: int, domains: Sequence[str], device: torch.device = gpu, node_size: int | None = None) -> list[str]:
        mine = domains[rank]
        with (
            patch.object(comet.comm.nodes, "this_host", hosts_of(size, rank)),
            patch.dict("sys.modules", {"cuda": MagicMock(), "cuda.bindings": MagicMock(), DRIVER: MagicMock()}),
            patch.object(comet.comm.nodes, "exported", lambda cuda, device, until: mine.encode()),
            patch.object(comet.comm.nodes, "can_import", lambda cuda, handle: handle == mine.encode()),
        ):
            return [str(node) for node in nodes_of(group, node_size, device)]

    two = ["ranks 0 to 1 on host-0", "ranks 2 to 3 on host-1"]
    assert found(2, ("a", "a", "a", "a")) == ["ranks 0 to 3 on host-0, host-1"]
    assert found(2, ("a", "a", "b", "b")) == found(2, ("", "", "", "")) == two, "partitions, and no handles"
    assert found(2, ("a", "a", "a", "")) == two, "a GPU of host-1 is outside"
    assert found(2, ("a", "a", "a", "a"), torch.device("cpu")) == two
    assert found(1, ("a", "a", "b", "b")) == ["ranks 0 to 1 on host-0, host-1", "ranks 2 to 3 on host-2, host-3"]
    declared = found(1, ("a", "a", "a", "a"), node_size=2)
    assert declared == ["ranks 0 to 1 on host-0, host-1 (node 0)", "ranks 2 to 3 on host-2, host-3 (node 1)"]
    with patch.dict("sys.modules", {DRIVER: None}):
        assert domains_of(group, gpu) == [0, 1, 2, 3], "cuda.bindings is missing"
    with patch.object(comet.comm.collective, "this_host", hosts_of(2, rank)):
        assert isinstance(board_of(group), StoreBoard)
    assert not isinstance(board_of(group), StoreBoard)


def lack(reason: str) -> NoReturn:
    raise (UnavailableError if "nvshmem4py" in reason else ValueError)(reason)


@in_ranks(4)
def test_what_kernels_between_nodes_lack_is_said_on_all_ranks(rank: int, world_size: int) -> None:
    """Some ranks say what they lack. The others say which rank lacks it."""
    refused = [
        (3, "cpu_shm", ValueError, "node_size=3 must be a multiple or a divisor of ep x tp = 4"),
        (2, "mapped", ValueError, "backend='mapped' must be one of"),
        (2, "symm_mem", ValueError, "device=cpu must be 'cuda' for backend='symm_mem'"),
        (2, "nvshmem", ValueError, r"backend='nvshmem' between nodes needs the kernels in CUDA C\+\+ on all ranks"),
    ]
    for node_size, backend, kind, message in refused:
        with pytest.raises(kind, match=f"^{message}"):
            open_group(node_size, backend=backend)
    unequal = "backend='cpu_shm' between nodes cannot be used: nodes must have equally many ranks, consecutive ones"
    apart = f"backend='cpu_shm' needs all ranks of a group on one node, but there are rank {rank % 2} on host-0, rank"
    for size, message in ((3, unequal), (2, apart)):
        hosts = patch.object(comet.comm.nodes, "this_host", hosts_of(size, rank))
        with hosts, pytest.raises(UnavailableError, match=f"^{message}"):
            open_group(2, backend="cpu_shm")
    where = "" if rank in (1, 3) else "rank 1: "
    room = patch.object(MappedLink, "_alloc", lambda *_: lack("num_bytes=9 must fit")) if rank % 2 else nullcontext()
    with room, pytest.raises(ValueError, match=f"^{where}num_bytes=9 must fit$"):
        open_group(2, backend="cpu_shm")
    package = patch.object(comet.comm.nvshmem, "import_nvshmem", lambda: lack("no nvshmem4py") if rank == 3 else None)
    compilers = patch.object(comet.layer.group, "why_no_cuda", lambda device: "")
    with package, compilers, pytest.raises(UnavailableError, match=r"^(rank 3: )?no nvshmem4py$"):
        open_group(2, backend="nvshmem")
    group = open_group(2, backend="cpu_shm")
    assert group.nodes is not None
    assert group.nodes.legs is not None
    group.close()


@in_ranks(4)
def test_groups_within_a_node_keep_their_memory(rank: int, world_size: int) -> None:
    """Two nodes, each of which has all experts."""
    parallel = ParallelConfig(ep=2, node_size=2)
    group = make_expert_group(CONFIG, parallel, max_tokens=20, dtype=torch.float32, device="cpu")
    assert isinstance(make_path("auto", CONFIG, group), SymmetricPath)
    group.close()


def break_off(comm: Communicator) -> None:
    with comm.step("forward pass", collectives=True), comm.in_flight:
        raise KeyboardInterrupt


@in_ranks(4)
def test_a_failure_is_final_on_all_nodes_and_late_ranks_are_named(rank: int, world_size: int) -> None:
    """A rank breaks off and refuses at once; the others find its note, and no restart helps."""
    group = open_group(1)
    comm = group.comm
    comm.board.meet(30.0)
    if rank == 3:
        with pytest.raises(KeyboardInterrupt):
            break_off(comm)
    dist.barrier()
    for refuse in (
        group.workspace.check,
        group.workspace.join_stream,
        comm.step("backward pass").__enter__,
        comm.restart,
    ):
        with pytest.raises(
            StepFailedError, match=r"the forward pass failed on rank 3 \(KeyboardInterrupt.*new process"
        ):
            refuse()
    dist.barrier()
    comm.board.clear()
    dist.barrier()
    comm.board.check()
    comm.timeout_s = 2.0  # ranks other than 0 may be late by then, too
    if rank:
        with pytest.raises(CommTimeoutError, match=r"waited 2.0 s for rank 0(, \d)* \(meeting"):
            comm.barrier()
    dist.barrier()
    comm.board.meet(30.0)
    group.close()


@in_ranks(4)
def test_closing_waits_for_all_where_groups_are_of_nccl(rank: int, world_size: int) -> None:
    """NCCL's groups may end once all ranks have closed; a rank that breaks off never closes."""
    comet.comm.collective.settle = lambda device: None
    for late in (False, True):
        group = open_group(1, timeout_s=30.0)
        comm = group.comm
        comm.device, comm.timeout_s = torch.device("cuda"), 0.5 if late else 30.0
        if late and rank == 3:
            comm.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        else:
            comm.close()
        assert comm.all_left == (not late)
        dist.barrier()


@in_ranks(2)
def test_tune_needs_a_node(rank: int, world_size: int, tmp_path: Path) -> None:
    parallel, tune = ParallelConfig(ep=2, node_size=1), TuneConfig(profiles=str(tmp_path / "profiles"))
    job = TuneJob(model=MODEL, parallel=parallel, train=TRAIN, tune=tune)
    with pytest.raises(UnavailableError, match=r"^tune needs symmetric memory, but a group of 2 ranks"):
        tune_job(job, Rank(rank, world_size))
