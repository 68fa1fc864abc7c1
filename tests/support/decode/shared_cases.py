"""A decode step with a shared expert as always-on experts: its inputs, what one rank adds, and the whole in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from decode_cases import DecodeCase, Inputs, make_inputs
from gemm_cases import assert_as_good, chain_of
from torch import Tensor, nn

from comet.decode import DecodeWeights, SharedSlots, matrices_of, shared_columns, warp_decode, warp_decode_torch
from comet.layer.shared_expert import SharedExpert
from comet.layout import ExpertLayout
from comet.reference.layer import shard_experts


@dataclass(frozen=True, kw_only=True)
class SharedStep:
    """Tokens and routing of a case, all its experts in the order of their ids, a shared one, and its weight."""

    case: DecodeCase
    inputs: Inputs
    w1: Tensor
    w2: Tensor
    shared: SharedExpert
    gate: Tensor | None

    @classmethod
    def make(
        cls, case: DecodeCase, dtype: torch.dtype, device: str, *, times: int = 1, gated: bool = False
    ) -> SharedStep:
        inputs = make_inputs(case, dtype, device)
        order = inputs.weights.slots.long()
        torch.manual_seed(case.seed)
        shared = SharedExpert(case.D, times * case.F, dtype=dtype).to(device)
        wide = torch.promote_types(dtype, torch.float32)
        gate = torch.rand(case.T, 1, dtype=wide).to(device) if gated else None
        return cls(
            case=case, inputs=inputs, w1=inputs.weights.w1[order], w2=inputs.weights.w2[order], shared=shared, gate=gate
        )

    @property
    def routing_weights(self) -> Tensor:
        return self.inputs.routing_weights.to(torch.promote_types(self.inputs.tokens.dtype, torch.float32))

    def slots(self, layout: ExpertLayout) -> SharedSlots:
        columns = shared_columns(layout, self.case.F, self.shared.w2.shape[1])
        return SharedSlots(layout, columns, self.shared, matrices_of)

    def parts(self, layout: ExpertLayout) -> list[nn.Parameter]:
        return [nn.Parameter(part.contiguous()) for part in shard_experts(self.w1, self.w2, layout)]

    def rank_inputs(self, slots: SharedSlots) -> tuple[Tensor, Tensor, Tensor, DecodeWeights]:
        """Return arguments of warp decode; check that the layer's weights did not change and are stored once."""
        parts = self.parts(slots.layout)
        before = [part.clone() for part in parts]
        weights = slots.weights(*parts)
        assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True)), "the layer's weights changed"
        assert weights.w1.data_ptr() == parts[0].data_ptr(), "the routed experts are there twice"
        assert slots.weights(*parts) is weights, "joined again for nothing"
        ids, routing_weights = slots.routing(self.inputs.ids, self.routing_weights, self.gate)
        assert ids.shape[1] == self.case.K + slots.columns
        return self.inputs.tokens, ids, routing_weights, weights

    @torch.no_grad()
    def exact(self) -> Tensor:
        """Return the sum of the routed experts and the shared expert, ``(T, D)`` in float64."""
        inputs = self.inputs.double()
        beside: Tensor = copy.deepcopy(self.shared).double()(inputs.tokens)
        return inputs.twin() + (beside if self.gate is None else self.gate.double() * beside)


def layouts(case: DecodeCase, ep: int, tp: int) -> list[ExpertLayout]:
    return [ExpertLayout(num_experts=case.E, top_k=case.K, ep=ep, tp=tp, rank=rank) for rank in range(ep * tp)]


@torch.no_grad()
def check_kernels(step: SharedStep, ep: int, tp: int) -> None:
    parts, same = [], []
    for layout in layouts(step.case, ep, tp):
        arguments = step.rank_inputs(step.slots(layout))
        parts.append(warp_decode(*arguments, use_kernels=True))
        same.append(warp_decode_torch(*arguments))
    dtype = step.inputs.tokens.dtype
    total, twin = (torch.stack(outputs).double().sum(0).to(dtype) for outputs in (parts, same))
    chain = chain_of(max(step.case.D, step.shared.w2.shape[1]), dtype)
    assert_as_good(f"{step.case}, {dtype}, ep {ep}, tp {tp}", total, twin, step.exact(), chain=chain)
