"""What a layer call asks of a rank: shape, layout, tokens and how densely they are routed; expectations in closed form.

Letters (design section 2): T tokens per rank, K, E, e = E / EP, D, F, W = EP x TP.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from comet.config import MOE_DTYPES, MoEConfig, ParallelConfig, require

TAIL_DEVIATIONS = 6  # beyond them a probability counts as 0 or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One layer call, as every rank sees it; ``Problem.create`` fills in uniform routing.

    Args:
        moe: Shape of the layer.
        parallel: EP and TP.
        num_tokens: T of this call, 0 or more.
        dtype: Element type of tokens and weights.
        reach: Probability that a token goes to a given EP shard, 0 .. 1: its rank-deduplicated rows per rank.
        load: Routed rows of the busiest rank over the mean, 1 .. EP.

    Raises:
        ValueError: If a field breaks its rule.
    """

    moe: MoEConfig
    parallel: ParallelConfig
    num_tokens: int
    dtype: torch.dtype
    reach: float
    load: float = 1.0

    def __post_init__(self) -> None:
        self.parallel.check(self.moe)
        require(self.num_tokens >= 0, f"num_tokens={self.num_tokens} must be at least 0")
        require(self.dtype in MOE_DTYPES, f"dtype={self.dtype} must be one of {MOE_DTYPES}")
        require(0 <= self.reach <= 1, f"reach={self.reach} must be between 0 and 1: it is a probability")
        require(
            1 <= self.load <= self.parallel.ep,
            f"load={self.load} must be between 1 and ep={self.parallel.ep}: busiest rank over mean",
        )

    @classmethod
    def create(
        cls,
        moe: MoEConfig,
        parallel: ParallelConfig,
        num_tokens: int,
        dtype: torch.dtype,
        *,
        load: float = 1.0,
    ) -> Problem:
        """The problem under uniform random routing."""
        reach = shard_reach(moe.num_experts, moe.top_k, parallel.ep, moe.num_groups, moe.top_groups)
        return cls(moe=moe, parallel=parallel, num_tokens=num_tokens, dtype=dtype, reach=reach, load=load)

    @property
    def world_size(self) -> int:
        """W."""
        return self.parallel.world_size

    @property
    def width(self) -> int:
        """F / TP, the part of an expert one rank holds."""
        return self.moe.ffn_size // self.parallel.tp

    @property
    def experts_local(self) -> int:
        """e."""
        return self.moe.num_experts // self.parallel.ep

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.moe.hidden_size * self.dtype.itemsize

    @property
    def sent_rows(self) -> float:
        """Rows a rank sends to the others in the dispatch; T=8, W=4, reach 0.5: 12."""
        return self.num_tokens * (self.world_size - 1) * self.reach

    @property
    def recv_rows(self) -> float:
        """Received rows of the busiest rank, its own tokens included; T=8, W=4, reach 0.5: 16."""
        return self.world_size * self.num_tokens * min(1.0, self.reach * self.load)

    @property
    def routed_rows(self) -> float:
        """Routed rows of the busiest rank; T=8, W=4, EP=2, K=2: 32."""
        return self.world_size * self.num_tokens * self.moe.top_k / self.parallel.ep * self.load

    def num_tiles(self, block_rows: int, tallest: int = 0) -> float:
        """Expected tiles of the busiest rank, the partially filled ones included; see ``expected_tiles``."""
        chance = min(1.0, self.moe.top_k / self.moe.num_experts * self.load)
        return self.experts_local * expected_tiles(self.world_size * self.num_tokens, chance, block_rows, tallest)


def shard_reach(num_experts: int, top_k: int, ep: int, num_groups: int = 1, top_groups: int = 1) -> float:
    """Probability that K distinct random experts include one of a given EP shard, averaged over the shards.

    Without groups it is ``1 - C(E - e, K) / C(E, K)``. With groups, ``top_groups`` of them are drawn first and the
    experts from these; the sum then runs over how many experts of the shard the drawn groups contain.

    Args:
        num_experts: E.
        top_k: K.
        ep: EP shards of e = E / EP consecutive experts.
        num_groups: Groups of consecutive experts.
        top_groups: Groups a token may choose experts from.

    Returns:
        The probability; E=8, K=2, EP=4: ``1 - C(6, 2) / C(8, 2) = 13/28``.
    """
    experts_local, group_size = num_experts // ep, num_experts // num_groups
    open_experts = top_groups * group_size
    draws = math.comb(num_groups, top_groups) * math.comb(open_experts, top_k)
    missed = 0
    for shard in range(ep):
        covered_ways = _covered_ways(shard * experts_local, experts_local, num_groups, group_size, top_groups)
        missed += sum(ways * math.comb(open_experts - covered, top_k) for covered, ways in covered_ways.items())
    return 1 - missed / (ep * draws)


def _covered_ways(first: int, count: int, num_groups: int, group_size: int, top_groups: int) -> dict[int, int]:
    """In how many draws of ``top_groups`` groups they contain c of the experts ``first .. first + count - 1``."""
    ways = Counter({(0, 0): 1})  # (groups drawn, experts covered)
    for group in range(num_groups):
        low, high = group * group_size, (group + 1) * group_size
        inside = max(0, min(high, first + count) - max(low, first))
        drawn = Counter({(num + 1, covered + inside): n for (num, covered), n in ways.items() if num < top_groups})
        ways.update(drawn)
    return {covered: n for (num, covered), n in ways.items() if num == top_groups}


def expected_tiles(num_rows: int, chance: float, block_rows: int, tallest: int = 0) -> float:
    """Expected tiles of an expert that each of ``num_rows`` rows chooses with probability ``chance``.

    ``ceil(n / B)`` is the number of j >= 0 with ``n > j * B``, so the expectation sums their probabilities: exact for
    j = 0, by the normal distribution (with continuity correction) beyond.

    An expert of up to ``tallest`` rows is one tile, if that is more than a tile has else.

    Example: 1 row, chance 1/4: 0.25 tiles; 256 rows, chance 1, 128 rows per tile: 2 tiles, with ``tallest=256`` 1.
    """
    mean = num_rows * chance
    deviation = math.sqrt(mean * (1 - chance))
    total = 1 - (1 - chance) ** num_rows
    low, high = mean - TAIL_DEVIATIONS * deviation, mean + TAIL_DEVIATIONS * deviation

    def more_than(edge: int) -> float:
        if deviation == 0:
            return float(mean > edge)
        return 0.5 * math.erfc((edge + 0.5 - mean) / deviation / math.sqrt(2))

    certain = max(0, math.ceil(low / block_rows) - 1)  # edges j * B from j = 1 on that lie below
    total += certain
    for edge in range((certain + 1) * block_rows, min(num_rows, math.ceil(high)), block_rows):
        total += more_than(edge)
    if tallest > block_rows:
        total -= more_than(block_rows) - more_than(tallest)
    return total
