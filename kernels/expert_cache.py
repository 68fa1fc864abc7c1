"""The expert cache of one layer, kept by the GPU: which experts a step needs, which slots they take, and the copies.

Two launches before a decode step: ``lookup_kernel`` finds the distinct experts of the step that have no slot, gives
each one the slot that was used longest ago, and lists the copies; ``fetch_kernel`` reads the listed experts from host
memory, which the GPU has mapped, into their slots. The host reads nothing and waits for nothing, so the step stays one
CUDA graph.

No slot is overwritten that a kernel may still read: a step's kernels run one after the other on one stream, and a slot
of an expert that this step needs is never given away.

What bounds it: the link to the host (51 GB/s from four blocks on an H200 with PCIe 5); a step whose experts are all
there costs the two launches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot_case import KernelCase
from .arguments import power_of_2

LOOKUP_WARPS = 8
FETCH_BLOCKS = 16  # four fill the link; more hide the start of a copy
FETCH_WARPS = 16
PIECE_WORDS = 8192  # of 8 bytes, that a block copies at once
MAX_SLOTS = 512  # the ranking of slots compares each with each


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTables:
    """What the GPU knows of a layer's cache; all int32.

    Args:
        slots: ``(E,)`` in ``[-1, S)``: slot of each expert, -1 without one.
        owners: ``(S,)`` in ``[-1, E)``: expert of each slot, -1 while it is empty.
        last_used: ``(S,)``: number of the last step that used a slot, 0 while it is empty.
        clock: ``(1,)``: number of the last step.
        copies: ``(2, S)``: experts to fetch in this step, and their slots; the first ``counts[0]`` of them count.
        counts: ``(3,)``: copies of this step; and of all steps distinct experts needed, and those fetched.
    """

    slots: Tensor
    owners: Tensor
    last_used: Tensor
    clock: Tensor
    copies: Tensor
    counts: Tensor

    @classmethod
    def create(cls, num_experts: int, num_slots: int, device: torch.device) -> "CacheTables":
        """Of a cache that holds nothing yet."""

        def filled(shape: tuple[int, ...], value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            slots=filled((num_experts,), -1), owners=filled((num_slots,), -1), last_used=filled((num_slots,), 0),
            clock=filled((1,), 0), copies=filled((2, num_slots), 0), counts=filled((3,), 0),
        )  # fmt: skip


@triton.jit(do_not_specialize=["J", "E", "S"])
def lookup_kernel(
    ids_ptr, slots_ptr, owners_ptr, last_used_ptr, clock_ptr, copies_ptr, counts_ptr, J, E, S,
    E_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``lookup``; one block."""
    experts, places = tl.arange(0, E_BLOCK), tl.arange(0, S_BLOCK)
    owners = tl.load(owners_ptr + places, mask=places < S, other=-1)
    needed = experts < 0
    kept = places < 0
    for j in range(J):
        expert = tl.load(ids_ptr + j).to(tl.int32)
        needed |= experts == expert
        kept |= (owners == expert) & (owners >= 0)
    needed &= experts < E
    slots = tl.load(slots_ptr + experts, mask=experts < E, other=-1)
    missing = needed & (slots < 0)
    now = tl.load(clock_ptr) + 1
    last_used = tl.load(last_used_ptr + places, mask=places < S, other=0)
    # The order in which slots are given away: used longest ago first, of equals the lower number; kept ones last.
    age = tl.where(kept | (places >= S), 2**31 - 1, last_used)
    before = (age[None, :] < age[:, None]) | ((age[None, :] == age[:, None]) & (places[None, :] < places[:, None]))
    place_rank = tl.sum(before.to(tl.int32), axis=1)
    expert_rank = tl.cumsum(missing.to(tl.int32), axis=0) - 1
    num_missing = tl.sum(missing.to(tl.int32), axis=0)
    given = (place_rank < num_missing) & (places < S) & (kept == 0)
    pairs = (expert_rank[:, None] == place_rank[None, :]) & missing[:, None] & given[None, :]
    new_slots = tl.sum(tl.where(pairs, places[None, :], 0), axis=1)
    new_owners = tl.sum(tl.where(pairs, experts[:, None], 0), axis=0)
    tl.store(slots_ptr + owners, -1, mask=given & (owners >= 0))
    tl.store(slots_ptr + experts, new_slots, mask=missing)
    tl.store(owners_ptr + places, new_owners, mask=given)
    tl.store(last_used_ptr + places, now, mask=kept | given)
    tl.store(copies_ptr + expert_rank, experts, mask=missing)
    tl.store(copies_ptr + S + expert_rank, new_slots, mask=missing)
    tl.store(clock_ptr, now)
    tl.store(counts_ptr, num_missing)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + tl.sum(needed.to(tl.int32), axis=0))
    tl.store(counts_ptr + 2, tl.load(counts_ptr + 2) + num_missing)


