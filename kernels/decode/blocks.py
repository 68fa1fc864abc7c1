"""Shapes of the blocks of the decode kernels, and the table of those that were measured best."""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from ..runtime.arguments import power_of_2
from .scales import BLOCK, CODED_LANE, EIGHT, MX

LOAD_BYTES = 16
FEW_BLOCKS = 200  # one and a half for each SM of an H200
LARGE_EXPERT = 2**23  # elements of w2; Qwen3's has 1.6 million, DeepSeek-V3's 15, Mixtral's 59
LONG_EXPERT = 2**25
KINDS = 1024  # kinds of steps whose blocks, and whose launches, are kept
QUANTISED_BYTES = 32  # of a row, least step of the matrix form for quantised weights: what TMA swizzles


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Block of one of the two kernels."""

    # output columns: of hidden (gate/up reads as many rows of gate and of up) or of the output; a power of two, in the
    # vector form at most 16, in the matrix form 16 to 128
    rows: int
    # step of the contraction, a power of two from 16 on; in the vector form 16 bytes for each lane of all warps, or
    # loads get narrower; in the matrix form at least ``least_depth`` of quantised weights, and one of block FP8 may be
    # several of its blocks of 128
    depth: int
    num_warps: int = 4
    num_stages: int = 3  # depth of the load pipeline (matrix form)
    # most registers of a thread, so that more blocks run at once; 0 leaves it to the compiler, as it is over ranks,
    # whose all-reduce takes more
    max_registers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How a decode step runs; every choice computes the same sums in another order of additions."""

    form: Literal["vector", "matrix"]  # rows times contraction in registers, for 1 or 2 tokens; or tl.dot
    gate_up: BlockShape  # of the first kernel; in the vector form its rows divide 16
    down: BlockShape  # of the second one, likewise
    # vector form: down adds a token's experts in registers: no partial sums, shared weights are read again
    fold: bool = False
    dependent: bool = False  # start down while gate/up drains (programmatic dependent launch)
    ahead: int = 0  # steps of w2 that down loads before gate/up has ended, at most its contraction (vector form)
    # most tokens of an expert that are multiplied at once (matrix form), 8, 16, 32 or 64: fewer are quicker, but an
    # expert that more tokens chose is read once more for each tile of them
    tile: int = 64


def lane_of(dtype: torch.dtype) -> int:
    """Weights in the 16 bytes that a thread loads at once; int32 are words of eight e2m1 codes (MXFP4).

    Example: 8 in bfloat16, 16 in float8_e4m3fn, 32 in int32.
    """
    return LOAD_BYTES // dtype.itemsize * (EIGHT.value if dtype == torch.int32 else 1)


def least_depth(lane: int) -> int:
    """Least step of the matrix form for quantised weights, of which 16 bytes hold ``lane``: 32, in MXFP4 64."""
    return QUANTISED_BYTES // LOAD_BYTES * lane


def _vector(gate_up: BlockShape, down: BlockShape, **options: Any) -> DecodeConfig:
    return DecodeConfig(form="vector", gate_up=gate_up, down=down, **options)


def _matrix(gate_up: BlockShape, down: BlockShape, tile: int = 64) -> DecodeConfig:
    return DecodeConfig(form="matrix", gate_up=gate_up, down=down, tile=tile)


class Row(NamedTuple):
    """The blocks of steps of one kind; an empty word stands for all."""

    weights: str  # kinds of weights: plain (16 bits), fp8 (block FP8), mxfp8, mxfp4
    tokens: str  # bfloat16, float16
    experts: str  # small, large (``is_large``)
    most_tokens: int
    config: DecodeConfig


