"""Random cases of the stress tool: everything about case ``i`` follows from the seed, the ranks and the device.

A *family* is many cases with the same values of everything that makes kernels compile. Other values are drawn for each
case. Kernels compile again for their constants (layout, K, experts per rank, element type, tile widths, which follow
from D and F) and for integers that are 1 or no multiple of 16. They do not compile again for numbers of tokens, comm
blocks and capacity, and at most once more for a number of panels, which layer 1 may cut into parts.

* Family: EP x TP, D, element type, and the sizes of the pool: most tokens and most experts per token.
* Layer (a family has ``LAYERS``): K, E, F, expert weights. The last layer's weights may be in block FP8 if D allows it;
  then without backward and capacity.
* Case: the layer, tokens of each rank, routing, routing weights, comm blocks, panels, capacity, calls and their inputs,
  backward or not, strided inputs, delays of each rank.
"""

import math
from dataclasses import dataclass, replace
from random import Random

import torch
from layer_cases import LayerCase

from comet.quantization.formats import FP8_BLOCK
from comet.utils.choices import CommBackend

LAYERS = 2
ROUTINGS = ("uniform", "zipf", "hot", "masked", "one", "first_half", "none")
ROUTING_ODDS = (3, 4, 2, 3, 2, 1, 1)
BACKWARD_SHARE = 1 / 3
CAPACITY_SHARE = 1 / 5
FP8_SHARE = 1 / 2
FP8_FFN_BLOCKS = (1, 1, 3)
CAPACITY_FACTORS = (0.02, 0.1, 0.3, 1.0)
CHUNK_EDGES = (127, 128, 129, 256, 257)


@dataclass(frozen=True)
class Sizes:
    """The values that are drawn on one kind of device; delays in seconds.

    D is a multiple of 16, F mostly one of 16 x TP; where it is not, a rank's share of F is padded.
    """

    hidden: tuple[int, ...]
    ffn: tuple[int, ...]
    max_tokens: tuple[int, ...]
    top_k: tuple[int, ...]
    comm_blocks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    calls: tuple[tuple[int, ...], ...]
    longest_delays: tuple[float, ...]
    family: int


# In float32 a tile has 64 columns: 5 x 16 columns and more make several panels.
TWIN_SIZES = Sizes(
    hidden=(1, 2, 3, 4, 5, 8, 13),
    ffn=(1, 2, 3, 5),
    max_tokens=(40, 40, 300),
    top_k=(1, 2, 3, 4, 6, 8),
    comm_blocks=(0, 0, 1, 2, 3, 4),
    dtypes=(torch.float32, torch.float16),
    calls=((0,), (0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 2)),
    longest_delays=(0.0, 0.0, 0.0, 0.001, 0.02),
    family=25,
)
# The interpreter takes a while for every operation of a kernel, and less for fewer rows and experts per token.
INTERPRETER_SIZES = replace(
    TWIN_SIZES,
    hidden=(1, 2, 3, 4, 5, 8, 16),
    max_tokens=(12, 12, 12, 150),
    top_k=(1, 1, 2, 2, 3, 5),
    calls=((0,), (0,), (0,), (0, 0), (0, 1)),
)
GPU_SIZES = Sizes(
    hidden=(8, 16, 21, 32, 64),
    ffn=(4, 8, 13, 32),
    max_tokens=(300, 1100),
    top_k=(1, 2, 3, 4, 6, 8),
    comm_blocks=(0, 0, 0, 1, 8, 16, 40, 100),
    dtypes=(torch.bfloat16,),
    calls=((0,), (0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 2)),
    longest_delays=(0.0, 0.0, 0.0, 0.0002, 0.003),
    family=1000,
)


def sizes_of(path: str, device: str) -> Sizes:
    if device == "cuda":
        return GPU_SIZES
    return INTERPRETER_SIZES if path == "fused" else TWIN_SIZES


