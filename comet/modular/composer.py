"""One MoE layer from a prepare/finalize, experts and a type of weights that fit each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from comet.comm.collectives import wants_grad
from comet.config import DIM_MULTIPLE, require
from comet.layer.expert_path import ExpertPath
from comet.layer.sharding import require_held
from comet.layer.weights import match_biases, pad_width
from comet.layout import Biases
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedRows,
    Experts,
    FusedHandle,
    NoOpReduce,
    PrepareFinalize,
    Receiver,
    RoutedTokens,
    Rows,
    TopKReduce,
)
from comet.quantization.formats import FP8, FP8_BLOCK, Weight
from comet.reference.plain import check_inputs
from comet.utils.autocast import without_autocast
from comet.utils.match import Sizes
from comet.utils.uncompiled import uncompiled


class ModularMoE(ExpertPath):
    """Routed experts, put together at run time: an ``ExpertPath``, usable as ``MoE.experts``. For inference.

    Args:
        shared: ``(T, D) -> (T, D)`` for experts every token goes through; runs on this rank's own tokens while others
            travel, and is added. Leave it out where the layer around has its own.
        weight_type: What w1 and w2 will be: ``Tensor``, or ``FP8`` or ``MXFP8`` of ``comet.quantization.formats``.
    """

    def __init__(
        self,
        prepare_finalize: PrepareFinalize,
        experts: Experts,
        shared: Callable[[Tensor], Tensor] | None = None,
        *,
        weight_type: type[Weight] = Tensor,
    ) -> None:
        reason = incompatibility(prepare_finalize, experts, weight_type)
        names = f"{type(prepare_finalize).__name__} and {type(experts).__name__}"
        names += "" if weight_type is Tensor else f" with {weight_type.__name__} weights"
        require(reason is None, f"{names} do not go together: {reason}")
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.shared = shared
        self.weight_type = weight_type

    @uncompiled
    def __call__(self, routed: RoutedTokens, w1: Weight, w2: Weight, biases: Biases | None = None) -> Tensor:
        """Compute the weighted sum of each token's experts (collective).

        Args:
            routed: T may be 0 and differ between ranks.
            w1: ``(e, 2F/TP, D)``, gate rows first, then up rows; of ``weight_type``, plain ones in the dtype of
                the tokens. Where a plain F/TP is no multiple of 16, every call pads a copy.
            w2: ``(e, D, F/TP)``, of the type of ``w1``.
            biases: ``(e, 2F/TP)`` and ``(e, D)``, dtype of the tokens, if the layer has ``expert_bias``, and only then.

        Raises:
            ValueError: If a type, shape or dtype breaks these rules, or a gradient would be required.
        """
        w1, w2, biases = self._check(routed, w1, w2, biases)
        prepare_finalize, comm = self.prepare_finalize, self.prepare_finalize.comm
        with comm.step("modular layer", collectives=prepare_finalize.uses_collectives):
            receive = prepare_finalize.prepare_no_receive(routed)
            with comm.in_flight:
                return self._run(receive, routed.tokens, w1, w2, biases)

    def _run(self, receive: Receiver, tokens: Tensor, w1: Weight, w2: Weight, biases: Biases | None) -> Tensor:
        shared = None if self.shared is None else self.shared(tokens)
        received = receive()
        output = tokens.new_empty(output_shape(received.rows, self.experts.reduce, tokens.shape[1]))
        with without_autocast(tokens.device):
            outputs = self.experts.apply(received.rows, w1, w2, output, *(() if biases is None else (biases,)))
            combined = self.prepare_finalize.finalize(outputs, received, self.experts.reduce)
        return combined if shared is None else combined + shared

    def _check(
        self, routed: RoutedTokens, w1: Weight, w2: Weight, biases: Biases | None
    ) -> tuple[Weight, Weight, Biases | None]:
        """The weights, of a width that experts take, and what this rank adds, once everything is seen to be right."""
        for name, weight in (("w1", w1), ("w2", w2)):
            require(
                isinstance(weight, self.weight_type),
                f"{name} is {type(weight).__name__}, must be the {self.weight_type.__name__} the layer was made for",
            )
            if isinstance(weight, FP8):
                require(
                    weight.block_rows == FP8_BLOCK,
                    f"block_rows={weight.block_rows} of {name} must be {FP8_BLOCK}, as of any weight",
                )
        (tokens, top_k_ids, top_k_weights), layout = routed, self.prepare_finalize.layout
        require(top_k_ids.dtype == torch.int32, f"dtype={top_k_ids.dtype} of top_k_ids must be torch.int32")
        _require_inference(tokens=tokens, top_k_weights=top_k_weights, w1=elements(w1), w2=elements(w2))
        is_plain, in_turn = isinstance(w1, Tensor), self.experts.interleaved
        check_inputs(routed, elements(w1), elements(w2), layout, tokens.dtype if is_plain else None)
        width, kind = elements(w2).shape[2], "interleaved w1" if in_turn else f"{self.weight_type.__name__} weights"
        require(
            width % DIM_MULTIPLE == 0 or (is_plain and not in_turn),
            f"F/TP={width} of {kind} must be a multiple of {DIM_MULTIPLE}",
        )
        added = self._added(biases, tokens, elements(w2))
        if isinstance(w1, Tensor) and isinstance(w2, Tensor):
            require_held(w1, w2)
            return pad_width(w1, w2, added)
        return w1, w2, added

    def _added(self, biases: Biases | None, tokens: Tensor, w2: Tensor) -> Biases | None:
        """Biases that are seen to be right, the second 0 on all but the first TP rank."""
        experts, hidden_size, width = w2.shape
        sizes = Sizes(e=(experts, "w2"), D=(hidden_size, "w2"), F=(width, "w2"))
        match_biases(sizes, *(biases or ()), biased=self.experts.biased, dtype=tokens.dtype, device=tokens.device)
        if biases is None:
            return None
        _require_inference(b1=biases.b1, b2=biases.b2)
        is_first = self.prepare_finalize.layout.tp_rank == 0
        return biases if is_first else biases._replace(b2=torch.zeros_like(biases.b2))


def elements(weight: Weight) -> Tensor:
    """The numbers of a weight, scaled or not: what has its shape."""
    return weight if isinstance(weight, Tensor) else weight.elements


def output_shape(rows: Rows, reduce: TopKReduce, hidden_size: int) -> tuple[int, ...]:
    """The shape of the experts' outputs: one a row, or one for each of its slots, as the format of rows has them."""
    if isinstance(rows, FusedHandle):
        return rows.tokens.shape[0], hidden_size
    if isinstance(reduce, NoOpReduce):
        return rows.top_k_weights.shape[0], hidden_size
    slots = (len(rows.counts), rows.batch_rows) if isinstance(rows, BatchedRows) else rows.top_k_ids.shape
    return *slots, hidden_size


