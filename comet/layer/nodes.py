"""Expert groups over several nodes: the layer runs inside each node, and tokens cross the network once a node.

Letters: N nodes of L ranks; T tokens here, K, D, E as everywhere; a node has E / N experts.

A rank's *rail peers* are the ranks with its index on the other nodes. A token that has experts on another node travels
to the rail peer there, where it is a *guest*: that node's own layer takes it as a token of the rail peer, adds up its
experts there, and one partial sum travels home. The owner adds the partial sums of all nodes in the order of the nodes,
so the bits do not depend on what arrives first. The backward pass takes the same two legs with gradients.

What hides the network: the layer of a node runs once for a first part of the rank's own tokens, then for the guests of
each other node, in one part or several, and once for the rest of its own tokens. Guests travel while the first part is
computed; their partial sums travel home while later runs are. The pool does not grow with the number of nodes: all runs
use it, one after another. Guests and the sums that travel have memory of their own, for some nodes at a time
(``comet.layer.rails``).

With few tokens the host bounds the layer. Then own tokens and all guests are one run, and the pool of a node has room
for the tokens of all nodes (``comet.schedule.network.best_runs``).

Example: two nodes of one rank, E = 4, ids of rank 0 ``[[0, 1], [1, 3], [2, 3]]``. Tokens 1 and 2 are guests of rank 1
with the ids ``[[-1, 1], [0, 1]]``; rank 0 itself runs all three with ``[[0, 1], [1, -1], [-1, -1]]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from comet import limits
from comet.comm.collectives import CollectiveSteps, accumulator_dtype, all_gather_stacked, wants_grad
from comet.config import MAX_TOP_K, MoEConfig, OverlapConfig, require
from comet.errors import CommTimeoutError, StepFailedError
from comet.kernels.runtime.activation import Activation
from comet.layer.backend import Backend, expert_capacity
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.plan import Plan, check_routing, check_tokens
from comet.layer.rails.collective import CollectiveRails, Rails, Stop
from comet.layer.rails.merged_wgrad import MergedWgrad, RunOperands, merged_bytes
from comet.layer.routed_experts import DeferredWgrad, Saved, backward, check_fp8, forward, in_order, make_backend
from comet.layer.weights import match_fp8_weights, match_once, match_weights, pad_width
from comet.layout import Biases, RoutedTokens, positions_in_groups
from comet.quantization.formats import FP8, FP8_BLOCK
from comet.schedule.choice import Problem
from comet.schedule.network import Rates, Runs, best_runs
from comet.utils.derivatives import first_only
from comet.utils.uncompiled import uncompiled

Result = TypeVar("Result")
# Rows of all runs are kept for one product of weight gradients if they take at most so many times the weights' bytes.
MERGED_SIZE = 6


def nodes_obstacle(group: ExpertGroup) -> str:
    """Return why layers cannot run inside the nodes of a group, in words; empty where they can."""
    if group.nodes is None:
        return group.nodes_obstacle or "the group lies within one node"
    return group.nodes.inner.comm.memory_obstacle


@dataclass(frozen=True, kw_only=True, slots=True)
class InNode(MoEConfig):
    """The shape of a layer inside a node, where all but some of a token's K experts may lie on other nodes."""

    top_k: Annotated[int, limits.at_least(1), limits.at_most(MAX_TOP_K)]

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", Activation(**self.activation))  # type: ignore[arg-type]
        limits.check(self)


@contextmanager
def pass_over_nodes(group: ExpertGroup, what: str, *, collectives: bool, refuses: bool = False) -> Iterator[None]:
    """One step of all ranks of the group; if it fails, ranks that wait inside this node learn it, too."""
    assert group.nodes is not None, "the group spans several nodes"
    board = group.comm.board
    try:
        with group.comm.step(what, collectives=collectives, refuses=refuses):
            yield
    except BaseException as error:
        if board.word[0]:
            group.nodes.inner.comm.board.note(what, error, is_final=board.is_final)
        raise


@contextmanager
def inside_node(node: int, *, collectives: bool) -> Iterator[None]:
    """Surround a step of one node; if it fails for want of a rank, the whole group looks for the missing rank."""
    try:
        yield
    except (CommTimeoutError, StepFailedError) as error:
        kind = dist.DistBackendError if collectives else StepFailedError
        raise kind(f"inside node {node}, whose ranks count from 0: {error}") from error


