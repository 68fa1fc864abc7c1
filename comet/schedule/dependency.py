"""Shared-tensor dependency analysis: along which axis can a producer and a consumer overlap?

A *shared tensor* is the buffer between two operators, exactly one of which communicates. An ``Operator`` says for every
axis of every tensor how it touches it; ``analyze`` reads nothing else, so the axis of each pipeline is derived, never
stated. Axes: ``tokens`` are rows (tokens or routed rows), ``hidden`` is D wide, ``ffn`` is F wide, ``experts`` e long.

    analyze(dispatch, grouped_gemm_layer0).axis             == "tokens"
    analyze(grouped_gemm_layer1, topk_reduce_combine).axis  == "hidden"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

TOKENS = "tokens"
HIDDEN = "hidden"
FFN = "ffn"
EXPERTS = "experts"


class DependencyError(ValueError):
    """Two operators cannot be overlapped; the message names the axis (or tensor) and the reason."""


class AxisUse(Enum):
    """How an operator touches one axis of one tensor.

    INDEPENDENT: every element is read or finished alone. GATHERED: alone too, but an index known only at run time says
    which element goes where. REDUCED: elements are needed, or become final, only together (sum, contraction, softmax).
    """

    INDEPENDENT = "independent"
    GATHERED = "gathered"
    REDUCED = "reduced"


class TileAxis(Enum):
    """The side of the computing operator's output tiles that the decomposed axis runs along."""

    ROWS = "rows"
    COLUMNS = "columns"