@dataclass(frozen=True)
class StressCase(LayerCase):
    """A case, and before it is drawn to the end a layer or a family.

    ``inputs`` numbers the inputs of its calls, in order: a number that comes twice must give the same bits twice.
    ``layer`` is its layer in the family, whose expert weights it has.
    """

    layer: int = 0
    inputs: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Stress:
    """One run of the tool."""

    seed: int
    world_size: int  # W; every EP x TP layout with this product is drawn
    path: str
    device: str
    family: int  # cases of one
    nodes: int = 1  # nodes of equally many ranks
    backend: CommBackend = "auto"  # of the group's memory
    timeout_s: float = 30.0  # of every wait between ranks
    until: float = math.inf  # after this time (seconds since 1970) no case begins

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.path, self.device)

    @property
    def node_size(self) -> int:
        """Ranks of a node."""
        return self.world_size // self.nodes

    def family_of(self, index: int) -> int:
        return index // self.family

    def family_case(self, family: int) -> StressCase:
        """Return the fields that the layers of a family share."""
        dice, sizes = Random(f"{self.seed} family {family}"), self.sizes
        ep = self.nodes * dice.choice([ep for ep in range(1, self.node_size + 1) if self.node_size % ep == 0])
        top_k = dice.choice((max(sizes.top_k), dice.choice(sizes.top_k)))
        return StressCase(
            name=f"family {family}",
            ep=ep,
            tp=self.world_size // ep,
            num_tokens=(0,) * self.world_size,
            num_experts=top_k * ep,
            top_k=top_k,
            hidden_size=16 * dice.choice(sizes.hidden),
            ffn_size=16 * (self.world_size // ep),
            dtype=dice.choice(sizes.dtypes),
            max_tokens=dice.choice(sizes.max_tokens),
            node_size=None if self.nodes == 1 else self.node_size,
            backend=self.backend,
        )

    def layer_case(self, family: int, layer: int) -> StressCase:
        """Return the fields that the cases of a layer share."""
        dice, sizes = Random(f"{self.seed} family {family} layer {layer}"), self.sizes
        pool = self.family_case(family)
        num_experts = pool.ep * dice.randint(1, 6)
        found = replace(
            pool,
            name=f"family {family}, layer {layer}",
            layer=layer,
            weight_seed=dice.getrandbits(40),
            num_experts=num_experts,
            top_k=dice.choice([top_k for top_k in sizes.top_k if top_k <= min(num_experts, pool.top_k)]),
            ffn_size=16 * dice.choice(sizes.ffn) * dice.choice((pool.tp, pool.tp, pool.tp // math.gcd(pool.tp, 16))),
        )
        if layer < LAYERS - 1 or pool.hidden_size % FP8_BLOCK or dice.random() >= FP8_SHARE:
            return found
        return replace(found, fp8=True, ffn_size=FP8_BLOCK * dice.choice(FP8_FFN_BLOCKS) * pool.tp)

    def case(self, index: int) -> StressCase:
        dice, sizes = Random(f"{self.seed} case {index}"), self.sizes
        layer = self.layer_case(self.family_of(index), dice.randrange(LAYERS))
        case = replace(
            layer,
            name=f"case {index}",
            num_tokens=tuple(draw_tokens(dice, layer.max_tokens) for _ in range(self.world_size)),
            routing=dice.choices(ROUTINGS, ROUTING_ODDS)[0],
            num_panels=dice.randint(1, 4),
            comm_blocks=dice.choice(sizes.comm_blocks),
            capacity_factor=dice.choice(CAPACITY_FACTORS) if dice.random() < CAPACITY_SHARE else None,
            inputs=dice.choice(sizes.calls),
            backward=dice.random() < BACKWARD_SHARE,
            strided=dice.random() < 0.2,
            delay_s=dice.choice(sizes.longest_delays),
            seed=self.seed * 1_000_003 + index,
        )
        return replace(case, backward=False, capacity_factor=None) if case.fp8 else case

    def command(self, first: int, index: int) -> str:
        """Return the command that runs case ``index`` again, after the earlier cases of its family from ``first`` on.

        Example: case 12 of seed 3, families of 5: ``--seed 3 --first 10 --cases 3 --family 5``.
        """
        first = max(first, self.family_of(index) * self.family)
        return (
            f"python tests/stress.py --seed {self.seed} --first {first} --cases {index + 1 - first} "
            f"--family {self.family} --world-size {self.world_size} --nodes {self.nodes} --path {self.path} "
            f"--device {self.device}{'' if self.backend == 'auto' else f' --backend {self.backend}'}"
        )


def draw_tokens(dice: Random, most: int) -> int:
    """Tokens of one rank: none, a few, some, any number, as many as there may be, or at the edge of a chunk."""
    edges = [edge for edge in CHUNK_EDGES if edge <= most] or [most]
    some = dice.randint(min(9, most), min(40, most))
    kinds = (0, dice.randint(1, min(9, most)), some, some, dice.randint(0, most), dice.choice([most, *edges]))
    return dice.choice(kinds)
