"""The experts a rank holds for decoding, memory between the kernels of a step, and what a step accepts."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from comet import limits
from comet.capabilities import refuse
from comet.comm.collectives import wants_grad
from comet.config import DIM_MULTIPLE, MAX_TOP_K, check_token_dtype, require
from comet.kernels.experts.tables import ExpertParts, HostExperts
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.quantization.formats import CODES, FP8_BLOCK, MX_BLOCK, check_scale_values
from comet.utils.match import Sizes, check_id_dtype

MAX_DECODE_TOKENS = 64
START_BYTES = 16  # kernels read codes in pieces of so many bytes
WIDTH = limits.at_least(DIM_MULTIPLE), limits.multiple_of(DIM_MULTIPLE)
KINDS = {
    (torch.float8_e4m3fn, torch.float32): "block FP8",
    (torch.float8_e4m3fn, torch.uint8): "MXFP8, whose e8m0 is viewed as uint8",
    (CODES, torch.uint8): "MXFP4",
}
TOP_K = limits.at_least(1), limits.at_most(MAX_TOP_K)
MOST_TOKENS = limits.at_most(MAX_DECODE_TOKENS, "more tokens take the fused path")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWeights(ExpertParts):
    """Expert weights in slots, and the table that finds an expert's slot.

    A shared expert n times as wide as a routed one can be n more experts that every token routes to with weight 1:
    ``SharedSlots`` makes them, over ranks as well; one of another width stays outside.

    Example: S = 2 slots hold experts 5 and 1 of E = 8: slots ``[-1, 1, -1, -1, -1, 0, -1, -1]``.
    """

    # (S, 2F, D), gate rows first, then up rows, of each slot. In MXFP4 (S, 2F, D / 2) uint8 (or float4_e2m1fn_x2, which
    # becomes uint8 here): two e2m1 codes a byte, as in comet.quantization.formats.MXFP4
    w1: Tensor
    w2: Tensor  # (S, D, F), or (S, D, F / 2), dtype of w1
    # (E,) int32 in [-1, S): slot of each global expert; -1: not held here, its routed rows contribute nothing on this
    # rank. Read on the device at every step, never by the host
    slots: Tensor
    # None for float32, float16 and bfloat16. Quantised weights (float8_e4m3fn) have MXFP8 scales (S, 2F, D / 32) uint8,
    # e8m0 codes, or block scales (S, ceil(2F / 128), ceil(D / 128)) float32; MXFP4 has the scales of MXFP8. Their
    # values are looked at here, which waits for their device
    w1_scales: Tensor | None = None
    w2_scales: Tensor | None = None
    # the source of experts that have no slot yet, and the slots that they take; None: there is no source
    host: HostExperts | None = None
    activation: Activation = SWIGLU
    # (S, 2F), in the order of w1's rows, dtype of the tokens: added to the products with w1; None: nothing is. With a
    # host (e, 2F) of all its experts, as it has them
    b1: Tensor | None = None
    # (S, D) or (e, D), dtype of the tokens: added to the products with w2; None: nothing is, as on all but the first TP
    # rank of a shard
    b2: Tensor | None = None
    # rows of w1, w1_scales and b1 are gate and up in turn (gpt-oss), and not gate rows first
    interleaved: bool = False
    trusted: InitVar[bool] = False  # whether all of this was right in weights alike, and none is quantised

    def __post_init__(self, trusted: bool) -> None:
        if trusted:
            return
        for name in ("w1", "w2"):
            stored = getattr(self, name)
            if not isinstance(stored, Tensor):
                kind = type(stored).__name__
                raise ValueError(f"{name} of type {kind} must be its elements; scales are {name}_scales")
            if stored.dtype == torch.float4_e2m1fn_x2:  # torch has no operations on it
                object.__setattr__(self, name, stored.view(CODES))
        sizes, device, part = Sizes(), self.w1.device, ""
        if self.per_number > 1:
            sizes = Sizes(F=(self.per_number * self.w2.shape[-1:].numel(), "w2"))
            part = f"/{self.per_number}"
        sizes.match("w2", self.w2, f"S D F{part}", dtype=self.w1.dtype, device=device, contiguous=True)
        sizes.match("w1", self.w1, f"S 2F D{part}", contiguous=True)
        rows = "S"
        if self.host is not None:
            rows, sizes.values["e"], sizes.origins["e"] = "e", self.host.w1.shape[0], "host"
        for name, bias, spec in (("b1", self.b1, f"{rows} 2F"), ("b2", self.b2, f"{rows} D")):
            if bias is not None:
                sizes.match(name, bias, spec, device=device, contiguous=True)
        sizes.match("slots", self.slots, "E", dtype=torch.int32, device=device, contiguous=True)
        limits.check_values(*WIDTH, D=sizes.values["D"], F=sizes.values["F"])
        if not sizes.values["S"]:
            raise ValueError(f"w1 of shape {tuple(self.w1.shape)} must have at least one slot")
        check_scales(sizes, self.w1, self.w2, self.w1_scales, self.w2_scales)
        if self.shared_scale == FP8_BLOCK or self.host is not None:
            refuse("with experts in block FP8 or in a store", interleaved=self.interleaved)

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1]

    @property
    def ffn_size(self) -> int:
        return self.w2.shape[2] * self.per_number

    @property
    def num_experts(self) -> int:
        """E, all experts that ids may name, held here or not."""
        return self.slots.shape[0]

    @property
    def per_number(self) -> int:
        """Weights in one element of ``w1`` and ``w2``: 2 in MXFP4, else 1."""
        return 2 if self.w1.dtype == CODES else 1

    @property
    def shared_scale(self) -> int:
        """Neighbours along the contraction that share a scale: 32 (MX types), 128 (block FP8), 0 without scales."""
        if self.w1_scales is None:
            return 0
        return MX_BLOCK if self.w1_scales.dtype == torch.uint8 else FP8_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Buffers of one stream: steps that use them must run one after the other."""

    hidden: Tensor  # (J, F) in the tokens' dtype: what gate/up leaves for down, per routed row; J = most tokens x K
    partials: Tensor  # (J, D) float32: what down computes per routed row
    tickets: Tensor  # (D,) int32 zeros: how many blocks finished a column block; zero again after every step

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.partials, self.tickets

    @classmethod
    def create(
        cls, weights: DecodeWeights, top_k: int, dtype: torch.dtype, *, max_tokens: int = MAX_DECODE_TOKENS
    ) -> DecodeScratch:
        """Allocate for steps of at most ``max_tokens`` tokens with ``top_k`` experts each, on the weights' device."""
        limits.check_values(limits.at_least(0), limits.at_most(MAX_DECODE_TOKENS), max_tokens=max_tokens)
        limits.check_values(*TOP_K, top_k=top_k)
        device, rows = weights.w1.device, max_tokens * top_k
        return cls(
            hidden=torch.empty(rows, weights.ffn_size, dtype=dtype, device=device),
            partials=torch.empty(rows, weights.hidden_size, dtype=torch.float32, device=device),
            tickets=torch.zeros(weights.hidden_size, dtype=torch.int32, device=device),
        )

    def check(self, tokens: Tensor, top_k: int, weights: DecodeWeights) -> None:
        """Raise ``ValueError`` unless the buffers are large enough for a step, of its dtype and on its device."""
        rows, (held, width), hidden = tokens.shape[0] * top_k, self.hidden.shape, self.hidden
        found = width, self.partials.shape[1], hidden.dtype, hidden.device
        wanted = weights.ffn_size, weights.hidden_size, tokens.dtype, tokens.device
        if held < rows or found != wanted:
            rule = f"{rows} of F, D, dtype and device {wanted}"
            raise ValueError(f"scratch for {held} rows of {found} must hold {rule}")


