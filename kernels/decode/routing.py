"""Device functions of the decode kernels: which expert a block serves, for which tokens, and the hand-over.

Letters: T tokens, K experts per token, J = T*K routed rows (row t*K + k), E experts, S slots.

A block serves one *group*: one expert with all tokens that chose it. There are as many groups as experts, or as routed
rows where those are fewer; then a routed row whose expert an earlier one names has nothing to do. So every weight row
is read once, without sort, padding or token lists in memory. In tiles of fewer tokens than the step has, an expert that
more of them chose takes a pass for each tile, and reads its weights in every one.
"""

import triton
import triton.language as tl

NO_ROW = tl.constexpr(2**30)


@triton.jit
def slot_of(ids, slots_ptr, E, S, CACHE: tl.constexpr = None):
    """Slot of each expert of ``ids``, any shape; -1 where it is masked, unknown or not held here.

    The table of a cache is read past L1: the kernel before changes it, and blocks of that one, on the same
    SM when this one starts early, may have loaded what shares a line with it.
    """
    known = (ids >= 0) & (ids < E)
    MODIFIER: tl.constexpr = "" if CACHE is None else ".cg"
    slots = tl.load(slots_ptr + ids, mask=known, other=-1, cache_modifier=MODIFIER)
    return tl.where(slots < S, slots, -1)


@triton.jit
def serves(ids_ptr, group, T, K: tl.constexpr, K_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, BY_EXPERT: tl.constexpr):
    """The work of the blocks of ``group``: ``(expert, rows)``.

    ``expert`` is -1 where there is nothing to do. ``rows`` ``(T_BLOCK,)`` int32 is, for each token, its first routed
    row with the group's expert, or ``NO_ROW``. With one token every routed row serves itself.

    Example (T = 2, K = 2, E = 4; ids [[3, 1], [1, 0]]): four groups; group 0 is expert 3 with rows [0, NO_ROW], group 1
    expert 1 with rows [1, 2], group 2 is -1 because row 1 names its expert, group 3 expert 0 with rows [NO_ROW, 3].
    """
    if T_BLOCK == 1 and not BY_EXPERT:
        expert = tl.load(ids_ptr + group).to(tl.int32)
        rows = tl.full((1,), 0, tl.int32) + group
    else:
        tokens = tl.arange(0, T_BLOCK)[:, None]
        ks = tl.arange(0, K_BLOCK)[None, :]
        index = tokens * K + ks
        expert = group
        if not BY_EXPERT:
            expert = tl.load(ids_ptr + group).to(tl.int32)
        ids = tl.load(ids_ptr + index, mask=(tokens < T) & (ks < K), other=-1).to(tl.int32)
        rows = tl.min(tl.where(ids == expert, index, NO_ROW), axis=1)
        first = tl.min(rows, axis=0)
        if BY_EXPERT:
            expert = tl.where(first < NO_ROW, expert, -1)
        else:
            expert = tl.where(first == group, expert, -1)
    return expert, rows


@triton.jit
def rows_in_passes(rows, TILE: tl.constexpr):
    """How far a loop over ``pass_of`` runs: the number of routed rows, or TILE where one pass takes all tokens."""
    if rows.shape[0] == TILE:
        return TILE
    else:
        return tl.sum(tl.where(rows < NO_ROW, 1, 0), axis=0)


@triton.jit
def pass_of(rows, first, TILE: tl.constexpr):
    """``(TILE,)``: the routed rows among ``rows`` from number ``first`` on, and ``NO_ROW`` behind the last.

    Where one pass takes all tokens, ``rows`` as they are.

    Example (TILE = 2; rows [NO_ROW, 3, 4, 8]): [3, 4] from number 0 on, [8, NO_ROW] from number 2 on.
    """
    if rows.shape[0] == TILE:
        return rows
    else:
        is_row = rows < NO_ROW
        place = tl.cumsum(tl.where(is_row, 1, 0), axis=0) - 1 - first
        here = is_row[:, None] & (place[:, None] == tl.arange(0, TILE)[None, :])
        return tl.min(tl.where(here, rows[:, None], NO_ROW), axis=0)


@triton.jit
def row_of(rows, token: tl.constexpr):
    """The routed row of one token of ``rows``, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, rows.shape[0]) == token, rows, 0), axis=0)


@triton.jit
def token_of(rows, K: tl.constexpr):
    """Token of each routed row; 0 for ``NO_ROW``, so that its address is legal."""
    return tl.where(rows < NO_ROW, rows, 0) // K


@triton.jit
def load_columns(ptrs, in_range, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """A block, with zeros where its columns are out of range; EVEN says that none are."""
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY)
    else:
        return tl.load(ptrs, mask=in_range, other=0.0, eviction_policy=POLICY)


@triton.jit
def lane_products(weights, x, LANE: tl.constexpr):
    """``(ROWS, COLS / LANE)`` float32: a ``(ROWS, COLS)`` tile times ``(COLS,)``, each thread's LANE products added up.

    LANE elements are what one 16-byte load brings, so the sum needs no other thread, and the accumulators of a loop
    take 1 / LANE of the registers.
    """
    products = weights.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(products.reshape(weights.shape[0], weights.shape[1] // LANE, LANE), axis=2)
