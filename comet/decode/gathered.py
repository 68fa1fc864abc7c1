"""Tokens of decode that differ between ranks: where they meet before a step."""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.base import Communicator
from comet.config import MAX_TOP_K, MOE_DTYPES, require
from comet.kernels.decode.gather import ABSENT
from comet.kernels.decode.step import Batch, Gather
from comet.kernels.decode.words import LOW_HALF
from comet.kernels.runtime.arguments import aligned


def gather_bytes(world_size: int, hidden_size: int, max_tokens: int) -> int:
    """Symmetric memory one rank needs for the tokens, in bytes: 2 halves x W ranks x tokens x (D + 64) words of 8.

    Example: W=4, D=2048, 16 tokens per rank: 2162688.
    """
    return 2 * world_size * max_tokens * (hidden_size + 2 * MAX_TOP_K) * 8


class TokenGather:
    """Brings every rank's tokens to every rank (see ``comet.kernels.decode.gather``); memory of ``RankDecode``.

    Args:
        hidden_size: D.
        max_tokens: Most tokens of one rank; a batch always has W * max_tokens, absent ones included.
    """

    def __init__(self, comm: Communicator, *, hidden_size: int, max_tokens: int) -> None:
        world_size, stride = comm.world_size, hidden_size + 2 * MAX_TOP_K
        self.comm = comm
        self.hidden_size = hidden_size
        self.batch_size = world_size * max_tokens
        memory = comm.alloc(gather_bytes(world_size, hidden_size, max_tokens))
        self.words = memory.view(0, (2, world_size, max_tokens, stride), torch.int64)
        device = comm.device
        self._tokens = torch.empty(self.batch_size * hidden_size, dtype=torch.int32, device=device)
        self._ids = torch.empty(self.batch_size * MAX_TOP_K, dtype=torch.int32, device=device)
        self._weights = torch.empty(self.batch_size * MAX_TOP_K, dtype=torch.float32, device=device)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What a step reads and writes besides the symmetric memory."""
        return self.words.pointers, self._tokens, self._ids, self._weights

    def batch(self, own: Batch) -> Batch:
        """Memory for the tokens of all ranks, alike to ``own``; written by the next gather."""
        dtype, top_k = own.tokens.dtype, own.ids.shape[1]
        require(dtype in MOE_DTYPES, f"tokens of dtype {dtype} must be one of {MOE_DTYPES} where replicated=False")
        rows, routed_rows = self.batch_size, self.batch_size * top_k
        tokens = self._tokens.view(dtype)[: rows * self.hidden_size].view(rows, self.hidden_size)
        ids, weights = (memory[:routed_rows].view(rows, top_k) for memory in (self._ids, self._weights))
        return Batch(tokens, ids, weights)

    def kernel_inputs(self, own: Batch) -> Gather:
        """``own`` and where it goes, as the kernel takes them."""
        return Gather(
            tokens=Batch(aligned(own.tokens.contiguous()), own.ids.contiguous(), own.routing_weights.contiguous()),
            addresses=self.words.pointers,
            stride=self.words.local.shape[-1],
        )

    def twin(self, own: Batch, epoch: int) -> Batch:
        """The gather in torch: the same words in the same half, with a barrier where the kernel looks at epochs.

        Absent tokens have ids -1 and unknown ids stay what they are: what computes the batch shall name them.
        """
        batch, (num_tokens, top_k) = self.batch(own), own.ids.shape
        ids = own.ids.clamp(ABSENT.value + 1, 2**31 - 1).int()
        absent = ids.new_full((self.words.local.shape[2] - num_tokens, top_k), ABSENT.value)
        id_words = words_of(torch.cat((ids, absent)), epoch)
        token_words, weight_words = words_of(own.tokens, epoch), words_of(own.routing_weights, epoch)
        width = token_words.shape[1]
        for peer in self.words.peers:
            rows = peer[epoch % 2, self.comm.rank]
            rows[:, -2 * top_k : -top_k].copy_(id_words)
            rows[:num_tokens, -top_k:].copy_(weight_words)
            rows[:num_tokens, :width].copy_(token_words)
        self.comm.barrier()
        landed = self.words.local[epoch % 2].flatten(0, 1)
        batch.ids.copy_(_payload(landed[:, -2 * top_k : -top_k], epoch))
        there = (batch.ids != ABSENT.value).all(dim=1)
        batch.ids[~there] = -1
        batch.tokens.view(torch.int32)[there] = _payload(landed[there, :width], epoch)
        batch.routing_weights.view(torch.int32)[there] = _payload(landed[there, -top_k:], epoch)
        return batch


def words_of(values: Tensor, epoch: int) -> Tensor:
    """Every 32 bits along the last axis of ``values`` below ``epoch``, as int64 words."""
    return (aligned(values.contiguous()).view(torch.int32).long() & LOW_HALF.value) | (epoch << 32)


def _payload(words: Tensor, epoch: int) -> Tensor:
    assert bool((words >> 32 == epoch).all()), "a word of another step is in this step's half"
    return words.int()
