"""The ranks that share the experts of a model, with the memory they talk through."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from comet.comm import CommBackend, make_communicator
from comet.comm.base import Communicator, settle
from comet.comm.handshake import check_equal, gather, set_deadline, this_rank, together
from comet.comm.nodes import nodes_of
from comet.config import DIM_MULTIPLE, MoEConfig, ParallelConfig, require
from comet.errors import UnavailableError
from comet.layer.sharding import forget_meshes, make_mesh
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout
from comet.schedule.choice import Problem, Resolver, shared_resolver
from comet.schedule.network import node_tokens
from comet.utils.renamed import warn_renamed
from comet.utils.streams import SideStream
from comet.version import comet_version

if TYPE_CHECKING:
    from comet.comm.link import Link
    from comet.layer.rails.legs import Legs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """A group over several nodes as one of its ranks sees it: the group inside its node, and its peers elsewhere."""

    inner: ExpertGroup  # the ranks of this node, which share its experts and its memory
    rails: ProcessGroup  # the ranks with this rank's index on all nodes, in the order of the nodes
    peers: tuple[int, ...]  # these ranks' numbers in the whole group
    node: int
    num_nodes: int
    legs: Legs | None = None  # memory for rails by kernels; None where rails are collectives
    link: Link | None = None  # what this memory belongs to


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroup:
    """This rank's MoE group: W = EP x TP consecutive ranks of the world; the groups are data-parallel to each other."""

    parallel: ParallelConfig  # EP and TP, and the ranks of a node
    world_rank: int
    world_size: int
    process_group: ProcessGroup | None  # the W ranks of this MoE group; None when the world is one rank
    # the ranks that hold the same expert shard, one of each MoE group; None when alone
    expert_data_group: ProcessGroup | None
    # the world as torch's tools see it, (data, ep, tp) without those of ep and tp that are 1; None where an MoE group
    # is one rank
    mesh: DeviceMesh | None
    process_groups: tuple[ProcessGroup, ...]  # all that close destroys
    comm: Communicator
    workspace: Workspace  # the pool all MoE layers share; without memory where the group spans several nodes
    cuda_kernels: bool  # whether all ranks of the group have the kernels in CUDA C++
    reserved_sms: int  # how many layer 1 leaves to other kernels
    resolver: Resolver  # what a layer without a setting of its own asks for one
    side_stream: SideStream  # for work of a layer that runs next to its routed experts
    nodes: NodeGroup | None = None  # where the group spans several equal nodes
    nodes_obstacle: str = ""  # why a group over several nodes has no ``nodes``, in words

    @property
    def rank(self) -> int:
        """This rank in its MoE group, 0 .. W-1."""
        return self.world_rank % self.parallel.world_size

    @property
    def data_parallel(self) -> int:
        """How many MoE groups the world holds."""
        return self.world_size // self.parallel.world_size

    @property
    def device(self) -> torch.device:
        """The device of tokens, weights and symmetric memory."""
        return self.comm.device

    @property
    def num_nodes(self) -> int:
        """The nodes in each of which its layers run; 1 as well where they run by collectives of all ranks."""
        return 1 if self.nodes is None else self.nodes.num_nodes

    def layout(self, moe: MoEConfig) -> ExpertLayout:
        """This rank's place among the experts of ``moe``; raises ``ValueError`` where they do not divide."""
        return ExpertLayout.create(moe, self.parallel, self.rank)

    def check_same(self, moe: MoEConfig, **choices: Any) -> None:
        """Raise the same ``ValueError`` on every rank unless all make the same layer, in the same way (collective).

        Counts the layers, equally on all ranks, as all of them come here.
        """
        if self.process_group is not None:
            check_equal(self.process_group, asdict(moe) | choices)
        self.workspace.layers_made += 1

    def __deepcopy__(self, memo: Any) -> Self:
        """The group itself: a copy of a layer runs on the same ranks and memory."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: processes and their memory cannot be written down."""
        raise TypeError(
            "an ExpertGroup cannot be pickled, nor can a layer that runs on one: save its state_dict(), with "
            "torch.distributed.checkpoint for several ranks, and make group and layer anew"
        )

    def close(self) -> None:
        """Release the symmetric memory and the process groups (collective, idempotent); no layer runs afterwards.

        CUDA graphs that hold a collective of these process groups have to go first. If a rank did not come, the process
        groups are kept: NCCL would wait for it, without a deadline.
        """
        if self.nodes is not None:
            self.nodes.inner.close()
        self.comm.close()
        if self.nodes is not None and self.nodes.link is not None:
            self.nodes.link.close(all_left=self.comm.all_left)
        if self.comm.all_left:
            leave_groups(*self.process_groups)


