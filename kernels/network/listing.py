"""Lists the tokens that travel: one program goes through this rank's tokens for each other node."""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from .legs import LegShape, SendLists

MOST_ELEMENTS = 8192  # ids that a program reads at once


@triton.jit(do_not_specialize=["num_tokens", "node", "experts_per_node"])
def list_kernel(
    ids_ptr, weights_ptr, lists, num_tokens, node, experts_per_node,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, LEG: tl.constexpr,
):  # fmt: skip
    """Fill ``lists`` (``SendLists``) for one slot; ``weights_ptr`` points to the bits of the weights."""
    slot = tl.program_id(0)
    M: tl.constexpr = LEG.num_chunks * LEG.chunk
    first_expert = (node + 1 + slot) % LEG.num_nodes * experts_per_node
    slots = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    sent = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        exists = (tokens < num_tokens)[:, None] & (slots < TOP_K)
        ids = tl.load(ids_ptr + tokens[:, None] * TOP_K + slots, mask=exists, other=-1)
        weights = tl.load(weights_ptr + tokens[:, None] * TOP_K + slots, mask=exists, other=0)
        local = ids - first_expert
        local = tl.where((ids >= 0) & (local >= 0) & (local < experts_per_node), local, -1)
        travels = (tl.max(local, axis=1) >= 0).to(tl.int32)
        places = sent + tl.cumsum(travels, axis=0) - travels
        tl.store(lists.tokens + slot * M + places, tokens, mask=travels != 0)
        tl.store(lists.places + slot * M + tokens, tl.where(travels != 0, places, -1), mask=tokens < num_tokens)
        words = lists.words + (slot * M + places)[:, None] * (2 * TOP_K) + slots
        tl.store(words, local, mask=exists & (travels != 0)[:, None])
        tl.store(words + TOP_K, weights, mask=exists & (travels != 0)[:, None])
        sent += tl.sum(travels, axis=0)
    tl.store(lists.counts + slot, sent)


def list_tokens(
    top_k_ids: Tensor, top_k_weights: Tensor, lists: SendLists, node: int, experts_per_node: int, shape: LegShape
) -> None:
    """Write which tokens have experts on which other node, in the order of the tokens.

    Example: two nodes, this one node 0 with experts 0 and 1 of 4, ids ``[[0, 1], [1, 3], [2, 3]]``: tokens ``[1, 2]``,
    places ``[-1, 0, 1]``, counts ``[2]``, ids among the words ``[-1, 1]`` and ``[0, 1]``.

    Args:
        top_k_ids: ``(T, K)`` int32, contiguous; ids of no expert, -1 among them, go nowhere.
        top_k_weights: ``(T, K)`` float32, contiguous.
        lists: Receives the result.
        node: This rank's node.
        experts_per_node: E / N.
        shape: The leg's.
    """
    num_tokens, top_k = top_k_ids.shape
    block = max(16, min(1024, MOST_ELEMENTS // power_of_2(top_k)))
    list_kernel[(shape.num_nodes - 1,)](
        top_k_ids, top_k_weights.view(top_k_ids.dtype), lists, num_tokens, node, experts_per_node,
        TOP_K=top_k, BLOCK=block, LEG=shape, num_warps=8,
    )  # fmt: skip