@triton.jit
def copy_piece(source, target, source_ptr, target_ptr, first, WORDS: tl.constexpr, PIECE: tl.constexpr):
    """Words ``[first, first + PIECE)`` of expert ``source`` in host memory to slot ``target``; each has WORDS."""
    at = first + tl.arange(0, PIECE)
    from_host = source_ptr + source.to(tl.int64) * WORDS + at
    to_slot = target_ptr + target.to(tl.int64) * WORDS + at
    if WORDS % PIECE == 0:
        tl.store(to_slot, tl.load(from_host, eviction_policy="evict_first"))
    else:
        words = tl.load(from_host, mask=at < WORDS, other=0, eviction_policy="evict_first")
        tl.store(to_slot, words, mask=at < WORDS)


@triton.jit(do_not_specialize=["S"])
def fetch_kernel(
    w1_host_ptr, w2_host_ptr, w1_ptr, w2_ptr, copies_ptr, counts_ptr, S,
    WORDS1: tl.constexpr, WORDS2: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """See ``fetch``; blocks take pieces in turn, those of w1 before those of w2."""
    PIECES1: tl.constexpr = (WORDS1 + PIECE - 1) // PIECE
    PIECES: tl.constexpr = PIECES1 + (WORDS2 + PIECE - 1) // PIECE
    num_pieces = tl.load(counts_ptr) * PIECES
    for item in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        copy, piece = item // PIECES, item % PIECES
        source, target = tl.load(copies_ptr + copy), tl.load(copies_ptr + S + copy)
        if piece < PIECES1:
            copy_piece(source, target, w1_host_ptr, w1_ptr, piece * PIECE, WORDS1, PIECE)
        else:
            copy_piece(source, target, w2_host_ptr, w2_ptr, (piece - PIECES1) * PIECE, WORDS2, PIECE)


def lookup(ids: Tensor, tables: CacheTables) -> None:
    """Give every expert of a step a slot, and list those that have to be fetched into theirs.

    Example (E = 4, S = 2; slot 0 holds expert 3, used in step 1, slot 1 expert 0, used in step 2): ids ``[[3, 2]]`` in
    step 3 keep slot 0 and give slot 1 to expert 2: slots ``[-1, -1, 1, 0]``, owners ``[3, 2]``, copies ``[2], [1]``.

    Args:
        ids: ``(T, K)`` int32 or int64 expert ids; others than ``[0, E)`` need no slot. At most S distinct ones.
        tables: Of the layer; changed in place.
    """
    num_experts, num_slots = tables.slots.shape[0], tables.owners.shape[0]
    lookup_kernel[(1,)](
        ids, tables.slots, tables.owners, tables.last_used, tables.clock, tables.copies, tables.counts,
        ids.numel(), num_experts, num_slots,
        E_BLOCK=power_of_2(num_experts), S_BLOCK=power_of_2(num_slots), num_warps=LOOKUP_WARPS,
    )  # fmt: skip


def lookup_torch(ids: Tensor, tables: CacheTables) -> None:
    """The twin of ``lookup``."""
    num_experts = tables.slots.shape[0]
    needed = [expert for expert in sorted(set(ids.flatten().tolist())) if 0 <= expert < num_experts]
    missing = [expert for expert in needed if tables.slots[expert] < 0]
    owners, last_used = tables.owners.tolist(), tables.last_used.tolist()
    now = int(tables.clock) + 1
    free = sorted((used, slot) for slot, used in enumerate(last_used) if owners[slot] not in needed)
    for copy, (expert, (_, slot)) in enumerate(zip(missing, free, strict=False)):
        if owners[slot] >= 0:
            tables.slots[owners[slot]] = -1
        tables.slots[expert], tables.owners[slot] = slot, expert
        tables.copies[0, copy], tables.copies[1, copy] = expert, slot
    for expert in needed:
        tables.last_used[tables.slots[expert]] = now
    tables.clock.add_(1)
    tables.counts.add_(torch.tensor([len(missing) - int(tables.counts[0]), len(needed), len(missing)]))


def fetch(w1_host: Tensor, w2_host: Tensor, w1: Tensor, w2: Tensor, tables: CacheTables) -> None:
    """Copy the listed experts from host memory into their slots.

    Args:
        w1_host: ``(E, ...)``, on a GPU's host pinned, so that the GPU reads it; an expert is a multiple of 16 bytes.
        w2_host: ``(E, ...)``, likewise.
        w1: ``(S, ...)`` the slots, of the dtype and shape per expert of ``w1_host``.
        w2: ``(S, ...)``, likewise.
        tables: What ``lookup`` listed.
    """
    words = [_words(tensor) for tensor in (w1_host, w2_host, w1, w2)]
    fetch_kernel[(FETCH_BLOCKS,)](
        *words, tables.copies, tables.counts, tables.owners.shape[0],
        WORDS1=words[0].shape[1], WORDS2=words[1].shape[1], PIECE=PIECE_WORDS, num_warps=FETCH_WARPS,
    )  # fmt: skip


def fetch_torch(w1_host: Tensor, w2_host: Tensor, w1: Tensor, w2: Tensor, tables: CacheTables) -> None:
    """The twin of ``fetch``."""
    for source, target in tables.copies[:, : int(tables.counts[0])].T.tolist():
        w1[target], w2[target] = w1_host[source], w2_host[source]


def _words(tensor: Tensor) -> Tensor:
    """An expert a row, of 8 bytes an element."""
    return tensor.view(torch.uint8).flatten(1).view(torch.int64)


def aot_cases() -> list[KernelCase]:
    """The shapes of three models, with slots for a quarter of the experts or half of them."""
    shapes = {"qwen3": (128, 32, 2048, 768), "mixtral": (8, 4, 4096, 14336), "deepseek": (256, 64, 7168, 2048)}
    state = dict.fromkeys(("slots_ptr", "owners_ptr", "last_used_ptr", "clock_ptr"), "*i32")
    lists = {"copies_ptr": "*i32", "counts_ptr": "*i32", "S": "i32"}
    pointers = dict.fromkeys(("w1_host_ptr", "w2_host_ptr", "w1_ptr", "w2_ptr"), "*i64")
    cases = []
    for name, (experts, slots, hidden, ffn) in shapes.items():
        sizes = {"E_BLOCK": power_of_2(experts), "S_BLOCK": power_of_2(slots)}
        given = {"ids_ptr": "*i32", "J": "i32", "E": "i32", **state, **lists}
        cases.append(KernelCase(name=name, fn=lookup_kernel, signature=given, constexprs=sizes, num_warps=LOOKUP_WARPS))
        words = hidden * ffn * 2 // 8
        pieces = {"WORDS1": 2 * words, "WORDS2": words, "PIECE": PIECE_WORDS}
        given, wide = {**pointers, **lists}, frozenset({"wide_loads", "wide_stores"})
        options = dict(num_warps=FETCH_WARPS, expects=wide)
        cases.append(KernelCase(name=name, fn=fetch_kernel, signature=given, constexprs=pieces, **options))
    return cases
