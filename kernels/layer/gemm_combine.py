"""Layer 1 in CUDA C++ (``cuda/gemm_combine.cu``): what ``gemm_combine`` of Triton does, bit for bit, in one launch.

In 16 bits and in block FP8, and as fc1_dgrad.

What it has and its Triton twin cannot have: a warp that only loads, rows that two blocks share through multicast, token
tiles of equal height in the place of tiles of 128, and combining warps with a dozen loads in flight each.

Blocks take the tiles of the GEMM and the tickets of the combine as they are ready: the launch ends with whatever blocks
find a place on the GPU, also while a kernel of another stream holds some and waits for another rank.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..runtime.arch import HOPPER
from ..runtime.arguments import CombineLists, Scaled, SymmBuffer, TileTable, aligned, num_sms, parts
from ..runtime.case import CudaCase
from ..runtime.cuda_source import (
    INT32,
    INT64,
    MATH_WARPS,
    NUM_THREADS,
    POINTER,
    SWIZZLE_BYTES,
    CudaSource,
    DeviceStruct,
    TensorMap,
    fields,
    padded,
    storage_bytes,
)
from ..runtime.limits import CHUNK_FLAGS, COMBINE_CHUNK_ROWS, PANEL_COUNTERS
from ..runtime.nvrtc import CudaKernel, is_available, load_source, tensor_map
from ..runtime.primitives import PLACE_LAYER1, PLACE_PANEL
from ..runtime.recorder import KIND_FINAL_SUM, KIND_LAYER1_TILE, KIND_REDUCE
from .blocks import FP8_MMA, PASS_COLS, PLAN_TILE_ROWS, TILE_SLOTS, Fault, LayerVariant
from .settings import LaunchSettings

PANEL_UNIT = 256  # columns that count as one in panels
COMBINE_WARPS = NUM_THREADS // 32 - MATH_WARPS - 1  # that combine from the start; one more loads
TILE_BYTES = 32  # size of ``PanelTile`` in ``layer1/tiles.cuh``
EXPERT_BYTES = 4  # size of an expert in the table of token tiles
ENTRY_BYTES = 8  # size of a row to add up in the list
MOST_ENTRIES = 16  # experts of a token, or ranks
FEW_ENTRIES = 8  # with more, the longer list leaves room for four rows fewer in flight during the GEMM
GPU_PARTS = 8  # parts of an H200; a cluster lies within one

ASSUMED_SMS = 132  # SMs of an H200: ranks must agree on their tickets, whatever GPUs they have
ROW_PARTS = 1, 2, 4, 8  # parts of a chunk
LEAST_ENTRIES = 16  # of a ticket, if ranks have equal shares of a token's experts
TALL_FROM, TALL_TO = 232.0, 280.0  # rows of an expert for which taller token tiles pay


class ScaleArgs(DeviceStruct):
    """Scales of block FP8; null in 16 bits."""

    _fields_ = (*fields(POINTER, "rows weights"), *fields(INT64, "num_rows"))


class PanelGemmArgs(DeviceStruct):
    """The operands of the GEMM and its tiles."""

    _fields_ = padded(
        *fields(TensorMap, "rows_map weights_map"),
        *fields(POINTER, "counts starts"),
        *fields(INT32, "experts depth"),
        *fields(ScaleArgs, "scales"),
        *fields(POINTER, "biases"),
    )


class CombineArgs(DeviceStruct):
    """Arguments of the combining warps: the rows to add up, and the ranks that get the sums."""

    _fields_ = (
        *fields(POINTER, "y received out row_slots row_weights send_rows recv_counts row_addresses received_grads"),
        *fields(POINTER, "grad_addresses weight_grads flags flag_addresses tickets panel_counters num_plan_tiles"),
        *fields(POINTER, "epoch"),
        *fields(Fault, "fault"),
        *fields(POINTER, "events"),
        *fields(INT32, "rank num_tokens max_tokens cols panels event_capacity parts row_parts comm_blocks"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig:
    """Shape of the blocks, as measured best on an H200."""

    cluster: int = 2  # blocks that share their rows: 1 or 2
    most_rows: int = 256  # most rows of a token tile that has all rows of its expert; others have up to ``mma_rows``
    num_stages: int = 4  # depth of the load pipeline
    box_rows: int = 32  # rows per TMA load, a divisor of ``most_rows``
    staged_rows: int = 32  # rows of a result that are stored at once, a divisor of ``most_rows``
    # rows that a combining warp has in flight during the GEMM, a multiple of 4, for sums of few entries
    ahead: int = 12
    ahead_after: int = 32  # the same after it, in the memory of the stages

    @staticmethod
    def select(expected_rows: float) -> "CudaConfig":
        """The blocks in 16 bits for experts of about so many rows.

        Around what an instruction multiplies at once, half of the experts have a few rows more, for which all their
        weights are loaded again, unless one token tile holds them. Its stages leave combining warps less memory, which
        costs up to 6 % elsewhere (benchmarks/results/forward_kernels.md).

        Args:
            expected_rows: Routed rows of each expert if all have equally many.

        Example: 256 +- 16 rows: token tiles of up to 272; 512 or 64: of up to 256.
        """
        return TALL if TALL_FROM <= expected_rows <= TALL_TO else DEFAULT


DEFAULT = CudaConfig()
TALL = CudaConfig(most_rows=272, box_rows=16, staged_rows=16, ahead=8)
SELECTABLE = DEFAULT, TALL
FP8_CONFIG = CudaConfig(cluster=1, most_rows=FP8_MMA.mma_rows, box_rows=64, staged_rows=0)  # stages serve for results


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant(LayerVariant):
    """The constants for which a kernel of layer 1 is compiled."""

    top_k: int  # K
    config: CudaConfig = DEFAULT  # shape of the blocks

    def shared_bytes(self, num_experts: int) -> int:
        """Shared memory of a block, for so many experts of this rank.

        It holds alignment, stages, staging, barriers, tiles, combining warps, and the table of token tiles.

        Example:
            32 experts, top-8, bfloat16: 1024 + 4 * 49152 + 2 * 4096 + 64 + 384 + 3 * (2048 + 6144) + 4 * 33 = 230980.
        """
        config = self.config
        stage = self.stage_bytes(config.most_rows, int(self.is_fp8))
        staging = 2 * config.staged_rows * SWIZZLE_BYTES
        storage = storage_bytes(config.num_stages, stage, staging, TILE_BYTES, TILE_SLOTS)
        return storage + combine_bytes(self._entries, self._ahead) + EXPERT_BYTES * (num_experts + 1)

    @property
    def _entries(self) -> int:
        """Most rows that a sum has."""
        return max(self.top_k, self.world_size)

    @property
    def _ahead(self) -> int:
        return self.config.ahead - 4 * (self._entries > FEW_ENTRIES)

    @property
    def entry(self) -> str:
        """Name of the kernel: ``gemm_combine_fp8_bf16_top8_rows128``, ``fc1_dgrad_bf16_top8_rows272``."""
        elements = "fp8_" * self.is_fp8 + self.types["Output"].lower()
        name = f"{'fc1_dgrad' if self.is_dgrad else 'gemm_combine'}_{elements}_top{self.top_k}"
        return self.entry_of(f"{name}_rows{self.config.most_rows}")

    def source(self, num_experts: int) -> CudaSource:
        """The source to compile, for a launch with so many experts of this rank."""
        return CudaSource(
            template="gemm_combine",
            entry=self.entry,
            arguments=dict(gemm=PanelGemmArgs, combine=CombineArgs),
            types=self.types,
            constants=self._constants(),
            shared_bytes=self.shared_bytes(num_experts),
            cluster=self.config.cluster,
        )

    def _constants(self) -> dict[str, int]:
        config = self.config
        of_type = dict(math_registers=216) if self.is_fp8 else dict(math_registers=176, staged_rows=config.staged_rows)
        return self.constants(
            cluster=config.cluster, num_stages=config.num_stages, max_tile_rows=config.most_rows,
            box_rows=config.box_rows, ahead_colocated=self._ahead, ahead_after=config.ahead_after, scale_steps=1,
            top_k=self.top_k, panel_unit=PANEL_UNIT, combine_warps=COMBINE_WARPS, chunk=COMBINE_CHUNK_ROWS,
            chunk_flags=CHUNK_FLAGS, place_panel=PLACE_PANEL.value, place_layer1=PLACE_LAYER1.value,
            kind_layer1_tile=KIND_LAYER1_TILE.value, kind_reduce=KIND_REDUCE.value,
            kind_final_sum=KIND_FINAL_SUM.value, shared_bytes=self.shared_bytes(0),
            shared_bytes_per_expert=EXPERT_BYTES, **of_type,
        )  # fmt: skip


def combine_bytes(entries: int, ahead: int) -> int:
    """Shared memory of the warps that combine from the start, for sums of ``entries`` rows with ``ahead`` in flight.

    Example:
        8 entries, 12 rows: 3 * (32 * 8 * 8 + 12 * 512) = 24576.
    """
    return COMBINE_WARPS * (COMBINE_CHUNK_ROWS * entries * ENTRY_BYTES + ahead * 2 * PASS_COLS)


@functools.cache
def fits(entries: int, experts: int, itemsize: int, block_rows: int) -> bool:
    """Whether kernels exist for sums of so many rows, so many experts and tiles of so many rows."""
    dtype = torch.float8_e4m3fn if itemsize == 1 else torch.bfloat16
    variants = [
        Variant(weights=dtype, output=torch.bfloat16, top_k=entries, world_size=1, config=config)
        for config in ((FP8_CONFIG,) if itemsize == 1 else SELECTABLE)
    ]
    fit = all(variant.shared_bytes(experts) <= HOPPER.shared_bytes for variant in variants)
    return itemsize <= 2 and block_rows == PLAN_TILE_ROWS and entries <= MOST_ENTRIES and fit


def can_run(y: Tensor, b: Tensor | Scaled, symm: SymmBuffer, returns: CombineLists, table: TileTable) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch; equal on all ranks, whose flags differ otherwise."""
    elements, scales = parts(b)
    entries = max(returns.row_slots.shape[1], symm.world_size)
    return (
        fits(entries, len(elements), elements.element_size(), table.block_rows)
        and y.element_size() == 2
        and (returns.row_weights is None) == (returns.grads is not None)
        and (scales is None or returns.grads is None)
        and table.segments is not None
        and is_available(y.device)
    )