def check_inputs(tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor, weights: DecodeWeights) -> None:
    """Raise ``ValueError`` naming field, value and rule unless a decode step can take these tensors."""
    refuse("in warp decode", requires_grad=wants_grad(tokens, top_k_weights))
    sizes, device = Sizes(D=(weights.hidden_size, "w2")), weights.w1.device
    sizes.match("tokens", tokens, "T D", device=device)
    check_token_dtype(tokens.dtype)
    for name, bias in (("b1", weights.b1), ("b2", weights.b2)):
        if bias is not None and bias.dtype != tokens.dtype:
            raise ValueError(f"{name} of dtype {bias.dtype} must have the tokens' {tokens.dtype}")
    limits.check_values(MOST_TOKENS, T=tokens.shape[0])
    sizes.match("top_k_ids", top_k_ids, "T K", device=device)
    check_id_dtype(top_k_ids)
    limits.check_values(*TOP_K, K=top_k_ids.shape[1])
    if weights.w1_scales is None and tokens.dtype != weights.w1.dtype:
        raise ValueError(f"tokens of dtype {tokens.dtype} must have the weights' {weights.w1.dtype}")
    wide = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    sizes.match("top_k_weights", top_k_weights, "T K", dtype=wide, device=device)


def check_scales(sizes: Sizes, w1: Tensor, w2: Tensor, w1_scales: Tensor | None, w2_scales: Tensor | None) -> None:
    """Raise ``ValueError`` naming field, value and rule unless scales are there where they must be, and good.

    Waits for the device, because a scale that is no number is an error. Shapes are those of ``DecodeWeights``.
    """
    if w1_scales is None and w2_scales is None:
        plain = w1.dtype not in (torch.float8_e4m3fn, CODES)
        require(plain, f"w1 and w2 of dtype {w1.dtype} must come with w1_scales and w2_scales")
        return
    if w1_scales is None or w2_scales is None:
        raise ValueError("w1_scales and w2_scales must both be given, or neither")
    dtype, device = w1_scales.dtype, w1.device
    rule = ", ".join(f"{weights} with {scales} ({kind})" for (weights, scales), kind in KINDS.items())
    require((w1.dtype, dtype) in KINDS, f"w1 of {w1.dtype} with w1_scales of {dtype} must be one of {rule}")
    for name, codes in (("w1", w1), ("w2", w2)) if w1.dtype == CODES else ():
        off = codes.data_ptr() % START_BYTES
        require(off == 0, f"{name} starts {off} bytes past a multiple of {START_BYTES}, must start at one: clone it")
    if dtype == torch.uint8:
        whole = limits.multiple_of(MX_BLOCK, f"contractions of {KINDS[w1.dtype, dtype]} are whole blocks")
        limits.check_values(whole, D=sizes.values["D"], F=sizes.values["F"])
        specs = f"S 2F D/{MX_BLOCK}", f"S D F/{MX_BLOCK}"
    else:
        specs = f"S 2F/{FP8_BLOCK} D/{FP8_BLOCK}", f"S D/{FP8_BLOCK} F/{FP8_BLOCK}"
    for name, scales, spec in zip(("w1_scales", "w2_scales"), (w1_scales, w2_scales), specs, strict=True):
        sizes.match(name, scales, spec, dtype=dtype, device=device, contiguous=True)
        check_scale_values(name, scales)
