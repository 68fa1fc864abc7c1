"""Inputs and checks for warp decode, shared by the interpreter and the GPU tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from activation_cases import draw_biases
from gemm_cases import assert_as_good, chain_of
from gpus import captured
from torch import Tensor

from comet.decode import DecodeScratch, DecodeWeights, warp_decode_torch
from comet.decode.local import run_kernels
from comet.decode.twin import slot_weights
from comet.kernels.decode.blocks import BlockShape, DecodeConfig, select
from comet.kernels.decode.dequantize import dequantize_slots
from comet.kernels.decode.scales import widen
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.quantization.formats import (
    E8M0_NAN,
    FP8,
    FP8_BLOCK,
    MX_BLOCK,
    MXFP4,
    MXFP8,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
)

NAN = float("nan")
E4M3_NAN = 0x7F
E2M1_LARGEST = 0x77  # twice 6, which is infinity with the largest scale
QUANTISERS = {"mxfp8": quantize_mxfp8, "fp8": quantize_fp8, "mxfp4": quantize_mxfp4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP specification, section 5.3.3; from code 8 on negative

# Small blocks, so that small inputs have several blocks and tails along every axis.
VECTOR = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=32), down=BlockShape(rows=16, depth=32))
FOLD = replace(VECTOR, fold=True)
MATRIX = DecodeConfig(form="matrix", gate_up=BlockShape(rows=16, depth=32), down=BlockShape(rows=32, depth=16))


def draw_experts(case: DecodeCase, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """w1 ``(E, 2F, D)`` and w2 ``(E, D, F)`` on the CPU."""
    made = torch.Generator().manual_seed(case.seed)
    shapes = (case.E, 2 * case.F, case.D), (case.E, case.D, case.F)
    w1, w2 = ((torch.randn(shape, generator=made) / shape[-1] ** 0.5).to(dtype) for shape in shapes)
    return w1, w2


def stored_parts(kind: str, w1: Tensor, w2: Tensor) -> dict[str, Tensor]:
    """Two weights by the names that a cache has for them; of a kind of ``QUANTISERS`` their elements and scales."""
    if not kind:
        return {"w1": w1, "w2": w2}
    packed = {name: QUANTISERS[kind](weight) for name, weight in (("w1", w1), ("w2", w2))}
    parts = {name: each.elements for name, each in packed.items()}
    return parts | {f"{name}_scales": each.scales for name, each in packed.items()}


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One step: T tokens, K experts each of E, sizes D and F.

    ``routing``: ``uniform``; ``one``: every token's first expert is 0; ``masked``: a third of the routed rows is -1;
    ``none``: all are; ``repeated``: every token names one expert K times; ``unknown``: some ids are no expert's;
    ``always``: the last two experts of every token are E-2 and E-1, as a shared one's pieces are.
    ``held``: how many of the E experts are held; the others' routing weights are NaN, as are slots without a use.
    ``activation`` of the experts, ``biased`` where both of their projections have biases.
    ``quantised``: one of ``QUANTISERS``, with scales that differ from one to the next by powers of two.
    """

    name: str
    T: int
    K: int
    E: int
    D: int
    F: int
    config: DecodeConfig | None = None
    routing: str = "uniform"
    held: int | None = None
    seed: int = 0
    quantised: str = ""
    activation: Activation = SWIGLU
    biased: bool = False


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; ``ids`` as the kernels get them, ``legal_ids`` with every unknown id masked."""

    tokens: Tensor
    ids: Tensor
    legal_ids: Tensor
    routing_weights: Tensor
    weights: DecodeWeights

    def double(self) -> Inputs:
        by_slot = [slot_weights(self.weights, slot, torch.float64) for slot in range(self.weights.w1.shape[0])]
        w1, w2 = (torch.stack(of_slots) for of_slots in zip(*by_slot, strict=True))
        biases = {name: None if bias is None else bias.double() for name, bias in self.biases().items()}
        wide = DecodeWeights(w1=w1, w2=w2, slots=self.weights.slots, activation=self.weights.activation, **biases)
        return replace(self, tokens=self.tokens.double(), routing_weights=self.routing_weights.double(), weights=wide)

    def biases(self) -> dict[str, Tensor | None]:
        return {"b1": self.weights.b1, "b2": self.weights.b2}

    def twin(self) -> Tensor:
        return warp_decode_torch(self.tokens, self.legal_ids, self.routing_weights, self.weights)


def draw_ids(case: DecodeCase, generator: torch.Generator) -> Tensor:
    ids = torch.rand(case.T, case.E, generator=generator).argsort(dim=1)[:, : case.K].to(torch.int32)
    chosen = torch.rand(case.T, case.K, generator=generator) < 0.34
    if case.routing == "one":
        ids = torch.where(ids == 0, ids[:, :1], ids)
        ids[:, 0] = 0
    if case.routing == "repeated":
        ids = ids[:, :1].expand(case.T, case.K).contiguous()
    if case.routing == "masked":
        ids[chosen] = -1
    if case.routing == "always":
        ids[:, -2:] = torch.tensor([case.E - 2, case.E - 1])
    if case.routing == "none":
        ids[:] = -1
    if case.routing == "unknown":
        strange = torch.tensor([case.E, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ids = torch.where(chosen, strange.repeat(ids.numel())[: ids.numel()].view_as(ids), ids)
    return ids


def make_inputs(case: DecodeCase, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    held = case.E if case.held is None else case.held
    slots = torch.full((case.E,), -1, dtype=torch.int32)
    num_slots = held + 2
    experts = torch.randperm(case.E, generator=generator)[:held]
    slots[experts] = torch.randperm(num_slots, generator=generator)[:held].int()
    w1 = torch.randn(num_slots, 2 * case.F, case.D, generator=generator) / case.D**0.5
    w2 = torch.randn(num_slots, case.D, case.F, generator=generator) / case.F**0.5
    used = torch.zeros(num_slots, dtype=torch.bool)
    used[slots[slots >= 0].long()] = True
    if not case.quantised:
        w1[~used], w2[~used] = NAN, NAN
    ids = draw_ids(case, generator)
    legal = torch.where((ids >= 0) & (ids < case.E), ids, -1)
    routing_weights = torch.rand(case.T, case.K, generator=generator) + 0.1
    skipped = (legal < 0) | (slots[legal.long().clamp(min=0)] < 0)
    routing_weights[skipped] = NAN
    tokens = torch.randn(case.T, case.D + 16, generator=generator).to(dtype).to(device)[:, 8:-8]
    if case.quantised:
        weights = quantised_weights(case.quantised, w1, w2, slots, used, generator, device)
    else:
        weights = DecodeWeights(w1=w1.to(dtype).to(device), w2=w2.to(dtype).to(device), slots=slots.to(device))
    weights = replace(weights, activation=case.activation)
    if case.biased:
        b1, b2 = draw_biases(num_slots, case.F, case.D, dtype, case.seed)
        b1[~used], b2[~used] = NAN, NAN
        weights = replace(weights, b1=b1.to(device), b2=b2.to(device))
    return Inputs(tokens, ids.to(device), legal.to(device), routing_weights.to(device), weights)


def quantised_weights(
    kind: str, w1: Tensor, w2: Tensor, slots: Tensor, used: Tensor, generator: torch.Generator, device: str
) -> DecodeWeights:
    """Quantised weights whose every group of 32 x 32 (MX) or 128 x 128 is multiplied by its own power of two.

    Slots that are not ``used`` hold the NaN of e4m3, or the largest number of e2m1, and the largest scale.
    """
    is_mx, quantise = kind.startswith("mx"), QUANTISERS[kind]
    size = MX_BLOCK if is_mx else FP8_BLOCK
    fields: dict[str, Tensor] = {}
    for name, weight in (("w1", w1), ("w2", w2)):
        num_slots, rows, columns = weight.shape
        factors = 2.0 ** -torch.randint(0, 4, (num_slots, rows // size + 1, columns // size + 1), generator=generator)
        factors = factors.repeat_interleave(size, 1)[:, :rows].repeat_interleave(size, 2)[:, :, :columns]
        packed = quantise(weight * factors)
        packed.elements.view(torch.uint8)[~used] = E2M1_LARGEST if kind == "mxfp4" else E4M3_NAN
        packed.scales[~used] = 254 if is_mx else 3e38
        fields |= {name: packed.elements.to(device), f"{name}_scales": packed.scales.to(device)}
    return DecodeWeights(slots=slots.to(device), **fields)


def check_decode(case: DecodeCase, dtype: torch.dtype, device: str, *, runs: int = 2) -> Tensor:
    """Compare with the twin and float64, with poisoned scratch, the same bits every time, tickets left at 0."""
    inputs = make_inputs(case, dtype, device)
    scratch = DecodeScratch.create(inputs.weights, case.K, dtype, max_tokens=case.T)
    scratch.hidden.fill_(NAN)
    scratch.partials.fill_(NAN)
    outputs = [
        run_kernels(
            inputs.tokens, inputs.ids, inputs.routing_weights, inputs.weights, scratch=scratch, config=case.config
        )
        for _ in range(runs)
    ]
    where = f"decode {case} {dtype}"
    assert all(torch.equal(output, outputs[0]) for output in outputs), f"{where}: other bits in another run"
    assert not scratch.tickets.any(), f"{where}: tickets {scratch.tickets.tolist()}"
    # In float32 the kernels add up the contraction step by step, torch's library in several partial sums.
    chain = chain_of(max(case.D, case.F), dtype)
    assert_as_good(where, outputs[0], inputs.twin(), inputs.double().twin(), chain=chain)
    idle = (inputs.routing_weights.isnan()).all(dim=1)
    assert (outputs[0][idle] == 0).all(), f"{where}: a token without experts must give zeros"
    return outputs[0]


def check_rows_in_turn(case: DecodeCase, dtype: torch.dtype, device: str) -> None:
    """Gate and up rows in turn give the bits of gate rows first, by the twin and by the kernels."""
    given = make_inputs(case, dtype, device)
    first, step = given.weights, (given.tokens, given.legal_ids, given.routing_weights)
    order = torch.arange(2 * case.F, device=device).view(2, -1).T.flatten()
    scales = None if first.w1_scales is None else first.w1_scales.view(torch.uint8)[:, order].contiguous()
    in_turn = first.w1.view(torch.uint8)[:, order].view(first.w1.dtype)
    b1 = None if first.b1 is None else first.b1[:, order]
    turned = replace(first, w1=in_turn, w1_scales=scales, b1=b1, interleaved=True)
    for run in (partial(run_kernels, config=case.config), warp_decode_torch):
        assert torch.equal(run(*step, turned), run(*step, first)), case


def check_graph(case: DecodeCase, *, replays: int, dependent: bool = True) -> None:
    """One CUDA graph, replayed with other tokens, other routing and moved slots, against steps outside of it."""
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    scratch = DecodeScratch.create(inputs.weights, case.K, torch.bfloat16, max_tokens=case.T)
    arguments = (inputs.tokens.contiguous(), inputs.ids, inputs.routing_weights, inputs.weights)
    sizes = (case.T, case.K, case.D, case.F)
    types = dict(shared_scale=inputs.weights.shared_scale, four_bits=inputs.weights.per_number > 1)
    config = replace(select(torch.bfloat16, *sizes, **types), dependent=dependent)
    graph, output = captured(lambda: run_kernels(*arguments, scratch=scratch, config=config))
    generator = torch.Generator("cuda").manual_seed(0)
    used = inputs.weights.slots.clone()
    for replay in range(replays):
        ids = torch.rand(case.T, case.E, device="cuda", generator=generator).argsort(dim=1)[:, : case.K]
        inputs.ids.copy_(ids.masked_fill(torch.rand(ids.shape, device="cuda", generator=generator) < 0.1, -1))
        inputs.weights.slots.copy_(used[torch.randperm(case.E, device="cuda", generator=generator)])
        arguments[0].normal_(generator=generator)
        graph.replay()
        assert torch.equal(output, run_kernels(*arguments, config=config)), f"replay {replay}"


def random_case(seed: int, *, most_tokens: int, largest: int, quantised: str = "") -> DecodeCase:
    """A case drawn from a seed; sizes are multiples of 16, for MX of 32, up to ``largest``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    num_experts, multiple = draw(1, 12), 32 if quantised.startswith("mx") else 16
    return DecodeCase(
        name=f"random {seed}", T=draw(1, most_tokens), K=draw(1, min(num_experts, 5)), E=num_experts,
        D=multiple * draw(1, largest // multiple), F=multiple * draw(1, largest // multiple), quantised=quantised,
        routing=("uniform", "one", "masked", "repeated", "unknown")[draw(0, 4)], held=draw(0, num_experts), seed=seed,
    )  # fmt: skip


@triton.jit
def widen_kernel(elements_ptr, values_ptr, N: tl.constexpr, NUMBERS: tl.constexpr):
    numbers = widen(tl.load(elements_ptr + tl.arange(0, N))[:, None], values_ptr.dtype.element_ty)
    tl.store(values_ptr + tl.arange(0, N)[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :], numbers)


def check_every_code(kind: str, dtype: torch.dtype, device: str) -> None:
    """The kernels read all numbers exactly: of e4m3, or of e2m1 at each of the 8 places of a word, among others."""
    if kind == "mxfp4":
        codes = (torch.arange(16)[:, None] + 5 * torch.arange(8)) % 16
        elements = (codes[:, ::2] | codes[:, 1::2] << 4).byte().view(torch.int32)
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])[codes]
    else:
        elements = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
        numbers = elements.float()
    values = torch.empty(numbers.shape, dtype=dtype, device=device)
    widen_kernel[(1,)](elements.to(device), values, N=len(numbers), NUMBERS=numbers.shape[1])
    bits, is_number = bits_of(dtype), ~numbers.isnan()
    assert torch.equal(values.cpu()[is_number].view(bits), numbers.to(dtype)[is_number].view(bits))


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """To compare with, for the sign of zeros counts, too."""
    return torch.int32 if dtype == torch.float32 else torch.int16