class NodesPath(ExpertPath):
    """Routed experts of a group over several nodes: ``comet.layer.routed_experts`` in each node, guests between them.

    Args:
        overlap: Split and order of the work within a node; ``None`` takes what was measured.
    """

    def __init__(
        self, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, use_kernels: bool
    ) -> None:
        self.name = "fused" if use_kernels else "twin"
        obstacle = nodes_obstacle(group)
        require(not obstacle, f"path={self.name!r} over nodes cannot be used: {obstacle}; use path 'plain'")
        assert group.nodes is not None, "nodes_obstacle has looked"
        self.group, self.nodes = group, group.nodes
        inner = self.nodes.inner
        self.layout, self.workspace = group.layout(config), inner.workspace
        changes = dict(num_groups=1, top_groups=1, capacity_factor=None)  # rows are dropped before
        num_experts = config.num_experts // self.nodes.num_nodes
        in_node = InNode(**{**asdict(config), **changes, "num_experts": num_experts})
        inner.check_same(in_node)
        self.backend = make_backend(in_node, inner, overlap, use_kernels=use_kernels)
        self.rails = make_rails(config, group, use_kernels=use_kernels)
        self.capacity, self.number = expert_capacity(config, group), group.workspace.layers_made
        self.collectives = self.rails.collectives or self.capacity is not None
        rules = dict(biased=config.expert_bias, dtype=group.workspace.shape.dtype, device=group.device)
        self.match = match_once(match_weights, config, self.layout, **rules)
        self.match_fp8 = match_once(match_fp8_weights, config, self.layout, **rules)
        self.takes_fp8 = use_kernels and config.hidden_size % FP8_BLOCK == 0
        self.waits_for_counts = self.collectives
        self.runs, most = runs_of(config, group), group.workspace.max_tokens
        self.own_backend = self.guest_backend = self.backend
        if config.max_imbalance is None and self.runs.parts:  # a limit holds for all tokens, not for those of a run
            self.own_backend = self.backend.with_tokens(self.first_part(most))
            self.guest_backend = self.backend.with_tokens(self.rails.most_guests)

    @uncompiled
    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        """The weighted sum of each token's experts, as every ``comet.layer.paths.ExpertPath`` makes it.

        Raises:
            ValueError: If tokens or routing do not fit the pool or each other, or weights the layer.
            AgreedError: If ids of any rank are out of range, or ranks call different layers, or gradients are wanted on
                some ranks only. By kernels ids out of range count as masked, and ``Workspace.check`` raises the rest.
        """
        check_tokens(routed.tokens, routed.top_k_ids, self.workspace)
        check_routing(routed.top_k_ids, routed.top_k_weights, self.layout, self.workspace)
        self.match(w1, w2, *(biases or ()))
        w1, w2 = w1.contiguous(), w2.contiguous()
        biases = biases and Biases(*(bias.contiguous() for bias in biases))
        w1, w2, biases = pad_width(w1, w2, biases)
        with self.step("forward pass"):
            if not wants_grad(*routed, w1, w2, *(biases or ())):
                return self.forward(in_order(routed), w1, w2, biases, trains=False)[0]
            output: Tensor = _NodesExperts.apply(*routed, w1, w2, self, *(biases or ()))
            return output

    @uncompiled
    def fp8(self, routed: RoutedTokens, w1: FP8, w2: FP8, biases: Biases | None = None) -> Tensor:
        """Run the layer for inference with e4m3 products, as ``SymmetricPath.fp8``; tokens travel as they are."""
        check_fp8(routed, w1, w2, self.workspace)
        check_routing(routed.top_k_ids, routed.top_k_weights, self.layout, self.workspace)
        self.match_fp8(w1.elements, w2.elements, w1.scales, w2.scales, *(biases or ()))
        with self.step("forward pass"):
            return self.forward(in_order(routed), w1, w2, biases, trains=False)[0]

    def step(self, what: str) -> AbstractContextManager[None]:
        """``pass_over_nodes`` for one pass of this layer."""
        return pass_over_nodes(self.group, what, collectives=self.collectives)

    def forward(
        self, routed: RoutedTokens, w1: Tensor | FP8, w2: Tensor | FP8, biases: Biases | None, *, trains: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], list[Saved]]:
        """The sums of this rank's tokens ``(T, D)``, what the trip kept, and of each run what its backward reads."""
        runs: list[Saved] = []

        def run(part: RoutedTokens, backend: Backend) -> Tensor:
            with inside_node(self.nodes.node, collectives=self.collectives), self.workspace.forward_step:
                output, saved = forward(part, w1, w2, backend, biases, trains=trains)
            if saved is not None:
                runs.append(saved)
            return output

        with self.group.comm.in_flight:
            if self.capacity is not None:
                routed = routed._replace(top_k_ids=self.kept(routed.top_k_ids, self.capacity, trains=trains))
            trip = self.rails.depart(routed, trains=trains)
            kept = trip.kept if trains else ()
            own = routed._replace(top_k_ids=self.rails.ids_in(self.nodes.node, routed.top_k_ids))
            if not self.runs.parts:
                guests = [self._awaited(stop, partial(trip.guests, stop)) for stop in self.rails.stops]
                sums = run(joined([own, *guests]), self.backend).split([len(each.tokens) for each in (own, *guests)])
                for stop, theirs in zip(self.rails.stops, sums[1:], strict=True):
                    trip.send_home(stop, theirs)
                return self._awaited(None, partial(trip.arrive, sums[0]))[0], kept, runs
            first = self.first_part(len(routed.tokens))
            outputs = [run(own.part(slice(0, first)), self.own_backend)]
            for stop in self.rails.stops:
                trip.send_home(stop, run(self._awaited(stop, partial(trip.guests, stop)), self.guest_backend))
            if self.runs.is_split:
                outputs.append(run(own.part(slice(first, None)), self.own_backend))
            return self._awaited(None, partial(trip.arrive, torch.cat(outputs)))[0], kept, runs

    def backward(
        self,
        grad: Tensor,
        kept: Sequence[Tensor],
        runs: Sequence[Saved],
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of tokens, routing weights, w1, w2 and biases, from ``grad (T, D)`` and the runs of ``forward``."""
        waiting = iter(runs)
        sums = _WeightGradients(self.backend, [run.plan for run in runs], w1, w2)

        def run(part: Tensor) -> tuple[Tensor, Tensor]:
            saved, deferred = next(waiting), sums.deferred
            with inside_node(self.nodes.node, collectives=self.collectives), self.workspace.backward_step:
                grad_x, grad_weights, *found = backward(part, saved, w1, w2, self.backend, deferred, biases)
                sums.add(found)
            assert grad_x is not None, "tokens always have a gradient"
            assert grad_weights is not None, "as have their weights"
            return grad_x, grad_weights

        with self.group.comm.in_flight:
            trip = self.rails.depart_backward(kept, grad)
            if not self.runs.parts:
                grads = [grad, *(self._awaited(stop, partial(trip.guest_gradients, stop)) for stop in self.rails.stops)]
                sizes = [len(each) for each in grads]
                mine, *theirs = zip(*(each.split(sizes) for each in run(torch.cat(grads))), strict=True)
                for stop, results in zip(self.rails.stops, theirs, strict=True):
                    trip.send_home(stop, *results)
                own = [mine]
            else:
                first = self.first_part(len(grad))
                own = [run(grad[:first])]
                for stop in self.rails.stops:
                    trip.send_home(stop, *run(self._awaited(stop, partial(trip.guest_gradients, stop))))
                if self.runs.is_split:
                    own.append(run(grad[first:]))
            whole = (torch.cat(parts) for parts in zip(*own, strict=True))
            grad_x, grad_weights = self._awaited(None, partial(trip.arrive, *whole))
        given = (w1, w2, *(biases or ()))
        found = (each.to(like.dtype) for each, like in zip(sums.gradients(), given, strict=True))
        return grad_x, grad_weights, *found

    def _awaited(self, stop: Stop | None, run: Callable[[], Result]) -> Result:
        """Return ``run()``, which waits for the guests of a stop or for all sums; a timeline marks the wait."""
        recorder = self.group.workspace.recorder
        return run() if recorder is None else recorder.around(*(stop or (-1, 0)), run)

    def kept(self, top_k_ids: Tensor, capacity: int, *, trains: bool) -> Tensor:
        """The ids, -1 for rows that an expert has no room for, in the order of all ranks; waits for the device."""
        assert self.group.process_group is not None, "several nodes have several ranks"
        CollectiveSteps(self.group.comm, self.group.process_group, self.number).begin(0, trains=trains)
        ids, num_experts = top_k_ids.flatten().long(), self.layout.num_experts
        is_expert = (ids >= 0) & (ids < num_experts)
        ids = ids.where(is_expert, num_experts)
        positions, sizes = positions_in_groups(ids, num_experts + 1)
        earlier = all_gather_stacked(sizes, self.group.process_group)[: self.group.rank].sum(0)
        dropped = is_expert & (positions + earlier[ids] >= capacity)
        return top_k_ids.masked_fill(dropped.view_as(top_k_ids), -1)

    def first_part(self, num_tokens: int) -> int:
        """How many own tokens are computed while guests travel."""
        return -(-num_tokens // 2) if self.runs.is_split else num_tokens


class _WeightGradients:
    """Gradients of weights and biases, of all runs: as one product where its rows fit, else added up run by run."""

    def __init__(self, backend: Backend, plans: list[Plan], w1: Tensor, w2: Tensor) -> None:
        fits = len(plans) > 1 and merged_bytes(plans, w1, w2) <= MERGED_SIZE * (w1.nbytes + w2.nbytes)
        self._num_runs = len(plans)
        self._merged = MergedWgrad(backend, plans) if fits else None
        self._backend = backend
        self.deferred: DeferredWgrad | None = [] if fits else None  # a run leaves here what it has not multiplied
        self._totals: list[Tensor] = []

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add what a run has found of w1, w2 and biases, or left."""
        if self._merged is not None and self.deferred is not None:
            of_w1, of_w2 = self.deferred
            grad_pre, received, plan = of_w1.args
            grad_rows, weighted_hidden, _ = of_w2.args
            rows = self._backend.routed_rows(received, plan)
            self._merged.add(RunOperands(grad_pre, rows, grad_rows, weighted_hidden))
            self.deferred.clear()
        present = [each for each in found if each is not None]
        if not self._totals:
            self._totals = [each.to(accumulator_dtype(each.dtype)) if self._num_runs > 1 else each for each in present]
        else:
            for total, each in zip(self._totals, present, strict=True):
                total.add_(each)

    def gradients(self) -> list[Tensor]:
        """All of them, in the order of the parameters."""
        return [*(self._merged.gradients() if self._merged is not None else ()), *self._totals]


def make_rails(config: MoEConfig, group: ExpertGroup, *, use_kernels: bool, at_once: bool = False) -> Rails:
    """Rails by kernels where the group has memory for these, else by collectives; ``at_once``: of all nodes at once."""
    if use_kernels and group.nodes is not None and group.nodes.legs is not None:
        from comet.layer.rails.network import DeviceRails  # needs Triton

        return DeviceRails(group, group.layout(config), group.nodes.legs, runs_of(config, group).parts)
    return CollectiveRails(group, group.layout(config), at_once=at_once)


def runs_of(config: MoEConfig, group: ExpertGroup) -> Runs:
    """The runs of a layer: one, where the pool of the node has room for the tokens of all nodes.

    Every rank runs the layer equally often, so pools decide and not a call's tokens.
    """
    assert group.nodes is not None, "the group spans several nodes"
    most = group.workspace.max_tokens * group.num_nodes
    if group.nodes.inner.workspace.max_tokens >= most:
        return Runs(0, is_split=False)
    return best_runs(problem_over(config, group), Rates(), joins=False)


def joined(parts: Sequence[RoutedTokens]) -> RoutedTokens:
    """Tokens and routing behind each other."""
    return RoutedTokens(*(torch.cat(each) for each in zip(*parts, strict=True)))


def problem_over(config: MoEConfig, group: ExpertGroup) -> Problem:
    """The largest call of a layer of a group over nodes, whose ranks are those that it found."""
    shape, node_size = group.workspace.shape, group.parallel.world_size // group.num_nodes
    return Problem(config, replace(group.parallel, node_size=node_size), shape.max_tokens, shape.dtype)


class _NodesExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        path: NodesPath,
        *biases: Tensor,
    ) -> Tensor:
        given = Biases(*biases) if biases else None
        routed = RoutedTokens(x.contiguous(), top_k_ids, top_k_weights)
        output, of_trip, runs = path.forward(routed, w1, w2, given, trains=True)
        ctx.path, ctx.num_kept, ctx.plans = path, len(of_trip), [run.plan for run in runs]
        # All as tensors, counts too: a checkpoint hands the backward pass those of the forward pass that it ran again.
        counts = torch.tensor([run.plan.num_tokens for run in runs])
        kept = [each for run in runs for each in (run.received, run.pre_activation, run.plan.memory)]
        ctx.save_for_backward(w1, w2, counts, *of_trip, *kept, *biases)
        return output

    @staticmethod
    @first_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        path: NodesPath = ctx.path
        w1, w2, counts, *others = ctx.saved_tensors
        of_trip, others = others[: ctx.num_kept], others[ctx.num_kept :]
        plans: list[Plan] = ctx.plans
        kept, biases = others[: 3 * len(plans)], others[3 * len(plans) :]
        present = [
            replace(plan.for_backward(memory), num_tokens=num_tokens)
            for plan, memory, num_tokens in zip(plans, kept[2::3], counts.tolist(), strict=True)
        ]
        runs = [Saved(*each) for each in zip(kept[::3], kept[1::3], present, strict=True)]
        given = Biases(*biases) if biases else None
        with path.step("backward pass"):
            found = path.backward(grad_output.contiguous(), of_trip, runs, w1, w2, given)
        grad_x, grad_weights, grad_w1, grad_w2, *of_biases = found
        return grad_x, None, grad_weights, grad_w1, grad_w2, None, *of_biases
