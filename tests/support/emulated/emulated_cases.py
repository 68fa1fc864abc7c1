"""Cases of layers that are emulated on one device: of 16 bits, of block FP8, and small ones for the interpreter."""

import random
from dataclasses import replace

import torch
from emulated_layer import EmulatedCase
from layer_cases import EDGE_ROWS

from comet.quantization.formats import FP8_BLOCK

CASES = [
    EmulatedCase("one rank", 1, 1, (700,), 8, 2, 512, 512),
    EmulatedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512, num_panels=1),
    EmulatedCase("unequal", 2, 1, (900, 5), 8, 4, 768, 128, num_panels=3),
    EmulatedCase("none on rank 1", 2, 1, (300, 0), 8, 4, 256, 128, num_panels=1),
    EmulatedCase("nobody has tokens", 2, 1, (0, 0), 8, 4, 256, 128, num_panels=1),
    EmulatedCase("one expert takes all", 2, 1, (600, 500), 8, 2, 512, 128, routing="one"),
    EmulatedCase("half of the experts idle", 2, 1, (500, 200), 16, 2, 256, 128, routing="first_half"),
    EmulatedCase("masked, odd widths", 2, 1, (300, 450), 64, 8, 336, 208, routing="masked"),
    EmulatedCase("half a block of columns outside", 2, 1, (300, 450), 8, 2, 256, 192),
    EmulatedCase("four ranks", 4, 1, (500, 90, 0, 710), 16, 4, 2048, 256, num_panels=6),
    EmulatedCase("four ranks, unequal", 4, 1, (150, 900, 260, 1), 16, 4, 512, 192),
    EmulatedCase("eight ranks, K = 8", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1024, 192, num_panels=4),
    EmulatedCase("all experts here", 1, 1, (2100,), 128, 8, 512, 64),
    EmulatedCase("12 experts of a token", 2, 1, (300, 450), 64, 12, 768, 128, routing="masked"),
    EmulatedCase("256 +- 15 rows of an expert", 2, 1, (1024, 1024), 16, 2, 1280, 272, num_panels=3),
    EmulatedCase("tall pieces on one rank only", 2, 1, (1024, 300), 16, 2, 512, 128),
    EmulatedCase("D less than a stage", 2, 1, (300, 80), 4, 1, 16, 256),
    EmulatedCase("F less than a stage", 1, 1, (300,), 4, 1, 256, 16, num_panels=1),
    EmulatedCase("narrow", 1, 1, (300,), 4, 2, 80, 16),
    EmulatedCase("more items than blocks", 2, 1, (2500, 1800), 8, 4, 128, 1040),
    EmulatedCase("float16", 2, 1, (400, 300), 16, 4, 512, 256, dtype=torch.float16),
    EmulatedCase("float16, long", 2, 1, (400, 300), 16, 4, 512, 4096, dtype=torch.float16),
    EmulatedCase("sixteen panels", 2, 1, (400, 300), 16, 4, 4096, 128, num_panels=16),
]
SPLITS = [
    EmulatedCase("split", 4, 1, (500, 90, 0, 710), 16, 4, 768, 256, num_panels=3),
    EmulatedCase("split", 2, 1, (2500, 1800), 8, 2, 1280, 1152, dtype=torch.float16),
    EmulatedCase("split alone", 1, 1, (700,), 8, 2, 512, 256, num_panels=1),
]