@torch.inference_mode(mode=False)  # its memory outlives the mode, outside of which torch would not write to it
def make_expert_group(
    moe: MoEConfig,
    parallel: ParallelConfig,
    *,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: CommBackend = "auto",
    timeout_s: float = 60.0,
    profiles: Path | str | None = None,
    reserved_sms: int = 0,
    spare_multiprocessors: int | None = None,
) -> ExpertGroup:
    """Join the MoE group of this rank (collective over the world).

    Collectives of other streams may run next to the group's layers, in the order that ``MoE`` says.

    Args:
        moe: Shape of the layers the group will run, equal on all ranks: they have its ``hidden_size``, and at most its
            ``top_k``.
        parallel: EP and TP, and the ranks of a node, equal on all ranks; EP x TP must divide the world size.
        max_tokens: Most tokens a rank passes to a layer; equal on all ranks, as capacities and settings follow from it.
        dtype: Element type of the tokens; equal on all ranks.
        device: This rank's device; a GPU has to be the current one, on which kernels start (``torch.cuda.set_device``).
        backend: Symmetric memory: ``auto``, ``nvshmem``, ``symm_mem`` or ``cpu_shm``. Where ``parallel.node_size``
            makes several nodes, kernels put tokens for other nodes into it; with ``auto`` NCCL or gloo sends these.
        timeout_s: Deadline of every wait for another rank, in seconds.
        profiles: Folder of measured settings (``comet tune``), read by the group's first rank; ``None`` reads those
            shipped with Comet only.
        reserved_sms: How many of the GPU's SMs layer 1 leaves to kernels of other streams, so that these run next to it
            and not behind it: as many as they have blocks, all that run at a time together (NCCL: channels, of which
            ``NCCL_MAX_CTAS=32`` allows 32).
        spare_multiprocessors: Former name of ``reserved_sms``.

    Returns:
        The group, with symmetric memory of its ranks, or of those of each node where it spans several.

    Raises:
        ValueError: If the experts or the world do not divide over the group, its ranks ask for different groups, the
            device is not there or not the current GPU, or layer 1 would keep less than half of its SMs.
        UnavailableError: If the backend cannot work here.
    """
    if spare_multiprocessors is not None:
        reserved_sms = spare_multiprocessors
        warn_renamed("spare_multiprocessors", "reserved_sms")
    device = torch.device(device)
    check_device(device)
    check_reserved_sms(reserved_sms, device)
    ranks = _join(moe, parallel, device.type, timeout_s)
    folder = None if profiles is None else Path(profiles)
    options = _Options(moe, max_tokens, dtype, device, timeout_s, folder, reserved_sms)
    shared = ranks.process_group if parallel.world_size > 1 else None
    with ExitStack() as opened:
        if device.type == "cpu":  # NCCL might wait for ranks that did not fail
            opened.callback(leave_groups, *ranks.process_groups)
        if ranks.process_group is not None:
            check_equal(dist.group.WORLD, {"comet_version": comet_version(), "torch_version": torch.__version__})
            check_equal(ranks.process_group, asdict(options.shape(parallel)) | asdict(parallel) | asdict(moe))
        comm = opened.enter_context(
            make_communicator(
                "auto" if parallel.declares_nodes else backend,
                shared,
                device,
                timeout_s=timeout_s,
                node_size=parallel.node_size,
            )
        )
        place = _Place.of(shared if comm.memory_obstacle else None, ranks.world_rank, parallel, comm.device)
        nodes = _join_node(place, ranks, parallel, options, opened)
        if nodes is not None:
            ranks = ranks._replace(process_groups=(*ranks.process_groups, nodes.rails))
            comm.process_groups.append(nodes.rails)
        made = options.group(ranks, parallel, comm, nodes, place.obstacle)
        if parallel.declares_nodes and backend != "auto":
            made = _linked(made, backend, opened)
        opened.pop_all()
    return made


