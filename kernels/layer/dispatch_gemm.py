"""Layer 0 in CUDA C++ (``cuda/dispatch_gemm.cu``): what ``dispatch_gemm`` of Triton does, bit for bit, in one launch.

In 16 bits and in block FP8, and as fc2_dgrad, where gradients of the output travel as tokens do, and weights are read
along their columns, as they lie.

What it has and its Triton twin cannot have: warps that only load, token tiles of equal height in the place of tiles of
128, and a warp in every block that pushes rows, eight at a time: the first rows arrive after microseconds, and no block
is kept from multiplying. Blocks take the next tile when they are ready, so that those that need the same weights read
them together.

Why it ends: pushing warps never wait, so every flag is raised, in whatever order blocks run.
"""

import functools
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..runtime.activation import SWIGLU, Activation
from ..runtime.arch import HOPPER
from ..runtime.arguments import Scaled, SymmBuffer, TileTable, aligned, num_sms, parts
from ..runtime.case import CudaCase
from ..runtime.cuda_source import (
    INT32,
    INT64,
    POINTER,
    SWIZZLE_BYTES,
    CudaSource,
    DeviceStruct,
    TensorMap,
    fields,
    padded,
    storage_bytes,
)
from ..runtime.limits import CHUNK_ROWS
from ..runtime.nvrtc import CudaKernel, is_available, load_source, tensor_map
from ..runtime.primitives import PLACE_LAYER0
from ..runtime.recorder import KIND_DISPATCH, KIND_LAYER0_TILE
from .blocks import FP8_MMA, MMA, PLAN_TILE_ROWS, TILE_SLOTS, Fault, LayerVariant
from .settings import LaunchSettings
from .triton.dispatch import DispatchLists

PRODUCER_WARPS = 3  # one more pushes
TILE_BYTES = 48  # of ``GatheredTile`` of ``layer0/tiles.cuh``
EXPERT_BYTES = 12  # of an expert in the table of token tiles
# Blocks in 16 bits, as measured best on an H200; those of block FP8 have as many stages, and push as many rows.
MOST_ROWS = 288  # rows of a token tile that has all rows of its expert; others have up to ``MMA.mma_rows``
NUM_STAGES = 4
STAGED_ROWS = 32  # rows of a result that are stored at once, a multiple of 32 that divides MOST_ROWS
PUSH_ROWS = 8  # rows of a pushing warp's ticket, a divisor of 128
FP8_SCALE_STEPS = 4  # whose scales of a row are loaded together: four bytes at a time cost 6.5 % of the launch


class GatherGemmArgs(DeviceStruct):
    """The operands of the GEMM and its tiles."""

    _fields_ = padded(
        *fields(TensorMap, "weights_map"),
        *fields(POINTER, "received counts starts plan_tiles num_plan_tiles row_ids flags"),
        *fields(INT32, "experts depth ffn"),
        *fields(POINTER, "biases"),
    )


class HiddenArgs(DeviceStruct):
    """Addresses of the results."""

    _fields_ = (*fields(POINTER, "hidden gate_up scales weight_scales"), *fields(INT64, "num_rows"))


