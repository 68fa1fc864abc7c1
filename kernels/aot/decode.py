"""The configurations of the decode kernels that ship, for the compile-ahead tool."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from ..decode.blocks import LOAD_BYTES, DecodeConfig, lane_of, select
from ..decode.dequantize import DTYPES, STORED, dequantize_slots
from ..decode.scales import BLOCK, MX, in_number
from ..decode.step import Batch, ExpertWeights, Gather, ReceiveBuffer, Step, StepConstants, StepTensors, Words
from ..decode.warp_decode import decode
from ..experts.mailbox import Mailbox
from ..experts.prefetch import plan, travel
from ..experts.tables import CacheTables, HostExperts
from ..experts.waves import split_waves
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import as_triton_dtype
from ..runtime.case import WIDE_ACCESS, KernelCase, meta, recorded

WGMMA_ROWS, WGMMA_TOKENS = 64, 16  # smaller products take the older matrix instruction
# name: E, K, D, F
SHAPES = {
    "qwen3": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "deepseek": (256, 8, 7168, 2048),
    "deepseek and shared": (257, 9, 7168, 2048),  # with its shared expert as one that every token names
    "gpt_oss": (128, 4, 2880, 2880),
}
GPT_OSS: dict[str, Any] = dict(activation=Activation("clamped_swiglu"), biased=True)
RANKS = 4
BIAS_LOADS = 16  # most loads of a bias of 16 bits in a kernel, each once a block
DEADLINE_NS = 30 * 10**9
HALF, FLOAT = torch.float16, torch.float32
# name: type of the elements, and neighbours that share a scale
QUANTISED = {
    "mxfp8": (torch.float8_e4m3fn, MX.value),
    "fp8": (torch.float8_e4m3fn, BLOCK.value),
    "mxfp4": (torch.int32, MX.value),  # words of codes
}
FLAGS = "gathered", "in_node", "cache", "prefetched", "waves", "hosted", "biased", "interleaved"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One decode step as the kernels see it."""

    shape: str  # name in ``SHAPES``
    num_tokens: int  # T
    dtype: torch.dtype = torch.bfloat16  # of the tokens, and of the weights unless they are quantised
    quantised: str = ""  # name in ``QUANTISED``
    ranks: int = 1  # W
    gathered: bool = False  # whether the tokens are those of all ranks, ``num_tokens / ranks`` of each
    in_node: bool = False  # whether the output is float32, for other nodes to add
    cache: bool = False  # whether GPU memory holds a quarter of the experts; else all are there
    prefetched: bool = False  # whether experts may have travelled to the cache before
    waves: bool = False  # whether the step takes some
    hosted: bool = False  # whether the host's cores compute some of those that are missing
    activation: Activation = SWIGLU  # of the experts
    biased: bool = False  # whether they have biases
    interleaved: bool = False  # whether gate and up rows of w1 are in turn
    only: str = ""  # part of the name of the kernels that are not those of another setting

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [as_triton_dtype(self.dtype), self.quantised, self.shape, f"{self.num_tokens} tokens", self.config.form]
        words += [f"{self.ranks} ranks" * (self.ranks > 1), self.activation.name * (self.activation != SWIGLU)]
        words += [flag.replace("_", " ") for flag in FLAGS if getattr(self, flag)]
        words += ["not dependent" * (not self.config.dependent)]
        return ", ".join(filter(None, words))

    @property
    def stored(self) -> tuple[torch.dtype, int]:
        """The type of w1 and w2, and how many neighbours share a scale."""
        return QUANTISED.get(self.quantised, (self.dtype, 0))

    @property
    def config(self) -> DecodeConfig:
        """The blocks a step takes by default."""
        _, top_k, hidden_size, ffn_size = SHAPES[self.shape]
        return select(
            self.dtype, self.num_tokens, top_k, hidden_size, ffn_size,
            shared_scale=self.stored[1], four_bits=self.quantised == "mxfp4",
        )  # fmt: skip

    @property
    def step(self) -> Step:
        """The arguments of the step."""
        num_experts, _, hidden_size, ffn_size = SHAPES[self.shape]
        w1, w2 = self.experts(2 * ffn_size, hidden_size), self.experts(hidden_size, ffn_size)
        batch = self.batch(self.num_tokens)
        rows = batch.ids.numel()
        out = self.batch(self.num_tokens // self.ranks).tokens if self.gathered else batch.tokens
        tensors = StepTensors(
            *batch, slots=meta(num_experts), hidden=meta(rows, ffn_size, dtype=self.dtype),
            partials=meta(rows, hidden_size, dtype=FLOAT), tickets=meta(hidden_size),
            out=out.float() if self.in_node else out,
        )  # fmt: skip
        return Step(
            tensors=tensors, w1=w1, w2=w2, shared_scale=self.stored[1], activation=self.activation,
            interleaved=self.interleaved, host=self.host(w1, w2) if self.cache else None,
        )  # fmt: skip

    @property
    def buffer(self) -> ReceiveBuffer | None:
        """The memory where ranks meet."""
        if self.ranks == 1:
            return None
        addresses, fault = meta(self.ranks, dtype=torch.int64), meta(8, dtype=torch.int64)
        own = self.batch(self.num_tokens // self.ranks)
        return ReceiveBuffer(
            words=Words(addresses, meta(1), fault), rank=0, max_tokens=len(own.ids), timeout_ns=DEADLINE_NS,
            gather=Gather(tokens=own, addresses=addresses, stride=2 * own.tokens.shape[1]) if self.gathered else None,
        )  # fmt: skip

    def batch(self, num_tokens: int) -> Batch:
        _, top_k, hidden_size, _ = SHAPES[self.shape]
        weights = meta(num_tokens, top_k, dtype=FLOAT)
        return Batch(meta(num_tokens, hidden_size, dtype=self.dtype), meta(num_tokens, top_k), weights)

    def experts(self, rows: int, columns: int) -> ExpertWeights:
        """One of the two matrices of all experts."""
        num_experts, (dtype, shared_scale) = SHAPES[self.shape][0], self.stored
        scales = {
            0: None,
            MX.value: meta(num_experts, rows, columns // MX.value, dtype=torch.uint8),
            BLOCK.value: meta(num_experts, *(triton.cdiv(size, BLOCK.value) for size in (rows, columns)), dtype=FLOAT),
        }
        elements = meta(num_experts, rows, columns // in_number(lane_of(dtype)), dtype=dtype)
        biases = meta(num_experts, rows, dtype=self.dtype) if self.biased else None
        return ExpertWeights(elements, scales[shared_scale], biases)

    def host(self, w1: ExpertWeights, w2: ExpertWeights) -> HostExperts:
        """The experts beyond GPU memory; as many slots as a step needs, and fewer for waves."""
        num_experts, top_k, hidden_size, _ = SHAPES[self.shape]
        quarter, needed, rows = num_experts // 4, self.num_tokens * top_k, meta(16, hidden_size, dtype=FLOAT)
        num_slots = min(quarter, needed // 2) if self.waves else max(quarter, needed)
        mail = Mailbox(
            share=meta(17, num_experts + 1), sequence=meta(1), words=meta(1024), tokens=rows.to(self.dtype),
            weights=meta(16 * top_k, dtype=FLOAT), answer=rows, sums=rows, fault=meta(8, dtype=torch.int64),
            timeout_ns=DEADLINE_NS,
        )  # fmt: skip
        return HostExperts(
            w1=w1.elements, w2=w2.elements, w1_scales=w1.scales, w2_scales=w2.scales,
            tables=CacheTables.create(num_experts, num_slots, rows.device), prefetched=self.prefetched,
            mail=mail if self.hosted else None,
        )  # fmt: skip


def aot_cases() -> list[KernelCase]:
    """The blocks that steps of 1 to 64 tokens take; alone and over ranks; all types and kinds of weights."""
    return [
        _judged(setting, case)
        for setting in (*_weights(), *_ranks(), *_caches(), *_activations())
        for case in recorded(setting.label, (), decode, setting.step, setting.config, setting.buffer)
        if setting.only in case.kernel
    ] + [*_planned(), *_dequantised()]


def _planned() -> list[KernelCase]:
    """The launches around a step: experts that travel before it, and waves of verifying passes."""
    cases = []
    for stored in ("", "mxfp4"):
        setting = Setting(shape="qwen3", num_tokens=1, quantised=stored, cache=True, prefetched=True)
        host, name = setting.step.host, stored or "bf16"
        cases += recorded(f"{name}, travel", WIDE_ACCESS, travel, host.parts, host)
        for ids in (meta(1, 8), meta(16, 8)):
            cases += recorded(f"{name}, plan for {len(ids)} tokens", (), plan, ids, host.parts, host)
    for num_tokens, num_waves in ((5, 4), (16, 11)):
        name = f"{num_tokens} tokens, K=8, {num_waves} waves"
        cases += recorded(name, (), split_waves, meta(num_tokens, 8), host, num_waves)
    return cases


def _dequantised() -> list[KernelCase]:
    """Every kind of weights in every type."""
    cases = []
    for (of_elements, of_scales), (shared_scale, packed) in STORED.items():
        is_mx = shared_scale == MX.value
        stored = "MXFP4" if packed else "MXFP8" if is_mx else "FP8"
        elements = meta(32, 1536, 1024 if packed else 2048, dtype=of_elements)
        scales = meta(*((32, 1536, 64) if is_mx else (32, 12, 16)), dtype=of_scales)
        for dtype in DTYPES:
            name = f"{stored} to {as_triton_dtype(dtype)}"
            found = recorded(name, WIDE_ACCESS, dequantize_slots, elements, scales, meta(8), dtype)
            cases += [replace(case, narrow_loads=int(is_mx)) for case in found]
    return cases


def _steps(shape: str, *num_tokens: int, **options: Any) -> list[Setting]:
    return [Setting(shape=shape, num_tokens=count, **options) for count in num_tokens]


def _weights() -> Iterator[Setting]:
    """Types of tokens, and kinds of weights."""
    for shape in ("qwen3", "mixtral"):
        yield from _steps(shape, 1, 2, 8, 16, 32, 64)
    yield from [*_steps("qwen3", 1, 8, dtype=FLOAT), *_steps("qwen3", 8, dtype=HALF)]
    yield from _steps("deepseek and shared", 1, 2, 8)
    for stored in QUANTISED:
        for shape in ("qwen3", "deepseek"):
            yield from _steps(shape, 1, 2, 8, 16, 32, 64, quantised=stored)
        yield from _steps("qwen3", 1, 8, *[16] * (stored == "fp8"), 64, quantised=stored, dtype=HALF)
        yield from _steps("qwen3", 1, 8, quantised=stored, dtype=FLOAT)


def _ranks() -> Iterator[Setting]:
    for shape in ("qwen3", "mixtral"):
        yield from _steps(shape, 1, 8, ranks=RANKS)
    for stored in QUANTISED:
        yield from _steps("qwen3", 1, 8, 16, quantised=stored, ranks=RANKS)
    yield from _steps("qwen3", 4, 16, 64, ranks=RANKS, gathered=True)
    yield from _steps("qwen3", 2, ranks=2, gathered=True, quantised="mxfp8")
    yield from _steps("qwen3", 8, ranks=RANKS, gathered=True, quantised="mxfp8")
    yield from _steps("mixtral", RANKS, ranks=RANKS, gathered=True, only="gather")
    for ranks in (1, RANKS):
        yield from _steps("qwen3", 1, 8, ranks=ranks, in_node=True, only="down")


def _caches() -> Iterator[Setting]:
    """Experts beyond GPU memory: weights, the host's cores, prefetch, waves."""
    for host in (dict(cache=True), dict(cache=True, hosted=True)):
        yield from [*_steps("qwen3", 1, 2, 4, **host), *_steps("deepseek", 1, **host)]
    yield from _steps("mixtral", 1, cache=True)
    for stored in QUANTISED:
        yield from _steps("qwen3", 1, 4, quantised=stored, cache=True)
    yield from _steps("qwen3", 4, ranks=RANKS, **host)
    yield from [*_steps("qwen3", 1, dtype=FLOAT, **host), *_steps("qwen3", 1, quantised="fp8", **host)]
    yield from _steps("qwen3", 4, quantised="mxfp4", **host)
    prefetched: dict[str, Any] = dict(cache=True, prefetched=True)
    yield from [*_steps("qwen3", 1, 8, **prefetched), *_steps("qwen3", 1, quantised="mxfp4", **prefetched)]
    for count, stored, ranks in ((2, "", 1), (8, "", 1), (16, "", 1), (8, "mxfp4", 1), (8, "", RANKS)):
        yield from _steps("qwen3", count, cache=True, waves=True, quantised=stored, ranks=ranks, only="down")


def _activations() -> Iterator[Setting]:
    for stored in ("", "mxfp4"):
        yield from _steps("gpt_oss", 1, 2, 16, quantised=stored, **GPT_OSS)
        yield from _steps("gpt_oss", 1, 16, quantised=stored, interleaved=True, only="gate_up", **GPT_OSS)
    yield from _steps("gpt_oss", 1, 4, quantised="mxfp4", cache=True, **GPT_OSS)
    yield from _steps("gpt_oss", 1, ranks=RANKS, interleaved=True, only="gate_up", **GPT_OSS)
    for name in ("geglu", "reglu"):
        yield from _steps("qwen3", 8, activation=Activation(name))


def _judged(setting: Setting, case: KernelCase) -> KernelCase:
    """Wide stores where a thread has 16 bytes of the tile to store; the vector form stores a value per row.

    MX in the vector form loads a byte of scales for each row that a lane reads in a step, and for those that it loads
    ahead. In the matrix form one load is narrow where a step has less than four scales for each thread.
    """
    if case.kernel == "gather_kernel":
        return replace(case, expects=frozenset(WIDE_ACCESS))
    is_down, config, expects = case.kernel == "down_kernel", setting.config, {"wide_loads"}
    shape = config.down if is_down else config.gate_up
    rows = shape.rows * (2 if not is_down else SHAPES[setting.shape][1] if config.fold else 1)
    constants: StepConstants = case.source.constants[case.source.fn.arg_names.index("STEP"),]
    if not constants.vector:
        item_bytes = 4 if is_down else setting.dtype.itemsize
        if shape.rows * constants.tile * item_bytes >= 32 * shape.num_warps * LOAD_BYTES:
            expects |= {"wide_stores"}
        if constants.precision != "ieee" and rows >= WGMMA_ROWS and constants.tile >= WGMMA_TOKENS:
            expects |= {"wgmma"}
    scale_bytes = 0
    if setting.quantised.startswith("mx"):
        lanes_of_row = min(32, shape.depth // constants.lane)
        few_scales = rows * shape.depth // MX.value < 4 * 32 * shape.num_warps
        steps = 1 + constants.ahead
        scale_bytes = steps * rows * lanes_of_row // 32 if constants.vector else int(few_scales)
    return replace(
        case,
        name=case.name if constants.adds_up else f"{case.name}, not the last",
        expects=frozenset(expects),
        narrow_loads=scale_bytes + (BIAS_LOADS if setting.biased else 0),
        # A thread has 128 registers; without biases 24 bytes spill.
        spilled_bytes=48 if setting.biased and setting.quantised == "mxfp4" and setting.num_tokens == 16 else 0,
    )
