"""Decode steps from a cache that the device fills itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from comet.config import require
from comet.decode.runners import Runner
from comet.experts.cache import CacheReport, ExpertCache, report_of
from comet.experts.prefetch import Predict, Prefetch
from comet.experts.streaming import ExpertsFromSlots
from comet.layout import RoutedTokens
from comet.router.router import Router

NEXT_ROW = (0, 0, 0, 1)  # a row of padding


class CachedExperts(ExpertsFromSlots):
    """Experts that the device brings itself.

    A step that may need more experts than there are slots runs in waves (``comet.kernels.experts.waves``). Kernels that
    are compiled for one token have none: where its K experts have no room, a token without any is computed with it.
    """

    cache: ExpertCache
    prefetch: Prefetch | None = None  # brings experts of this layer before its step

    def __init__(self, cache: ExpertCache, runner: Runner, top_k: int) -> None:
        super().__init__(cache, runner)
        require(
            self.has_steps(top_k),
            f"decode_tokens={runner.decode.max_tokens} must be at least 2 with num_slots={cache.num_slots}, fewer than "
            f"top_k={top_k}",
        )
        cache.copy_stream = runner.decode.copy_stream(cache.weights.w1.device)

    def has_steps(self, top_k: int) -> bool:
        """Whether the slots hold the experts of one token, or waves of two tokens, without the host's cores, do."""
        waves = self.runner.decode.max_tokens > 1 and self.cache.cores is None
        return waves or self.cache.num_slots >= self.most_of_a_token(top_k)

    def prefetch_by(self, predict: Predict, following: Prefetch | None, stream: torch.cuda.Stream | None) -> Prefetch:
        self.cache.expect_prefetch()
        self.prefetch = Prefetch(self.cache, predict, following, stream)
        return self.prefetch

    @staticmethod
    def report(paths: Sequence[CachedExperts]) -> CacheReport:
        return report_of([path.cache for path in paths])

    def check(self) -> None:
        """Raise ``HostComputeError`` if the host's cores are gone; once a pass is enough."""
        if self.cache.cores is not None and self.cache.layer == 0:
            self.cache.cores.raise_if_failed()

    def step(self, routed: RoutedTokens, w1: Tensor, w2: Tensor) -> Tensor:
        """Compute a decode step, while experts of other layers may travel."""
        tokens, top_k_ids, top_k_weights = routed
        if self.prefetch is not None:
            self.prefetch.before_step(tokens, top_k_ids.shape[1])
        step, num_tokens = routed._replace(top_k_ids=top_k_ids.contiguous()), tokens.shape[0]
        if num_tokens == 1 and self.cache.num_slots < self.most_of_a_token(top_k_ids.shape[1]):
            ids = pad(top_k_ids, NEXT_ROW, value=-1)
            step = RoutedTokens(pad(tokens, NEXT_ROW), ids, pad(top_k_weights, NEXT_ROW))
        with torch.autocast(tokens.device.type, enabled=False):  # decode rounds where it means to
            output = self.runner(step, w1, w2, experts=self.cache.weights)[:num_tokens]
        if self.prefetch is not None:
            self.prefetch.after_step(tokens)
        if self.cache.cores is not None and not tokens.is_cuda:  # a GPU has not computed this step yet
            self.cache.cores.raise_if_failed()
        return output


@torch.no_grad()
def probable(router: Router, tokens: Tensor) -> Tensor:
    """``(T, K)`` int32: where the tokens ``(T, D)`` of the layer before would go if they were this router's."""
    return router(tokens).top_k_ids


def prefetch_between(paths: Sequence[ExpertsFromSlots], predict: Sequence[Predict]) -> None:
    """Let every layer bring the experts of the next one.

    Args:
        predict: For each of them; the first one's is not asked.
    """
    device = paths[0].cache.weights.w1.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    following: Prefetch | None = None
    for path, each in zip(reversed(paths), reversed(predict), strict=True):
        following = path.prefetch_by(each, following, stream)
