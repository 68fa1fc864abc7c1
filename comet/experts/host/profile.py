"""Costs of missing experts on this machine, over the link and on the host's cores, and the split between the two."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import Tensor

from comet.kernels.experts.host import ask_torch, asked_by_host
from comet.kernels.experts.mailbox import Mailbox
from comet.kernels.experts.tables import ExpertParts
from comet.kernels.runtime.activation import SWIGLU, Activation

REPEATS = 8  # counted, of requests of a kind; as many come before
PAUSE_S = 300e-6  # between requests, about what a step has between those of two layers
LEAST_GAIN = 0.1  # of the link's time alone: costs vary from step to step, and a step waits for the slower of two ends


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProfile:
    """Costs of experts, in nanoseconds."""

    link_ns: float  # to bring one to the device
    shared_link_ns: float  # to bring one there while the host's cores compute
    request_ns: float  # of a request of one token to the host's cores, without its experts
    expert_ns: float  # of each of its experts
    full_request_ns: float  # of a request of max_tokens tokens, which all chose all of its experts
    full_expert_ns: float  # of each of its experts

    def share_table(self, max_tokens: int, num_experts: int) -> Tensor:
        """How many of m missing experts the host computes, so that host and link end soonest.

        The host computes none unless it saves ``LEAST_GAIN`` of the time of the link alone. At least one expert comes
        to the device: a cache that fetches nothing never learns what it should hold.

        Example: 200 us for an expert on the link, 290 on the cores and 20 a request: of 1 to 8 missing experts the host
        computes 0, 1, 1, 1, 2, 2, 3 and 3. Of 3 it takes one, 310 us, while two travel for 400. Were it 345 on the
        cores, it would compute 0 of 2: 365 us are more than 9 tenths of the 400 of the link alone. So would it if an
        expert took 370 us on the link while the cores compute.

        Args:
            max_tokens: Of a step; costs are taken to grow evenly between one token and these.
        """
        table = torch.zeros(max_tokens + 1, num_experts + 1, dtype=torch.int32)
        missing = hosted = torch.arange(num_experts + 1, dtype=torch.float64)
        fetched = missing[:, None] - hosted
        for num_tokens in range(1, max_tokens + 1):
            grown = (num_tokens - 1) / max(max_tokens - 1, 1)
            request = self.request_ns + grown * (self.full_request_ns - self.request_ns)
            expert = self.expert_ns + grown * (self.full_expert_ns - self.expert_ns)
            ends = torch.maximum(request + hosted * expert, fetched * self.shared_link_ns)
            ends = ends.where(fetched > 0, torch.inf)
            ends[:, 0] = missing * self.link_ns * (1 - LEAST_GAIN)
            soonest = ends == ends.amin(1, keepdim=True)
            table[num_tokens] = hosted.where(soonest, num_experts).amin(1)
        return table


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSizes:
    """Sizes of requests to the host's cores."""

    num_experts: int
    first_expert: int  # number of the rank's first
    hidden_size: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype  # the type of tokens and of plain weights
    activation: Activation = SWIGLU


class Link:
    """The way of experts to a device: the last ones first, so that they are others than the host computes meanwhile.

    Args:
        device: That experts come to; a CPU copies them, and has no link to keep busy.
    """

    def __init__(self, stores: Sequence[ExpertParts], device: torch.device) -> None:
        self.stores, self._copied = stores, 0
        self._room = [torch.empty_like(part[0], device=device) for part in stores[0].parts]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event] = []
        self.alone_ns = self._time_alone()  # nanoseconds of an expert while nothing else goes on

    def send(self, count: int) -> None:
        """Start copies of so many experts."""
        if self._stream is None:
            return
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self._stream):
            self._marks[0].record()
            for mark in self._marks[1:]:
                self._copy()
                mark.record()

    def arrived(self) -> int:
        """How many of those that ``send`` started are there."""
        return max(bisect_left(self._marks, True, key=lambda mark: not mark.query()) - 1, 0)

    def cost(self, first: int, last: int) -> float:
        """Nanoseconds of an expert between two answers of ``arrived``, of one at least; waits for all of them."""
        if self._stream is None:
            return self.alone_ns
        self._stream.synchronize()
        first = min(first, len(self._marks) - 2)
        last = max(last, first + 1)
        return self._marks[first].elapsed_time(self._marks[last]) * 1e6 / (last - first)

    def _time_alone(self) -> float:
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
            self.send(2 * REPEATS)
            return self.cost(REPEATS, 2 * REPEATS)
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter_ns()
            self._copy()
            times.append(time.perf_counter_ns() - started)
        return float(median(times))

    def _copy(self) -> None:
        self._copied += 1
        store = self.stores[-self._copied % len(self.stores)]
        for part, target in zip(store.parts, self._room, strict=True):
            target.copy_(part[-self._copied % len(part)], non_blocking=True)


def measure_host(mail: Mailbox, stores: Sequence[ExpertParts], sizes: HostSizes, device: torch.device) -> HostProfile:
    """Time the link and the host's cores on experts of all layers, each another one, so that no cache has them.

    An expert costs the host its part of a request of three, and what one alone takes beyond that is the request's.
    """
    aside, link = asked_by_host(mail), Link(stores, device)
    few = min(sizes.top_k, stores[0].w1.shape[0], 3)
    (one, _), (more, shared_ns), (full_one, _), (full_more, _) = (
        time_request(aside, link, sizes, num_tokens, count)
        for num_tokens in (1, sizes.max_tokens)
        for count in (1, few)
    )
    mail.sequence.copy_(aside.sequence)
    return HostProfile(
        link_ns=link.alone_ns, shared_link_ns=shared_ns,
        request_ns=max(one - more / few, 0.0), expert_ns=more / few,
        full_request_ns=max(full_one - full_more / few, 0.0), full_expert_ns=full_more / few,
    )  # fmt: skip


def time_request(mail: Mailbox, link: Link, sizes: HostSizes, num_tokens: int, num_experts: int) -> tuple[float, float]:
    """Time requests as steps make them: behind a pause, while the link is busy.

    Returns:
        Nanoseconds of a request, and of an expert on the link meanwhile.
    """
    tokens = torch.ones(num_tokens, sizes.hidden_size, dtype=sizes.dtype)
    weights = torch.ones(num_tokens, num_experts, dtype=torch.float32)
    held, times, shared = link.stores[0].w1.shape[0], [0], []
    for repeat in range(2 * REPEATS):
        experts = [sizes.first_expert + (repeat * num_experts + each) % held for each in range(num_experts)]
        ids = torch.tensor(experts).expand(num_tokens, num_experts)
        time.sleep(PAUSE_S)
        link.send(2 + int(2 * times[-1] / link.alone_ns))  # for twice as long as the last request took
        first, started = link.arrived(), time.perf_counter_ns()
        ask_torch(mail, repeat % len(link.stores), experts, tokens, ids, weights)
        times.append(time.perf_counter_ns() - started)
        shared.append(link.cost(first, link.arrived()))
    # The third quartile: a step has tens of requests one after the other, and each slow one delays it.
    return quantiles(times[-REPEATS:], n=4)[2], median(shared[-REPEATS:])
