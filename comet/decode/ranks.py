"""Decode over the ranks of an MoE group: every rank computes its experts, or its slice of them, for all tokens.

The ranks hold the same tokens, or (data-parallel attention) each its own, which are gathered first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comet.comm.base import Communicator, SymmTensor, require_memory, settle
from comet.comm.collectives import wants_grad
from comet.comm.signals import check_epoch, waited
from comet.config import MAX_TOP_K, MOE_DTYPES, require, resolve_kernels
from comet.decode.local import run_kernels
from comet.decode.twin import decode_partial_torch
from comet.decode.weights import MAX_DECODE_TOKENS, WIDTH, DecodeScratch, DecodeWeights, check_inputs
from comet.kernels.decode.blocks import DecodeConfig
from comet.kernels.decode.gather import ABSENT
from comet.kernels.decode.step import Batch, Gather, ReceiveBuffer, Words
from comet.kernels.decode.words import LOW_HALF
from comet.kernels.runtime.arguments import aligned
from comet.kernels.runtime.faults import Fault, Place
from comet.layout import ExpertLayout
from comet.limits import at_least, at_most, check_values
from comet.utils.graphs import hold_if_captured
from comet.utils.match import MatchOnce
from comet.utils.uncompiled import uncompiled


def rank_slots(layout: ExpertLayout, device: torch.device | str) -> Tensor:
    """The slot table of a rank that holds its EP shard in order; its TP ranks share one table.

    Example: E = 8, EP = 4, TP = 1, rank 1: ``[-1, -1, 0, 1, -1, -1, -1, -1]``.
    """
    slots = torch.full((layout.num_experts,), -1, dtype=torch.int32)
    held = slice(layout.first_expert, layout.first_expert + layout.experts_local)
    slots[held] = torch.arange(layout.experts_local, dtype=torch.int32)
    return slots.to(device)


def receive_bytes(world_size: int, hidden_size: int, max_tokens: int = MAX_DECODE_TOKENS) -> int:
    """Bytes of symmetric memory of one rank: 2 halves x W ranks x tokens x D words of 8; W=4, D=2048: 8388608."""
    return 2 * world_size * max_tokens * hidden_size * 8


def gather_bytes(world_size: int, hidden_size: int, max_tokens: int) -> int:
    """Bytes of symmetric memory of one rank for the tokens: 2 halves x W ranks x tokens x (D + 64) words of 8."""
    return 2 * world_size * max_tokens * (hidden_size + 2 * MAX_TOP_K) * 8


class TokenGather:
    """Brings up to ``max_tokens`` tokens of every rank to every rank (``comet.kernels.decode.gather``).

    Memory of ``RankDecode``; a batch always has W * max_tokens, absent ones included.
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
        self._batches: dict[tuple[torch.dtype, int], Batch] = {}

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return self.words.pointers, self._tokens, self._ids, self._weights

    def batch(self, own: Batch) -> Batch:
        """Memory for the tokens of all ranks, alike to ``own``; written by the next gather."""
        key = dtype, top_k = own.tokens.dtype, own.ids.shape[1]
        if key in self._batches:
            return self._batches[key]
        require(dtype in MOE_DTYPES, f"tokens of dtype {dtype} must be one of {MOE_DTYPES} where replicated=False")
        rows, routed_rows = self.batch_size, self.batch_size * top_k
        tokens = self._tokens.view(dtype)[: rows * self.hidden_size].view(rows, self.hidden_size)
        ids, weights = (memory[:routed_rows].view(rows, top_k) for memory in (self._ids, self._weights))
        return self._batches.setdefault(key, Batch(tokens, ids, weights))

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
        arrived = self.words.local[epoch % 2].flatten(0, 1)
        batch.ids.copy_(_payload(arrived[:, -2 * top_k : -top_k], epoch))
        there = (batch.ids != ABSENT.value).all(dim=1)
        batch.ids[~there] = -1
        batch.tokens.view(torch.int32)[there] = _payload(arrived[there, :width], epoch)
        batch.routing_weights.view(torch.int32)[there] = _payload(arrived[there, -top_k:], epoch)
        return batch


