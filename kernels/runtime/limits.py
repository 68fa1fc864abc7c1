"""How flags and lists of the fused kernels are laid out, for kernels and for the memory that they share.

This module needs no Triton: the memory is made, and the twin works on it, where there is none.
"""

CHUNK_ROWS = 128  # that share an arrival flag of the dispatch
# Of the combine, where a chunk is the work of one block at a time: with 128 rows there are too few at 2048 tokens.
COMBINE_CHUNK_ROWS = 32
CHUNK_FLAGS = 64  # per chunk of the combine
MAX_PANELS = 16  # of a launch
PANEL_COUNTERS = 16  # where the panels' counters begin among a launch's counters
LEG_HEADER = 16  # int32 before the words of tokens that travel between nodes
MAX_BUCKETS = 32  # that a list of sent rows is ordered by


def num_buckets(experts_local: int) -> int:
    """Buckets of a list of sent rows, a power of two; the last is for tokens that are not sent.

    Example: 2 local experts make 4 buckets (one each, one empty, the last), 32 and more make 32.
    """
    return min(MAX_BUCKETS, 1 << experts_local.bit_length())
