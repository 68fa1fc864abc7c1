"""What missing experts cost on this machine, over the link and on the host's cores, and how they are split."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from comet.kernels.expert_host import ask_torch, asked_by_host
from comet.kernels.expert_mailbox import Mailbox
from comet.kernels.expert_parts import ExpertParts
from comet.layout import ExpertLayout

REPEATS = 5  # counted


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProfile:
    """What experts cost, in nanoseconds.

    Args:
        link_ns: To bring one to the device.
        request_ns: Of a request of one token to the host's cores, without its experts.
        expert_ns: Of each of its experts.
        full_request_ns: Of a request of ``max_tokens`` tokens, which all chose all of its experts.
        full_expert_ns: Likewise.
    """

    link_ns: float
    request_ns: float
    expert_ns: float
    full_request_ns: float
    full_expert_ns: float

    def share_table(self, max_tokens: int, num_experts: int) -> Tensor:
        """Of m missing experts, how many the host computes, so that it and the link end soonest.

        At least one comes to the device: a cache that fetches nothing never learns what it should hold.

        Example: 200 us for an expert on the link, 290 on the cores and 20 a request: of 1 to 8 missing experts the host
        computes 0, 1, 1, 1, 2, 2, 3 and 3. Of 3 it takes one, 310 us, while two travel for 400.

        Args:
            max_tokens: Of a step; costs are taken to grow evenly between one token and these.
            num_experts: E.

        Returns:
            ``(max_tokens + 1, E + 1)`` int32: for steps of T tokens and m missing experts.
        """
        table = torch.zeros(max_tokens + 1, num_experts + 1, dtype=torch.int32)
        hosted = torch.arange(num_experts + 1)
        fetched = hosted[:, None] - hosted
        for num_tokens in range(1, max_tokens + 1):
            request, expert = self.costs_of(num_tokens, max_tokens)
            ends = torch.maximum((request + hosted * expert).where(hosted > 0, 0.0), fetched * self.link_ns)
            ends = ends.where((fetched > 0) | (hosted == 0), torch.inf)
            soonest = ends == ends.amin(1, keepdim=True)
            table[num_tokens] = hosted.where(soonest, num_experts).amin(1)
        return table

    def costs_of(self, num_tokens: int, max_tokens: int) -> tuple[float, float]:
        """Of a request of so many tokens, without its experts, and of each of them."""
        grown = (num_tokens - 1) / max(max_tokens - 1, 1)
        request = self.request_ns + grown * (self.full_request_ns - self.request_ns)
        return request, self.expert_ns + grown * (self.full_expert_ns - self.expert_ns)

    def share_of_prompt(self, num_tokens: Sequence[int], num_missing: int, max_tokens: int) -> int:
        """How many experts of a prompt the host computes, each in a request of its own, so that all is done soonest.

        Example: 200 us for an expert on the link, 290 on the cores and 20 a request: of 5 missing experts, three of
        which have one token, the host computes two, 620 us, while three travel for 600.

        Args:
            num_tokens: Of the experts that it could compute, in the order in which it would.
            num_missing: These and all others, at least one of which comes to the device.
            max_tokens: Of a step.
        """
        host, best, soonest = 0.0, 0, num_missing * self.link_ns
        for hosted, tokens in enumerate(num_tokens[: max(num_missing - 1, 0)], start=1):
            host += sum(self.costs_of(tokens, max_tokens))
            ends = max(host, (num_missing - hosted) * self.link_ns)
            if ends < soonest:
                best, soonest = hosted, ends
        return best


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSizes:
    """Of requests.

    Args:
        num_experts: E, of all ranks.
        first_expert: Number of the rank's first.
        hidden_size: D.
        top_k: K, at most.
        max_tokens: Of a step.
        dtype: Of tokens, and of weights that are not quantised.
    """

    num_experts: int
    first_expert: int
    hidden_size: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden_size: int, layout: ExpertLayout, max_tokens: int, dtype: torch.dtype) -> HostSizes:
        """Of a rank's layers."""
        return cls(
            num_experts=layout.num_experts,
            first_expert=layout.first_expert,
            hidden_size=hidden_size,
            top_k=layout.top_k,
            max_tokens=max_tokens,
            dtype=dtype,
        )


def measure(mail: Mailbox, stores: Sequence[ExpertParts], sizes: HostSizes, device: torch.device) -> HostProfile:
    """Time the link and the host's cores on experts of all layers, each another one, so that no cache has them.

    An expert costs the host its part of a request of three, and what one alone takes beyond that is the request's.
    """
    aside = asked_by_host(mail)
    few = min(sizes.top_k, stores[0].w1.shape[0], 3)
    costs = []
    for num_tokens in (1, sizes.max_tokens):
        one, more = (time_request(aside, stores, sizes, num_tokens, count) for count in (1, few))
        costs += [max(one - more / few, 0.0), more / few]
    mail.sequence.copy_(aside.sequence)
    return HostProfile(
        link_ns=time_link(stores, device),
        request_ns=costs[0], expert_ns=costs[1], full_request_ns=costs[2], full_expert_ns=costs[3],
    )  # fmt: skip


def time_link(stores: Sequence[ExpertParts], device: torch.device) -> float:
    """Nanoseconds in which an expert comes to the device."""
    room = [torch.empty_like(part[0], device=device) for part in stores[0].parts]
    times = []
    for repeat in range(REPEATS + 1):
        store = stores[repeat % len(stores)]
        started = time.perf_counter_ns()
        for part, target in zip(store.parts, room, strict=True):
            target.copy_(part[repeat % len(part)], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - started)
    return float(median(times[1:]))


def time_request(
    mail: Mailbox, stores: Sequence[ExpertParts], sizes: HostSizes, num_tokens: int, num_experts: int
) -> float:
    """Nanoseconds of a request of so many tokens, each of which chose all of so many experts."""
    tokens = torch.ones(num_tokens, sizes.hidden_size, dtype=sizes.dtype)
    weights = torch.ones(num_tokens, num_experts)
    held, times = stores[0].w1.shape[0], []
    for repeat in range(2 * REPEATS):
        experts = [sizes.first_expert + (repeat * num_experts + each) % held for each in range(num_experts)]
        ids = torch.tensor(experts).expand(num_tokens, num_experts)
        started = time.perf_counter_ns()
        ask_torch(mail, repeat % len(stores), experts, tokens, ids, weights)
        times.append(time.perf_counter_ns() - started)
    return float(median(times[REPEATS:]))