@torch.inference_mode(mode=False)
def join_expert_group(
    process_group: ProcessGroup | None,
    moe: MoEConfig,
    *,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    timeout_s: float = 60.0,
    reserved_sms: int = 0,
) -> ExpertGroup:
    """Make an MoE group of the ranks of a process group, each with its part of the experts (collective over these).

    For frameworks with process groups of their own: others ranks need not come, and ``close`` leaves the process group.
    Its layers have no data parallelism and no ``DTensor`` parameters. Arguments, errors and the rest are as of
    ``make_expert_group``; ``None`` is this rank alone. Over several nodes its layers run ``plain``.
    """
    check_device(device)
    check_reserved_sms(reserved_sms, device)
    rank, size = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
    parallel = ParallelConfig(ep=size)
    parallel.check(moe)
    options = _Options(moe, max_tokens, dtype, device, timeout_s, None, reserved_sms)
    if process_group is not None:
        check_equal(process_group, asdict(options.shape(parallel)) | asdict(moe))
    shared = process_group if size > 1 else None
    with ExitStack() as opened:
        comm = opened.enter_context(make_communicator("auto", shared, device, timeout_s=timeout_s))
        made = options.group(_Ranks(rank, size, process_group, None, None, ()), parallel, comm)
        opened.pop_all()
    return made


