"""Any dispatch and combine with any expert compute, behind three small interfaces.

``ModularMoE(prepare_finalize, experts)`` refuses a pair that does not fit, with the reason, and is otherwise a path
like those of ``MoE``; see ``comet.modular.interfaces`` for what travels. With ``weight_type=MXFP8`` or ``FP8`` (see
``comet.quantization.formats``) it takes weights of that type. Names here and in vLLM, one to one:

======================  =====================================================
here                    vLLM
======================  =====================================================
ActivationFormat        FusedMoEActivationFormat
PrepareFinalize         FusedMoEPrepareAndFinalizeModular
Experts                 FusedMoEExpertsModular
TopKReduce              TopKWeightAndReduce
ModularMoE              FusedMoEKernel
RoutedTokens            prepare(a1, topk_weights, topk_ids)
Received                PrepareResultType
Receiver                ReceiverType
ContiguousRows          FusedMoEActivationFormat.Standard
BatchedRows             FusedMoEActivationFormat.BatchedExperts
FusedHandle             PrepareMonolithicResultType
NoOpReduce              TopKWeightAndReduceNoOP
ContiguousReduce        TopKWeightAndReduceContiguous
BatchedReduce           TopKWeightAndReduceNaiveBatched
DelegateReduce          TopKWeightAndReduceDelegate
SingleRank              MoEPrepareAndFinalizeNoDPEPModular
AllToAll                MoEPrepareAndFinalizeNaiveDPEPModular
SymmetricContiguous     DeepEPHTPrepareAndFinalize
SymmetricBatched        DeepEPLLPrepareAndFinalize
FusedPrepareFinalize    FusedMoEPrepareAndFinalizeMonolithic
FusedExperts            FusedMoEExpertsMonolithic
ReferenceExperts        NaiveBatchedExperts
GroupedContiguous       TritonExperts
GroupedBatched          BatchedTritonExperts
WarpDecodeExperts       (no counterpart)
DequantizingContiguous  DeepGemmExperts
DequantizingBatched     BatchedDeepGemmExperts
======================  =====================================================

======================  =====================================================
method here             method in vLLM
======================  =====================================================
prepare                 prepare
prepare_no_receive      prepare_async
finalize                finalize
activation_format       activation_format
apply                   apply
reduce                  finalize_weight_and_reduce_impl
takes_fp8               expects_unquantized_inputs, negated
weight_types            _supports_quant_scheme
======================  =====================================================

Not built: a backward pass (train with ``MoE``), GEMMs in FP8 (rows and weights in FP8 or MXFP8 are dequantised before
they are multiplied, or as they are read), the fused layer in block FP8 (``comet.layer.routed_experts`` has it).
"""

from comet.modular.all_to_all import AllToAll, SingleRank
from comet.modular.composer import ModularMoE
from comet.modular.experts import (
    DequantizingBatched,
    DequantizingContiguous,
    FusedExperts,
    GroupedBatched,
    GroupedContiguous,
    ReferenceExperts,
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

# All there are, each made by (config, group), the experts with reduce= as well. The tests run every combination, with
# every type of weights: comet.quantization.formats.WEIGHT_TYPES.
PREPARE_FINALIZE = (SingleRank, AllToAll, SymmetricContiguous, SymmetricBatched, FusedPrepareFinalize)
EXPERTS = (
    ReferenceExperts,
    GroupedContiguous,
    GroupedBatched,
    WarpDecodeExperts,
    DequantizingContiguous,
    DequantizingBatched,
    FusedExperts,
)
REDUCTIONS = (NoOpReduce, ContiguousReduce, BatchedReduce, DelegateReduce)
