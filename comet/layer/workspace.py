"""One pool of symmetric memory for all MoE layers of a process, and the epoch that orders its use.

Regions (W ranks, M = ``max_tokens`` rounded up to 128, K, D; C = M / 128 chunks):

================  ======================  ========  ==========================================================
region            shape                   dtype     written by
================  ======================  ========  ==========================================================
``ids``           (2, W, M, K)            int32     every rank s writes its top-k ids into [parity, s] of all
``weights``       (2, W, M, K)            float32   its routing weights, in the same place
``ids_flags``     (W, C)                  int32     epoch of the exchange, per chunk of 128 tokens
``recv_rows``     (W * M, D)              dtype     dispatch: rank s writes s*M + i (or token s*M + t)
``recv_flags``    (W, C)                  int32     epoch of the dispatch, per chunk of 128 rows
``combine_rows``  (W * M, D)              dtype     combine: rank d writes partial sums d*M + i
``combine_grads`` (W * M, K)              float32   backward: gradients of the routing weights
``combine_flags`` (W, 4C, 64)             int32     epoch of the combine, per chunk of 32 rows, panel and part
``barrier_flags`` (W,)                    int32     epoch of the barrier
``calls``         (4, W)                  int32     s writes [parity, s]: layer, and whether gradients are wanted;
                                                    before a backward pass [2 + parity, s]: epoch of its plan
================  ======================  ========  ==========================================================

Why no rank overwrites what another still reads: a rank writes ids of epoch n+1 only after its stream finished the
layer of epoch n; every rank waits for all ids (or at the barrier that opens a backward pass) before it writes rows;
hence when rows of epoch n+1 are written, all ranks are done with epoch n. Ids themselves alternate between two halves,
because a fast rank may write ids n+1 while a slow one still reads ids n; ids n+2 wait for ids n+1 of all ranks.

The epoch lasts for a billion calls. ``Workspace.check`` raises when they are used up, and ``Workspace.restart``
begins at 0 (``comet.comm.signals``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from comet import limits
from comet.comm.base import ALIGNMENT, Communicator, Regions, SymmTensor, regions_bytes
from comet.comm.collectives import ONE_ORDER, other_call
from comet.comm.failures import FEWER_CALLS, RESTART
from comet.comm.signals import check_epoch, waited
from comet.config import MOE_DTYPES, MoEConfig, require
from comet.errors import CapacityError, CommTimeoutError, NotFiniteError, StepFailedError
from comet.kernels.runtime.faults import ROWS_NEEDED, Fault, Place
from comet.kernels.runtime.limits import CHUNK_FLAGS, CHUNK_ROWS, COMBINE_CHUNK_ROWS, LEG_HEADER
from comet.layout import round_up
from comet.schedule.choice import Problem
from comet.schedule.network import node_tokens, ring_slots
from comet.utils.choices import CommBackend

if TYPE_CHECKING:
    from comet.kernels.runtime.recorder import Recorder

# Places at which a pass opens an epoch: the flags that another rank raises if it opened the other kind of pass.
OTHERWISE = {Place.BARRIER: ("ids_flags", "forward"), Place.EXCHANGE: ("barrier_flags", "backward")}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceShape:
    """Sizes that decide what the pool holds."""

    world_size: int
    max_tokens: limits.Count  # most tokens a rank passes to a layer; rounded up to a multiple of 128
    hidden_size: int
    top_k: int  # K, the largest of all layers
    dtype: torch.dtype  # element type of tokens: float32, float16 or bfloat16

    def __post_init__(self) -> None:
        limits.check(self)
        require(self.dtype in MOE_DTYPES, f"dtype={self.dtype} must be one of {MOE_DTYPES}")

    @classmethod
    def create(cls, moe: MoEConfig, world_size: int, max_tokens: int, dtype: torch.dtype) -> WorkspaceShape:
        """The shape for one layer configuration."""
        return cls(
            world_size=world_size, max_tokens=max_tokens, hidden_size=moe.hidden_size, top_k=moe.top_k, dtype=dtype
        )

    def check(self, moe: MoEConfig) -> None:
        """Raise ``ValueError`` unless layers of this shape can use the pool: kernels trust its columns and slots."""
        require(
            moe.hidden_size == self.hidden_size,
            f"hidden_size={moe.hidden_size} of the layer must be the group's {self.hidden_size}",
        )
        require(moe.top_k <= self.top_k, f"top_k={moe.top_k} of the layer must be at most the group's {self.top_k}")

    @property
    def padded_tokens(self) -> int:
        """M."""
        return round_up(self.max_tokens, CHUNK_ROWS)

    def regions(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every region, in pool order."""
        ranks, tokens, chunks = self.world_size, self.padded_tokens, self.padded_tokens // CHUNK_ROWS
        return {
            "ids": ((2, ranks, tokens, self.top_k), torch.int32),
            "weights": ((2, ranks, tokens, self.top_k), torch.float32),
            "ids_flags": ((ranks, chunks), torch.int32),
            "recv_rows": ((ranks * tokens, self.hidden_size), self.dtype),
            "recv_flags": ((ranks, chunks), torch.int32),
            "combine_rows": ((ranks * tokens, self.hidden_size), self.dtype),
            "combine_grads": ((ranks * tokens, self.top_k), torch.float32),
            "combine_flags": ((ranks, tokens // COMBINE_CHUNK_ROWS, CHUNK_FLAGS), torch.int32),
            "barrier_flags": ((ranks,), torch.int32),
            "calls": ((4, ranks), torch.int32),
        }


def workspace_bytes(shape: WorkspaceShape) -> int:
    """Bytes of symmetric memory one rank needs.

    Example: W=2, max_tokens=100 (M=128), D=64, K=2, float32: ids and weights 4096 + 4096, rows 65536 + 65536, weight
    gradients 2048, combine flags 2048, three other flag regions and calls of 256 each: 144384 bytes.
    """
    return regions_bytes(shape.regions())


def leg_regions(shape: WorkspaceShape, num_nodes: int) -> Regions:
    """Shape and dtype of each region for rows that travel between nodes, out and home (``comet.layer.rails.network``).

    Beyond ``ring_slots`` only flags and the headers that tell of room grow with the number of nodes.

    Example: two nodes, M=128, D=64, K=2, float32: 528 words, 128 rows and 2 flags each way.
    """
    slots, tokens = num_nodes - 1, shape.padded_tokens
    ring = ring_slots(num_nodes, tokens)
    one: Regions = {
        "words": ((ring, LEG_HEADER + 2 * tokens * shape.top_k), torch.int32),
        "rows": ((ring, tokens, shape.hidden_size), shape.dtype),
        "flags": ((slots, 1 + tokens // CHUNK_ROWS, 2), torch.int32),
    }
    regions = {f"{leg}_{name}": each for leg in ("out", "home") for name, each in one.items()}
    if ring < slots:
        regions |= {"room_words": ((slots, LEG_HEADER), torch.int32), "room_flags": ((slots, 2, 2), torch.int32)}
    return regions


def rank_pool_bytes(problem: Problem, backend: CommBackend = "auto") -> int:
    """Bytes that a rank shares with its group, or with its declared node, and for kernels that send to other nodes.

    NVSHMEM sends from as much memory for staging.
    """
    parallel, ranks = problem.parallel, problem.parallel.ranks_with_memory
    if not ranks:
        return 0
    shape = WorkspaceShape.create(problem.moe, parallel.world_size, problem.num_tokens, problem.dtype)
    inside = workspace_bytes(replace(shape, world_size=ranks, max_tokens=node_tokens(problem)))
    if backend == "auto" or not parallel.declares_nodes:
        return inside
    network = regions_bytes(leg_regions(shape, problem.num_nodes))
    return inside + network * (2 if backend == "nvshmem" else 1)


class Workspace:
    """The pool, cut into regions, with its epoch and fault record; no regions where a group has no symmetric memory.

    Args:
        inner: The pool of this rank's node, where the group spans several; this one looks after it.
    """

    ids: SymmTensor
    weights: SymmTensor
    ids_flags: SymmTensor
    recv_rows: SymmTensor
    recv_flags: SymmTensor
    combine_rows: SymmTensor
    combine_grads: SymmTensor
    combine_flags: SymmTensor
    barrier_flags: SymmTensor
    calls: SymmTensor

    def __init__(self, comm: Communicator, shape: WorkspaceShape, inner: Workspace | None = None) -> None:
        require(
            shape.world_size == comm.world_size,
            f"world_size={shape.world_size} of the workspace must equal the communicator's {comm.world_size}",
        )
        self.comm = comm
        self.shape = shape
        self.inner = inner
        self.num_bytes = 0 if comm.memory_obstacle else workspace_bytes(shape)
        if self.num_bytes:
            pool, offset = self._alloc(), 0
            for name, (dims, dtype) in shape.regions().items():
                setattr(self, name, pool.view(offset, dims, dtype))
                offset += round_up(math.prod(dims) * dtype.itemsize, ALIGNMENT)
        # (1,) int32 on the device; grows by one with every plan and every barrier, equally on all ranks
        self.epoch = torch.zeros(1, dtype=torch.int32, device=comm.device)
        # (8,) int64 record of a spin that met its deadline (see comet.kernels.runtime.primitives)
        self.fault = Fault.allocate(comm.device)
        # () float32, NaN or infinite once a router's logits were (see comet.router.router.watch_finite), until check
        # raises
        self.largest_logit = torch.zeros((), dtype=torch.float32, device=comm.device)
        self.rail_peers: tuple[int, ...] = ()  # rail peers by node, if kernels wait for other nodes
        self.layers_made = 0  # ``ExpertGroup.check_same`` counts them
        # where the fused kernels note what they do and when (see comet.trace.timeline); None: they do not
        self.recorder: Recorder | None = None
        flags = [getattr(self, name).local for name in shape.regions() if name.endswith("_flags") and self.num_bytes]
        comm.renew_at_restart(self.epoch, self.fault, flags)
        if inner is not None:
            self.num_bytes = inner.num_bytes  # this rank holds no more
        self.forward_step = comm.step("forward pass")
        self.backward_step = comm.step("backward pass")

    def _alloc(self) -> SymmTensor:
        shape = self.shape
        try:
            return self.comm.alloc(self.num_bytes)
        except ValueError as error:
            raise ValueError(
                f"max_tokens={shape.max_tokens} with hidden_size={shape.hidden_size}, top_k={shape.top_k} and "
                f"world_size={shape.world_size} needs {self.num_bytes} bytes of symmetric memory per rank: {error}"
            ) from error

    @property
    def max_tokens(self) -> int:
        """M."""
        return self.shape.padded_tokens

    @property
    def timeout_ns(self) -> int:
        """Deadline of every spin."""
        return int(self.comm.timeout_s * 1e9)

    def check(self) -> None:
        """Report what went wrong on the device since the last check; waits for all its streams.

        After a timeout the ranks are out of step: every later check reports it again, and the next call on any rank
        is refused, until ``restart``. The rest is reported once, so that a job that leaves out what it computed may go
        on.

        Raises:
            CommTimeoutError: If a spin of a kernel met its deadline.
            StepFailedError: If a step failed on any rank, or ranks called layers in different orders.
            EpochError: If the epoch has passed 2^30; ``restart`` is due.
            CapacityError: If a plan needed more routed rows than were reserved.
            ValueError: If the router of a layer on a GPU met logits that are not finite.
        """
        self.comm.settle("last step")
        if self.inner is not None:
            self._check_inner(self.inner)
        fault = Fault.of(self.fault)
        if late := self.timeout():
            was_called = fault.place in (Place.CALL, Place.OTHER_CALL)
            error = StepFailedError(f"{late}; {RESTART}") if was_called else self.comm.board.explained(late)
            self.comm.board.note("last step", error)
            raise error
        self.comm.board.check()
        check_epoch(self.epoch, self.comm.rank)
        if fault.rows_needed:
            self.fault[ROWS_NEEDED] = 0
            raise self.no_room(fault.rows_needed)
        largest_logit = self.largest_logit.item()
        if not math.isfinite(largest_logit):
            self.largest_logit.zero_()
            raise NotFiniteError(
                f"router logits on rank {self.comm.rank}, {largest_logit} among them, must be finite: look for NaN or "
                "Inf in tokens or router weight"
            )

    def _check_inner(self, inner: Workspace) -> None:
        """Check the pool of this rank's node; a step that failed there has failed for the ranks of all nodes."""
        self.comm.board.check()
        try:
            inner.check()
        except (CommTimeoutError, StepFailedError) as error:
            self.comm.board.note("last step inside its node, whose ranks count from 0,", error)
            self.comm.board.check()

    def no_room(self, rows_needed: int) -> CapacityError:
        """The error for a plan that needs more routed rows than were reserved."""
        return CapacityError(
            f"rank {self.comm.rank} needs {rows_needed} routed rows, more than max_imbalance reserves; "
            "raise max_imbalance or leave it unset, and let no token name an expert twice"
        )

    def timeout(self) -> str:
        """Return which rank waited in vain, or called another layer; empty if none."""
        fault = Fault.of(self.fault)
        _, place, peer, index, expected, seen, *_ = fault
        if not fault.is_set or place is Place.ELSEWHERE:
            return ""
        if place is Place.OTHER_CALL:
            theirs, node = divmod(peer, len(self.rail_peers))
            return other_call(self.comm.rank, index, self.rail_peers[node], theirs, expected, seen)
        node, peer = peer, self.rail_peers[peer] if self.rail_peers else peer
        if place is Place.CALL and index:  # in a backward pass
            theirs = int(self.calls.local[(int(self.epoch) + 1) & 1, peer])
            return other_call(self.comm.rank, index, peer, theirs, expected, seen)
        if place is Place.CALL:
            return other_call(self.comm.rank, expected, peer, seen)
        where = f"{place.words.format(node)}, chunk {index}"
        text = waited(self.comm.rank, peer, where, self.comm.timeout_s, expected, seen)
        return self.explained(text, place, peer, expected)

    def explained(self, late: str, place: Place, peer: int, epoch: int) -> str:
        """The message for a rank that came late to a place, with what it did instead where that shows."""
        if place not in OTHERWISE:
            return late
        flags, kind = OTHERWISE[place]
        if (getattr(self, flags).local[peer : peer + 1] >= epoch).any():
            return f"{late}; rank {peer} began a {kind} pass: {ONE_ORDER}"
        return f"{late}; {FEWER_CALLS}"

    def join_stream(self) -> None:
        """Let the current stream wait for the last one that used the pool; replays of a layer's graph need this."""
        self.comm.require_open()
        self.comm.stream_order.join()
        if self.inner is not None:
            self.inner.join_stream()

    def restart(self) -> None:
        """Begin again (collective): between calls, after a step that failed, or when ``check`` raises ``EpochError``.

        It goes for all that uses the group's communicator, decode steps as well. A service may do so whenever it is
        idle. Captured graphs stay valid, as they read the epoch on the device, and a backward pass may follow whose
        forward pass came before. A plan is lost that no layer has used yet. Waits for the device.

        Raises:
            StepFailedError: If a collective of ``torch.distributed`` broke off, which stays out of step.
            CommTimeoutError: If a rank did not come in time.
        """
        self.comm.restart()
        if self.inner is not None:
            self.inner.restart()