def gemm_combine_cuda(
    a: Tensor | Scaled,
    b: Tensor | Scaled,
    y: Tensor,
    out: Tensor,
    symm: SymmBuffer,
    returns: CombineLists,
    table: TileTable,
    settings: LaunchSettings,
    bias: Tensor | None = None,
) -> None:
    """y = a @ b[expert] + bias[expert] for all routed rows, then out[t] = sum of token t's rows over all ranks.

    Args:
        a: ``(Q, C)`` routed rows, bfloat16 or float16; in block FP8 with scales ``(C / 128, Q)``.
        b: ``(e, D, C)``, same dtype, of fc1_dgrad ``(e, C, D)``; in block FP8 with scales ``(e, D / 128, C / 128)``.
        y: ``(Q, D)`` scratch for the expert outputs, bfloat16 or float16.
        out: ``(T, D)`` result, of y's dtype.
        symm: Combine rows and flags.
        returns: Rows to add up and the ranks that get the sums, with weights, or with these weights' gradients.
        table: Segments, counters and the number of tiles.
        settings: ``num_panels``, ``reserved_sms`` that the launch leaves to others, and ``comm_blocks`` that only
            combine, in whole clusters; 0: some warps of each block combine during the GEMM.
        bias: ``(e, D)`` of a floating type; ``None``: none, as of all gradients.
    """
    (rows, row_scales), (weights, weight_scales) = parts(a), parts(b)
    is_dgrad, num_experts = returns.grads is not None, len(weights)
    blocks = FP8_CONFIG if weight_scales is not None else CudaConfig.select(table.expected_tokens_per_expert)
    variant = Variant(
        weights=weights.dtype, output=y.dtype, top_k=returns.row_slots.shape[1], world_size=symm.world_size,
        is_dgrad=is_dgrad, records=symm.recorder is not None, is_split=settings.comm_blocks > 0, config=blocks,
        bias=None if bias is None else bias.dtype,
    )  # fmt: skip
    kernel = _kernels(variant, num_experts, torch.cuda.current_device())[blocks]
    line, mma = SWIZZLE_BYTES // weights.itemsize, variant.mma
    box = (1, mma.block_k, line) if is_dgrad else (1, mma.block_n, mma.block_k)
    assert table.segments is not None
    starts, counts = table.segments
    gemm = PanelGemmArgs.of(
        rows_map=tensor_map(rows, (blocks.box_rows, mma.block_k)), weights_map=tensor_map(weights, box), counts=counts,
        starts=starts, experts=num_experts, depth=rows.shape[1],
        scales=ScaleArgs.of(rows=row_scales, weights=weight_scales, num_rows=len(y)),
        biases=None if bias is None else aligned(bias),
    )  # fmt: skip
    num_blocks = launched_blocks(num_sms(y.device), settings.reserved_sms, blocks.cluster)
    comm_blocks = min(settings.comm_blocks, num_blocks - blocks.cluster)  # some have to compute
    combine = combine_args(y, out, symm, returns, table, settings.num_panels, comm_blocks)
    kernel.launch(num_blocks, [gemm, combine])


