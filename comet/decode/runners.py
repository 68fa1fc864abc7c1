"""Experts of decode steps: all on this rank, or over a group whose ranks hold the same tokens or each its own.

Few tokens take warp decode, more take the path of the group. Ranks that run the same tokens, as generation does, get
equal results, bit for bit: the all-reduce of ``RankDecode`` adds in rank order, in float32; results that differed in
the last bit might end in different tokens. Nothing here waits for the device, but for the plain path of a rank without
a group; hence steps can be captured in a CUDA graph. Ranks of their own tokens have to say then how many there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from comet.capabilities import refuse
from comet.comm.collectives import all_gather_stacked, wants_grad
from comet.config import DIM_MULTIPLE, MoEConfig, require
from comet.decode.local import warp_decode
from comet.decode.nodes import NodesDecode, decode_obstacle, make_decode
from comet.decode.ranks import RankDecode, rank_slots
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.kernels.runtime.arguments import power_of_2
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path
from comet.layer.weights import match_once, match_weights
from comet.layout import Biases, ExpertLayout, RoutedTokens, added_biases, gate_first
from comet.limits import at_least, at_most, check_values, multiple_of
from comet.quantization.formats import FP8
from comet.reference.plain import plain_experts
from comet.utils.graphs import is_capturing
from comet.utils.match import Sizes
from comet.utils.uncompiled import uncompiled

logger = logging.getLogger(__name__)
# Most tokens that take warp decode where the caller does not say: all that it takes. On an H200 no other path was
# faster for the experts of Qwen3-30B at any number up to it (``benchmarks/results/decode.md``).
DECODE_TOKENS = MAX_DECODE_TOKENS


class Decoder:
    """Warp decode of what this rank holds, with scratch memory that all layers share.

    Each thread has its own, for steps on one stream, made at its first step and kept; none on the CPU. ``top_k`` is the
    largest K of all layers, with what a shared expert adds to it (``shared_columns``).
    """

    def __init__(self, top_k: int, max_tokens: int) -> None:
        check_values(at_least(0), at_most(MAX_DECODE_TOKENS), decode_tokens=max_tokens)
        self.top_k = top_k
        self.max_tokens = max_tokens
        self._scratch: dict[int, DecodeScratch] = {}  # keys are threads
        self._copy_stream: torch.cuda.Stream | None = None

    def __call__(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, experts: DecodeWeights) -> Tensor:
        """``(T, D)``, ``(T, K)`` int32, ``(T, K)`` float32 -> ``(T, D)``: what this rank's experts contribute."""
        return warp_decode(tokens, top_k_ids, top_k_weights, experts, scratch=self.scratch(tokens, experts))

    def scratch(self, tokens: Tensor, experts: DecodeWeights) -> DecodeScratch | None:
        """The memory for a step with these tensors; ``None`` lets the step allocate it, as a graph's first one does."""
        thread = threading.get_ident()
        kept = self._scratch.get(thread)
        if tokens.is_cuda and (kept is None or kept.hidden.device != tokens.device):
            if is_capturing(tokens.device):
                return None  # zeros that a capture makes are not there before the graph is replayed
            kept = DecodeScratch.create(experts, self.top_k, tokens.dtype, max_tokens=self.max_tokens)
            self._scratch[thread] = kept
        return kept

    def copy_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream on which all layers copy experts while they compute; ``None`` on a CPU."""
        if device.type == "cuda" and self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)
        return self._copy_stream


class LocalRunner:
    """All experts on this rank, which waits for no other: warp decode, or grouped GEMMs for many tokens and gradients.

    ``top_k`` is K, with ``shared_columns``; ``interleaved`` rows of w1 and b1 are gate and up in turn, read as they
    are.
    """

    takes_fp8 = False  # whether more tokens are computed from experts in block FP8 as they are, too

    def __init__(
        self,
        top_k: int,
        decode_tokens: int = DECODE_TOKENS,
        *,
        activation: Activation = SWIGLU,
        interleaved: bool = False,
    ) -> None:
        self.decode = Decoder(top_k, decode_tokens)
        self.activation = activation
        self.interleaved = interleaved
        self._slots: Tensor | None = None

    @uncompiled
    def __call__(
        self,
        routed: RoutedTokens,
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None = None,
        *,
        experts: DecodeWeights | None = None,
    ) -> Tensor:
        """The weighted sum ``(T, D)`` of each token's experts, of those that this rank holds.

        Args:
            w1: ``(e, 2F/TP, D)``, with w2 ``(e, D, F/TP)`` and biases ``(e, 2F/TP)`` and ``(e, D)``, if there are some.
            experts: What a decode step reads in their place, such as those of ``SharedSlots``; only to be given where
                the call is one (``joins_step``), or where they are in block FP8 and ``takes_fp8``.
        """
        layout = ExpertLayout(num_experts=w1.shape[0], top_k=routed.top_k_ids.shape[1], ep=1, tp=1, rank=0)
        learns = wants_grad(*routed, w1, w2, *(biases or ()))
        # On a CPU, where the twin would decode, copies of other weights into rows cost more than it saves.
        in_rows = experts is not None or not w1.is_cpu or (w1.is_contiguous() and w2.is_contiguous())
        if len(routed.tokens) <= self.decode.max_tokens and not learns and in_rows:
            if experts is None:
                b1, b2 = added_biases(biases, layout)
                experts = DecodeWeights(
                    w1=w1, w2=w2, slots=self._slots_like(w1), activation=self.activation, b1=b1, b2=b2,
                    interleaved=self.interleaved,
                )  # fmt: skip
            return self.decode(*routed, experts)
        return plain_experts(routed, w1, w2, layout, None, self.activation, biases, interleaved=self.interleaved)

    def _slots_like(self, w1: Tensor) -> Tensor:
        if self._slots is None or self._slots.device != w1.device or len(self._slots) != len(w1):
            self._slots = torch.arange(w1.shape[0], dtype=torch.int32, device=w1.device)
        return self._slots

    def add_up(self, partial: Tensor) -> Tensor:
        """``(T, D)`` float32, what this rank's experts contribute -> the sum over ranks, in their order; collective."""
        return partial

    def in_turn(self, own: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """Around what threads have to do one after the other; ``own`` is a lock of what they use."""
        return own

    def noting(self, what: str, *, collectives: bool = False) -> AbstractContextManager[object]:
        """Around what may fail on one rank while others wait for it: then all of them know. No rank waits here."""
        return nullcontext()

    @property
    def captured_tokens(self) -> int:
        """Most tokens of a step that a CUDA graph may hold."""
        return self.decode.max_tokens

    def before_replay(self) -> None:
        """Refuse the replay of a captured step once the group is closed, and order it behind the last step."""

    def check(self) -> None:
        """Raise what ``Workspace.check`` or ``RankDecode.check`` raises; waits for the device."""

    def restart(self) -> None:
        """Start new epochs (collective), which is due where ``check`` raises ``EpochError``."""


class GroupExperts(ExpertPath):
    """Experts over a group: warp decode for at most ``decode_tokens`` of a rank, else the group's path; collective.

    ``top_k`` is K in a decode step, with what a shared expert adds; ``decode_tokens=0`` takes no warp decode.
    """

    interleaved = False  # whether rows of w1 and b1 are gate and up in turn

    def __init__(self, moe: MoEConfig, group: ExpertGroup, decode_tokens: int, *, top_k: int, replicated: bool) -> None:
        group.workspace.shape.check(moe)
        if decode_tokens:  # narrower slices of experts than warp decode takes are right where it is off
            width = multiple_of(group.parallel.tp * DIM_MULTIPLE, f"{DIM_MULTIPLE} x tp, or give decode_tokens=0")
            check_values(width, ffn_size=moe.ffn_size)
        refuse("in warp decode", capacity_factor=moe.capacity_factor if decode_tokens else None)
        self.group = group
        self.decode = Decoder(top_k, decode_tokens * (1 if replicated else group.parallel.world_size))
        self.activation = moe.activation
        self.layout = group.layout(moe)
        self.slots = rank_slots(self.layout, group.device)
        self.path: ExpertPath = make_path("auto", moe, group)
        self.match = match_once(self._check_held, moe, self.layout, biased=moe.expert_bias)
        # Last, because it allocates symmetric memory on all ranks.
        self.decode_on_ranks: RankDecode | NodesDecode | None = None
        if decode_tokens:
            # Its memory stays until the group closes: powers of two bound what engines of all settings take.
            most = power_of_2(decode_tokens) if replicated else decode_tokens
            self.decode_on_ranks = make_decode(moe, group, max_tokens=most, replicated=replicated)

    def held(self, w1: Tensor, w2: Tensor, biases: Biases | None, *, trusted: bool = True) -> DecodeWeights:
        """The experts of this rank, as a decode step reads them."""
        if trusted:
            self.match(w1, w2, *(biases or ()))
        b1, b2 = added_biases(biases, self.layout)
        return DecodeWeights(
            w1=w1, w2=w2, slots=self.slots, activation=self.activation, b1=b1, b2=b2, interleaved=self.interleaved,
            trusted=trusted,
        )  # fmt: skip

    def _check_held(self, sizes: Sizes, w1: Tensor, w2: Tensor, *biases: Tensor, biased: bool) -> None:
        match_weights(sizes, w1, w2, *biases, biased=biased)  # slots name places that there have to be
        self.held(w1, w2, Biases(*biases) if biases else None, trusted=False)

    def decode_step(self, routed: RoutedTokens, experts: DecodeWeights) -> Tensor:
        assert self.decode_on_ranks is not None, "decode_tokens=0"
        return self.decode_on_ranks(*routed, experts, scratch=self.decode.scratch(routed.tokens, experts))

    def check(self) -> None:
        """Raise ``CommTimeoutError``, ``EpochError`` (``restart`` is due), ``CapacityError``; waits for the device."""
        self.group.workspace.check()
        if self.decode_on_ranks is not None:
            self.decode_on_ranks.check()

    def restart(self) -> None:
        self.group.workspace.restart()


class ReplicatedRunner(GroupExperts):
    """Experts over a group whose ranks all hold the same tokens; collective, for inference.

    Any number of tokens may come: ``max_tokens`` of the group only bounds how many are computed at once. Where rows of
    w1 are ``interleaved``, calls of more tokens copy w1, gate rows first, for as long as they take.

    Args:
        decode_tokens: Most tokens that take warp decode; ``None``: 64. It is 0 where ``decode_obstacle`` of the group
            has a reason, and by default where warp decode takes no slices of experts as narrow as those of a rank.
        shared_columns: What a shared expert adds to K in a decode step.
    """

    def __init__(
        self,
        moe: MoEConfig,
        group: ExpertGroup,
        decode_tokens: int | None = None,
        *,
        shared_columns: int = 0,
        interleaved: bool = False,
    ) -> None:
        if decode_tokens is None:
            decode_tokens = default_decode_tokens(moe, group, DECODE_TOKENS)
        decode_tokens = 0 if decode_obstacle(group) else decode_tokens
        self.interleaved = interleaved
        super().__init__(moe, group, decode_tokens, top_k=moe.top_k + shared_columns, replicated=True)
        self.takes_fp8 = self.path.takes_fp8

    def add_up(self, partial: Tensor) -> Tensor:
        """``(T, D)`` float32 of each rank -> their sum, in the order of the ranks; collective."""
        if self.group.parallel.world_size == 1:
            return partial
        return all_gather_stacked(partial, self.group.process_group).sum(0)

    @contextmanager
    def in_turn(self, own: AbstractContextManager[object]) -> Iterator[None]:
        """A group's steps have a lock."""
        comm = self.group.comm
        comm.take_turn("call of experts in slots")
        try:
            yield
        finally:
            comm.turn.release()

    @contextmanager
    def noting(self, what: str, *, collectives: bool = False) -> Iterator[None]:
        """Note a step of the group, with ``collectives`` of ``torch.distributed`` or without."""
        comm = self.group.comm
        with comm.step(what, collectives=collectives), comm.in_flight:
            yield

    @property
    def captured_tokens(self) -> int:
        """Most tokens of a step that a CUDA graph may hold."""
        steps = self.decode_on_ranks
        return 0 if steps is not None and steps.collectives else self.decode.max_tokens

    def before_replay(self) -> None:
        self.group.workspace.join_stream()

    @uncompiled
    def __call__(
        self,
        routed: RoutedTokens,
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None = None,
        *,
        experts: DecodeWeights | None = None,
    ) -> Tensor:
        """Run the experts; arguments as of ``LocalRunner.__call__``."""
        tokens, dtype = routed.tokens, self.group.workspace.shape.dtype
        require(tokens.dtype == dtype, f"dtype={tokens.dtype} of the tokens must be the group's {dtype}")
        refuse("in a converted model over a group", requires_grad=wants_grad(*routed))
        if tokens.shape[0] > self.decode.max_tokens or self.decode_on_ranks is None:
            if self.interleaved:
                w1, biases = gate_first(w1, -2), biases and biases._replace(b1=gate_first(biases.b1, -1))
            compute: Callable[..., Tensor] = partial(self.path, w1=w1, w2=w2, biases=biases)
            if experts is not None and experts.w1_scales is not None:
                in_fp8 = fp8_weights(experts)
                compute = partial(self.path.fp8, w1=in_fp8["w1"], w2=in_fp8["w2"])
            return run_path_on_slices(routed, compute, self.group)
        return self.decode_step(routed, self.held(w1, w2, biases) if experts is None else experts)


Runner = LocalRunner | ReplicatedRunner  # all ranks hold the same tokens


class DataParallelDecode(GroupExperts):
    """Experts over a group each of whose ranks brings its own tokens (data-parallel attention); collective.

    ``layer.experts = DataParallelDecode(config, group)`` lets a ``MoE`` decode. Where a gradient is
    needed (on all ranks or on none) its calls take the group's path.

    Args:
        decode_tokens: Most tokens of one rank that take warp decode; 0: none do; ``None``: 64 / W, or 0 where
            ``decode_obstacle`` of the group has a reason (``UnavailableError`` where it is given) or a rank's slices of
            experts are too narrow.
    """

    def __init__(self, moe: MoEConfig, group: ExpertGroup, decode_tokens: int | None = None) -> None:
        ranks = group.parallel.world_size
        most = MAX_DECODE_TOKENS // ranks
        self.decode_tokens = default_decode_tokens(moe, group, most) if decode_tokens is None else decode_tokens
        share = at_most(most, f"{MAX_DECODE_TOKENS} tokens of a step are divided among W={ranks} ranks")
        check_values(at_least(0), share, decode_tokens=self.decode_tokens)
        super().__init__(moe, group, self.decode_tokens, top_k=moe.top_k, replicated=False)

    @uncompiled
    def __call__(
        self,
        routed: RoutedTokens,
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None = None,
        *,
        most_tokens: int | None = None,
    ) -> Tensor:
        """Compute this rank's tokens, as any ``ExpertPath``; all ranks take part, also without any.

        Args:
            most_tokens: The largest T of all ranks, or a bound of it, equal on all of them. ``None``: the ranks' hosts
                ask each other, which cannot be captured in a CUDA graph.
        """
        num_tokens, most = routed.tokens.shape[0], most_tokens
        decodes = self.decode_on_ranks is not None and not wants_grad(*routed, w1, w2, *(biases or ()))
        if most is None:
            most = self.group.comm.largest(num_tokens) if decodes else num_tokens
        require(num_tokens <= most, lambda: f"T={num_tokens} tokens must be at most most_tokens={most}")
        if not decodes or most > self.decode_tokens:
            return self.path(routed, w1, w2, biases)
        return self.decode_step(routed, self.held(w1, w2, biases))


def default_decode_tokens(moe: MoEConfig, group: ExpertGroup, most: int) -> int:
    """``most``, or 0 where warp decode takes no slices of experts as narrow as those of a rank, or no such group."""
    is_narrow = moe.ffn_size % (group.parallel.tp * DIM_MULTIPLE) != 0
    if is_narrow and group.rank == 0:
        words = "warp decode is off: ffn_size=%d / tp=%d is no multiple of %d"
        logger.info(words, moe.ffn_size, group.parallel.tp, DIM_MULTIPLE)
    return 0 if is_narrow or decode_obstacle(group) else most


def run_path_on_slices(routed: RoutedTokens, compute: Callable[[RoutedTokens], Tensor], group: ExpertGroup) -> Tensor:
    """Each rank brings its slice of the tokens to the group's path, and all ranks gather the results; collective.

    So no token is computed twice. More tokens than the pool holds go through it in several rounds.

    Example: W=2, max_tokens=128: 300 tokens make a round of 256, rank 0 brings 0..127, and a round of 44: 22 and 22.
    """
    outputs = []
    for start, stop in rounds(len(routed.tokens), group.parallel.world_size * group.workspace.max_tokens):
        mine = rank_slice(start, stop, group.rank, group.parallel.world_size)
        output = compute(routed.part(mine))
        # All ranks gather equally many rows; the last ones may bring fewer, and pad.
        rows = -(-(stop - start) // group.parallel.world_size)
        padded = output.new_zeros(rows, output.shape[1])
        padded[: output.shape[0]] = output
        if group.parallel.world_size > 1:
            padded = all_gather_stacked(padded, group.process_group).flatten(0, 1)
        outputs.append(padded[: stop - start])
    return torch.cat(outputs) if outputs else torch.empty_like(routed.tokens)


def fp8_weights(experts: DecodeWeights) -> dict[str, FP8]:
    """``w1`` and ``w2`` of experts in block FP8."""
    pairs = {"w1": (experts.w1, experts.w1_scales), "w2": (experts.w2, experts.w2_scales)}
    return {
        name: FP8(elements=elements, scales=scales, trusted=True)
        for name, (elements, scales) in pairs.items()
        if scales is not None
    }


def rounds(num_tokens: int, at_once: int) -> list[tuple[int, int]]:
    """First and last + 1 token of each round; ``rounds(300, 256) == [(0, 256), (256, 300)]``."""
    return [(start, min(start + at_once, num_tokens)) for start in range(0, num_tokens, at_once)]


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> slice:
    """The tokens that one rank brings to a round; 5 tokens over 4 ranks: 0..1, 2..3, 4, none."""
    rows = -(-(stop - start) // world_size)
    first = min(start + rank * rows, stop)
    return slice(first, min(first + rows, stop))