NARROW, TALL = BlockShape(32, 128, num_stages=4), BlockShape(64, 128, num_warps=8)
WIDE, SHORT = BlockShape(128, 128, num_warps=8), BlockShape(32, 256)
PLAIN, DEEP = BlockShape(64, 128), BlockShape(64, 128, num_stages=4)
LONG = _matrix(BlockShape(32, 256), BlockShape(64, 256), 8)
BYTES, CODES = (BlockShape(2, 512, 1), BlockShape(8, 256, 1)), (BlockShape(2, 1024, 1), BlockShape(16, 256, 1))
# The first row that a step matches was fastest on an H200 (``benchmarks/results/decode.md``).
#
# Large experts in 16 bits leave nothing to load early. Of quantised experts there are many blocks, and not only memory
# bounds these. One or two tokens: half a warp for a row of w2 in bytes, as much of which is loaded early as fits. Tiles
# of 8 read an expert that all tokens chose again for every 8 tokens; tiles of 16 cost little then, and are nearly as
# fast else. Models with large experts have few, and many tokens choose each: no tiles. MXFP8 takes longer steps,
# because its scales are loads, too, but not for float16 tokens: they multiply in tf32, whose operands take twice the
# registers. MXFP4 takes what MXFP8 takes, but no long steps of w2 in passes: these spill over ranks, and short steps
# spill if the compiler aims at 96 registers. With 80 registers six blocks of FP8 run on an SM in place of five.
ROWS = (
    Row("plain", "", "small", 1, _vector(BlockShape(2, 256, 1), BlockShape(8, 256, 1), ahead=1)),
    Row("plain", "", "large", 1, _vector(BlockShape(1, 1024), BlockShape(1, 256, 1), fold=True)),
    Row("plain", "", "large", 2, _vector(BlockShape(1, 1024, 2), BlockShape(4, 256, 1))),
    Row("plain", "", "", 8, _matrix(NARROW, WIDE)),
    Row("plain", "", "", 16, _matrix(TALL, WIDE)),
    Row("plain", "", "", 32, _matrix(TALL, PLAIN)),
    Row("plain", "", "small", 64, _matrix(TALL, BlockShape(64, 64, num_stages=4))),
    Row("plain", "", "large", 64, _matrix(TALL, WIDE)),
    Row("fp8 mxfp8", "", "", 1, _vector(*BYTES, ahead=3)),
    Row("fp8 mxfp8", "", "", 2, _vector(*BYTES, ahead=1)),
    Row("mxfp4", "", "", 1, _vector(*CODES, ahead=3)),
    Row("mxfp4", "", "", 2, _vector(*CODES, ahead=1)),
    Row("fp8", "", "small", 8, LONG),
    Row("fp8", "", "small", 32, _matrix(BlockShape(64, 256, num_stages=2), replace(DEEP, max_registers=80), 8)),
    Row("fp8", "", "small", 64, _matrix(NARROW, DEEP, 16)),
    Row("fp8", "", "large", 8, _matrix(PLAIN, DEEP, 8)),
    Row("mxfp8", "bfloat16", "small", 64, LONG),
    Row("mxfp4", "bfloat16", "small", 8, LONG),
    Row("mxfp4", "bfloat16", "small", 64, _matrix(LONG.gate_up, replace(DEEP, max_registers=128), 8)),
    Row("mxfp8 mxfp4", "bfloat16", "large", 8, _matrix(LONG.gate_up, DEEP, 8)),
    Row("mxfp8 mxfp4", "float16", "", 8, _matrix(NARROW, DEEP, 8)),
    Row("mxfp8 mxfp4", "float16", "small", 16, _matrix(PLAIN, BlockShape(128, 128))),
    Row("mxfp8 mxfp4", "float16", "small", 32, _matrix(BlockShape(64, 64), BlockShape(128, 64))),
    Row("mxfp8 mxfp4", "float16", "small", 64, _matrix(PLAIN, DEEP, 16)),
    Row("fp8 mxfp8 mxfp4", "", "large", 16, _matrix(PLAIN, BlockShape(128, 128))),
    Row("fp8 mxfp8 mxfp4", "bfloat16", "large", 64, _matrix(PLAIN, BlockShape(128, 128))),
    Row("fp8 mxfp8 mxfp4", "float16", "large", 64, _matrix(BlockShape(64, 64), BlockShape(128, 64))),
)


def is_large(hidden_size: int, ffn_size: int) -> bool:
    """Whether an expert is as large as those of Mixtral and DeepSeek-V3, rather than as those of Qwen3."""
    return hidden_size * ffn_size >= LARGE_EXPERT


