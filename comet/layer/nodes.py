"""Expert groups over several nodes: the layer runs inside each node, and tokens cross the network once a node.

Letters: N nodes of L ranks; T tokens here, K, D, E as everywhere; a node has E / N experts.

A rank's *rail peers* are the ranks with its index on the other nodes. A token that has experts on another node travels
to the rail peer there, where it is a *guest*: that node's own layer takes it as a token of the rail peer, adds up its
experts there, and one partial sum travels home. The owner adds the partial sums of all nodes in the order of the nodes,
so the bits do not depend on what arrives first. The backward pass takes the same two legs with gradients.

What hides the network: the layer of a node runs once for a first part of the rank's own tokens, once for the guests of
each other node, and once for the rest of its own tokens. Guests travel while the first part is computed; their partial
sums travel home while the rest is. The pool does not grow with the number of nodes: all runs use it, one after another.
Guests and the sums that travel lie in ordinary memory, up to (N - 1) T rows of either.

Example: two nodes of one rank, E = 4, ids of rank 0 ``[[0, 1], [1, 3], [2, 3]]``. Tokens 1 and 2 are guests of rank 1
with the ids ``[[-1, 1], [0, 1]]``; rank 0 itself runs all three with ``[[0, 1], [1, -1], [-1, -1]]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from comet.comm.collectives import (
    CollectiveSteps,
    accumulator_dtype,
    all_gather_stacked,
    bad_ids,
    check_calls,
    check_ids,
    wants_grad,
)
from comet.comm.failures import Step
from comet.comm.handshake import to_host
from comet.config import MoEConfig, OverlapConfig, ParallelConfig, require
from comet.errors import CommTimeoutError, StepFailedError
from comet.layer.group import ExpertGroup, NodeGroup
from comet.layer.plan import Plan, check_routing, check_tokens
from comet.layer.routed_experts import Saved, backward, forward, in_order, make_backend
from comet.layer.weights import match_once, match_weights, pad_width
from comet.layout import Biases, RoutedTokens
from comet.utils.derivatives import first_only
from comet.utils.uncompiled import uncompiled

# With fewer tokens reserved, a rank's own tokens are one run: two would launch more and hide no more.
SPLIT_TOKENS = 1024


def nodes_obstacle(config: MoEConfig, group: ExpertGroup) -> str:
    """Return why layers of this shape cannot run inside the nodes of a group, in words; empty where they can."""
    if group.nodes is None:
        return group.nodes_obstacle or "the group lies within one node"
    return group.nodes.inner.comm.memory_obstacle or shape_obstacle(config, group.nodes.num_nodes)


def shape_obstacle(config: MoEConfig, num_nodes: int) -> str:
    """Return why layers of this shape cannot run inside so many nodes, in words; empty where they can."""
    experts = config.num_experts // num_nodes
    if config.top_k > experts:
        return f"top_k={config.top_k} is more than the {experts} experts of a node"
    if config.capacity_factor is not None:
        return f"capacity_factor={config.capacity_factor} would drop rows node by node"
    return ""


def row_bytes(moe: MoEConfig, itemsize: int, *, trains: bool) -> int:
    """Bytes on the network for one token and one node that it reaches.

    Its row, K ids and K weights go there, and a sum comes back; in a backward pass a gradient goes there, and those of
    the token and of its K weights come back.

    Example: D = 32 in float32 and K = 2: 128 + 16 + 128 = 272, with a backward pass 272 + 128 + 128 + 8 = 536.
    """
    rows = 2 * moe.hidden_size * itemsize
    return rows + 8 * moe.top_k + (rows + 4 * moe.top_k) * trains


def expected_rows(moe: MoEConfig, parallel: ParallelConfig, num_tokens: int) -> float:
    """How often tokens of one rank reach another node where all experts are equally popular.

    Example: E = 4, K = 2, two nodes, 3 tokens: one of six pairs of experts lies in the token's own node: 3 * 5/6 = 2.5.
    """
    nodes = parallel.world_size // parallel.ranks_with_memory
    elsewhere = moe.num_experts - moe.num_experts // nodes
    missed = math.comb(elsewhere, moe.top_k) / math.comb(moe.num_experts, moe.top_k)
    return num_tokens * (nodes - 1) * (1 - missed)


class NodeRows(NamedTuple):
    """Which tokens travel between this rank and its rail peers."""

    tokens: Tensor  # (S,) int64: own tokens that travel, by node, then in their order
    send_counts: tuple[int, ...]  # (N,) tokens sent to each node; 0 to this one
    recv_counts: tuple[int, ...]  # (N,) guests from each node

    def sent(self, node: int) -> slice:
        """The rows sent to a node, among all that are sent."""
        first = sum(self.send_counts[:node])
        return slice(first, first + self.send_counts[node])

    @property
    def reversed(self) -> NodeRows:
        """The way home: guests' rows are sent, and those of own tokens arrive."""
        return self._replace(send_counts=self.recv_counts, recv_counts=self.send_counts)


