"""The configurations of the decode kernels that ship, for the compile-ahead tool."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from ..decode.blocks import LOAD_BYTES, BlockShape, DecodeConfig, lane_of, select
from ..decode.down import down_kernel
from ..decode.gate_up import gate_up_kernel
from ..decode.gather import COLS, NUM_WARPS, gather_kernel
from ..decode.scales import BLOCK, MX, in_number, part_of
from ..decode.step import Batch, ExpertWeights, StepConstants, StepTensors, Words
from ..decode.warp_decode import most_registers, of_down, of_gate_up, step_constants
from ..experts.mailbox import mail_pointers
from ..experts.policy import Policy
from ..experts.tables import CACHE_POINTERS, SCALE_POINTERS, CacheConstants, cache_constants, pieces_of
from ..runtime.activation import SWIGLU, Activation
from ..runtime.arguments import as_triton_dtype
from ..runtime.case import KernelCase

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
    dependent: bool = True  # whether down starts while gate/up drains
    # whose slot is given away where GPU memory holds a quarter of the experts; ``None``: all are there
    cache: Policy | None = None
    prefetched: bool = False  # whether experts may have travelled to the cache before
    wave: str = ""  # ``first`` or ``last`` of a step that takes some; empty: one is all
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
        words += [] if self.config.dependent else ["not dependent"]
        words += [f"cache {self.cache}"] if self.cache else []
        words += ["prefetched"] if self.prefetched else []
        words += [f"{self.wave} wave"] if self.wave else []
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

    def constants(self) -> StepConstants:
        """The constants that both kernels share."""
        num_experts, top_k, _, _ = SHAPES[self.shape]
        found = step_constants(
            self.config, self.num_tokens, top_k, num_experts, self.dtype, self.weight_dtype,
            shared_scale=SCALES[self.quantised], gathered=self.gathered, dependent=self.config.dependent,
        )  # fmt: skip
        return found._replace(cache=self.cache_constants(self.config.gate_up.num_warps) if self.cache else None)

    def cache_constants(self, num_warps: int) -> CacheConstants:
        """The cache's constants in a kernel whose blocks have so many warps."""
        num_experts, top_k, hidden_size, ffn_size = SHAPES[self.shape]
        number = in_number(lane_of(self.weight_dtype))
        num_bytes = [rows * ffn_size * hidden_size * self.weight_dtype.itemsize // number for rows in (2, 1)]
        if self.quantised:
            shared = SCALES[self.quantised]
            per_scale, scale = (shared, 1) if shared == MX.value else (shared**2, 4)
            num_bytes += [rows * ffn_size * hidden_size // per_scale * scale for rows in (2, 1)]
        groups = min(num_experts, self.num_tokens * top_k)
        sizes, ahead = (num_experts, num_experts // 4), pieces_of(num_bytes) if self.prefetched else 0
        found = cache_constants(*sizes, num_bytes, groups, num_warps, self.cache or "lru", ahead)
        mail = dict(mail=len(CACHE_POINTERS) + len(num_bytes[2:]) * 2, mail_tokens=16, timeout_ns=30 * 10**9)
        found = found._replace(**mail) if self.hosted else found
        return found.of_wave({"first": 0, "last": 1}[self.wave], 2) if self.wave else found

    @property
    def element(self) -> str:
        """Triton's name of the weights' type."""
        names = {torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32"}
        return names.get(self.weight_dtype) or as_triton_dtype(self.dtype)

    def descriptor(self, rows: list[int], depth: int) -> str | None:
        """Triton's type of the blocks of so many rows in which the matrix form reads w1 or w2."""
        block = [*rows, part_of(depth, SCALES[self.quantised]) // in_number(lane_of(self.weight_dtype))]
        return None if self.config.form == "vector" else f"tensordesc<{self.element}{block}>"

    def signature(self) -> dict[str, Any]:
        """Types of what both kernels take."""
        token = f"*{as_triton_dtype(self.dtype)}"
        scales = ("*u8" if self.quantised.startswith("mx") else "*fp32") if self.quantised else None
        weights = ExpertWeights(elements=f"*{self.element}", scales=scales, biases=token if self.biased else None)
        mail = mail_pointers(as_triton_dtype(self.dtype)) if self.hosted else ()
        cache = CACHE_POINTERS + (SCALE_POINTERS if self.quantised else ()) + mail
        tensors = StepTensors(
            tokens=token, ids="*i32", routing_weights="*fp32", slots="*i32", hidden=token, partials="*fp32",
            tickets="*i32", out=token, all_ids="*i32" if self.wave else None,
        )  # fmt: skip
        return dict(step=tensors, w1=weights, w2=weights, cache=cache if self.cache else None)


def aot_cases() -> list[KernelCase]:
    """The blocks that steps of 1 to 64 tokens take; alone and over ranks; all types and kinds of weights."""
    settings = [*_weights(), *_ranks(), *_caches(), *_activations()]
    cases = [case for setting in settings for case in (_gate_up(setting), _down(setting))]
    waves = [
        setting
        for count, stored in ((2, ""), (8, ""), (16, ""), (8, "mxfp4"))
        for wave in ("first", "last")
        for setting in _steps("qwen3", count, cache="lru", wave=wave, quantised=stored)
    ]
    waves += _steps("qwen3", 8, cache="lru", wave="last", ranks=RANKS)  # others add up nothing
    in_turn = [setting for stored in ("", "mxfp4") for setting in _steps("gpt_oss", 1, 16, quantised=stored, **GPT_OSS)]
    in_turn += _steps("gpt_oss", 1, ranks=RANKS, **GPT_OSS)
    cases += [_gate_up(replace(setting, interleaved=True)) for setting in in_turn]
    return cases + list(map(_down, waves)) + [_gather(shape) for shape in ("qwen3", "mixtral")]


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
    """Experts beyond GPU memory: policies, weights, the host's cores, prefetch."""
    found = [*_steps("qwen3", 1, 2, 4, cache="lru"), *_steps("mixtral", 1, cache="lru")]
    found += [*_steps("deepseek", 1, cache="lru"), *_steps("qwen3", 1, cache="lfu")]
    for stored in QUANTISED:
        found += _steps("qwen3", 1, 4, quantised=stored, cache="lru")
    hosted: dict[str, Any] = dict(cache="lru", hosted=True)
    found += [*_steps("qwen3", 1, 2, 4, **hosted), *_steps("deepseek", 1, **hosted)]
    found += [*_steps("qwen3", 1, cache="lfu", hosted=True), *_steps("qwen3", 4, ranks=RANKS, **hosted)]
    found += [*_steps("qwen3", 1, dtype=torch.float32, **hosted), *_steps("qwen3", 1, quantised="fp8", **hosted)]
    found += _steps("qwen3", 4, quantised="mxfp4", **hosted)
    prefetched: dict[str, Any] = dict(cache="lru", prefetched=True)
    return [*found, *_steps("qwen3", 1, 8, **prefetched), *_steps("qwen3", 1, quantised="mxfp4", **prefetched)]


def _activations() -> list[Setting]:
    found = [*_steps("gpt_oss", 1, 2, 16, **GPT_OSS), *_steps("gpt_oss", 1, 2, 16, quantised="mxfp4", **GPT_OSS)]
    found += _steps("gpt_oss", 1, 4, quantised="mxfp4", cache="lru", **GPT_OSS)
    return found + [each for name in ("geglu", "reglu") for each in _steps("qwen3", 8, activation=Activation(name))]


def _gate_up(setting: Setting) -> KernelCase:
    shape, hidden_size = setting.config.gate_up, SHAPES[setting.shape][2]
    constants = of_gate_up(setting.constants(), shape, hidden_size, setting.activation)
    constants = constants._replace(interleaved=setting.interleaved)
    of_kernel = dict(w1_desc=setting.descriptor([1, 2, shape.rows], shape.depth))
    of_kernel |= dict(epoch_ptr="*i32" if setting.ranks > 1 else None)
    return _case(setting, gate_up_kernel, shape, of_kernel, constants, rows=2 * shape.rows)


def _down(setting: Setting) -> KernelCase:
    shape, (_, top_k, _, ffn_size) = setting.config.down, SHAPES[setting.shape]
    constants = of_down(setting.constants(), setting.config, ffn_size, setting.ranks)
    constants = constants._replace(adds_up=setting.wave != "first")
    words = Words(addresses="*i64", epoch="*i32", fault="*i64") if setting.ranks > 1 else None
    of_kernel = dict(w2_desc=setting.descriptor([1, shape.rows], shape.depth), words=words, timeout_ns="i64")
    rows = shape.rows * (top_k if setting.config.fold else 1)
    return _case(setting, down_kernel, shape, of_kernel, constants, rows=rows)


def _gather(shape: str) -> KernelCase:
    """Tokens of all types: they travel as pieces of 32 bits."""
    tokens = Batch(tokens="*i32", ids="*i32", routing_weights="*fp32")
    constants = dict(W=RANKS, K=SHAPES[shape][1], COLS=COLS, DEPENDENT=True, INTERPRET=False)
    kinds = dict(own=tokens, batch=tokens, words=Words(addresses="*i64", epoch="*i32", fault="*i64"), timeout_ns="i64")
    return KernelCase.of(
        f"{shape}, {RANKS} ranks", gather_kernel, constants, kinds, num_warps=NUM_WARPS,
        expects=frozenset({"wide_loads", "wide_stores"}),
    )  # fmt: skip


def _case(
    setting: Setting,
    kernel: triton.JITFunction,
    shape: BlockShape,
    of_kernel: dict[str, Any],
    constants: StepConstants,
    *,
    rows: int,
) -> KernelCase:
    """Wide stores where a thread has 16 bytes of the tile to store; the vector form stores a value per row.

    MX in the vector form loads a byte of scales for each of the ``rows`` that a lane reads in a step, those loaded
    ahead among them; in the matrix
    form one load is narrow where a step has less than four scales for each thread.
    """
    expects = {"wide_loads"}
    if not constants.vector:
        item_bytes = 4 if kernel is down_kernel else setting.dtype.itemsize
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
    kinds = setting.signature() | of_kernel
    absent = {name: None for name in kernel.arg_names if name in kinds and kinds[name] is None}
    return KernelCase.of(
        setting.label,
        kernel,
        {"STEP": constants, **absent},
        kinds,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        max_registers=most_registers(shape, setting.ranks),
        expects=frozenset(expects),
        narrow_loads=scale_bytes + (BIAS_LOADS if setting.biased else 0),
        # A thread has 128 registers; without biases 24 bytes spill.
        spilled_bytes=48 if setting.biased and setting.quantised == "mxfp4" and setting.num_tokens == 16 else 0,
    )