@functools.lru_cache(maxsize=KINDS)
def select(
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    ffn_size: int,
    *,
    shared_scale: int = 0,
    four_bits: bool = False,
) -> DecodeConfig:
    """Return the blocks of a step, from ``ROWS``; those of float32 tokens were not measured and follow a rule.

    Args:
        dtype: Of the tokens, and of weights whose ``shared_scale`` is 0.
        four_bits: Whether the weights are MXFP4, where their scale is that of an MX type.
    """
    lane = (CODED_LANE.value if four_bits else LOAD_BYTES) if shared_scale else lane_of(dtype)
    if dtype == torch.float32:
        config = _float32_blocks(num_tokens, top_k, hidden_size, ffn_size, lane)
    else:
        weights = {0: "plain", BLOCK.value: "fp8", MX.value: "mxfp4" if four_bits else "mxfp8"}[shared_scale]
        tokens = "float16" if dtype == torch.float16 else "bfloat16"
        experts = "large" if is_large(hidden_size, ffn_size) else "small"
        config = next(
            row.config for row in ROWS
            if weights in row.weights.split() and row.tokens in ("", tokens) and row.experts in ("", experts)
            and num_tokens <= row.most_tokens
        )  # fmt: skip
        if config.form == "matrix" and not shared_scale:
            config = _narrowed(config, num_tokens, num_tokens * top_k, hidden_size, ffn_size)
    # Steps are no longer than their contractions.
    least = least_depth(lane) if shared_scale else 1
    depths = (power_of_2(max(size, least)) for size in (hidden_size, ffn_size))
    gate_up, down = (
        replace(block, depth=min(block.depth, depth))
        for block, depth in zip((config.gate_up, config.down), depths, strict=True)
    )
    # If gate/up has very many blocks, the blocks of down would take their room and wait.
    return replace(config, gate_up=gate_up, down=down, dependent=hidden_size * ffn_size < LONG_EXPERT)


def _narrowed(config: DecodeConfig, num_tokens: int, rows: int, hidden_size: int, ffn_size: int) -> DecodeConfig:
    """Return narrower blocks where so few tokens of so small experts would leave SMs without one."""
    if num_tokens <= 8 and rows * ffn_size < FEW_BLOCKS * NARROW.rows:
        config = replace(config, gate_up=replace(NARROW, rows=16))
    if num_tokens <= 16 and rows * hidden_size < FEW_BLOCKS * WIDE.rows:
        config = replace(config, down=SHORT)
    return config


def _float32_blocks(num_tokens: int, top_k: int, hidden_size: int, ffn_size: int, lane: int) -> DecodeConfig:
    """Vector for one token (and fold) and two (so that an expert both chose is read once), else matrix."""
    if num_tokens > 2:
        block = BlockShape(16, max(32, least_depth(lane)), num_stages=2)
        return _matrix(block, block)
    loads = 8 if num_tokens == 1 else 4  # weight rows times experts a lane has in flight
    if lane == CODED_LANE.value:
        loads //= 2  # with 128 bytes of the token, more would not fit into registers
    rows = max(2, 2 * loads // power_of_2(top_k)) if num_tokens == 1 else 4
    gate_up, down = _vector_block(lane, hidden_size, rows=loads // 2), _vector_block(lane, ffn_size, rows=rows)
    return _vector(gate_up, down, fold=num_tokens == 1)


def _vector_block(lane: int, contraction: int, *, rows: int) -> BlockShape:
    """Every lane of up to 4 warps loads 16 bytes of a row at a time; as many warps as divide the contraction.

    All warps along the contraction: a lane's piece of the tokens serves all rows of the block, and arrives where it is
    needed without shared memory. Quantised weights, where not even one warp divides it: half a warp for each of twice
    the rows.
    """
    lanes = 32 * lane
    if lane >= LOAD_BYTES and contraction % lanes:
        return BlockShape(rows=min(2 * rows, 16), depth=lanes // 2, num_warps=1)
    num_warps = next(count for count in (4, 2, 1) if count == 1 or contraction % (count * lanes) == 0)
    return BlockShape(rows=min(rows, 16), depth=num_warps * lanes, num_warps=num_warps)
