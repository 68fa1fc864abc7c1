"""Any dispatch and combine with any expert compute, behind three small interfaces.

``ModularMoE(prepare_finalize, experts)`` refuses a pair that does not fit, with the reason, and is otherwise a path
like those of ``MoE``; see ``comet.modular.interfaces`` for what travels. With ``weight_type=MXFP8`` or ``FP8`` (see
``comet.quantization.formats``) it takes weights of that type.

vLLM has a class for each one here. ``PREPARE_FINALIZE``, ``EXPERTS`` and ``REDUCTIONS`` say which. ``PrepareFinalize``
and ``Experts`` are its ``FusedMoEPrepareAndFinalizeModular`` and ``FusedMoEExpertsModular``, ``ModularMoE`` is its
``FusedMoEKernel``, and ``ActivationFormat`` its ``FusedMoEActivationFormat``. Methods have vLLM's names, but for
``prepare_no_receive`` (``prepare_async``) and ``reduce`` (``finalize_weight_and_reduce_impl``).

Not built: a backward pass (train with ``MoE``), rows that travel in FP8, GEMMs in FP8 (weights in FP8 or MXFP8 are
dequantised before they are multiplied, or as they are read), the fused layer in block FP8
(``comet.layer.routed_experts`` has it).
"""

from comet.modular.all_to_all import AllToAll, SingleRank
from comet.modular.composer import ModularMoE
from comet.modular.experts import (
    FusedExperts,
    GroupedBatched,
    GroupedContiguous,
    WarpDecodeExperts,
)
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedReduce,
    BatchedRows,
    ContiguousReduce,
    ContiguousRows,
    DelegateReduce,
    Experts,
    FusedHandle,
    NoOpReduce,
    PrepareFinalize,
    Received,
    Receiver,
    RoutedTokens,
    TopKReduce,
)
from comet.modular.symmetric import FusedPrepareFinalize, SymmetricBatched, SymmetricContiguous

# All parts, with the names of vLLM's. Each is made by (config, group), the experts with reduce= as well. The tests run
# every combination, with every type of weights: comet.quantization.formats.WEIGHT_TYPES.
PREPARE_FINALIZE: dict[type[PrepareFinalize], str] = {
    SingleRank: "MoEPrepareAndFinalizeNoDPEPModular",
    AllToAll: "MoEPrepareAndFinalizeNaiveDPEPModular",
    SymmetricContiguous: "DeepEPHTPrepareAndFinalize",
    SymmetricBatched: "DeepEPLLPrepareAndFinalize",
    FusedPrepareFinalize: "FusedMoEPrepareAndFinalizeMonolithic",
}
EXPERTS: dict[type[Experts], str] = {
    GroupedContiguous: "TritonExperts",
    GroupedBatched: "BatchedTritonExperts",
    WarpDecodeExperts: "",  # has no counterpart
    FusedExperts: "FusedMoEExpertsMonolithic",
}
REDUCTIONS: dict[type[TopKReduce], str] = {
    NoOpReduce: "TopKWeightAndReduceNoOP",
    ContiguousReduce: "TopKWeightAndReduceContiguous",
    BatchedReduce: "TopKWeightAndReduceNaiveBatched",
    DelegateReduce: "TopKWeightAndReduceDelegate",
}


GONE = {
    "ReferenceExperts": "GroupedContiguous(..., use_kernels=False) is plain torch, too",
    "DequantizingContiguous": "GroupedContiguous takes its place, rows travel in the type of the tokens",
    "DequantizingBatched": "GroupedBatched takes its place, rows travel in the type of the tokens",
}


def __getattr__(name: str) -> object:
    if name in GONE:
        raise ImportError(f"{name} is gone: {GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
