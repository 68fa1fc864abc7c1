"""Tables of an expert cache, parts of experts, and constants of the cache's kernels."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.arguments import power_of_2
from .mailbox import Mailbox

NEVER = tl.constexpr(2**31 - 1)
FETCH_WARPS = 64  # Warps of all blocks together; a warp has 4 KB in flight.
PIECE_WORDS = 512  # A warp copies so many words of 8 bytes at once.
AHEAD_WORDS = 1024  # A block copies so many words at once before their step.
LINE_BYTES = 128  # a line of L1
HEADER_WORDS = 16
# The words of ``CacheTables.header`` of a step,
COUNT, CLOCK, READY, DONE, FIRST, LAST, CHANGED = (tl.constexpr(word) for word in range(7))
# those of experts that travel before their step (see ``experts.prefetch``),
GATE, PLANNED, NEXT, THERE1, THERE2, BEGUN, NEEDED = (tl.constexpr(word) for word in range(7, 14))
# and those of experts that the host computes (see ``experts.host``).
HOSTED, LAYER = tl.constexpr(14), tl.constexpr(15)


class Totals(NamedTuple):
    """Sums over all steps of a cache: in a kernel pointers to them, in a report the numbers."""

    needed: Any  # distinct experts that steps needed
    fetched: Any  # those of them that were fetched
    fetching_ns: Any  # nanoseconds in which they travelled
    since_ns: Any  # when the last ones began to travel; no sum
    begun: Any  # experts that began to travel before their step
    useful: Any  # those of them that the step needed
    words: Any  # words of 8 bytes that travelled before their step
    hosted: Any  # experts that the host computed


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTables:
    """The GPU's tables of a layer's cache; all that is not given is a view of ``state``."""

    state: Tensor  # (3E + 8S + 16,) int32: the views below one after the other, landed behind copies
    totals: Tensor  # (8,) int64, Totals of all steps
    num_experts: int  # E
    num_slots: int  # S
    slots: Tensor = field(init=False)  # (E,) in [-1, S): slot of each expert; -1 without one, or while it travels
    arriving: Tensor = field(init=False)  # (E,) in [-1, S): the same, from the moment on that w1 is there
    last_used: Tensor = field(init=False)  # (E,) number of the last step that needed an expert, 0 for none
    owners: Tensor = field(init=False)  # (S,) in [-1, E): expert of each slot, -1 while it is empty
    # (2, S) the experts that the last step missed, and their slots; the first header[COUNT] count. Behind those that
    # were fetched come header[HOSTED] that the host computed, with -1
    copies: Tensor = field(init=False)
    ahead: Tensor = field(init=False)  # (3, S) experts that are to travel, their slots, and whose these were, or -1
    header: Tensor = field(init=False)  # (16,) of the last step, and between its blocks; number of the layer

    def __post_init__(self) -> None:
        experts, slots = self.num_experts, self.num_slots
        sizes = experts, experts, experts, slots, 2 * slots, 2 * slots, 3 * slots, HEADER_WORDS
        names = "slots", "arriving", "last_used", "owners", "copies", "landed", "ahead", "header"
        views = dict(zip(names, self.state.split(sizes), strict=True))
        del views["landed"]  # the kernels' alone
        views |= {name: views[name].view(-1, slots) for name in ("copies", "ahead")}
        for name, view in views.items():
            object.__setattr__(self, name, view)

    @classmethod
    def create(
        cls, num_experts: int, num_slots: int, device: torch.device, held: tuple[int, int] | None = None
    ) -> "CacheTables":
        """Make the tables of an empty cache; ``held``: the first expert that this rank serves, and the last + 1."""
        tables = cls(
            state=torch.zeros(3 * num_experts + 8 * num_slots + HEADER_WORDS, dtype=torch.int32, device=device),
            totals=torch.zeros(len(Totals._fields), dtype=torch.int64, device=device),
            num_experts=num_experts,
            num_slots=num_slots,
        )
        first, end = held or (0, num_experts)
        tables.served.copy_(torch.tensor([first, end]))
        tables.clear()
        return tables

    @property
    def served(self) -> Tensor:
        """``(2,)`` the first expert that this rank serves, and the last + 1."""
        return self.header[FIRST.value : LAST.value + 1]

    def clear(self) -> None:
        """Empty all slots, whatever a step that broke off has left; it must have ended on the device."""
        served, layer = self.served.clone(), self.header[LAYER.value].clone()
        self.state.zero_()
        for table in (self.slots, self.arriving, self.owners):
            table.fill_(-1)
        self.served.copy_(served)
        self.header[LAYER.value] = layer

    def words_of(self, experts: Collection[int], slots: Collection[int]) -> list[int]:
        """Places in ``state`` of the slots of experts, of the same while they arrive, and of the owners of slots.

        Example (E = 8): experts 2 and 5, slot 1: ``[2, 5, 10, 13, 25]``.
        """
        tables = (self.slots, experts), (self.arriving, experts), (self.owners, slots)
        return [table.storage_offset() + place for table, places in tables for place in places]


class ExpertParts:
    """w1 and w2 of some experts, an expert a row, and the scales of quantised ones: the base of what holds them."""

    __slots__ = ()
    w1: Tensor  # gate rows first, then up rows
    w2: Tensor  # of the same experts and dtype
    w1_scales: Tensor | None  # None where experts are not quantised, as of w2
    w2_scales: Tensor | None

    @property
    def named_parts(self) -> dict[str, Any]:
        """w1 and w2, and their scales where they have some, by their names."""
        given = {"w1": self.w1, "w2": self.w2, "w1_scales": self.w1_scales, "w2_scales": self.w2_scales}
        return {name: part for name, part in given.items() if part is not None}

    @property
    def biases(self) -> dict[str, Any]:
        """The biases b1 and b2 where it has some, by their names; they take no slot."""
        given = {name: getattr(self, name, None) for name in ("b1", "b2")}
        return {name: bias for name, bias in given.items() if bias is not None}

    @property
    def stored_parts(self) -> dict[str, Any]:
        return self.named_parts | self.biases

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self.named_parts.values())

    @property
    def expert_bytes(self) -> int:
        return sum(part[0].nbytes for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostExperts(ExpertParts):
    """The host memory from which experts without a slot come."""

    w1: Tensor  # (e, ...) of the experts this rank serves, in host memory that the GPU reads; 16 bytes divide an expert
    w2: Tensor  # (e, ...), in the same memory
    tables: CacheTables  # of the layer; a step changes them
    # (e, ...) of quantised experts, in the same memory; 4 bytes divide those of an expert
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None  # (e, ...) of w2
    prefetched: bool = False  # whether experts may travel to these slots before their step (experts.prefetch)
    fetched: torch.cuda.Event | None = None  # recorded where all experts of a step are there, if anybody asks
    mail: Mailbox | None = None  # asks the host's cores for some of them; None: all that are missing come to the device

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Memory that kernels of a step use in addition to the slots and ``tables.slots``."""
        return (*self.parts, self.tables.totals, *(() if self.mail is None else self.mail[:-1]))

    def place_in_rank(self, slot: int) -> int:
        """Number of a slot's expert among those of the rank; waits for the device."""
        return int(self.tables.owners[slot] - self.tables.served[0])

    @property
    def pieces(self) -> int:
        """Pieces of one expert that travels before its step.

        Example: 65,536 bytes are 8 pieces, 65,544 are 9, and 12 bytes of scales one, whose words have 4.
        """
        num_bytes = (part[0].nbytes for part in self.parts)
        return sum(triton.cdiv(part // word_bytes(part), AHEAD_WORDS) for part in num_bytes)

    def pointers(
        self, w1: Tensor, w2: Tensor, w1_scales: Tensor | None = None, w2_scales: Tensor | None = None
    ) -> "CachePointers":
        """The ``cache`` argument of the kernels, for slots w1 and w2 and their scales."""
        return CachePointers(
            state=self.tables.state,
            totals=self.tables.totals,
            stored=_words(self.w1, self.w2),
            slots=_words(w1, w2),
            stored_scales=_words(self.w1_scales, self.w2_scales),
            slot_scales=_words(w1_scales, w2_scales),
            mail=self.mail,
        )

    def constants(self, groups: int, num_warps: int) -> "CacheConstants":
        """The ``CACHE`` argument, for a grid of so many groups and blocks of so many warps."""
        w1, w2, *scales = [part[0].nbytes for part in self.parts]
        scales1, scales2 = scales or (0, 0)
        return CacheConstants(
            rows=triton.cdiv(FETCH_WARPS, groups * num_warps),
            experts=power_of_2(self.tables.num_experts),
            slots=power_of_2(self.tables.num_slots),
            words1=w1 // 8,
            words2=w2 // 8,
            scales1=scales1 // word_bytes(scales1),
            scales2=scales2 // word_bytes(scales2),
            lines_shared=scales1 % LINE_BYTES != 0,
            piece=PIECE_WORDS * num_warps,
            ahead=self.pieces if self.prefetched else 0,
            interpret=triton.knobs.runtime.interpret,
            mail_tokens=0 if self.mail is None else len(self.mail.tokens),
        )


class CachePointers(NamedTuple):
    """Memory of a cache that the kernels read and write."""

    state: Tensor  # CacheTables.state
    totals: Tensor  # CacheTables.totals
    stored: Any  # w1 and w2 in host memory, as words
    slots: Any  # w1 and w2 in the slots, as words
    stored_scales: Any = None  # scales of w1 and of w2 in host memory, as words; None where there are none
    slot_scales: Any = None  # scales of w1 and of w2 in the slots, as words
    mail: Mailbox | None = None  # asks the host's cores; None: all that are missing come to the device


class CacheConstants(NamedTuple):
    """Constants of ``gate_up_kernel`` where it serves misses."""

    rows: int  # rows of blocks, in front of those that multiply, which fetch
    experts: int  # power of two, at least E
    slots: int  # power of two, at least S
    words1: int  # of w1 of an expert, of 8 bytes
    words2: int  # of w2
    scales1: int  # words of the scales of w1, each of word_bytes; 0: there are none
    scales2: int  # of w2
    lines_shared: bool  # whether the scales of two slots' w1 may be in one line of L1
    piece: int  # words that a block copies at once
    ahead: int  # pieces of an expert that travels before its step; 0: none does
    interpret: bool  # under Triton's interpreter
    mail_tokens: int  # most tokens of which the host's cores compute missing experts


def word_bytes(num_bytes: int) -> int:
    """Bytes that are copied as one word: 8 where they divide those of an expert, else 4, of a few float32 scales."""
    return 4 if num_bytes % 8 else 8


def _words(*tensors: Tensor | None) -> tuple[Tensor, ...] | None:
    """Tensors with an expert a row, of ``word_bytes`` an element; ``None`` if there are none."""
    rows = [tensor.view(torch.uint8).flatten(1) for tensor in tensors if tensor is not None]
    return tuple(row.view(torch.int32 if word_bytes(row.shape[1]) == 4 else torch.int64) for row in rows) or None


@triton.jit
def load_acquired(ptr, INTERPRET: tl.constexpr):
    """An int32 that another block stores with release; what it wrote before can be read after this."""
    if INTERPRET:
        return tl.load(ptr)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def totals_of(ptr):
    """The ``Totals`` in ``CacheTables.totals``."""
    return Totals(ptr, ptr + 1, ptr + 2, ptr + 3, ptr + 4, ptr + 5, ptr + 6, ptr + 7)


class TablePointers(NamedTuple):
    """The views of ``CacheTables`` in a kernel, of several rows row by row."""

    slots: tl.tensor
    arriving: tl.tensor
    last_used: tl.tensor
    owners: tl.tensor
    copy_experts: tl.tensor
    copy_slots: tl.tensor
    landed: tl.tensor  # (2, S) blocks that have ended w1, and w2, of a copy
    ahead_experts: tl.tensor
    ahead_slots: tl.tensor
    ahead_owners: tl.tensor
    header: tl.tensor
    num_slots: tl.tensor  # S


@triton.jit
def tables_of(state_ptr, E, S):
    """The tables in ``CacheTables.state``, in its order."""
    of_slots = state_ptr + 3 * E
    return TablePointers(
        slots=state_ptr, arriving=state_ptr + E, last_used=state_ptr + 2 * E, owners=of_slots,
        copy_experts=of_slots + S, copy_slots=of_slots + 2 * S, landed=of_slots + 3 * S,
        ahead_experts=of_slots + 5 * S, ahead_slots=of_slots + 6 * S, ahead_owners=of_slots + 7 * S,
        header=of_slots + 8 * S, num_slots=S,
    )  # fmt: skip


def cheapest_place(host: HostExperts, now: int, kept: Sequence[int] = ()) -> int:
    """The slot that is given away next, of no expert that step ``now`` needs nor of one that is ``kept``."""
    tables = host.tables
    owners = tables.owners.long()
    values = tables.last_used[owners].double().where(owners >= 0, -1.0)
    needed = (owners >= 0) & (tables.last_used[owners] == now)
    needed |= torch.isin(owners, torch.tensor(kept, dtype=torch.int64))
    return int(values.where(~needed, torch.inf).argmin())
