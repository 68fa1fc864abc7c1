"""Experts of a model whose ranks decode tokens of their own: data-parallel attention, as in training."""

from __future__ import annotations

from torch import Tensor

from comet.comm.collectives import wants_grad
from comet.comm.handshake import largest
from comet.config import MoEConfig, require
from comet.decode.runners import GroupExperts
from comet.decode.weights import MAX_DECODE_TOKENS
from comet.layer.group import ExpertGroup
from comet.layout import Biases
from comet.utils.uncompiled import uncompiled


class DataParallelDecode(GroupExperts):
    """Experts over a group each of whose ranks brings its own tokens (data-parallel attention); collective.

    An ``ExpertPath``: ``layer.experts = DataParallelDecode(config, group)`` lets a ``MoE`` decode. Where a gradient is
    needed (on all ranks or on none) its calls take the group's path.

    Args:
        decode_tokens: Most tokens of one rank that take warp decode; 0: none do; ``None``: 64 / W, or 0 where the group
            spans several nodes.

    Raises:
        ValueError: If the experts do not divide over the group, its pool is for another shape, or warp decode cannot
            take so many tokens.
        UnavailableError: If warp decode is asked for and the group spans several nodes.
    """

    def __init__(self, moe: MoEConfig, group: ExpertGroup, decode_tokens: int | None = None) -> None:
        ranks = group.parallel.world_size
        most = MAX_DECODE_TOKENS // ranks
        default = 0 if group.comm.memory_obstacle else most
        self.decode_tokens = default if decode_tokens is None else decode_tokens
        require(
            0 <= self.decode_tokens <= most,
            f"decode_tokens={self.decode_tokens} must be between 0 and {MAX_DECODE_TOKENS} / W={ranks}",
        )
        super().__init__(moe, group, self.decode_tokens, top_k=moe.top_k, replicated=False)

    @uncompiled
    def __call__(
        self,
        tokens: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None = None,
        *,
        most_tokens: int | None = None,
    ) -> Tensor:
        """Compute this rank's tokens; all ranks take part, also without any.

        ``(T, D)``, ``(T, K)`` int32, ``(T, K)`` float32, ``(e, 2F/TP, D)``, ``(e, D, F/TP)`` -> ``(T, D)``, with biases
        ``(e, 2F/TP)`` and ``(e, D)`` where there are some.

        Args:
            most_tokens: The largest T of all ranks, or a bound of it, equal on all of them. ``None``: the ranks ask
                each other, which waits for the device and cannot be captured in a CUDA graph.
        """
        if most_tokens is None:
            most_tokens = int(largest([tokens.shape[0]], tokens.device, self.group.process_group)[0])
        most = most_tokens
        require(tokens.shape[0] <= most, f"T={tokens.shape[0]} tokens must be at most most_tokens={most}")
        learns = wants_grad(tokens, top_k_weights, w1, w2, *(biases or ()))
        if most > self.decode_tokens or self.decode_on_ranks is None or learns:
            return self.path(tokens, top_k_ids, top_k_weights, w1, w2, biases)
        self.match(w1, w2, *(biases or ()))  # slots name places that there have to be
        experts = self.held(w1, w2, biases)
        scratch = self.decode.scratch(tokens, experts)
        return self.decode_on_ranks(tokens, top_k_ids, top_k_weights, experts, scratch=scratch)
