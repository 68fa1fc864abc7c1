"""The fused layer as a pair: its GEMMs run while rows travel, so its two halves only go together.

``prepare`` makes the plan and hands out a light handle; ``apply`` runs layer 0 (dispatch || GEMM || SwiGLU) and layer 1
(GEMM || reduce || combine), whose result is finished; ``finalize`` has nothing left to do.
"""

from __future__ import annotations

from torch import Tensor

from comet.layer.plan import check_tokens
from comet.layout import Biases, added_biases
from comet.modular.base import ExpertsBase, NoOpReduce
from comet.modular.interfaces import (
    ActivationFormat,
    FusedHandle,
    Problem,
    Received,
    Receiver,
    RoutedTokens,
    Rows,
    Scratch,
    ScratchShapes,
    TopKReduce,
)
from comet.modular.symmetric import OverBackend
from comet.quantization.formats import Weight


class FusedPrepareFinalize(OverBackend):
    """The plan of the fused layer. Any EP x TP; unequal and zero tokens per rank; masked slots; a capacity factor."""

    activation_format = ActivationFormat.HANDLE
    carries_fp8 = False
    default_overlap = None

    def prepare(self, routed: RoutedTokens, *, quantize: bool) -> Received:
        """Exchange ids and plan; no row travels yet."""
        assert not quantize, "the composer refuses FP8 in the fused layer"
        check_tokens(routed.tokens, routed.top_k_ids, self.backend.workspace)
        plan = self.backend.plan(routed.top_k_ids, routed.top_k_weights)
        handle = FusedHandle(tokens=routed.tokens.contiguous(), plan=plan, backend=self.backend)
        return Received(rows=handle, route=None)

    def prepare_no_receive(self, routed: RoutedTokens, *, quantize: bool) -> Receiver:
        """``prepare`` itself, since rows travel inside ``apply``, which waits for them tile by tile."""
        received = self.prepare(routed, quantize=quantize)
        return lambda: received

    def finalize(self, outputs: Tensor, received: Received, reduce: TopKReduce) -> Tensor:
        """The outputs: layer 1 has combined them."""
        return outputs


class FusedExperts(ExpertsBase):
    """Layer 0 and layer 1 of the handle's plan. Goes only with ``FusedPrepareFinalize``."""

    formats = frozenset({ActivationFormat.HANDLE})
    reductions: tuple[type[TopKReduce], ...] = (NoOpReduce,)
    weight_types: frozenset[type[Weight]] = frozenset({Tensor})

    def scratch_shapes(self, problem: Problem) -> ScratchShapes:
        """None: how many rows there are is known on the device only, where the plan reserves them."""
        return ScratchShapes(regions={}, output=None)

    def apply(self, rows: Rows, w1: Weight, w2: Weight, scratch: Scratch, biases: Biases | None = None) -> Tensor:
        """Run both fused pipelines: ``(T, D)``, finished (collective)."""
        assert isinstance(rows, FusedHandle)
        assert isinstance(w1, Tensor)
        assert isinstance(w2, Tensor)
        backend, plan = rows.backend, rows.plan
        b1, b2 = added_biases(biases, backend.layout)
        hidden, _ = backend.dispatch_gemm(rows.tokens, w1.contiguous(), plan, b1, save_pre_activation=False)
        return backend.gemm_combine(hidden, w2.contiguous(), plan, b2)