class DispatchArgs(DeviceStruct):
    """Arguments of the dispatch warps: the tokens that this rank sends, and where to."""

    _fields_ = (
        *fields(POINTER, "x token_ids counts row_addresses flag_addresses tickets pushed epoch events"),
        *fields(INT32, "rank max_tokens cols event_capacity comm_blocks"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant(LayerVariant):
    """The constants for which a kernel of layer 0 is compiled."""

    saves_gate_up: bool = False  # whether gate | up are stored for the backward pass
    activation: Activation = SWIGLU

    def shared_bytes(self, num_experts: int) -> int:
        """Shared memory of a block, for so many experts of this rank.

        It holds alignment, stages, staging, barriers, tiles and their table.

        Example:
            32 experts in bfloat16: 1024 + 4 * 53248 + 2 * 2048 + 64 + 512 + 4 * 97 = 219076.
        """
        if self.is_fp8:
            stage, staging = self.stage_bytes(FP8_MMA.mma_rows, FP8_SCALE_STEPS), 4 * 2 * FP8_MMA.mma_rows
        else:
            line = SWIZZLE_BYTES if self.is_dgrad else SWIZZLE_BYTES // 2
            stage, staging = self.stage_bytes(MOST_ROWS), 2 * STAGED_ROWS * line
        storage = storage_bytes(NUM_STAGES, stage, staging, TILE_BYTES, TILE_SLOTS)
        return storage + EXPERT_BYTES * num_experts + 4

    @property
    def entry(self) -> str:
        """Name of the kernel: ``dispatch_gemm_bf16_swiglu``, ``dispatch_gemm_fp8_swiglu``, ``fc2_dgrad_bf16``."""
        elements = "fp8" if self.is_fp8 else self.types["Element"].lower()
        name = f"fc2_dgrad_{elements}" if self.is_dgrad else f"dispatch_gemm_{elements}_{self.activation.name}"
        return self.entry_of(name, "_saving" * self.saves_gate_up)

    def source(self, num_experts: int) -> CudaSource:
        """The source to compile, for a launch with so many experts of this rank."""
        functor = self.activation.name.title().replace("_", "")  # in activation.cuh
        return CudaSource(
            template="dispatch_gemm",
            entry=self.entry,
            arguments=dict(gemm=GatherGemmArgs, hidden=HiddenArgs, fault=Fault, dispatch=DispatchArgs),
            types=self.types | dict(Activation=functor),
            constants=self._constants(),
            shared_bytes=self.shared_bytes(num_experts),
        )

    def _constants(self) -> dict[str, int]:
        if self.is_fp8:
            of_type = dict(
                max_tile_rows=FP8_MMA.mma_rows, scale_steps=FP8_SCALE_STEPS, push_batch=8, math_registers=208
            )  # fmt: skip
        else:
            of_type = dict(
                max_tile_rows=MOST_ROWS, scale_steps=1, push_batch=16, staged_rows=STAGED_ROWS,
                saves_gate_up=self.saves_gate_up,
                math_registers=176 if self.records else 184,  # recording takes registers of the producers
            )  # fmt: skip
        return self.constants(
            cluster=1, num_stages=NUM_STAGES, push_rows=PUSH_ROWS, producer_warps=PRODUCER_WARPS, chunk=CHUNK_ROWS,
            place_layer0=PLACE_LAYER0.value, kind_layer0_tile=KIND_LAYER0_TILE.value,
            kind_dispatch=KIND_DISPATCH.value, shared_bytes=self.shared_bytes(0), shared_bytes_per_expert=EXPERT_BYTES,
            **of_type, **self.activation.parameters,
        )  # fmt: skip


@functools.cache
def fits(shape: tuple[int, ...], itemsize: int, block_rows: int, *, is_dgrad: bool = False) -> bool:
    """Whether kernels exist for weights of this ``shape``, ``(e, N, K)``, and tiles of so many rows."""
    experts, n, k = shape
    dtype = torch.float8_e4m3fn if itemsize == 1 else torch.bfloat16
    in_step = itemsize == 1 or (n % (8 if is_dgrad else 16) == 0 and k % 8 == 0)
    shared_bytes = Variant(weights=dtype, output=torch.bfloat16, world_size=1, is_dgrad=is_dgrad).shared_bytes(experts)
    return itemsize <= 2 and in_step and block_rows == PLAN_TILE_ROWS and shared_bytes <= HOPPER.shared_bytes


def can_run(weights: Tensor | Scaled, table: TileTable, *, is_dgrad: bool = False) -> bool:
    """Whether the kernel in CUDA C++ takes such a launch, of w1, or of fc2_dgrad of w2 ``(e, D, F)``.

    Ranks may differ in it: flags are those of Triton's.
    """
    elements, _ = parts(weights)
    is_fit = fits(tuple(elements.shape), elements.element_size(), table.block_rows, is_dgrad=is_dgrad)
    return is_fit and table.segments is not None and is_available(elements.device)


def dispatch_gemm_cuda(
    x: Tensor | None,
    w1: Tensor | Scaled,
    hidden: Tensor | Scaled,
    pre: Tensor | None,
    symm: SymmBuffer,
    sends: DispatchLists,
    table: TileTable,
    settings: LaunchSettings,
    b1: Tensor | None = None,
) -> None:
    """Send this rank's rows, receive the others', and compute hidden = activation(x w_gate, x w_up) of routed rows.

    Args:
        x: ``(T, D)`` this rank's tokens, bfloat16 or float16; ``None`` in block FP8, where they lie packed among the
            receive rows.
        w1: ``(e, 2F, D)`` gate rows, then up rows, same dtype; in block FP8 with scales ``(e, 2F / 128, D / 128)``.
        hidden: ``(Q, F)`` result, in block FP8 with scales ``(F / 128, Q)``; rows of no expert are undefined.
        pre: ``(Q, 2F)`` receives gate | up for the backward pass, or ``None``.
        symm: Receive rows and flags.
        sends: Send lists.
        table: Segments, tiles by phase, and where each routed row arrives.
        settings: The activation, and ``comm_blocks`` that push rows before they compute; 0: a warp of each block pushes
            them meanwhile.
        b1: ``(e, 2F)`` biases of gate | up, added to their products, of a floating type; ``None``: none.
    """
    (weights, weight_scales), (result, scales) = parts(w1), parts(hidden)
    if x is None:
        x = symm.rows[symm.rank * symm.max_tokens :].view(torch.int16)
    variant = Variant(
        weights=weights.dtype,
        output=torch.bfloat16 if weight_scales is not None else weights.dtype,
        world_size=symm.world_size,
        saves_gate_up=pre is not None,
        records=symm.recorder is not None,
        is_split=settings.comm_blocks > 0,
        activation=settings.activation,
        bias=None if b1 is None else b1.dtype,
    )
    results = HiddenArgs.of(
        hidden=result, gate_up=pre, scales=scales, weight_scales=weight_scales, num_rows=len(result)
    )  # fmt: skip
    experts, double_f, depth = weights.shape
    sizes = experts, depth, double_f // 2
    weights_map = gate_up_map(weights, variant.mma.block_n)
    launch(variant, weights_map, x, results, symm, sends, table, sizes, settings.comm_blocks, b1)


def fc2_dgrad_cuda(
    grad_y: Tensor,
    w2: Tensor,
    out: Tensor,
    symm: SymmBuffer,
    sends: DispatchLists,
    table: TileTable,
    comm_blocks: int = 0,
) -> None:
    """Send this rank's gradients, receive the others', and multiply those of all routed rows by their expert's w2.

    Args:
        grad_y: ``(T, D)`` gradients of this rank's outputs, bfloat16 or float16.
        w2: ``(e, D, F)``, same dtype.
        out: ``(Q, F)`` result; rows of no expert are undefined.
        symm: Receive rows, which hold the others' gradients afterwards and not this rank's own, and flags.
        comm_blocks: Blocks that push rows before they compute; 0: a warp of each block pushes them meanwhile.
    """
    variant = Variant(
        weights=w2.dtype,
        output=w2.dtype,
        world_size=symm.world_size,
        is_dgrad=True,
        records=symm.recorder is not None,
        is_split=comm_blocks > 0,
    )
    weights_map = tensor_map(w2, (1, MMA.block_k, SWIZZLE_BYTES // w2.itemsize))
    results = HiddenArgs.of(hidden=out, gate_up=None, scales=None, weight_scales=None, num_rows=len(out))
    launch(variant, weights_map, grad_y, results, symm, sends, table, tuple(w2.shape), comm_blocks)


def gate_up_map(w1: Tensor, cols: int) -> TensorMap:
    """Descriptor of w1 for TMA loads of ``cols`` rows: gate rows and the up rows that go with them in groups of 8."""
    experts, double_f, depth = w1.shape
    groups = w1.view(experts, 2, double_f // 16, 8, depth).transpose(1, 2)
    return tensor_map(groups, (1, cols // 16, 2, 8, SWIZZLE_BYTES // w1.itemsize))


def launch(
    variant: Variant,
    weights_map: TensorMap,
    x: Tensor,
    hidden: DeviceStruct,
    symm: SymmBuffer,
    sends: DispatchLists,
    table: TileTable,
    sizes: tuple[int, ...],
    comm_blocks: int = 0,
    biases: Tensor | None = None,
) -> None:
    """Launch a variant on all SMs, of ``sizes`` e, D and F; ``x (T, ..)``: what travels, in rows of 16-bit words."""
    assert table.segments is not None
    recorder, (starts, counts), (experts, depth, ffn) = symm.recorder, table.segments, sizes
    gemm = GatherGemmArgs.of(
        weights_map=weights_map, received=symm.rows, counts=counts, starts=starts, plan_tiles=table.tiles,
        num_plan_tiles=table.num_tiles, row_ids=table.row_ids, flags=symm.flags, experts=experts, depth=depth, ffn=ffn,
        biases=None if biases is None else aligned(biases),
    )  # fmt: skip
    dispatch = DispatchArgs.of(
        x=x, token_ids=sends.token_ids, counts=sends.counts, row_addresses=symm.row_pointers,
        flag_addresses=symm.flag_pointers, tickets=table.counters, pushed=sends.pushed, epoch=symm.epoch,
        events=None if recorder is None else recorder.events, rank=symm.rank, max_tokens=symm.max_tokens,
        cols=x.shape[1], event_capacity=symm.event_capacity, comm_blocks=comm_blocks,
    )  # fmt: skip
    fault = Fault.of(record=symm.fault, timeout_ns=symm.timeout_ns)
    kernel = _kernel(variant, experts, torch.cuda.current_device())
    kernel.launch(num_sms(x.device), [gemm, hidden, fault, dispatch])


@functools.cache
def _kernel(variant: Variant, experts: int, device: int) -> CudaKernel:
    """Loaded once per device: a module belongs to its context."""
    return load_source(variant.source(experts))


def aot_cases() -> list[CudaCase]:
    """Inference and training, recording, float16, block FP8; splits; fc2_dgrad; other activations; with biases."""
    bf16, fp16, fp8, gpt_oss = torch.bfloat16, torch.float16, torch.float8_e4m3fn, Activation("clamped_swiglu")
    variants = [
        *(Variant(weights=bf16, output=bf16, world_size=4, saves_gate_up=saves, records=records)
          for saves, records in product([False, True], [False, True])),
        *(Variant(weights=fp16, output=fp16, world_size=4, saves_gate_up=True, records=records)
          for records in (False, True)),
        *(Variant(weights=fp8, output=bf16, world_size=4, records=records) for records in (False, True)),
        Variant(weights=bf16, output=bf16, world_size=4, saves_gate_up=True, is_split=True),
        Variant(weights=fp8, output=bf16, world_size=4, is_split=True),
        *(Variant(weights=dtype, output=dtype, world_size=4, is_dgrad=True, records=records)
          for dtype, records in product([bf16, fp16], [False, True])),
        Variant(weights=bf16, output=bf16, world_size=4, is_dgrad=True, is_split=True),
        *(Variant(weights=bf16, output=bf16, world_size=4, saves_gate_up=True, activation=Activation(name))
          for name in ("geglu", "reglu")),
        *(Variant(weights=weights, output=bf16, world_size=4, saves_gate_up=saves, activation=gpt_oss, bias=bf16)
          for weights, saves in [(bf16, False), (bf16, True), (fp8, False)]),
    ]  # fmt: skip
    return [CudaCase(variant.source(64), "4 ranks", _spilled_bytes(variant)) for variant in variants]


def _spilled_bytes(variant: Variant) -> int:
    """Known spills, once per tile of a layer that is looked at and not timed.

    In float16 the assembler splits rounded gates and ups into halves, for the activation, before they are stored as
    words, and has both at once: 72 registers more, where bfloat16 needs a shift.
    """
    if not variant.records or variant.is_dgrad or variant.weights == torch.bfloat16:
        return 0
    return 16 if variant.weights.itemsize == 1 else 184
