"""Inputs and checks for warp decode, shared by the interpreter and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gemm_cases import assert_as_good
from torch import Tensor

from comet.decode import DecodeScratch, DecodeWeights, warp_decode_torch
from comet.decode.local import run_kernels
from comet.kernels.warp_decode import BlockShape, DecodeConfig

NAN = float("nan")

# Small blocks, so that small inputs have several blocks and tails along every axis.
VECTOR = DecodeConfig(form="vector", gate_up=BlockShape(rows=16, depth=32), down=BlockShape(rows=16, depth=32))
FOLD = replace(VECTOR, fold=True)
MATRIX = DecodeConfig(form="matrix", gate_up=BlockShape(rows=16, depth=32), down=BlockShape(rows=32, depth=16))


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One step: T tokens, K experts each of E, sizes D and F.

    ``routing``: ``uniform``; ``one``: every token's first expert is 0; ``masked``: a third of the routed rows is -1;
    ``none``: all are; ``repeated``: every token names one expert K times; ``unknown``: some ids are no expert's.
    ``held``: how many of the E experts are held; the others' routing weights are NaN, as are the slots nobody uses.
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


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; ``ids`` as the kernels get them, ``legal_ids`` with every unknown id masked."""

    tokens: Tensor
    ids: Tensor
    legal_ids: Tensor
    routing_weights: Tensor
    weights: DecodeWeights

    def double(self) -> Inputs:
        wide = DecodeWeights(w1=self.weights.w1.double(), w2=self.weights.w2.double(), slots=self.weights.slots)
        return replace(self, tokens=self.tokens.double(), routing_weights=self.routing_weights.double(), weights=wide)

    def twin(self) -> Tensor:
        return warp_decode_torch(self.tokens, self.legal_ids, self.routing_weights, self.weights)


def draw_ids(case: DecodeCase, generator: torch.Generator) -> Tensor:
    """(T, K) int32 of the case's routing."""
    ids = torch.rand(case.T, case.E, generator=generator).argsort(dim=1)[:, : case.K].to(torch.int32)
    chosen = torch.rand(case.T, case.K, generator=generator) < 0.34
    if case.routing == "one":
        ids = torch.where(ids == 0, ids[:, :1], ids)
        ids[:, 0] = 0
    if case.routing == "repeated":
        ids = ids[:, :1].expand(case.T, case.K).contiguous()
    if case.routing == "masked":
        ids[chosen] = -1
    if case.routing == "none":
        ids[:] = -1
    if case.routing == "unknown":
        strange = torch.tensor([case.E, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ids = torch.where(chosen, strange.repeat(ids.numel())[: ids.numel()].view_as(ids), ids)
    return ids


def make_inputs(case: DecodeCase, dtype: torch.dtype, device: str) -> Inputs:
    """Random inputs; the rows of ``tokens`` are views into a wider tensor."""
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
    w1[~used], w2[~used] = NAN, NAN
    ids = draw_ids(case, generator)
    legal = torch.where((ids >= 0) & (ids < case.E), ids, -1)
    routing_weights = torch.rand(case.T, case.K, generator=generator) + 0.1
    skipped = (legal < 0) | (slots[legal.long().clamp(min=0)] < 0)
    routing_weights[skipped] = NAN
    tokens = torch.randn(case.T, case.D + 16, generator=generator).to(dtype).to(device)[:, 8:-8]
    weights = DecodeWeights(w1=w1.to(dtype).to(device), w2=w2.to(dtype).to(device), slots=slots.to(device))
    return Inputs(tokens, ids.to(device), legal.to(device), routing_weights.to(device), weights)


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
    assert_as_good(where, outputs[0], inputs.twin(), inputs.double().twin())
    idle = (inputs.routing_weights.isnan()).all(dim=1)
    assert (outputs[0][idle] == 0).all(), f"{where}: a token without experts must give zeros"
    return outputs[0]


def random_case(seed: int, *, most_tokens: int, largest: int) -> DecodeCase:
    """A case drawn from a seed; sizes are multiples of 16 up to ``largest``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    num_experts = draw(1, 12)
    return DecodeCase(
        name=f"random {seed}", T=draw(1, most_tokens), K=draw(1, min(num_experts, 5)), E=num_experts,
        D=16 * draw(1, largest // 16), F=16 * draw(1, largest // 16),
        routing=("uniform", "one", "masked", "repeated", "unknown")[draw(0, 4)], held=draw(0, num_experts), seed=seed,
    )  # fmt: skip
