"""Which shapes of blocks the decode kernels take, and which are the default for a step."""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton

from .scales import CODED_LANE, EIGHT, MX

LOAD_BYTES = 16
FEW_BLOCKS = 200  # one and a half for each SM of an H200
LARGE_EXPERT = 2**23  # elements of w2; Qwen3's has 1.6 million, DeepSeek-V3's 15, Mixtral's 59
LONG_EXPERT = 2**25
SIX_BLOCKS_REGISTERS, FOUR_BLOCKS_REGISTERS = 80, 128  # 6 or 4 blocks of 4 warps on an SM with 65536
KINDS = 1024  # kinds of steps whose blocks, and whose launches, are kept
QUANTISED_BYTES = 32  # of a row, least step of the matrix form for quantised weights: what TMA swizzles


@dataclass(frozen=True, kw_only=True, slots=True)
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


LONG_STEPS = BlockShape(rows=32, depth=256), BlockShape(rows=64, depth=256)  # for quantised weights of small experts


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

    def fit(self, hidden_size: int, ffn_size: int, **changes: Any) -> "DecodeConfig":
        """Return the config with ``changes``, and with steps no longer than their contractions."""
        gate_up = replace(self.gate_up, depth=min(self.gate_up.depth, triton.next_power_of_2(hidden_size)))
        down = replace(self.down, depth=min(self.down.depth, triton.next_power_of_2(ffn_size)))
        return replace(self, gate_up=gate_up, down=down, **changes)


def lane_of(dtype: torch.dtype) -> int:
    """Weights in the 16 bytes that a thread loads at once; int32 are words of eight e2m1 codes (MXFP4).

    Example: 8 in bfloat16, 16 in float8_e4m3fn, 32 in int32.
    """
    return LOAD_BYTES // dtype.itemsize * (EIGHT.value if dtype == torch.int32 else 1)


def least_depth(lane: int) -> int:
    """Least step of the matrix form for quantised weights, of which 16 bytes hold ``lane``: 32, in MXFP4 64."""
    return QUANTISED_BYTES // LOAD_BYTES * lane


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
    dependent: bool = True,
) -> DecodeConfig:
    """The default for a step.

    16-bit tokens: what was fastest of some hundred blocks on an H200, for experts of four models
    (``benchmarks/results/decode.md``): vector for one token, and for two where experts are large or quantised; else
    matrix. float32, not measured: vector for one token (and fold) and two (so that an expert both chose is read once),
    else matrix. MXFP4: what MXFP8 takes, with as many bytes for each thread in the vector form; at four tokens none of
    ten others was faster.

    Args:
        dtype: Of the tokens, and of weights whose ``shared_scale`` is 0.
        four_bits: Whether the weights are MXFP4, where their scale is that of an MX type.
        dependent: Whether down may start while gate/up drains, where experts are not too large for it to pay.
    """
    lane = (CODED_LANE.value if four_bits else LOAD_BYTES) if shared_scale else lane_of(dtype)
    large = is_large(hidden_size, ffn_size)
    if dtype == torch.float32:
        config = _float32_blocks(num_tokens, top_k, hidden_size, ffn_size, lane)
    elif num_tokens <= 2 and shared_scale:
        config = _few_quantised(num_tokens, lane)
    elif shared_scale:
        config = _quantised_blocks(num_tokens, dtype, shared_scale, four_bits, large)
    elif num_tokens == 1 or (num_tokens == 2 and large):
        config = _few_blocks(num_tokens, large)
    else:
        config = _measured_blocks(num_tokens, top_k, hidden_size, ffn_size)
    least = least_depth(lane) if shared_scale else 1
    # If gate/up has very many blocks, the blocks of down would take their room and wait.
    dependent = dependent and hidden_size * ffn_size < LONG_EXPERT
    return config.fit(max(hidden_size, least), max(ffn_size, least), dependent=dependent)