def combine_args(
    y: Tensor,
    out: Tensor,
    symm: SymmBuffer,
    returns: CombineLists,
    table: TileTable,
    num_panels: int,
    comm_blocks: int,
) -> DeviceStruct:
    """The arguments that ``combine.cuh`` reads."""
    recorder, grads, (num_tokens, cols) = symm.recorder, returns.grads, out.shape
    top_k = returns.row_slots.shape[1]
    column_parts, row_parts = ticket_parts(symm.max_tokens, symm.world_size, top_k, cols, num_panels)
    return CombineArgs.of(
        y=y, received=symm.rows, out=out, row_slots=returns.row_slots,
        row_weights=returns.row_weights if grads is None else grads.row_grads, send_rows=returns.send_rows,
        recv_counts=returns.recv_counts, row_addresses=symm.row_pointers,
        received_grads=None if grads is None else grads.received,
        grad_addresses=None if grads is None else grads.received_pointers,
        weight_grads=None if grads is None else grads.out, flags=symm.flags, flag_addresses=symm.flag_pointers,
        tickets=table.counters, panel_counters=table.counters[PANEL_COUNTERS:], num_plan_tiles=table.num_tiles,
        epoch=symm.epoch, fault=Fault.of(record=symm.fault, timeout_ns=symm.timeout_ns),
        events=None if recorder is None else recorder.events, rank=symm.rank, num_tokens=num_tokens,
        max_tokens=symm.max_tokens, cols=cols, panels=num_panels,
        event_capacity=symm.event_capacity, parts=column_parts, row_parts=row_parts,
        comm_blocks=comm_blocks,
    )  # fmt: skip