NUM_SLOTS = 5
LISTED = (4, 0, 2, 0)  # in no order, one twice
# Rows and columns: less than a block of 4096 weights, several blocks and a part of one, scales that end inside.
SLOT_SIZES = {
    "mxfp8": ((3, 32), (130, 96), (64, 128)),
    "mxfp4": ((3, 32), (130, 96), (64, 128)),
    "fp8": ((3, 16), (272, 144), (128, 128), (16, 1040)),
}


def stored_slots(kind: str, num_slots: int, rows: int, columns: int, seed: int) -> MXFP8 | MXFP4 | FP8:
    """Elements of all codes; scales, all from 2^-127 to 2^127, or, of block FP8, that round with every element."""
    made = torch.Generator().manual_seed(seed)
    if kind == "fp8":
        size = num_slots, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        scales = torch.rand(size, generator=made) * 2.0 ** torch.randint(-20, 9, size, generator=made)
        return FP8(elements=_e4m3((num_slots, rows, columns), made), scales=scales)
    size = num_slots, rows, columns // MX_BLOCK
    scales = (torch.randperm(math.prod(size), generator=made) % E8M0_NAN).byte().view(size)
    if kind == "mxfp8":
        return MXFP8(elements=_e4m3((num_slots, rows, columns), made), scales=scales)
    codes = torch.randint(256, (num_slots, rows, columns // 2), generator=made, dtype=torch.uint8)
    return MXFP4(elements=codes, scales=scales)


def _e4m3(size: tuple[int, ...], made: torch.Generator) -> torch.Tensor:
    """All but NaN."""
    codes = torch.randint(256, size, generator=made, dtype=torch.uint8)
    return codes.masked_fill_(codes & E4M3_NAN == E4M3_NAN, 0).view(torch.float8_e4m3fn)


def check_dequantize(kind: str, rows: int, columns: int, dtype: torch.dtype, device: str | torch.device) -> None:
    """The kernel's bits are those of ``dequantize``, whose own are checked in ``quantization/test_quantize*.py``."""
    stored = stored_slots(kind, NUM_SLOTS, rows, columns, seed=rows)
    # One number into its memory: what a layer sends is one list of all its groups.
    slots = torch.tensor([0, *LISTED], dtype=torch.int32, device=device)[1:]
    found = dequantize_slots(stored.elements.to(device), stored.scales.to(device), slots, dtype)
    wanted = stored.dequantize(dtype)[list(LISTED)]
    bits = bits_of(dtype)
    assert found.shape == wanted.shape
    assert torch.equal(found.cpu().view(bits), wanted.view(bits)), f"{kind}, {rows} x {columns}, {dtype}"