FP8 = EmulatedCase("two ranks", 2, 1, (700, 700), 8, 2, 512, 512, num_panels=1, fp8=True)
FP8_CASES = [
    replace(FP8, name="one rank", ep=1, num_tokens=(700,), num_panels=2),
    FP8,
    replace(FP8, name="unequal", num_tokens=(900, 5), top_k=4, hidden_size=768, ffn_size=128, num_panels=3),
    replace(FP8, name="none on rank 1", num_tokens=(300, 0), top_k=4, hidden_size=128, ffn_size=128),
    replace(FP8, name="nobody has tokens", num_tokens=(0, 0)),
    replace(FP8, name="one expert takes all", num_tokens=(600, 500), hidden_size=640, routing="one", num_panels=2),
    replace(FP8, name="half of the experts idle", num_experts=16, routing="first_half", ffn_size=384),
    replace(FP8, name="masked", num_tokens=(300, 450), num_experts=64, top_k=8, hidden_size=640, routing="masked"),
    replace(FP8, name="4 blocks push first", num_tokens=(900, 5), comm_blocks=4),
    replace(FP8, name="float16", top_k=4, hidden_size=896, dtype=torch.float16, num_panels=4),
    replace(FP8, name="float32", num_tokens=(300, 80), hidden_size=256, ffn_size=128, dtype=torch.float32),
    replace(FP8, name="31 blocks in 16 panels", num_tokens=(400, 300), hidden_size=3968, num_panels=16),
    replace(FP8, name="more items than blocks", num_tokens=(2500, 1800), top_k=4, hidden_size=128, ffn_size=1152),
    replace(FP8, name="four ranks", ep=4, num_tokens=(150, 900, 260, 1), num_experts=16, top_k=4, ffn_size=384),
    EmulatedCase("eight ranks", 8, 1, (130, 260, 1, 400, 90, 33, 257, 128), 128, 8, 1152, 128, num_panels=4, fp8=True),
    replace(FP8, name="all experts here", ep=1, num_tokens=(2100,), num_experts=128, top_k=8, ffn_size=128),
]

# Under the interpreter.
SMALL = EmulatedCase("two", 2, 1, (150, 5), 4, 2, 64, 32, "masked", torch.float32)
SMALL_CASES = [
    SMALL,
    replace(SMALL, name="none on rank 0", num_tokens=(0, 30), dtype=torch.float16),
    replace(SMALL, name="one expert", num_tokens=(20, 40), routing="one", comm_blocks=1),
    replace(SMALL, name="three ranks", ep=3, num_tokens=(17, 33, 1), num_experts=6, hidden_size=80),
]
SMALL_FP8 = replace(SMALL, hidden_size=256, ffn_size=128, fp8=True)
SMALL_FP8_CASES = [
    SMALL_FP8,
    replace(SMALL_FP8, name="float16", hidden_size=384, dtype=torch.float16),
    replace(SMALL_FP8, name="none on rank 0", num_tokens=(0, 30), ffn_size=384),
    replace(SMALL_FP8, name="one expert", num_tokens=(20, 40), routing="one"),
    replace(SMALL_FP8, name="three ranks", ep=3, num_tokens=(17, 33, 1), num_experts=6, hidden_size=640),
]


def edges(top_k: int) -> EmulatedCase:
    """Experts with rows around the heights of pieces, on one rank or on two, in block FP8."""
    world_size = 1 + top_k % 2
    tokens = -(-sum(EDGE_ROWS) * world_size // top_k) + 40  # some slots are masked
    num_tokens = (tokens,) if world_size == 1 else (tokens - tokens // 4, tokens // 4)
    return replace(
        FP8,
        name=f"edges, K = {top_k}",
        ep=world_size,
        num_tokens=num_tokens,
        num_experts=len(EDGE_ROWS) * world_size,
        top_k=top_k,
        hidden_size=(640, 128, 384, 1408)[top_k % 4],
        ffn_size=(128, 384)[top_k // 4 % 2],
        routing="edges",
        dtype=torch.float16 if top_k in (2, 5) else torch.bfloat16,
        num_panels=1 + top_k % 3,
        seed=top_k,
    )


def draw_case(draw: random.Random, seed: int, *, fp8: bool) -> EmulatedCase:
    """Few numbers of ranks, experts per token and types, for each is a compilation; any widths, tokens and routing."""
    world_size, top_k, dtype = draw.choice([(1, 8, torch.bfloat16), (4, 4, torch.bfloat16), (2, 3, torch.float16)])
    unit = FP8_BLOCK if fp8 else 16
    hidden_size = unit * draw.randrange(1, 1664 // unit)
    return EmulatedCase(
        f"seed {seed}",
        world_size,
        1,
        tuple(draw.choice([0, 1, 17, draw.randrange(1, 1500)]) for _ in range(world_size)),
        num_experts=world_size * draw.choice([8, 24, 40]),
        top_k=top_k,
        hidden_size=hidden_size,
        ffn_size=unit * draw.randrange(1, 960 // unit),
        num_panels=draw.randrange(1, -(-hidden_size // 256) + 1),
        routing=draw.choice(["uniform", "one", "masked", "first_half"]),
        dtype=dtype,
        seed=seed,
        fp8=fp8,
    )
