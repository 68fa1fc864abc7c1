"""The configurations of the decode kernels that ship, for the compile-ahead tool."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..decode.blocks import LOAD_BYTES, DecodeConfig, lane_of, select
from ..decode.down import down_kernel
from ..decode.gate_up import gate_up_kernel
from ..decode.gather import COLS, NUM_WARPS, gather_kernel
from ..decode.scales import BLOCK, MX, in_number, part_of
from ..decode.warp_decode import LEAST_TOKENS, WORD_COLS, most_registers
from ..experts.mailbox import mail_pointers
from ..experts.tables import CACHE_POINTERS, SCALE_POINTERS, CacheConstants, Policy, cache_constants, pieces_of
from ..gemm.group_gemm import dot_precision
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
RANKS = 4
BIAS_LOADS = 16  # most loads of a bias of 16 bits in a kernel, each once a block
SCALES = {"": 0, "mxfp8": MX.value, "fp8": BLOCK.value, "mxfp4": MX.value}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One decode step as the kernels see it.

    Args:
        shape: Name in ``SHAPES``.
        num_tokens: T.
        dtype: Of the tokens, and of the weights unless they are quantised.
        quantised: Name in ``SCALES``.
        ranks: W.
        gathered: Whether the tokens are those of all ranks, ``num_tokens / ranks`` of each.
        dependent: See ``DecodeConfig``.
        cache: Whose slot is given away where GPU memory holds a quarter of the experts; ``None``: all are there.
        prefetched: Whether experts may have travelled to the cache before.
        drafted: Whether some of these may have done so for the verification of drafts.
        wave: ``first`` or ``last`` of a step that takes some; empty: one is all.
        hosted: Whether the host's cores compute some of those that are missing.
        activation: Of the experts.
        biased: Whether they have biases.
    """

    shape: str
    num_tokens: int
    dtype: torch.dtype = torch.bfloat16
    quantised: str = ""
    ranks: int = 1
    gathered: bool = False
    dependent: bool = True
    cache: Policy | None = None
    prefetched: bool = False
    drafted: bool = False
    wave: str = ""
    hosted: bool = False
    activation: Activation = SWIGLU
    biased: bool = False

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [as_triton_dtype(self.dtype), self.quantised, self.shape, f"{self.num_tokens} tokens", self.config.form]
        words += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        words += ["gathered"] if self.gathered else []
        words += [] if self.config.dependent else ["not dependent"]
        words += [f"cache {self.cache}"] if self.cache else []
        words += ["prefetched"] if self.prefetched else []
        words += ["with drafts"] if self.drafted else []
        words += [f"{self.wave} wave"] if self.wave else []
        words += ["host cores"] if self.hosted else []
        words += [self.activation.name] if self.activation != SWIGLU else []
        words += ["biases"] if self.biased else []
        return ", ".join(filter(None, words))

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of w1 and w2; words of codes for MXFP4."""
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

    def constants(self) -> dict[str, Any]:
        """What both kernels are compiled for, ``None`` for scales that are not there among it."""
        num_experts, top_k, _, _ = SHAPES[self.shape]
        vector = self.config.form == "vector"
        token_block = max(1 if vector else LEAST_TOKENS, self.num_tokens)
        return dict(
            K=top_k, K_BLOCK=triton.next_power_of_2(top_k), T_BLOCK=token_block,
            TILE=min(self.config.tile, token_block), BY_EXPERT=self.num_tokens * top_k >= num_experts, VECTOR=vector,
            LANE=lane_of(self.weight_dtype),
            SCALES=SCALES[self.quantised], PRECISION=dot_precision(self.dtype), DEPENDENT=self.config.dependent,
            GATHERED=self.gathered, **({} if self.quantised else {"scales_ptr": None}),
            **({} if self.cache else {"cache": None, "CACHE": None}),
        )  # fmt: skip

    def cache_constants(self, num_warps: int) -> CacheConstants:
        """Those of a kernel whose blocks have so many warps."""
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
        found = found._replace(drafts=self.drafted)
        mail = dict(mail=len(CACHE_POINTERS) + len(num_bytes[2:]) * 2, mail_tokens=16, timeout_ns=30 * 10**9, asks=True)
        found = found._replace(**mail) if self.hosted else found
        return found.of_wave({"first": 0, "last": 1}[self.wave], 2) if self.wave else found

    def weight_type(self, rows: list[int], depth: int) -> str:
        """Triton's type of w1 or w2, read in blocks of so many rows in the matrix form."""
        names = {torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32"}
        element = names.get(self.weight_dtype) or as_triton_dtype(self.dtype)
        block = [*rows, part_of(depth, SCALES[self.quantised]) // in_number(lane_of(self.weight_dtype))]
        return f"*{element}" if self.config.form == "vector" else f"tensordesc<{element}{block}>"


def aot_cases() -> list[KernelCase]:
    """The blocks that steps of 1 to 64 tokens take; alone and over ranks; all types and kinds of weights."""
    settings = []
    for shape in ("qwen3", "mixtral"):
        settings += [Setting(shape=shape, num_tokens=num_tokens) for num_tokens in (1, 2, 8, 16, 32, 64)]
        settings += [Setting(shape=shape, num_tokens=num_tokens, ranks=RANKS) for num_tokens in (1, 8)]
    settings += [Setting(shape="qwen3", num_tokens=num_tokens, dtype=torch.float32) for num_tokens in (1, 8)]
    settings += [Setting(shape="qwen3", num_tokens=1, dependent=False)]
    settings += [Setting(shape="qwen3", num_tokens=8, dtype=torch.float16)]
    for quantised in ("mxfp8", "fp8", "mxfp4"):
        for shape in ("qwen3", "deepseek"):
            settings += [Setting(shape=shape, num_tokens=count, quantised=quantised) for count in (1, 2, 8, 16, 32, 64)]
        settings += [Setting(shape="qwen3", num_tokens=count, quantised=quantised, ranks=RANKS) for count in (1, 8, 16)]
        settings += [
            Setting(shape="qwen3", num_tokens=count, quantised=quantised, dtype=dtype)
            for count in (1, 8)
            for dtype in (torch.float16, torch.float32)
        ]
        settings += [Setting(shape="qwen3", num_tokens=64, quantised=quantised, dtype=torch.float16)]
    settings += [Setting(shape="qwen3", num_tokens=16, quantised="fp8", dtype=torch.float16)]
    settings += [Setting(shape="deepseek and shared", num_tokens=count) for count in (1, 2, 8)]
    settings += [Setting(shape="qwen3", num_tokens=count, ranks=RANKS, gathered=True) for count in (4, 16, 64)]
    settings += [
        Setting(shape="qwen3", num_tokens=count, ranks=ranks, gathered=True, quantised="mxfp8")
        for count, ranks in ((2, 2), (8, RANKS))
    ]
    settings += [Setting(shape="qwen3", num_tokens=count, cache="lru") for count in (1, 2, 4)]
    settings += [
        Setting(shape="mixtral", num_tokens=1, cache="lru"),
        Setting(shape="deepseek", num_tokens=1, cache="lru"),
    ]
    settings += [Setting(shape="qwen3", num_tokens=1, cache=policy) for policy in ("lfu", "score")]
    settings += [Setting(shape="qwen3", num_tokens=count, cache="lru", hosted=True) for count in (1, 2, 4)]
    settings += [
        Setting(shape="qwen3", num_tokens=1, cache="score", hosted=True),
        Setting(shape="qwen3", num_tokens=4, cache="lru", hosted=True, ranks=RANKS),
        Setting(shape="deepseek", num_tokens=1, cache="lru", hosted=True),
        Setting(shape="qwen3", num_tokens=1, dtype=torch.float32, cache="lru", hosted=True),
        Setting(shape="qwen3", num_tokens=1, cache="lru", hosted=True, quantised="fp8"),
        Setting(shape="qwen3", num_tokens=4, cache="lru", hosted=True, quantised="mxfp4"),
    ]
    settings += [
        Setting(shape="qwen3", num_tokens=count, cache="lru", prefetched=True, quantised=quantised)
        for count, quantised in ((1, ""), (8, ""), (1, "mxfp4"))
    ]
    settings += [
        Setting(shape="qwen3", num_tokens=count, cache="lru", prefetched=True, drafted=True) for count in (1, 4)
    ]
    settings += [
        Setting(shape="qwen3", num_tokens=count, quantised=quantised, cache="lru")
        for quantised in ("mxfp8", "fp8", "mxfp4")
        for count in (1, 4)
    ]
    gpt_oss: dict[str, Any] = dict(shape="gpt_oss", activation=Activation("clamped_swiglu"), biased=True)
    settings += [
        Setting(num_tokens=count, quantised=quantised, **gpt_oss) for quantised in ("", "mxfp4") for count in (1, 2, 16)
    ]
    settings += [Setting(shape="qwen3", num_tokens=8, activation=Activation(name)) for name in ("geglu", "reglu")]
    cases = [case for setting in settings for case in (_gate_up(setting), _down(setting))]
    waves = [
        Setting(shape="qwen3", num_tokens=count, cache="lru", wave=wave, **kind)
        for count, kind in ((2, {}), (8, {}), (16, {}), (8, {"quantised": "mxfp4"}))
        for wave in ("first", "last")
    ]
    waves += [Setting(shape="qwen3", num_tokens=8, cache="lru", wave="last", ranks=RANKS)]  # others add up nothing
    hosted = Setting(shape="qwen3", num_tokens=8, cache="lru", wave="last", hosted=True)  # others ask nobody
    cases += [_gate_up(hosted), _down(hosted)]
    return cases + list(map(_down, waves)) + [_gather(shape) for shape in ("qwen3", "mixtral")]


def _gate_up(setting: Setting) -> KernelCase:
    shape, element = setting.config.gate_up, as_triton_dtype(setting.dtype)
    hidden_size = SHAPES[setting.shape][2]
    pointers = {
        "w1": setting.weight_type([1, 2, shape.rows], shape.depth), "x_ptr": f"*{element}",
        "hidden_ptr": f"*{element}", "weights_ptr": "*fp32", "b1_ptr": f"*{element}",
    }  # fmt: skip
    constants = dict(
        BLOCK_F=shape.rows, BLOCK_K=shape.depth, EVEN_K=hidden_size % shape.depth == 0, ADVANCE=setting.ranks > 1,
        ACTIVATION=setting.activation, **({} if setting.biased else {"b1_ptr": None}),
    )  # fmt: skip
    return _case(setting, gate_up_kernel, pointers, constants, rows=2 * shape.rows)


def _down(setting: Setting) -> KernelCase:
    shape, element = setting.config.down, as_triton_dtype(setting.dtype)
    ffn_size, over_ranks = SHAPES[setting.shape][3], setting.ranks > 1
    pointers = {
        "w2": setting.weight_type([1, shape.rows], shape.depth), "hidden_ptr": f"*{element}", "out_ptr": f"*{element}",
        "b2_ptr": f"*{element}", "weights_ptr": "*fp32", "partials_ptr": "*fp32",
        "landing_addresses": "*i64" if over_ranks else "*i32", "fault_ptr": "*i64" if over_ranks else "*i32",
    }  # fmt: skip
    constants = dict(
        FOLD=setting.config.fold, BLOCK_D=shape.rows, BLOCK_K=shape.depth, EVEN_K=ffn_size % shape.depth == 0,
        W=setting.ranks, WORD_COLS=WORD_COLS * shape.num_warps, INTERPRET=False,
        AHEAD=min(setting.config.ahead, triton.cdiv(ffn_size, shape.depth)), ADDS_UP=setting.wave != "first",
        **({} if setting.wave else {"all_ids_ptr": None}), **({} if setting.biased else {"b2_ptr": None}),
    )  # fmt: skip
    rows = shape.rows * (SHAPES[setting.shape][1] if setting.config.fold else 1)
    return _case(setting, down_kernel, pointers, constants, rows=rows)


def _gather(shape: str) -> KernelCase:
    """Tokens of all types: they travel as pieces of 32 bits."""
    kinds = {"timeout_ns": "i64", "addresses": "*i64", "fault_ptr": "*i64"}
    kinds |= dict.fromkeys(("tokens_ptr", "ids_ptr", "all_tokens_ptr", "all_ids_ptr", "epoch_ptr"), "*i32")
    kinds |= dict.fromkeys(("weights_ptr", "all_weights_ptr"), "*fp32")
    constants = dict(W=RANKS, K=SHAPES[shape][1], COLS=COLS, DEPENDENT=True, INTERPRET=False)
    return KernelCase(
        name=f"{shape}, {RANKS} ranks",
        fn=gather_kernel,
        signature={name: kinds.get(name, "i32") for name in gather_kernel.arg_names if name not in constants},
        constexprs=constants,
        num_warps=NUM_WARPS,
        expects=frozenset({"wide_loads", "wide_stores"}),
    )


def _case(
    setting: Setting, kernel: triton.JITFunction, pointers: dict[str, str], of_kernel: dict[str, Any], *, rows: int
) -> KernelCase:
    """Wide stores where a thread has 16 bytes of the tile to store; the vector form stores a value per row.

    MX in the vector form loads a byte of scales for each of the ``rows`` that a lane reads in a step, those loaded
    ahead among them; in the matrix
    form one load is narrow where a step has less than four scales for each thread.
    """
    config = setting.config
    shape = config.gate_up if kernel is gate_up_kernel else config.down
    constants = setting.constants() | of_kernel
    constants |= {"CACHE": setting.cache_constants(config.gate_up.num_warps)} if setting.cache else {}
    kinds = pointers | {"timeout_ns": "i64", "scales_ptr": "*u8" if setting.quantised.startswith("mx") else "*fp32"}
    kinds |= dict.fromkeys(("ids_ptr", "all_ids_ptr", "slots_ptr", "tickets_ptr", "epoch_ptr"), "*i32")
    mail = mail_pointers(as_triton_dtype(setting.dtype)) if setting.hosted else ()
    kinds |= {"cache": CACHE_POINTERS + (SCALE_POINTERS if setting.quantised else ()) + mail}
    expects = {"wide_loads"}
    if config.form == "matrix":
        item_bytes = 4 if kernel is down_kernel else setting.dtype.itemsize
        if shape.rows * constants["TILE"] * item_bytes >= 32 * shape.num_warps * LOAD_BYTES:
            expects |= {"wide_stores"}
        if constants["PRECISION"] != "ieee" and rows >= WGMMA_ROWS and constants["TILE"] >= WGMMA_TOKENS:
            expects |= {"wgmma"}
    scale_bytes = 0
    if setting.quantised.startswith("mx"):
        lanes_of_row = min(32, shape.depth // constants["LANE"])
        few_scales = rows * shape.depth // MX.value < 4 * 32 * shape.num_warps
        steps = 1 + constants.get("AHEAD", 0)
        scale_bytes = steps * rows * lanes_of_row // 32 if config.form == "vector" else int(few_scales)
    return KernelCase(
        name=setting.label,
        fn=kernel,
        signature={name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants},
        constexprs=constants,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        max_registers=most_registers(shape, setting.ranks),
        expects=frozenset(expects),
        narrow_loads=scale_bytes + (BIAS_LOADS if setting.biased else 0),
        # Of 128 registers; without biases it is 24.
        spilled_bytes=48 if setting.biased and setting.quantised == "mxfp4" and setting.num_tokens == 16 else 0,
    )