def _memory(
    comm: Communicator, hidden_size: int, max_tokens: int, own_tokens: bool
) -> tuple[SymmTensor, TokenGather | None, Tensor, Tensor]:
    """Make receive buffer, gather, epoch and fault of steps that follow each other, whichever object runs them."""
    shape = (2, comm.world_size, max_tokens, hidden_size)
    words = comm.alloc(receive_bytes(comm.world_size, hidden_size, max_tokens)).view(0, shape, torch.int64)
    gather = TokenGather(comm, hidden_size=hidden_size, max_tokens=max_tokens) if own_tokens else None
    epoch = torch.zeros(1, dtype=torch.int32, device=comm.device)
    fault = Fault.allocate(comm.device)
    signals = [words.local] if gather is None else [words.local, gather.words.local]
    comm.renew_at_restart(epoch, fault, signals)
    return words, gather, epoch, fault


def words_of(values: Tensor, epoch: int) -> Tensor:
    """Every 32 bits along the last axis of ``values`` below ``epoch``, as int64 words."""
    return (aligned(values.contiguous()).view(torch.int32).long() & LOW_HALF.value) | (epoch << 32)


def _payload(words: Tensor, epoch: int) -> Tensor:
    assert bool((words >> 32 == epoch).all()), "a word of another step is in this step's half"
    return words.int()