def launched_blocks(sms: int, reserved: int, cluster: int) -> int:
    """Blocks of a launch, of one cluster at least.

    The blocks of a cluster need SMs of the same part of the GPU: where others hold some, each part may have one left
    over.

    Example: 132 SMs in pairs: 132; with 31 reserved ones 132 - 31 - 8 = 93, so 92.
    """
    left_over = GPU_PARTS * (cluster - 1) if reserved else 0
    return max((sms - reserved - left_over) // cluster, 1) * cluster


@functools.cache
def ticket_parts(max_tokens: int, world_size: int, top_k: int, cols: int, num_panels: int) -> tuple[int, int]:
    """The parts of a panel's columns and of a chunk's rows, so that each combining warp has two tickets of a reduce.

    The parts of the columns are for the warps that combine during the GEMM. With one panel there are none, and math
    warps combine when they are done. Columns and rows together are for all warps, which share the last panel.

    The parts of the rows are a power of two, for tickets of ``LEAST_ENTRIES`` rows to add up or more; both together are
    no more than there are flags.

    Example:
        M=2048, W=4 and K=8 make 256 chunks. In 4 panels 396 warps want 792 tickets: D=2048 has 2 column blocks in each,
        so 2 parts, and 1452 warps 2904 tickets: 4 parts of 8 rows, which are 16 to add up. D=7168 has 4 parts and 2.
        M=8192: 1 part and 2.
    """
    widest_panel = -(-cols // (PANEL_UNIT * num_panels))
    chunks = max_tokens // COMBINE_CHUNK_ROWS * world_size
    beside, behind = (0, MATH_WARPS) if num_panels == 1 else (COMBINE_WARPS, COMBINE_WARPS + MATH_WARPS)
    wanted, in_all = 2 * ASSUMED_SMS * (beside or behind), 2 * ASSUMED_SMS * behind
    column_parts = min(-(-wanted // chunks), widest_panel, CHUNK_FLAGS // num_panels)
    tickets = min(in_all // chunks, CHUNK_FLAGS // num_panels) // column_parts
    entries = COMBINE_CHUNK_ROWS * top_k // (world_size * LEAST_ENTRIES)
    return column_parts, max(parts for parts in ROW_PARTS if parts <= max(min(tickets, entries), 1))


@functools.cache
def _kernels(variant: Variant, experts: int, device: int) -> dict[CudaConfig, CudaKernel]:
    """Loaded together: which one runs depends on a call's tokens, and who compiles keeps other ranks waiting.

    Once per device: a module belongs to its context.
    """
    selectable = (FP8_CONFIG,) if variant.config == FP8_CONFIG else SELECTABLE
    return {config: _kernel(replace(variant, config=config), experts, device) for config in selectable}


@functools.cache
def _kernel(variant: Variant, experts: int, device: int) -> CudaKernel:
    return load_source(variant.source(experts))


def aot_cases() -> list[CudaCase]:
    """Forward and fc1_dgrad in all blocks that a layer takes, and block FP8; a split, biases, 16 experts of a token."""
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    shapes = [(bf16, 2, False), (bf16, 8, False), (bf16, 8, True), (fp16, 8, False)]
    variants = [
        Variant(
            weights=dtype, output=dtype, top_k=top_k, world_size=4, is_dgrad=is_dgrad, records=records, config=config
        )
        for dtype, top_k, records in shapes
        for is_dgrad in (False, True)
        for config in SELECTABLE
    ]
    variants += [
        Variant(weights=fp8, output=dtype, top_k=top_k, world_size=4, records=records, config=FP8_CONFIG)
        for dtype, top_k, records in shapes
    ]
    bf16_split = Variant(weights=bf16, output=bf16, top_k=8, world_size=4, is_split=True)
    variants += [bf16_split, replace(bf16_split, is_dgrad=True), replace(bf16_split, weights=fp8, config=FP8_CONFIG)]
    variants += [replace(variant, top_k=4, is_split=False, bias=bf16) for variant in (bf16_split, variants[-1])]
    variants += [replace(bf16_split, top_k=MOST_ENTRIES, is_split=False)]
    return [CudaCase(variant.source(64), "4 ranks") for variant in variants]