class Travelling(NamedTuple):
    """Rows on the network."""

    received: tuple[Tensor, ...]
    works: tuple[Any, ...]

    def arrived(self) -> tuple[Tensor, ...]:
        """The rows, once they are there: a CPU waits, of a GPU the current stream does."""
        for work in self.works:
            work.wait()
        return self.received


class Rails:
    """This rank's links to its rail peers."""

    def __init__(self, nodes: NodeGroup) -> None:
        self.nodes = nodes
        self.num_bytes = 0  # sent so far

    def steps(self) -> Iterator[tuple[int, int]]:
        """The nodes that this rank sends to and receives from, in the order of the messages; they go round the ring.

        Example: node 1 of 4: (2, 0), (3, 3), (0, 2).
        """
        node, num_nodes = self.nodes.node, self.nodes.num_nodes
        return (((node + step) % num_nodes, (node - step) % num_nodes) for step in range(1, num_nodes))

    def exchange(self, target: int, source: int, rows: NodeRows, *tensors: Tensor) -> Travelling:
        """Send these tensors, of one row each for every token, to the rail peer of node ``target``.

        Returns:
            Tensors as long as the rows that come from node ``source``.
        """
        received, works = [], []
        for tensor in tensors:
            arriving = tensor.new_empty(rows.recv_counts[source], *tensor.shape[1:])
            comes, goes = ([0] * self.nodes.num_nodes for _ in range(2))
            comes[source], goes[target] = len(arriving), len(tensor)
            works.append(dist.all_to_all_single(arriving, tensor, comes, goes, self.nodes.rails, async_op=True))
            received.append(arriving)
            self.num_bytes += tensor.numel() * tensor.itemsize
        return Travelling(tuple(received), tuple(works))