def incompatibility(
    prepare_finalize: PrepareFinalize, experts: Experts, weight_type: type[Weight] = Tensor
) -> str | None:
    """The reason why these cannot make a layer, or ``None`` if they can."""
    ours, theirs = type(prepare_finalize).__name__, type(experts).__name__
    given, formats, reduce = prepare_finalize.activation_format, experts.formats, experts.reduce
    if given not in formats:
        if ActivationFormat.HANDLE in {given, *formats}:
            fused = ours if given is ActivationFormat.HANDLE else theirs
            return f"{fused} is one half of the fused layer, which moves rows while it computes, and needs the other"
        wanted = " or ".join(sorted(entry.value for entry in formats))
        return f"{ours} hands out {given.value} rows, {theirs} takes {wanted} rows"
    if not isinstance(reduce, experts.reductions):
        can = ", ".join(kind.__name__ for kind in experts.reductions)
        return f"{theirs} cannot leave its reduction to {type(reduce).__name__}, only to {can}"
    if given not in reduce.formats:
        return f"{type(reduce).__name__} of {theirs} cannot reduce the {given.value} rows of {ours}"
    if weight_type not in experts.weight_types:
        can = " or ".join(sorted(kind.__name__ for kind in experts.weight_types))
        return f"{theirs} computes with {can} weights, not with {weight_type.__name__}"
    if prepare_finalize.layout != experts.layout:
        return f"{ours} is made for {prepare_finalize.layout}, {theirs} for {experts.layout}"
    return None


def _require_inference(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require(
            not wants_grad(tensor),
            f"{name}.requires_grad=True must be False: ModularMoE has no backward pass; call it under "
            "torch.no_grad(), or train with MoE(path=...)",
        )
