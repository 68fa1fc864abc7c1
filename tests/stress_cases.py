"""Random cases of the stress tool: everything about case ``i`` follows from the seed, the ranks and the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from layer_cases import MASKED, LayerCase, RankInputs, full_weights, rank_inputs, shard
from torch import Tensor

from comet.config import OverlapConfig
from comet.reference import reference_experts

CASES_PER_POOL = 5
ROUTINGS = ("uniform", "zipf", "hot", "masked", "one", "first_half", "none")
ROUTING_ODDS = (3, 4, 2, 3, 2, 1, 1)
BACKWARD_SHARE = 1 / 3
CHUNK_EDGES = (127, 128, 129, 256, 257)


@dataclass(frozen=True)
class Sizes:
    """How large cases get on one kind of device; dimensions in multiples of 16."""

    hidden: tuple[int, ...]
    ffn: tuple[int, ...]
    max_tokens: tuple[int, ...]
    comm_blocks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    longest_delay_s: float


# The interpreter adds two blocks in float32 tiles of 64 columns: 5 x 16 columns and more make several panels.
CPU_SIZES = Sizes(
    (1, 2, 3, 4, 5, 8, 13), (1, 2, 3, 5), (40, 40, 300), (1, 2, 3, 4), (torch.float32, torch.float16), 0.03
)
GPU_SIZES = Sizes((8, 16, 21, 32, 64), (4, 8, 13, 32), (300, 1100), (1, 8, 16, 40, 100), (torch.bfloat16,), 0.01)


@dataclass(frozen=True)
class StressCase(LayerCase):
    """One layer on a pool it shares with other cases; ``inputs`` numbers the inputs of its calls, in order.

    A number that comes twice must give the same bits twice.
    """

    comm_blocks: int = 2
    inputs: tuple[int, ...] = (0,)
    backward: bool = True
    strided: bool = False
    delay_s: float = 0.0
    max_tokens: int = 128

    @property
    def overlap(self) -> OverlapConfig:
        """Split and order under test."""
        return replace(super().overlap, comm_blocks=self.comm_blocks)


@dataclass(frozen=True)
class Stress:
    """One run of the tool.

    Args:
        seed: Of all cases.
        world_size: W; every EP x TP layout with this product is drawn.
        path: Path of the layer.
        device: ``cpu`` or ``cuda``.
        timeout_s: Deadline of every wait between ranks.
        case_limit_s: A rank that spends longer on a case ends with its stack.
    """

    seed: int
    world_size: int
    path: str
    device: str
    timeout_s: float = 30.0
    case_limit_s: float = 1800.0

    def pool_case(self, pool: int) -> StressCase:
        """What the cases of a pool have in common: layout, D, element type, and the most of K and tokens."""
        dice, sizes = Random(f"{self.seed} pool {pool}"), GPU_SIZES if self.device == "cuda" else CPU_SIZES
        ep = dice.choice([ep for ep in range(1, self.world_size + 1) if self.world_size % ep == 0])
        return StressCase(
            name=f"pool {pool}",
            ep=ep,
            tp=self.world_size // ep,
            num_tokens=(0,) * self.world_size,
            num_experts=8 * ep,
            top_k=8,
            hidden_size=16 * dice.choice(sizes.hidden),
            ffn_size=16 * (self.world_size // ep),
            dtype=dice.choice(sizes.dtypes),
            max_tokens=dice.choice(sizes.max_tokens),
        )

    def case(self, index: int) -> StressCase:
        """Case ``index`` of this seed."""
        dice, sizes = Random(f"{self.seed} case {index}"), GPU_SIZES if self.device == "cuda" else CPU_SIZES
        pool = self.pool_case(index // CASES_PER_POOL)
        num_experts = pool.ep * dice.randint(1, 6)
        return replace(
            pool,
            name=f"case {index}",
            num_tokens=tuple(draw_tokens(dice, pool.max_tokens) for _ in range(self.world_size)),
            num_experts=num_experts,
            top_k=dice.randint(1, min(num_experts, pool.top_k)),
            ffn_size=16 * pool.tp * dice.choice(sizes.ffn),
            routing=dice.choices(ROUTINGS, ROUTING_ODDS)[0],
            num_phases=dice.randint(min(2, self.world_size), self.world_size),
            num_panels=dice.randint(1, 4),
            block_rows=dice.choice((16, 32, 64, 128)),
            comm_blocks=dice.choice(sizes.comm_blocks),
            inputs=dice.choice([(0,), (0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 2)]),
            backward=dice.random() < BACKWARD_SHARE,
            strided=dice.random() < 0.2,
            delay_s=dice.choice((0.0, sizes.longest_delay_s)),
            seed=self.seed * 1_000_003 + index,
        )


def draw_tokens(dice: Random, most: int) -> int:
    """Tokens of one rank: none, a few, some, any number, or at the edge of a chunk."""
    edges = [edge for edge in CHUNK_EDGES if edge <= most] or [most]
    kinds = (0, dice.randint(1, 9), dice.randint(9, 40), dice.randint(9, 40), dice.randint(0, most), dice.choice(edges))
    return dice.choice(kinds)


def stress_inputs(case: StressCase, rank: int, number: int) -> RankInputs:
    """Inputs ``number`` of ``rank``: those of ``layer_cases``, and three more kinds of routing."""
    inputs = rank_inputs(case, rank, number)
    generator = torch.Generator().manual_seed(case.seed * 31 + number * 7 + rank)
    ids = inputs.top_k_ids
    if case.routing == "zipf" and ids.numel():
        popularity = 1.0 / torch.arange(1, case.num_experts + 1) ** 1.5
        order = torch.randperm(case.num_experts, generator=torch.Generator().manual_seed(case.seed))
        drawn = torch.multinomial(popularity.expand(ids.shape[0], -1), case.top_k, generator=generator)
        ids = order[drawn].to(torch.int32)
    elif case.routing == "hot":
        ids[:, 0] = case.seed % case.num_experts  # some tokens name it twice
    elif case.routing == "none":
        ids = torch.full_like(ids, MASKED)
    return replace(inputs, top_k_ids=ids)


def expected(case: StressCase, number: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """The layer in one process, in ``dtype``: every rank's output, and with ``backward`` its gradients."""
    w1, w2 = (weight.to(dtype).requires_grad_(case.backward) for weight in full_weights(case))
    found: dict[str, list[Tensor]] = {"output": []}
    for source in range(case.world_size):
        inputs = stress_inputs(case, source, number)
        x = inputs.tokens.to(dtype).requires_grad_(case.backward)
        weights = inputs.top_k_weights.to(torch.promote_types(dtype, torch.float32)).requires_grad_(case.backward)
        y = reference_experts(x, inputs.top_k_ids, weights, w1.flatten(1, 2), w2, ep=case.ep, tp=case.tp)
        found["output"].append(y.detach())
        if case.backward:
            y.backward(inputs.grad_output.to(dtype))
            found.setdefault("grad_tokens", []).append(gradient(x))
            found.setdefault("grad_top_k_weights", []).append(gradient(weights))
    if case.backward:
        shards = [shard(case, rank, gradient(w1), gradient(w2)) for rank in range(case.world_size)]
        found["grad_w1"], found["grad_w2"] = ([pair[which] for pair in shards] for which in range(2))
    return found


def gradient(leaf: Tensor) -> Tensor:
    """The gradient that reached a leaf."""
    assert leaf.grad is not None, f"no gradient reached a leaf of shape {tuple(leaf.shape)}"
    return leaf.grad