def _float32_blocks(num_tokens: int, top_k: int, hidden_size: int, ffn_size: int, lane: int) -> DecodeConfig:
    if num_tokens > 2:
        block = BlockShape(rows=16, depth=max(32, least_depth(lane)), num_stages=2)
        return DecodeConfig(form="matrix", gate_up=block, down=block)
    loads = 8 if num_tokens == 1 else 4  # weight rows times experts a lane has in flight
    if lane == CODED_LANE.value:
        loads //= 2  # with 128 bytes of the token, more would not fit into registers
    rows = max(2, 2 * loads // triton.next_power_of_2(top_k)) if num_tokens == 1 else 4
    gate_up, down = _vector_block(lane, hidden_size, rows=loads // 2), _vector_block(lane, ffn_size, rows=rows)
    return DecodeConfig(form="vector", gate_up=gate_up, down=down, fold=num_tokens == 1)


def is_large(hidden_size: int, ffn_size: int) -> bool:
    """Whether an expert is as large as those of Mixtral and DeepSeek-V3, rather than as those of Qwen3."""
    return hidden_size * ffn_size >= LARGE_EXPERT


def _few_quantised(num_tokens: int, lane: int) -> DecodeConfig:
    """One or two tokens: half a warp for a row of w2 in bytes, as much of which is loaded early as fits.

    In MXFP4, 32 weights for each of the lanes, a step of w2 is as long, for it fits F, and has twice the rows.
    """
    gate_up = BlockShape(rows=2, depth=32 * lane, num_warps=1)
    down = BlockShape(rows=lane // 2, depth=256, num_warps=1)
    ahead = 3 if num_tokens == 1 else 1
    return DecodeConfig(form="vector", gate_up=gate_up, down=down, ahead=ahead)


def _few_blocks(num_tokens: int, large: bool) -> DecodeConfig:
    """One or two tokens, weights of 16 bits: small blocks of one warp; large experts leave nothing to load early."""
    is_one = num_tokens == 1
    if not large:
        gate_up, down = BlockShape(rows=2, depth=256, num_warps=1), BlockShape(rows=8, depth=256, num_warps=1)
        return DecodeConfig(form="vector", gate_up=gate_up, down=down, ahead=1)
    gate_up = BlockShape(rows=1, depth=1024, num_warps=4 if is_one else 2)
    down = BlockShape(rows=1 if is_one else 4, depth=256, num_warps=1)
    return DecodeConfig(form="vector", gate_up=gate_up, down=down, fold=is_one)


def _quantised_blocks(
    num_tokens: int, dtype: torch.dtype, shared_scale: int, four_bits: bool, large: bool
) -> DecodeConfig:
    """Return blocks for few tokens of an expert; there are many blocks, and not only memory bounds them.

    Tiles of 8 read an expert that all tokens chose again for every 8 tokens; tiles of 16 cost little then, and are
    nearly as fast else. MXFP8 takes longer steps, because its scales are loads, too, but not for float16 tokens: they
    multiply in tf32, whose operands take twice the registers. Models with large experts have few, and many tokens
    choose each: no tiles. MXFP4 takes no long steps of w2 in passes: long steps spill over ranks, and short steps spill
    if the compiler aims at 96 registers.
    """
    is_half, is_mx = dtype == torch.float16, shared_scale == MX.value
    gate_up, down = BlockShape(rows=64, depth=128, num_stages=3), BlockShape(rows=64, depth=128, num_stages=4)
    narrow = BlockShape(rows=32, depth=128, num_stages=4)
    tile = 8
    if is_mx and not (is_half or large):
        gate_up, long_down = LONG_STEPS
        down = replace(down, max_registers=FOUR_BLOCKS_REGISTERS) if four_bits and num_tokens > 8 else long_down
    elif num_tokens <= 32 and not (is_mx or large):
        gate_up, down = _small_fp8_blocks(num_tokens)
    elif num_tokens <= 8 and is_mx:
        gate_up = narrow if is_half else LONG_STEPS[0]
    elif num_tokens > 8 and (large or num_tokens <= 32):
        depth = 64 if is_half and num_tokens > 16 else 128
        gate_up, down = replace(gate_up, depth=depth), BlockShape(rows=128, depth=depth, num_stages=3)
        tile = 64
    elif num_tokens > 32:
        gate_up = gate_up if is_mx else narrow
        tile = 16
    return DecodeConfig(form="matrix", gate_up=gate_up, down=down, tile=tile)


def _small_fp8_blocks(num_tokens: int) -> tuple[BlockShape, BlockShape]:
    """Return blocks for small experts in block FP8, up to 32 tokens in tiles of 8; some steps have two scales.

    From 9 tokens on the down kernel is faster with six blocks per SM in place of five.
    """
    if num_tokens <= 8:
        return LONG_STEPS
    down = BlockShape(rows=64, depth=128, num_stages=4, max_registers=SIX_BLOCKS_REGISTERS)
    return BlockShape(rows=64, depth=256, num_stages=2), down


def _measured_blocks(num_tokens: int, top_k: int, hidden_size: int, ffn_size: int) -> DecodeConfig:
    """Return large blocks, which keep more loads in flight, or narrower ones if a GPU would have too few blocks."""
    routed_rows = num_tokens * top_k
    if num_tokens > 8:
        gate_up = BlockShape(rows=64, depth=128, num_warps=8, num_stages=3)
    else:
        enough = routed_rows * ffn_size >= FEW_BLOCKS * 32
        gate_up = BlockShape(rows=32 if enough else 16, depth=128, num_stages=4)
    if num_tokens > 32 and is_large(hidden_size, ffn_size):
        down = BlockShape(rows=128, depth=128, num_warps=8, num_stages=3)
    elif num_tokens > 32:
        down = BlockShape(rows=64, depth=64, num_stages=4)
    elif num_tokens > 16:
        down = BlockShape(rows=64, depth=128, num_stages=3)
    elif routed_rows * hidden_size >= FEW_BLOCKS * 128:
        down = BlockShape(rows=128, depth=128, num_warps=8, num_stages=3)
    else:
        down = BlockShape(rows=32, depth=256, num_stages=3)
    return DecodeConfig(form="matrix", gate_up=gate_up, down=down)


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
