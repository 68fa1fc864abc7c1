"""The mailbox by which decode steps ask the host's cores for experts, in memory of two processes and the device."""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

LAST_SEQUENCE = tl.constexpr(2**30)
# Words of ``Mailbox.words``; each word that is polled has a cache line of its own, but for ``SERVED``.
REQUEST, OF_LAYER, NUM_EXPERTS, NUM_TOKENS, TOP_K = (tl.constexpr(word) for word in range(5))
ANSWERED, FAILED, READY, STOP = (tl.constexpr(32 * line) for line in range(1, 5))
SERVED = tl.constexpr(ANSWERED.value + 1)  # number of the last request that was read, answered or not
EXPERTS = tl.constexpr(160)


class Mailbox(NamedTuple):
    """A mailbox in which decode steps of all layers of a rank, one after the other, ask the host's cores."""

    # (max_tokens + 1, E + 1) int32 on the device: of a step of T tokens that misses m experts, how many the host
    # computes; from 0 to m
    share: Tensor
    sequence: Tensor  # (1,) int32 on the device: number of the last request, from 1 to LAST_SEQUENCE, or 0
    # (160 + E + max_tokens * K,) int32, like all memory in which request and answer are, of the host and mapped: number
    # of the request, its layer, how many experts, tokens and experts per token; number of the last answer; whether a
    # deadline passed; whether the host is ready; whether it is to end; at 160 the numbers of the experts, behind E of
    # these the ids
    words: Tensor
    tokens: Tensor  # (max_tokens, D), of the request
    weights: Tensor  # (max_tokens * K,) float32 routing weights
    answer: Tensor  # (max_tokens, D) float32
    sums: Tensor  # (max_tokens, D) float32 on the device, where down_kernel finds the answer
    fault: Tensor  # (8,) int64 on the device, record of a spin that met its deadline (see primitives)
    timeout_ns: int  # deadline of an answer

    def share_of(self, num_tokens: int, num_missing: int) -> int:
        """Return how many of a step's missing experts the host computes; 0 once a deadline passed."""
        takes = num_tokens <= self.tokens.shape[0] and not int(self.fault[0])
        return int(self.share[num_tokens, num_missing]) if takes else 0