Accesses = Mapping[str, Mapping[str, AxisUse]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The tensors that one operator reads and writes; axes are listed outermost first."""

    name: str  # appears in reasons and errors
    reads: Accesses  # tensor name -> {axis name: use}
    writes: Accesses  # tensor name -> {axis name: use}; the first tensor is the one its tiles cover
    communicates: bool = False  # whether it moves data between ranks


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """An axis along which two operators overlap."""

    tensor: str  # name of the shared tensor
    axis: str  # the axis to cut it along
    tile_axis: TileAxis  # whether the parts are runs of the computing operator's tile rows or of its tile columns
    reasons: Mapping[str, str]  # for every axis of the shared tensor, why it can or cannot be cut


def analyze(producer: Operator, consumer: Operator) -> Decomposition:
    """Find the axis of the shared tensor along which ``consumer`` can start before ``producer`` has finished.

    An axis works when the producer finishes and the consumer reads its elements one by one. Of several axes one that
    neither gathers wins (its parts need no index), then the outermost (its parts are contiguous in memory). Operators
    that cannot overlap raise ``DependencyError``, which names the axes and the reasons.
    """
    pair = f"{producer.name!r} and {consumer.name!r}"
    if producer.communicates == consumer.communicates:
        which = "both communicate" if producer.communicates else "neither communicates"
        raise DependencyError(f"{pair} have nothing to overlap: {which}, exactly one must")
    shared = [tensor for tensor in producer.writes if tensor in consumer.reads]
    if len(shared) != 1:
        what = f"several tensors, {shared}: analyze one pipeline at a time"
        if not shared:
            what = f"no tensor: {list(producer.writes)} are written, {list(consumer.reads)} are read"
        raise DependencyError(f"{pair} share {what}")
    tensor = shared[0]
    produced, consumed = producer.writes[tensor], consumer.reads[tensor]
    if tuple(produced) != tuple(consumed):
        raise DependencyError(f"{pair} disagree about the axes of {tensor!r}: {tuple(produced)} and {tuple(consumed)}")
    reasons = {axis: _reason(produced[axis], consumed[axis], producer, consumer) for axis in produced}
    usable = [axis for axis in produced if AxisUse.REDUCED not in (produced[axis], consumed[axis])]
    if not usable:
        listed = "; ".join(f"axis {axis!r}: {reason}" for axis, reason in reasons.items())
        raise DependencyError(f"no axis of {tensor!r} lets {pair} overlap: {listed or 'it has no axes'}")
    ungathered = [axis for axis in usable if AxisUse.GATHERED not in (produced[axis], consumed[axis])]
    axis = (ungathered or usable)[0]
    compute = consumer if producer.communicates else producer
    return Decomposition(tensor=tensor, axis=axis, tile_axis=_side_of_tiles(compute, tensor, axis), reasons=reasons)


def _side_of_tiles(compute: Operator, tensor: str, axis: str) -> TileAxis:
    result, axes = next(iter(compute.writes.items()))
    if len(axes) != len(TileAxis) or axis not in axes:
        raise DependencyError(
            f"axis {axis!r} of {tensor!r} must be one of the two sides of the tiles of {compute.name!r}, but its "
            f"output {result!r} has the axes {tuple(axes)}"
        )
    return list(TileAxis)[list(axes).index(axis)]


def _reason(produced: AxisUse, consumed: AxisUse, producer: Operator, consumer: Operator) -> str:
    if consumed is AxisUse.REDUCED:
        return f"{consumer.name} reduces over it, so it needs all elements at once"
    if produced is AxisUse.REDUCED:
        return f"{producer.name} finishes its elements only together"
    if AxisUse.GATHERED in (produced, consumed):
        who = consumer.name if consumed is AxisUse.GATHERED else producer.name
        return f"{who} picks each element alone, by an index that must be known first"
    return f"{producer.name} finishes and {consumer.name} reads each element alone"


def operators() -> dict[str, Operator]:
    """Descriptions of the layer's operators, forward and backward, by name.

    A GEMM contracts one axis of its rows and never mixes rows. Grouped GEMMs behind a dispatch gather their rows by
    index, because a received row may serve several experts. Combine sums the routed rows of a token, so it reduces
    tokens. SwiGLU and its backward are epilogues: they only touch elements of the same row and column.
    """
    alone, gathered, reduced = AxisUse.INDEPENDENT, AxisUse.GATHERED, AxisUse.REDUCED

    def dispatch(name: str, source: str, received: str) -> Operator:
        return Operator(
            name=name,
            reads={source: {TOKENS: gathered, HIDDEN: alone}},
            writes={received: {TOKENS: alone, HIDDEN: alone}},
            communicates=True,
        )

    def combine(name: str, weights: Accesses, rows: str, result: str) -> Operator:
        return Operator(
            name=name,
            reads={rows: {TOKENS: reduced, HIDDEN: alone}, **weights},
            writes={result: {TOKENS: alone, HIDDEN: alone}},
            communicates=True,
        )

    described = (
        dispatch("dispatch", "x_local", "x_recv"),
        Operator(
            name="grouped_gemm_layer0",
            reads={
                "x_recv": {TOKENS: gathered, HIDDEN: reduced},
                "w1": {EXPERTS: gathered, FFN: alone, HIDDEN: reduced},
            },
            writes={"hidden_rows": {TOKENS: alone, FFN: alone}},
        ),
        Operator(
            name="grouped_gemm_layer1",
            reads={
                "hidden_rows": {TOKENS: alone, FFN: reduced},
                "w2": {EXPERTS: gathered, HIDDEN: alone, FFN: reduced},
            },
            writes={"y_rows": {TOKENS: alone, HIDDEN: alone}},
        ),
        combine("topk_reduce_combine", {"topk_weights": {TOKENS: gathered}}, "y_rows", "y_local"),
        dispatch("dispatch_grad", "dy_local", "dy_recv"),
        Operator(
            name="dgrad_gemm_layer1",
            reads={
                "dy_recv": {TOKENS: gathered, HIDDEN: reduced},
                "w2": {EXPERTS: gathered, HIDDEN: reduced, FFN: alone},
                "gate_up_rows": {TOKENS: alone, FFN: alone},
            },
            writes={"d_gate_up_rows": {TOKENS: alone, FFN: alone}, "d_topk_weights": {TOKENS: alone}},
        ),
        Operator(
            name="dgrad_gemm_layer0",
            reads={
                "d_gate_up_rows": {TOKENS: alone, FFN: reduced},
                "w1": {EXPERTS: gathered, FFN: reduced, HIDDEN: alone},
            },
            writes={"dx_rows": {TOKENS: alone, HIDDEN: alone}},
        ),
        combine("reduce_combine_grad", {"d_topk_weights": {TOKENS: gathered}}, "dx_rows", "dx_local"),
    )
    return {operator.name: operator for operator in described}


def pipelines() -> dict[str, Decomposition]:
    """Analyse ``layer0``, ``layer1``, ``layer1_backward`` and ``layer0_backward``, in order of execution."""
    named = operators()
    pairs = {
        "layer0": ("dispatch", "grouped_gemm_layer0"),
        "layer1": ("grouped_gemm_layer1", "topk_reduce_combine"),
        "layer1_backward": ("dispatch_grad", "dgrad_gemm_layer1"),
        "layer0_backward": ("dgrad_gemm_layer0", "reduce_combine_grad"),
    }
    return {name: analyze(named[producer], named[consumer]) for name, (producer, consumer) in pairs.items()}
