"""Cases of launches that are emulated on one device (``emulated_ranks``): of both layers, forward and backward."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from emulated_ranks import EmulatedCase

# Of layer 0, whose tokens travel to the experts, as gradients of outputs do.
LAYER0 = [
    EmulatedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    EmulatedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512),
    EmulatedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128),
    EmulatedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128),
    EmulatedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128),
    EmulatedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    EmulatedCase("half of the experts idle", 2, 1, (500, 200), 16, 2, 256, 128, routing="first_half"),
    EmulatedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    EmulatedCase("half a block of columns outside", 2, 1, (300, 450), 8, 2, 256, 192),
    EmulatedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256),
    EmulatedCase("four ranks, unequal", 4, 1, (150, 900, 260, 1), 16, 4, 512, 192),
    EmulatedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192),
    EmulatedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    EmulatedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 384, 272),
    EmulatedCase("less than a stage", 2, 1, (300, 80), 4, 1, 16, 256),
    EmulatedCase("narrow", 1, 1, (300,), 4, 2, 80, 16),
    EmulatedCase("more items than blocks", 2, 1, (2500, 1800), 8, 4, 128, 1040),
    EmulatedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
]

# The same, small, under the interpreter.
TWO = EmulatedCase("two", 2, 1, (300, 5), 4, 2, 64, 32, "masked", torch.float32, block_rows=16, device="cpu")
SMALL_LAYER0 = [
    replace(TWO, name="one rank", ep=1, num_tokens=(70,)),
    TWO,
    replace(TWO, name="none on rank 0", num_tokens=(0, 30), dtype=torch.float16),
    replace(TWO, name="nobody has tokens", num_tokens=(0, 0)),
    replace(TWO, name="one expert", num_tokens=(20, 40), routing="one", block_rows=128),
    replace(TWO, name="three ranks", ep=3, num_tokens=(17, 33, 1), num_experts=6, hidden_size=80),
]

# Of layer 1, whose sums travel home, as gradients of tokens do.
LAYER1 = [
    EmulatedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    EmulatedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512, num_panels=1),
    EmulatedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128, num_panels=3),
    EmulatedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, num_panels=1),
    EmulatedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128, num_panels=1),
    EmulatedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    EmulatedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    EmulatedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256, num_panels=6),
    EmulatedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192, num_panels=4),
    EmulatedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    EmulatedCase("12 experts of a token", 2, 1, (300, 450), 64, 12, 768, 128, routing="masked"),
    EmulatedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 1280, 272, num_panels=3),
    EmulatedCase("tall pieces on one rank only", 2, 1, (1024, 300), 16, 2, 512, 128),
    EmulatedCase("less than a stage", 1, 1, (300,), 4, 1, 256, 16, num_panels=1),
    EmulatedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
    EmulatedCase("float16, long", 2, 1, (400, 300), 16, 4, 512, 4096, dtype=torch.float16),
    EmulatedCase("sixteen panels", 2, 1, (400, 300), 16, 4, 4096, 128, num_panels=16),
]


def draw_layer0(draw: random.Random, seed: int, *, least_ffn: int = 16) -> EmulatedCase:
    """Of layer 0; few numbers of ranks, and F from ``least_ffn`` on, for each width of a tile is a compilation."""
    return replace(
        _draw_tokens(draw, seed, draw.choice([1, 4])),
        top_k=draw.randrange(1, 9),
        hidden_size=16 * draw.randrange(4, 100),
        ffn_size=16 * draw.randrange(least_ffn // 16, 60),
        routing=draw.choice(["uniform", "one", "masked", "first_half"]),
    )


def draw_layer1(draw: random.Random, seed: int) -> EmulatedCase:
    """Of layer 1; few shapes, for each number of experts per token and of ranks is a compilation."""
    world_size, top_k = draw.choice([(1, 8), (4, 4)])
    hidden_size = 16 * draw.randrange(16, 100)
    return replace(
        _draw_tokens(draw, seed, world_size),
        top_k=top_k,
        hidden_size=hidden_size,
        ffn_size=16 * draw.randrange(1, 60),
        num_panels=draw.randrange(1, -(-hidden_size // 256) + 1),
        routing=draw.choice(["uniform", "one", "masked"]),
    )


def _draw_tokens(draw: random.Random, seed: int, world_size: int) -> EmulatedCase:
    tokens = tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size))
    return EmulatedCase(f"seed {seed}", world_size, 1, tokens, world_size * draw.choice([8, 24, 40]), seed=seed)
