"""The configurations of the decode kernels that ship, for the compile-ahead tool."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from ..decode.blocks import LOAD_BYTES, DecodeConfig, lane_of, select
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
QUANTISED = "mxfp8", "fp8", "mxfp4"
KERNELS = "gate_up_kernel", "down_kernel"
DEADLINE_NS = 30 * 10**9
SCALES = {"": 0, "mxfp8": MX.value, "fp8": BLOCK.value, "mxfp4": MX.value}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One decode step as the kernels see it."""

    shape: str  # name in ``SHAPES``
    num_tokens: int  # T
    dtype: torch.dtype = torch.bfloat16  # of the tokens, and of the weights unless they are quantised
    quantised: str = ""  # name in ``SCALES``
    ranks: int = 1  # W
    gathered: bool = False  # whether the tokens are those of all ranks, ``num_tokens / ranks`` of each
    in_node: bool = False  # whether the output is float32, for other nodes to add
    dependent: bool = True  # whether down starts while gate/up drains
    cache: bool = False  # whether GPU memory holds a quarter of the experts; else all are there
    prefetched: bool = False  # whether experts may have travelled to the cache before
    waves: bool = False  # whether the step takes some
    hosted: bool = False  # whether the host's cores compute some of those that are missing
    activation: Activation = SWIGLU  # of the experts
    biased: bool = False  # whether they have biases
    interleaved: bool = False  # whether gate and up rows of w1 are in turn

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [as_triton_dtype(self.dtype), self.quantised, self.shape, f"{self.num_tokens} tokens", self.config.form]
        words += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        words += ["gathered"] if self.gathered else []
        words += ["in a node"] if self.in_node else []
        words += [] if self.config.dependent else ["not dependent"]
        words += ["cache"] if self.cache else []
        words += ["prefetched"] if self.prefetched else []
        words += ["host cores"] if self.hosted else []
        words += [self.activation.name] if self.activation != SWIGLU else []
        words += ["biases"] if self.biased else []
        words += ["in turn"] if self.interleaved else []
        return ", ".join(filter(None, words))

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type of w1 and w2; words of codes for MXFP4."""
        if self.quantised == "mxfp4":
            return torch.int32
        return torch.float8_e4m3fn if self.quantised else self.dtype

    @property
    def config(self) -> DecodeConfig:
        """The blocks a step takes by default."""
        _, top_k, hidden_size, ffn_size = SHAPES[self.shape]
        return select(
            self.dtype, self.num_tokens, top_k, hidden_size, ffn_size,
            shared_scale=SCALES[self.quantised], four_bits=self.quantised == "mxfp4", dependent=self.dependent,
        )  # fmt: skip

    @property
    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """w1 and w2 of all experts."""
        num_experts, _, hidden_size, ffn_size = SHAPES[self.shape]
        found = []
        for rows, columns in ((2 * ffn_size, hidden_size), (hidden_size, ffn_size)):
            elements = meta(
                num_experts, rows, columns // in_number(lane_of(self.weight_dtype)), dtype=self.weight_dtype
            )
            scales = meta(num_experts, rows, columns // MX.value, dtype=torch.uint8) if self.quantised else None
            if self.quantised == "fp8":
                blocks = (triton.cdiv(size, BLOCK.value) for size in (rows, columns))
                scales = meta(num_experts, *blocks, dtype=torch.float32)
            biases = meta(num_experts, rows, dtype=self.dtype) if self.biased else None
            found.append(ExpertWeights(elements, scales, biases))
        return found[0], found[1]

    @property
    def host(self) -> HostExperts | None:
        """The experts beyond GPU memory; as many slots as a step needs, and fewer for waves."""
        if not self.cache:
            return None
        num_experts, top_k, hidden_size, _ = SHAPES[self.shape]
        quarter, needed, (w1, w2), mail = num_experts // 4, self.num_tokens * top_k, self.weights, None
        tables = CacheTables.create(
            num_experts, min(quarter, needed // 2) if self.waves else max(quarter, needed), w1.elements.device
        )
        if self.hosted:
            rows = meta(16, hidden_size, dtype=torch.float32)
            mail = Mailbox(
                share=meta(17, num_experts + 1), sequence=meta(1), words=meta(1024), tokens=rows.to(self.dtype),
                weights=meta(16 * top_k, dtype=torch.float32), answer=rows, sums=rows,
                fault=meta(8, dtype=torch.int64), timeout_ns=DEADLINE_NS,
            )  # fmt: skip
        return HostExperts(
            w1=w1.elements, w2=w2.elements, w1_scales=w1.scales, w2_scales=w2.scales, tables=tables,
            prefetched=self.prefetched, mail=mail,
        )  # fmt: skip

    @property
    def step(self) -> Step:
        """The arguments of the step."""
        num_experts, _, hidden_size, ffn_size = SHAPES[self.shape]
        batch, w1, w2, host = self.batch(self.num_tokens), *self.weights, self.host
        rows = batch.ids.numel()
        out = self.batch(self.num_tokens // self.ranks).tokens if self.gathered else batch.tokens
        tensors = StepTensors(
            *batch, slots=meta(num_experts), hidden=meta(rows, ffn_size, dtype=self.dtype),
            partials=meta(rows, hidden_size, dtype=torch.float32), tickets=meta(hidden_size),
            out=out.float() if self.in_node else out,
        )  # fmt: skip
        return Step(
            tensors=tensors, w1=w1, w2=w2, shared_scale=SCALES[self.quantised], activation=self.activation,
            interleaved=self.interleaved, host=host,
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
        weights = meta(num_tokens, top_k, dtype=torch.float32)
        return Batch(meta(num_tokens, hidden_size, dtype=self.dtype), meta(num_tokens, top_k), weights)


def aot_cases() -> list[KernelCase]:
    """The blocks that steps of 1 to 64 tokens take; alone and over ranks; all types and kinds of weights."""
    cases = [each for setting in (*_weights(), *_ranks(), *_caches(), *_activations()) for each in _cases(setting)]
    in_turn = [setting for stored in ("", "mxfp4") for setting in _steps("gpt_oss", 1, 16, quantised=stored, **GPT_OSS)]
    in_turn += _steps("gpt_oss", 1, ranks=RANKS, **GPT_OSS)
    cases += [case for each in in_turn for case in _cases(replace(each, interleaved=True), KERNELS[:1])]
    in_node = [each for ranks in (1, RANKS) for each in _steps("qwen3", 1, 8, ranks=ranks, in_node=True)]
    cases += [case for each in in_node for case in _cases(each, KERNELS[1:])]
    for count, stored, ranks in ((2, "", 1), (8, "", 1), (16, "", 1), (8, "mxfp4", 1), (8, "", RANKS)):
        [setting] = _steps("qwen3", count, cache=True, waves=True, quantised=stored, ranks=ranks)
        downs = _cases(setting, KERNELS[1:])
        cases += [replace(downs[-1], name=f"{setting.label}, last wave")]
        cases += [replace(downs[0], name=f"{setting.label}, first wave")] if ranks == 1 else []  # adds up nothing
    for shape in ("qwen3", "mixtral"):
        [setting] = _steps(shape, RANKS, ranks=RANKS, gathered=True)
        cases += [replace(case, expects=frozenset(WIDE_ACCESS)) for case in _cases(setting, ["gather_kernel"])]
    return cases + _planned()


def _planned() -> list[KernelCase]:
    """The launches around a step: experts that travel before it, and waves of verifying passes."""
    cases = []
    for stored in ("", "mxfp4"):
        setting = Setting(shape="qwen3", num_tokens=1, quantised=stored, cache=True, prefetched=True)
        host, name = setting.host, stored or "bf16"
        cases += recorded(f"{name}, travel", WIDE_ACCESS, travel, host.parts, host)
        for ids in (meta(1, 8), meta(16, 8)):
            cases += recorded(f"{name}, plan for {len(ids)} tokens", (), plan, ids, host.parts, host)
    for num_tokens, num_waves in ((5, 4), (16, 11)):
        name = f"{num_tokens} tokens, K=8, {num_waves} waves"
        cases += recorded(name, (), split_waves, meta(num_tokens, 8), host, num_waves)
    return cases


def _steps(shape: str, *num_tokens: int, **options: Any) -> list[Setting]:
    return [Setting(shape=shape, num_tokens=count, **options) for count in num_tokens]


def _weights() -> list[Setting]:
    """Types of tokens, and kinds of weights."""
    half, wide = torch.float16, torch.float32
    found = [*_steps("qwen3", 1, 2, 8, 16, 32, 64), *_steps("mixtral", 1, 2, 8, 16, 32, 64)]
    found += [*_steps("qwen3", 1, 8, dtype=wide), *_steps("qwen3", 8, dtype=half), *_steps("qwen3", 1, dependent=False)]
    for stored in QUANTISED:
        for shape in ("qwen3", "deepseek"):
            found += _steps(shape, 1, 2, 8, 16, 32, 64, quantised=stored)
        found += _steps("qwen3", 1, 8, 64, quantised=stored, dtype=half)
        found += _steps("qwen3", 1, 8, quantised=stored, dtype=wide)
    return [*found, *_steps("qwen3", 16, quantised="fp8", dtype=half), *_steps("deepseek and shared", 1, 2, 8)]


def _ranks() -> list[Setting]:
    found = [*_steps("qwen3", 1, 8, ranks=RANKS), *_steps("mixtral", 1, 8, ranks=RANKS)]
    for stored in QUANTISED:
        found += _steps("qwen3", 1, 8, 16, quantised=stored, ranks=RANKS)
    found += _steps("qwen3", 4, 16, 64, ranks=RANKS, gathered=True)
    found += _steps("qwen3", 2, ranks=2, gathered=True, quantised="mxfp8")
    return found + _steps("qwen3", 8, ranks=RANKS, gathered=True, quantised="mxfp8")


def _caches() -> list[Setting]:
    """Experts beyond GPU memory: weights, the host's cores, prefetch."""
    found = [*_steps("qwen3", 1, 2, 4, cache=True), *_steps("mixtral", 1, cache=True)]
    found += _steps("deepseek", 1, cache=True)
    for stored in QUANTISED:
        found += _steps("qwen3", 1, 4, quantised=stored, cache=True)
    hosted: dict[str, Any] = dict(cache=True, hosted=True)
    found += [*_steps("qwen3", 1, 2, 4, **hosted), *_steps("deepseek", 1, **hosted)]
    found += _steps("qwen3", 4, ranks=RANKS, **hosted)
    found += [*_steps("qwen3", 1, dtype=torch.float32, **hosted), *_steps("qwen3", 1, quantised="fp8", **hosted)]
    found += _steps("qwen3", 4, quantised="mxfp4", **hosted)
    prefetched: dict[str, Any] = dict(cache=True, prefetched=True)
    return [*found, *_steps("qwen3", 1, 8, **prefetched), *_steps("qwen3", 1, quantised="mxfp4", **prefetched)]


