"""Prompts that stream their experts leave some of the missing ones to the host's cores, while others travel.

The host waits for the routing of every layer of a prompt anyway, so it asks itself, an expert at a time, with no flag
in GPU memory. Experts of the fewest tokens go there, of at most as many as a decode step has: for so many the cores are
bound by reading the weights, as for one token. An expert of Qwen3 in bfloat16 takes 16 cores 286 us (33 GB/s), a link
of 55 GB/s 172 us, and its products for 16 tokens 50 to 150 us at 3 to 1 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comet.experts.host.cores import HostCores
from comet.kernels.experts.host import ask_torch, asked_by_host
from comet.kernels.experts.tables import CLOCK, CacheTables


@dataclass(frozen=True, slots=True)
class PromptCores:
    """The host's cores, started, for one layer of prompts."""

    cores: HostCores  # started
    layer: int  # number of the layer there
    tables: CacheTables  # of its cache
    first_expert: int  # number of the rank's first expert among all

    def choose(self, counts: Sequence[int], owners: Sequence[int]) -> list[int]:
        """Which missing experts the host computes: of routed rows of each expert, and the expert of each slot."""
        assert self.cores.profile is not None, "they were started"
        missing = [expert for expert, count in enumerate(counts) if count and expert not in owners]
        missing.sort(key=lambda expert: counts[expert])
        most = self.cores.sizes.max_tokens
        few = [counts[expert] for expert in missing if counts[expert] <= most]
        return missing[: self.cores.profile.share_of_prompt(few, len(missing), most)]

    def compute(self, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """The outputs ``(R, D)`` float32 of the rows ``(R, D)`` of each expert, all in host memory."""
        mail, outputs = asked_by_host(self.cores.mail), []
        for expert, tokens in zip(experts, rows, strict=True):
            ids = torch.full((len(tokens), 1), self.first_expert + expert)
            outputs.append(ask_torch(mail, self.layer, ids[0].tolist(), tokens, ids, torch.ones(ids.shape)).clone())
            self.cores.raise_if_failed()
        self.cores.mail.sequence.copy_(mail.sequence)
        used = torch.tensor([self.first_expert + expert for expert in experts], device=self.tables.state.device)
        self.tables.last_used[used] = self.tables.header[CLOCK.value]
        self.tables.totals[0] += len(experts)
        self.tables.totals[7] += len(experts)
        return outputs