class RankDecode:
    """``warp_decode`` over W ranks, with the all-reduce inside the down kernel; one for all layers of equal D.

    *Replicated*: all ranks pass the same tokens and routing, and all get the same bits. *Not replicated*: each passes
    its own tokens, as many as it has, and gets theirs, with the bits that a replicated step of all of them gives; one
    more kernel gathers them first. All ranks take part in every step then, also with no tokens at all, and a step takes
    blocks for W * max_tokens tokens: make an object for each size of batch that matters. A captured step keeps its
    number of tokens; ids of -1 leave some out. ``comet.decode.DataParallelDecode`` puts it under a ``MoE``, with the
    layer's own path for more tokens.

    EP, TP and EP x TP alike: a rank's ``DecodeWeights`` say what it holds. Steps run in the order of one stream,
    without a barrier between them, captured in a CUDA graph or not; why that is safe stands in
    ``comet.kernels.decode.words`` and ``comet.kernels.decode.gather``.

    Args:
        max_tokens: Most tokens a rank passes to a step, equal on all ranks: at most 64, or 64 / W of each rank's own;
            ``None`` takes that.
        replicated: Whether all ranks hold the same tokens.

    Raises:
        UnavailableError: If the group spans several nodes: ``comet.decode.nodes`` has steps for these.
    """

    collectives = False  # whether steps run collectives of ``torch.distributed``

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        comm: Communicator,
        *,
        hidden_size: int,
        max_tokens: int | None = None,
        replicated: bool = True,
        use_kernels: bool | None = None,
    ) -> None:
        require_memory(comm, "warp decode over ranks", "use the layer's own path")
        world_size = comm.world_size
        batches = 1 if replicated else world_size
        max_tokens = max(1, MAX_DECODE_TOKENS // batches) if max_tokens is None else max_tokens
        advice = "" if replicated else f"with replicated=False a step holds those of all W={world_size} ranks"
        check_values(at_least(1), at_most(MAX_DECODE_TOKENS // batches, advice), max_tokens=max_tokens)
        check_values(*WIDTH, D=hidden_size)
        self.comm = comm
        self.hidden_size = hidden_size
        self.max_tokens = max_tokens
        self.use_kernels = resolve_kernels(comm.device, use_kernels)
        own_tokens = not replicated and world_size > 1
        self.words, self.gather, self.epoch, self.fault = comm.once(
            ("decode", hidden_size, max_tokens, own_tokens), lambda: _memory(comm, hidden_size, max_tokens, own_tokens)
        )
        if Fault.of(self.fault).place is Place.HOST:  # A model is gone whose host's cores did not answer.
            self.fault.zero_()
        self._step = comm.step("decode step", refuses=True)
        self._match = MatchOnce(self._check_inputs)
        self._memory = (self.words.pointers, *(() if self.gather is None else self.gather.memory))

    @uncompiled
    def __call__(
        self,
        tokens: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        weights: DecodeWeights,
        *,
        scratch: DecodeScratch | None = None,
        config: DecodeConfig | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Run one step; collective. Arguments and result as of ``warp_decode``, but of at most ``max_tokens`` tokens.

        D, dtype and K are equal on all ranks, and so is every input where these are replicated; else ``scratch`` is for
        W * max_tokens tokens. The sum is over all ranks, added in float32 in their order. After ``check`` raised, or
        would, the result means nothing. ``out_dtype`` is the type of the result; ``None`` takes that of the tokens.

        Raises:
            StepFailedError: If a step failed on any rank; ``restart`` goes on.
            CommTimeoutError: On the CPU, if a rank did not come in time; on a GPU ``check`` raises it.
        """
        own = Batch(tokens, top_k_ids, top_k_weights)
        self.check_inputs(own, weights)
        out_dtype = out_dtype or tokens.dtype
        if tokens.shape[0] == 0 and self.gather is None:
            return tokens.new_empty(tokens.shape, dtype=out_dtype)
        with self._step:
            if not self.use_kernels:
                return self._twin(own, weights).to(out_dtype)
            out = tokens.new_empty(tokens.shape, dtype=out_dtype)
            batch = own if self.gather is None else self.gather.batch(own)
            hold_if_captured(self.epoch, *self._memory)  # the communicator keeps the epoch
            run_kernels(*batch, weights, scratch=scratch, config=config, buffer=self._buffer(own), out=out)
            if tokens.device.type == "cpu":
                self.check()
            return out

    def check(self) -> None:
        """Report what went wrong since this object was made; synchronises with the device.

        Raises:
            CommTimeoutError: If a rank did not come in time; names it.
            EpochError: If the epoch has passed 2^30; ``restart`` is due.
        """
        settle(self.comm.device)
        fault = Fault.of(self.fault)
        if fault.is_set and fault.place is not Place.ELSEWHERE:  # the group over nodes knows what failed elsewhere
            place = f"{fault.place.words}, block {fault.index}"
            late = waited(self.comm.rank, fault.peer, place, self.comm.timeout_s, fault.expected, fault.seen)
            error = self.comm.board.explained(late)
            self.comm.board.note("last decode step", error)
            raise error
        self.comm.board.check()
        check_epoch(self.epoch, self.comm.rank)

    def restart(self) -> None:
        """``Workspace.restart``: all that uses the communicator starts again (collective), between two steps."""
        self.comm.restart()

    def check_inputs(self, own: Batch, weights: DecodeWeights) -> None:
        """Raise ``ValueError`` naming field, value and rule unless a step can take these tensors."""
        check = self._check_inputs if wants_grad(*own) else self._match
        check(*own, weights.w2, weights.b1, weights.b2, weights=weights)

    def _check_inputs(
        self, tokens: Tensor, ids: Tensor, routing: Tensor, *_: Tensor | None, weights: DecodeWeights
    ) -> None:
        check_inputs(tokens, ids, routing, weights)
        num_tokens, most = tokens.shape[0], self.max_tokens
        require(num_tokens <= most, f"T={num_tokens} tokens must be at most max_tokens={most}")
        require(tokens.shape[1] == self.hidden_size, f"D={tokens.shape[1]} of tokens must be {self.hidden_size}")

    def _buffer(self, own: Batch) -> ReceiveBuffer | None:
        if self.comm.world_size == 1:
            return None
        return ReceiveBuffer(
            words=Words(self.words.pointers, self.epoch, self.fault),
            rank=self.comm.rank,
            max_tokens=self.max_tokens,
            timeout_ns=int(self.comm.timeout_s * 1e9),
            gather=None if self.gather is None else self.gather.kernel_inputs(own),
        )

    def _twin(self, own: Batch, weights: DecodeWeights) -> Tensor:
        """The float32 sums in torch: the same words in the same halves, with a barrier in the place of epochs."""
        self.epoch += 1
        epoch, (num_tokens, _) = int(self.epoch), own.tokens.shape
        batch = own if self.gather is None else self.gather.twin(own, epoch)
        words = words_of(decode_partial_torch(*batch, weights).float(), epoch)
        for rank, peer in enumerate(self.words.peers):
            rows = words if self.gather is None else words[rank * self.max_tokens :][: self.max_tokens]
            peer[epoch % 2, self.comm.rank, : rows.shape[0]].copy_(rows)
        self.comm.barrier()
        arrived = self.words.local[epoch % 2, :, :num_tokens]
        if not bool((arrived >> 32 == epoch).all()):  # not a ValueError, which others take for refused by all of them
            raise RuntimeError(f"T={num_tokens} tokens must be as many on all ranks: another one passed fewer")
        total = torch.zeros(own.tokens.shape, dtype=torch.float32, device=own.tokens.device)
        for source in arrived.int().view(torch.float32):
            total = total + source
        return total
