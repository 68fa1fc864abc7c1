"""Dispatch and combine by all-to-all of ``torch.distributed`` (NCCL or gloo), which runs wherever that does; or, where
one rank owns all experts, none.

A token goes once to every rank that computes at least one of its slots, with its ids and weights, all packed into one
message per pair of ranks. Partial sums come back the same way and are added up in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from comet.comm.collectives import accumulator_dtype, all_to_all_rows, bad_ids, check_ids
from comet.comm.handshake import to_host
from comet.config import MoEConfig, require
from comet.layer.group import ExpertGroup
from comet.modular.interfaces import (
    ActivationFormat,
    ContiguousRows,
    PrepareFinalize,
    Received,
    Receiver,
    RoutedTokens,
    TopKReduce,
)
from comet.utils.match import check_id_range


class SingleRank(PrepareFinalize):
    """Hands the tokens on as they are. EP = TP = 1 only; any number of tokens; masked slots."""

    activation_format = ActivationFormat.CONTIGUOUS

    def __init__(self, config: MoEConfig, group: ExpertGroup) -> None:
        self.comm = group.comm
        self.layout = group.layout(config)
        size = self.layout.world_size
        require(size == 1, f"ep x tp = {size} of the group must be 1: SingleRank sends nothing to other ranks")
        require_dropless(config, "SingleRank")

    def prepare_no_receive(self, routed: RoutedTokens) -> Receiver:
        """Make contiguous rows of the tokens.

        Raises:
            ValueError: On a CPU, if an id is out of range; on a GPU looking would wait for the device.
        """
        if routed.tokens.device.type == "cpu":
            check_id_range(routed.top_k_ids, self.layout.num_experts)
        tokens, ids, weights = (each.contiguous() for each in routed)
        received = Received(rows=ContiguousRows(tokens=tokens, top_k_ids=ids, top_k_weights=weights), route=None)
        return lambda: received

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """Reduce; nothing is sent."""
        return reduce.apply(outputs, received.rows)


def require_dropless(config: MoEConfig, name: str) -> None:
    """Raise ``ValueError`` if the configuration lets experts drop rows."""
    require(
        config.capacity_factor is None,
        f"capacity_factor={config.capacity_factor} must be None: {name} is dropless",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Which tokens travel where."""

    num_tokens: int
    token_ids: Tensor  # (S,) int64 tokens sent, by destination, then token
    send_counts: tuple[int, ...]  # W numbers of tokens sent to each rank
    recv_counts: tuple[int, ...]  # W numbers of rows received from each rank


class AllToAll(PrepareFinalize):
    """Sends rows by all-to-all. Any EP x TP; unequal and zero tokens per rank; masked slots.

    Every call waits for the device once, because the ranks have to know each other's numbers of rows.
    """

    activation_format = ActivationFormat.CONTIGUOUS
    uses_collectives = True

    def __init__(self, config: MoEConfig, group: ExpertGroup) -> None:
        require_dropless(config, "AllToAll")
        self.comm = group.comm
        self.layout = group.layout(config)
        self.process_group = group.process_group

    def prepare_no_receive(self, routed: RoutedTokens) -> Receiver:
        """Wait for the numbers of rows only; the rows travel until the receiver is called.

        Raises:
            ValueError: On every rank, if an id of any rank is out of range.
        """
        route = self._route(routed.top_k_ids)
        arrive = self._send(pack(routed).index_select(0, route.token_ids), route)

        def receive() -> Received:
            tokens, ids, weights = unpack(arrive(), routed)
            local = ids - self.layout.first_expert
            rows = ContiguousRows(
                tokens=tokens,
                top_k_ids=local.masked_fill((local < 0) | (local >= self.layout.experts_local), -1),
                top_k_weights=weights,
            )
            return Received(rows=rows, route=route)

        return receive

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """Reduce, send the partial sums back and add them up in rank order, in float32."""
        route: Route = received.route
        partial = reduce.apply(outputs, received.rows)
        if self.layout.world_size > 1:
            partial = all_to_all_rows(partial, route.recv_counts, route.send_counts, self.process_group)
        total = partial.new_zeros(route.num_tokens, partial.shape[1], dtype=accumulator_dtype(partial.dtype))
        splits = list(route.send_counts)
        # One rank at a time, whose tokens are distinct: the order of the sum is fixed.
        for token_ids, rows in zip(route.token_ids.split(splits), partial.split(splits), strict=True):
            total.index_add_(0, token_ids, rows.to(total.dtype))
        return total.to(partial.dtype)

    def _route(self, top_k_ids: Tensor) -> Route:
        layout = self.layout
        bad = bad_ids(top_k_ids, layout)
        shards = torch.div(top_k_ids.masked_fill(bad, -1), layout.experts_local, rounding_mode="floor")
        wanted = torch.arange(layout.ep, device=top_k_ids.device).repeat_interleave(layout.tp)
        going = (shards == wanted[:, None, None]).any(dim=2)  # (W, T): which ranks compute a slot of which token
        # The second column has the number of bad ids, so that all ranks raise and none waits.
        sent = torch.stack([going.sum(1), bad.sum().expand(layout.world_size)], dim=1)
        received = sent
        if layout.world_size > 1:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.process_group)
        sent_host, received_host = to_host(torch.stack([sent, received]), self.process_group)
        check_ids([num for _, num in received_host], top_k_ids, layout)
        return Route(
            num_tokens=top_k_ids.shape[0],
            token_ids=going.nonzero()[:, 1],
            send_counts=tuple(count for count, _ in sent_host),
            recv_counts=tuple(count for count, _ in received_host),
        )

    def _send(self, message: Tensor, route: Route) -> Callable[[], Tensor]:
        if self.layout.world_size == 1:
            return lambda: message
        received = message.new_empty(sum(route.recv_counts), message.shape[1])
        splits = (list(route.recv_counts), list(route.send_counts))
        work = dist.all_to_all_single(received, message, *splits, group=self.process_group, async_op=True)

        def arrive() -> Tensor:
            work.wait()
            return received

        return arrive


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several ``(T, ...)`` matrices as bytes, side by side: ``(T, bytes)`` uint8."""
    # Flattened first: a matrix of one column may have any stride along it.
    flat = (part.contiguous().flatten().view(torch.uint8) for part in parts)
    return torch.cat([part.view(rows.shape[0], row_bytes(rows)) for part, rows in zip(flat, parts, strict=True)], dim=1)


def unpack(message: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``pack``: matrices of the widths and dtypes of ``parts``, with as many rows as the message."""
    columns = message.split([row_bytes(part) for part in parts], dim=1)
    # Copied into one piece each, so that every matrix starts at an aligned address.
    flat = (column.clone(memory_format=torch.contiguous_format).flatten() for column in columns)
    return [
        column.view(part.dtype).view(message.shape[0], part.shape[1]) for column, part in zip(flat, parts, strict=True)
    ]


def row_bytes(part: Tensor) -> int:
    return part.shape[1] * part.dtype.itemsize