class NodesPath:
    """Routed experts of a group over several nodes: ``comet.layer.routed_experts`` in each node, guests between them.

    Args:
        overlap: Split and order of the work within a node; ``None`` takes what was measured.
    """

    def __init__(
        self, config: MoEConfig, group: ExpertGroup, overlap: OverlapConfig | None, *, use_kernels: bool
    ) -> None:
        self.name = "fused" if use_kernels else "twin"
        obstacle = nodes_obstacle(config, group)
        require(not obstacle, f"path={self.name!r} over nodes cannot be used: {obstacle}; use path 'plain'")
        assert group.nodes is not None, "nodes_obstacle has looked"
        self.group, self.nodes = group, group.nodes
        inner = self.nodes.inner
        self.layout, self.workspace = group.layout(config), inner.workspace
        self.experts_per_node = config.num_experts // self.nodes.num_nodes
        self.rails = Rails(self.nodes)
        in_node = replace(config, num_experts=self.experts_per_node, num_groups=1, top_groups=1)
        inner.check_same(in_node)
        self.backend = make_backend(in_node, inner, overlap, use_kernels=use_kernels)
        assert group.process_group is not None, "several nodes have several ranks"
        self.steps = CollectiveSteps(group.comm, group.process_group, group.workspace.layers_made)
        rules = dict(biased=config.expert_bias, dtype=group.workspace.shape.dtype, device=group.device)
        self.match = match_once(match_weights, config, self.layout, **rules)
        # Every rank of a node runs the layer equally often, so the pool decides and not a call's tokens.
        self.is_split = group.workspace.max_tokens >= SPLIT_TOKENS

    @uncompiled
    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        """The weighted sum of each token's experts, as every ``comet.layer.paths.ExpertPath`` makes it.

        Raises:
            ValueError: If tokens or routing do not fit the pool or each other, or weights the layer.
            AgreedError: If ids of any rank are out of range, or ranks call different layers, or gradients are wanted on
                some ranks only.
        """
        check_tokens(routed.tokens, routed.top_k_ids, self.workspace)
        check_routing(routed.top_k_ids, routed.top_k_weights, self.layout, self.workspace)
        self.match(w1, w2, *(biases or ()))
        w1, w2 = w1.contiguous(), w2.contiguous()
        biases = biases and Biases(*(bias.contiguous() for bias in biases))
        w1, w2, biases = pad_width(w1, w2, biases)
        with self.step("forward pass"):
            trains = wants_grad(*routed, w1, w2, *(biases or ()))
            number = self.steps.begin(0, trains=trains)
            if not trains:
                return self.forward(in_order(routed), w1, w2, biases, trains=False)[0]
            output: Tensor = _NodesExperts.apply(*routed, w1, w2, self, number, *(biases or ()))
            return output

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One pass of all ranks of the group; where it cannot go on, ranks that wait inside this node learn it, too."""
        board = self.group.comm.board
        try:
            with self.group.comm.step(what, collectives=True):
                yield
        except BaseException as error:
            if board.is_final:
                self.nodes.inner.comm.board.note(what, error, is_final=True)
            raise

    @contextmanager
    def _inside(self, step: Step) -> Iterator[None]:
        """A step of this node; where it fails for want of a rank, the whole group looks for who is missing."""
        try:
            with step:
                yield
        except (CommTimeoutError, StepFailedError) as error:
            where = f"inside node {self.nodes.node}, whose ranks count from 0"
            raise dist.DistBackendError(f"{where}: {error}") from error

    def forward(
        self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None, *, trains: bool
    ) -> tuple[Tensor, NodeRows, list[Saved]]:
        """The sums of this rank's tokens ``(T, D)``, which rows travelled, and of each run what its backward reads."""
        runs: list[Saved] = []

        def run(part: RoutedTokens) -> Tensor:
            with self._inside(self.workspace.forward_step):
                output, saved = forward(part, w1, w2, self.backend, biases, trains=trains)
            if saved is not None:
                runs.append(saved)
            return output

        rows = self.rows_of(routed.top_k_ids, trains=trains)
        coming = [self.send(target, source, rows, routed) for target, source in self.rails.steps()]
        own = routed._replace(top_k_ids=self.ids_in(self.nodes.node, routed.top_k_ids))
        first = self.first_part(len(routed.tokens))
        outputs, returning = [run(own.part(slice(0, first)))], []
        home = rows.reversed
        for (target, source), guests in zip(self.rails.steps(), coming, strict=True):
            sums = run(self.guests(guests))
            returning.append(self.rails.exchange(source, target, home, sums))
        if self.is_split:
            outputs.append(run(own.part(slice(first, None))))
        partial = self._by_node(torch.cat(outputs), [each.arrived()[0] for each in returning])
        return self._add(partial, rows).to(routed.tokens.dtype), rows, runs

    def backward(
        self, grad: Tensor, rows: NodeRows, runs: Sequence[Saved], w1: Tensor, w2: Tensor, biases: Biases | None
    ) -> tuple[Tensor, ...]:
        """Gradients of tokens, routing weights, w1, w2 and biases, from ``grad (T, D)`` and the runs of ``forward``."""
        waiting = iter(runs)
        of_weights: list[Tensor] = []

        def run(part: Tensor) -> tuple[Tensor, Tensor]:
            with self._inside(self.workspace.backward_step):
                grad_x, grad_weights, *found = backward(part, next(waiting), w1, w2, self.backend, None, biases)
            wide = [each.to(accumulator_dtype(each.dtype)) for each in found if each is not None]
            if of_weights:
                wide = [total.add_(each) for total, each in zip(of_weights, wide, strict=True)]
            of_weights[:] = wide
            assert grad_x is not None, "tokens always have a gradient"
            assert grad_weights is not None, "as have their weights"
            return grad_x, grad_weights

        coming = [
            self.rails.exchange(target, source, rows, grad[rows.tokens[rows.sent(target)]])
            for target, source in self.rails.steps()
        ]
        first = self.first_part(len(grad))
        own, returning = [run(grad[:first])], []
        for (target, source), guests in zip(self.rails.steps(), coming, strict=True):
            returning.append(self.rails.exchange(source, target, rows.reversed, *run(guests.arrived()[0])))
        if self.is_split:
            own.append(run(grad[first:]))
        arrived = [each.arrived() for each in returning]
        grad_x, grad_weights = (
            self._add(self._by_node(torch.cat(mine), theirs), rows)
            for mine, theirs in zip(zip(*own, strict=True), zip(*arrived, strict=True), strict=True)
        )
        given = (w1, w2, *(biases or ()))
        return (
            grad_x.to(grad.dtype),
            grad_weights,
            *(each.to(like.dtype) for each, like in zip(of_weights, given, strict=True)),
        )

    def rows_of(self, top_k_ids: Tensor, *, trains: bool) -> NodeRows:
        """Decide which tokens travel where; waits once for the device; collective over the group.

        Raises:
            AgreedError: If ids of any rank are out of range, or gradients are wanted on some ranks only.
        """
        nodes, num_nodes = self.nodes, self.nodes.num_nodes
        bad = bad_ids(top_k_ids, self.layout)
        node_ids = torch.arange(num_nodes, device=top_k_ids.device)
        hits = (self._nodes_of(top_k_ids.masked_fill(bad, -1)) == node_ids[:, None, None]).any(2)  # (N, T)
        hits[nodes.node] = False
        wanted = hits.new_full((1,), trains, dtype=torch.int64)
        told = torch.cat([hits.sum(1), bad.sum().view(1), wanted])
        table = to_host(all_gather_stacked(told, self.group.process_group), self.group.process_group)
        check_calls([row.pop() for row in table], "tokens, top_k_weights, w1 or w2")
        check_ids([row.pop() for row in table], top_k_ids, self.layout)
        send_counts = tuple(table[self.group.rank])
        ranks = self.group.parallel.world_size // num_nodes
        peers = range(self.group.rank % ranks, len(table), ranks)
        recv_counts = tuple(table[peer][nodes.node] for peer in peers)
        order = hits.flatten().logical_not().to(torch.uint8).argsort(stable=True)[: sum(send_counts)]
        return NodeRows(order % max(len(top_k_ids), 1), send_counts, recv_counts)

    def first_part(self, num_tokens: int) -> int:
        """How many own tokens are computed while guests travel."""
        return -(-num_tokens // 2) if self.is_split else num_tokens

    def _nodes_of(self, top_k_ids: Tensor) -> Tensor:
        """The node of each id; -1 of masked ones."""
        return torch.div(top_k_ids, self.experts_per_node, rounding_mode="floor").clamp_(min=-1)

    def ids_in(self, node: int, top_k_ids: Tensor) -> Tensor:
        """Global ids as those of a node's experts; -1 for experts of other nodes."""
        elsewhere = self._nodes_of(top_k_ids) != node
        return (top_k_ids - node * self.experts_per_node).masked_fill_(elsewhere, -1)

    def send(self, target: int, source: int, rows: NodeRows, routed: RoutedTokens) -> Travelling:
        """Send the tokens of a node there, with their ids and weights as one tensor ``(S, 2K)`` int32."""
        tokens, ids, weights = (each[rows.tokens[rows.sent(target)]] for each in routed)
        meta = torch.cat([self.ids_in(target, ids), weights.detach().view(torch.int32)], dim=1)
        return self.rails.exchange(target, source, rows, tokens.detach(), meta)

    @staticmethod
    def guests(coming: Travelling) -> RoutedTokens:
        """Guests that another rank has sent with ``send``, once they are there."""
        tokens, meta = coming.arrived()
        ids, weights = meta.chunk(2, dim=1)
        return RoutedTokens(tokens, ids.contiguous(), weights.contiguous().view(torch.float32))

    def _by_node(self, own: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """Partial sums by node, from those of this node and those of the others in the order of the messages."""
        found = [own] * self.nodes.num_nodes
        for (target, _), part in zip(self.rails.steps(), others, strict=True):
            found[target] = part
        return found

    def _add(self, partial: Sequence[Tensor], rows: NodeRows) -> Tensor:
        """Add up partial sums in the order of the nodes, in float32: ``(T, ..)`` here, ``(S, ..)`` of other nodes."""
        own = partial[self.nodes.node]
        total = torch.zeros(own.shape, dtype=accumulator_dtype(own.dtype), device=own.device)
        for node, part in enumerate(partial):
            if node == self.nodes.node:
                total += part
            else:
                total.index_add_(0, rows.tokens[rows.sent(node)], part.to(total.dtype))
        return total


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
        number: int,
        *biases: Tensor,
    ) -> Tensor:
        given = Biases(*biases) if biases else None
        routed = RoutedTokens(x.contiguous(), top_k_ids, top_k_weights)
        output, rows, runs = path.forward(routed, w1, w2, given, trains=True)
        ctx.path, ctx.number, ctx.plans = path, number, [run.plan for run in runs]
        # All as tensors, counts too: a checkpoint hands the backward pass those of the forward pass that it ran again.
        counts = torch.tensor([*rows.send_counts, *rows.recv_counts, *(run.plan.num_tokens for run in runs)])
        kept = [each for run in runs for each in (run.received, run.pre_activation, run.plan.memory)]
        ctx.save_for_backward(rows.tokens, counts, w1, w2, *kept, *biases)
        return output

    @staticmethod
    @first_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        path: NodesPath = ctx.path
        tokens, counts, w1, w2, *others = ctx.saved_tensors
        num_nodes, numbers = path.nodes.num_nodes, counts.tolist()
        rows = NodeRows(tokens, tuple(numbers[:num_nodes]), tuple(numbers[num_nodes : 2 * num_nodes]))
        plans: list[Plan] = ctx.plans
        kept, biases = others[: 3 * len(plans)], others[3 * len(plans) :]
        present = [
            replace(plan.for_backward(memory), num_tokens=num_tokens)
            for plan, memory, num_tokens in zip(plans, kept[2::3], numbers[2 * num_nodes :], strict=True)
        ]
        runs = [Saved(*each) for each in zip(kept[::3], kept[1::3], present, strict=True)]
        given = Biases(*biases) if biases else None
        with path.step("backward pass"):
            path.steps.begin(ctx.number)
            found = path.backward(grad_output.contiguous(), rows, runs, w1, w2, given)
        grad_x, grad_weights, grad_w1, grad_w2, *of_biases = found
        return grad_x, None, grad_weights, grad_w1, grad_w2, None, None, *of_biases