class _Ranks(NamedTuple):
    """This rank and its process groups, by the names ``ExpertGroup`` has for them."""

    world_rank: int
    world_size: int
    process_group: ProcessGroup | None
    expert_data_group: ProcessGroup | None
    mesh: DeviceMesh | None
    process_groups: tuple[ProcessGroup, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    """Options that a group and the group inside a node share."""

    moe: MoEConfig
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    timeout_s: float
    profiles: Path | None
    reserved_sms: int

    def shape(self, parallel: ParallelConfig) -> WorkspaceShape:
        """The pool of so many ranks."""
        return WorkspaceShape.create(self.moe, parallel.world_size, self.max_tokens, self.dtype)

    def group(
        self,
        ranks: _Ranks,
        parallel: ParallelConfig,
        comm: Communicator,
        nodes: NodeGroup | None = None,
        nodes_obstacle: str = "",
    ) -> ExpertGroup:
        """A group over these ranks, with its pool (collective)."""
        process_group = ranks.process_group
        in_cuda = agree_on_kernels(comm.device, process_group)
        world = parallel.world_size
        return ExpertGroup(
            parallel=parallel,
            **ranks._asdict(),
            comm=comm,
            workspace=Workspace(comm, self.shape(parallel), None if nodes is None else nodes.inner.workspace),
            cuda_kernels=in_cuda,
            reserved_sms=self.reserved_sms,
            resolver=shared_resolver(self.profiles, self.device, world, process_group, in_cuda=in_cuda),
            side_stream=SideStream.create(comm.device),
            nodes=nodes,
            nodes_obstacle=nodes_obstacle,
        )


class _Place(NamedTuple):
    """The place of a rank in a group over several nodes; without ranks where there is no group inside its node."""

    node: int = 0
    num_nodes: int = 1
    own: tuple[int, ...] = ()  # ranks of its node
    rails: tuple[int, ...] = ()  # ranks with its index on all nodes
    obstacle: str = ""  # why a group over several nodes has no groups inside these

    @classmethod
    def of(cls, group: ProcessGroup | None, rank: int, parallel: ParallelConfig, device: torch.device) -> _Place:
        """The place of a rank of the world in its group (collective); ``None`` is a group with memory."""
        nodes = [] if group is None else nodes_of(group, parallel.node_size, device)
        if len(nodes) < 2:
            return cls()
        told, size = ", ".join(map(str, nodes)), len(nodes[0].ranks)
        if any(node.ranks != tuple(range(node.ranks[0], node.ranks[0] + size)) for node in nodes):
            return cls(obstacle=f"nodes must have equally many ranks, consecutive ones, and there are {told}")
        if size % parallel.tp:
            return cls(obstacle=f"tp={parallel.tp} must divide the {size} ranks of a node, and there are {told}")
        node = next(index for index, each in enumerate(nodes) if rank in each.ranks)
        index = nodes[node].ranks.index(rank)
        return cls(node, len(nodes), nodes[node].ranks, tuple(each.ranks[index] for each in nodes))


def _join_node(
    place: _Place, ranks: _Ranks, parallel: ParallelConfig, options: _Options, opened: ExitStack
) -> NodeGroup | None:
    """Join the group inside this rank's node and its rail peers (collective over the world)."""
    if ranks.process_group is None:
        return None
    wanted = dict.fromkeys(each for other in gather(dist.group.WORLD, place) for each in (other.own, other.rails))
    made = {each: dist.new_group(each) for each in wanted if len(each) > 1}
    if not place.rails:
        return None
    own, rails, size = made.get(place.own), made[place.rails], len(place.own)
    inside = () if own is None else (own,)
    if options.device.type == "cpu":
        opened.callback(leave_groups, *inside, rails)
    for each in (*inside, rails):
        set_deadline(each, options.timeout_s)
    comm = opened.enter_context(make_communicator("auto", own, options.device, timeout_s=options.timeout_s))
    in_node = _Ranks(ranks.world_rank, size, own, None, None, inside)
    most = node_tokens(Problem(options.moe, replace(parallel, node_size=size), options.max_tokens, options.dtype))
    inner = replace(options, max_tokens=most).group(
        in_node, ParallelConfig(ep=size // parallel.tp, tp=parallel.tp), comm
    )
    peers = tuple(dist.get_group_rank(ranks.process_group, each) for each in place.rails)
    return NodeGroup(inner=inner, rails=rails, peers=peers, node=place.node, num_nodes=place.num_nodes)


def _linked(group: ExpertGroup, backend: CommBackend, opened: ExitStack) -> ExpertGroup:
    """The group with memory for rails by kernels (collective)."""
    if group.nodes is None:
        raise UnavailableError(f"backend={backend!r} between nodes cannot be used: {group.nodes_obstacle}")
    from comet.comm.link import MappedLink, NvshmemLink
    from comet.comm.nvshmem import import_nvshmem

    nodes, ranks = group.nodes, group.process_group
    assert ranks is not None, "several nodes have several ranks"
    if backend == "nvshmem":
        require(group.cuda_kernels, "backend='nvshmem' between nodes needs the kernels in CUDA C++ on all ranks")
        together(ranks, import_nvshmem)
        link: Link = NvshmemLink(ranks, nodes.peers, group.device)
    else:
        link = MappedLink(backend, nodes.rails, group.device, group.comm.timeout_s)
    opened.callback(link.close, all_left=False)
    return with_legs(replace(group, nodes=replace(nodes, link=link)))


def with_legs(group: ExpertGroup) -> ExpertGroup:
    """The group with memory for rows that kernels send to other nodes, if they do; takes that of legs before."""
    if group.nodes is None or group.nodes.link is None:
        return group
    from comet.layer.rails.legs import make_legs  # needs Triton

    assert group.process_group is not None, "several nodes have several ranks"
    # No rank writes into the memory of legs before. Rail peers agree on what fits; others may have more room.
    together(group.process_group, partial(settle, group.device))
    nodes, link = group.nodes, group.nodes.link
    given = (group.workspace, nodes.inner.workspace.fault, nodes.peers, nodes.node)
    legs = together(group.process_group, partial(make_legs, link, *given))
    return replace(group, nodes=replace(nodes, legs=legs))


def _join(moe: MoEConfig, parallel: ParallelConfig, device_type: str, timeout_s: float) -> _Ranks:
    """Make the process groups, whose waits end after ``timeout_s`` seconds (collective over the world)."""
    world_rank, world_size = this_rank()
    parallel.check(moe)
    parallel.check_world(world_size)
    if world_rank == 0:
        _tell_of_padding(moe.ffn_size, parallel.tp)
    group, expert_data_group = _process_groups(world_size, parallel.world_size)
    mesh = make_mesh(parallel, device_type, group, expert_data_group)
    groups = [each for each in (group, expert_data_group) if each is not None]
    groups += [] if mesh is None else mesh.get_all_groups()
    for each in groups:
        set_deadline(each, timeout_s)
    return _Ranks(world_rank, world_size, group, expert_data_group, mesh, tuple(groups))


def _tell_of_padding(ffn_size: int, tp: int) -> None:
    width = ffn_size // tp
    if padded := -width % DIM_MULTIPLE:
        logger.warning(
            "ffn_size=%d over tp=%d is %d columns per rank, no multiple of %d: every call copies the rank's expert "
            "weights, padded to %d columns", ffn_size, tp, width, DIM_MULTIPLE, width + padded,
        )  # fmt: skip


def check_device(device: torch.device) -> None:
    """Raise ``ValueError`` for what is no CPU and no GPU that is there, and the current one, on which kernels start."""
    require(device.type in ("cpu", "cuda"), f"device={device} must be 'cpu' or 'cuda'")
    require(device.type == "cpu" or torch.cuda.is_available(), f"device={device} must be 'cpu': torch finds no GPU")
    if device.index is not None and device.type == "cuda":
        current = torch.cuda.current_device()
        require(
            device.index == current,
            f"device={device} must be the current GPU, cuda:{current}; torch.cuda.set_device makes it so",
        )


def check_reserved_sms(reserved_sms: int, device: torch.device) -> None:
    """Raise ``ValueError`` unless layer 1 keeps at least half of the GPU."""
    require(reserved_sms >= 0, f"reserved_sms={reserved_sms} must be at least 0")
    if reserved_sms > 0 and device.type == "cuda":
        most = torch.cuda.get_device_properties(device).multi_processor_count // 2
        require(
            reserved_sms <= most,
            f"reserved_sms={reserved_sms} must be at most {most}, half of the GPU's",
        )


def leave_groups(*groups: ProcessGroup) -> None:
    """Destroy process groups, with their threads and connections (collective); those already destroyed are left."""
    for group in groups:
        with suppress(ValueError):  # torch's error for a group it no longer knows
            dist.destroy_process_group(group)
    forget_meshes()


def agree_on_kernels(device: torch.device, group: ProcessGroup | None) -> bool:
    """Whether all ranks have the kernels in CUDA C++; says what which rank lacks if only some have (collective)."""
    lacking = gather(group, why_no_cuda(device))
    if group is not None and group.rank() == 0 and not all(lacking):
        for rank, reason in enumerate(lacking):
            if reason:
                logger.warning("rank %d: %s; so layers are slower on all ranks of its group", rank, reason)
    return not any(lacking)


def why_no_cuda(device: torch.device) -> str:
    """Return what keeps this process from kernels in CUDA C++, in words; empty if nothing does."""
    if device.type != "cuda":
        return f"{device} is no GPU"
    from comet.kernels.runtime.nvrtc import is_available, what_is_missing  # needs Triton, as GPUs do

    return "" if is_available(device) else what_is_missing() or f"{device} is no GPU of sm_90"


def _process_groups(size: int, group_size: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """The MoE group and the expert-data group of this rank; every rank creates all of them in the same order."""
    if size == 1:
        return None, None
    blocks = [list(range(start, start + group_size)) for start in range(0, size, group_size)]
    strides = [list(range(first, size, group_size)) for first in range(group_size)]
    mine, _ = dist.new_subgroups_by_enumeration(blocks)
    same_shard, _ = dist.new_subgroups_by_enumeration(strides)
    return mine, same_shard