def _activations() -> list[Setting]:
    found = [*_steps("gpt_oss", 1, 2, 16, **GPT_OSS), *_steps("gpt_oss", 1, 2, 16, quantised="mxfp4", **GPT_OSS)]
    found += _steps("gpt_oss", 1, 4, quantised="mxfp4", cache=True, **GPT_OSS)
    return found + [each for name in ("geglu", "reglu") for each in _steps("qwen3", 8, activation=Activation(name))]


def _cases(setting: Setting, kernels: Sequence[str] = KERNELS) -> list[KernelCase]:
    found = recorded(setting.label, (), decode, setting.step, setting.config, setting.buffer)
    return [_judged(setting, case) if case.kernel in KERNELS else case for case in found if case.kernel in kernels]


def _judged(setting: Setting, case: KernelCase) -> KernelCase:
    """Wide stores where a thread has 16 bytes of the tile to store; the vector form stores a value per row.

    MX in the vector form loads a byte of scales for each row that a lane reads in a step, and for those that it loads
    ahead. In the matrix form one load is narrow where a step has less than four scales for each thread.
    """
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
        expects=frozenset(expects),
        narrow_loads=scale_bytes + (BIAS_LOADS if setting.biased else 0),
        # A thread has 128 registers; without biases 24 bytes spill.
        spilled_bytes=48 if setting.biased and setting.quantised == "mxfp4" and setting.num_tokens == 16 else 0,
    )
