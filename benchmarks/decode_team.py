"""The ranks of a decode run, and what of Comet they share for one model: group, fused path, decode over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from points import Ranks, T, attempt
from torch import Tensor

from comet.config import MoEConfig, ParallelConfig
from comet.decode import MAX_DECODE_TOKENS, RankDecode
from comet.group import ExpertGroup, make_expert_group
from comet.layout import ExpertLayout
from comet.paths import ExpertPath, make_path

TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Of Comet, for one model: the group, its fused path (on a CPU the twin), and decode where there are more ranks.

    ``decode`` is for tokens that all ranks hold, ``own`` for tokens of their own, by the most that a rank brings.
    """

    group: ExpertGroup
    fused: ExpertPath
    decode: RankDecode | None
    own: dict[int, RankDecode] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """One model on this rank; ``shared`` is ``None`` where nobody asked for it or for the reason in ``failures``."""

    config: MoEConfig
    layout: ExpertLayout
    ranks: Ranks
    shared: Shared | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_alone(self) -> bool:
        """One rank, W = 1."""
        return self.layout.world_size == 1

    def total(self, part: Tensor) -> Tensor:
        """The sum over the ranks, in place (collective)."""
        if not self.is_alone:
            dist.all_reduce(part, group=self.ranks.process_group)
        return part

    def own_decode(self, max_tokens: int) -> RankDecode:
        """Decode of at most so many tokens of each rank's own: a step takes blocks for all of them, present or not.

        Made at the first call, which is collective.
        """
        assert self.shared is not None
        if max_tokens not in self.shared.own:
            self.shared.own[max_tokens] = RankDecode(
                self.shared.group.comm, hidden_size=self.config.hidden_size, max_tokens=max_tokens, replicated=False
            )
        return self.shared.own[max_tokens]

    def check(self) -> None:
        """Raise what went wrong on the device so far; waits for it."""
        if self.shared is not None:
            self.shared.group.workspace.check()
            for decode in (self.shared.decode, *self.shared.own.values()):
                if decode is not None:
                    decode.check()

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """``points.attempt`` with what the ranks share."""
        return attempt(action, self.ranks, None if self.shared is None else self.shared.group.workspace)


@contextmanager
def open_team(
    config: MoEConfig, parallel: ParallelConfig, *, max_tokens: int, wants_fused: bool, ranks: Ranks
) -> Iterator[Team]:
    """Build what is needed, release its symmetric memory at the end (collective)."""
    layout = ExpertLayout.create(config, parallel, ranks.rank)
    shared, failure = None, ""
    if wants_fused or layout.world_size > 1:
        shared, failure = attempt(partial(_build, config, parallel, max_tokens, ranks), ranks)
    failures = {"group": failure} if failure else {}
    yield Team(config=config, layout=layout, ranks=ranks, shared=shared, failures=failures)
    if shared is not None:
        shared.group.close()


def _build(config: MoEConfig, parallel: ParallelConfig, max_tokens: int, ranks: Ranks) -> Shared:
    group = make_expert_group(
        config,
        parallel,
        max_tokens=-(-max_tokens // parallel.world_size),
        dtype=ranks.dtype,
        device=ranks.device,
        timeout_s=TIMEOUT_S,
    )
    fused = make_path("fused" if ranks.device.type == "cuda" else "twin", config, group)
    decode = None
    if parallel.world_size > 1:
        decode = RankDecode(group.comm, hidden_size=config.hidden_size, max_tokens=min(max_tokens, MAX_DECODE_TOKENS))
    return Shared(group=group, fused=fused, decode=decode)
