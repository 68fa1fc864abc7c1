"""The adapters to vLLM against a stub of its signatures, driven in the order its kernel drives them."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch
from layer_cases import LayerCase, assert_as_close, rank_inputs
from modular_cases import expected, make_group, rank_weights
from ranks import run_ranks
from torch import Tensor
from vllm_stub import (
    PACKAGE,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalizeModular,
    MoEActivation,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
    install_stub,
)

from comet.errors import UnavailableError
from comet.group import ExpertGroup
from comet.integrations.vllm import adapt_experts, adapt_prepare_finalize, global_routing, map_ids
from comet.integrations.vllm_quant import WeightCache, weight_type_of
from comet.layout import ExpertLayout
from comet.modular import (
    AllToAll,
    ContiguousRows,
    DelegateReduce,
    DequantizingContiguous,
    GroupedBatched,
    GroupedContiguous,
    NoOpReduce,
    ReferenceExperts,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)
from comet.modular.composer import elements
from comet.quantize import MXFP8, WEIGHT_TYPES, Weight

CASE = LayerCase("vllm", 1, 1, (13,), seed=8, routing="masked")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stub(monkeypatch.setitem)


@pytest.fixture
def group() -> ExpertGroup:
    return make_group(CASE)


QUANT = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
NOT_QUANT = types.SimpleNamespace(quant_dtype=None, block_shape=None)


def drive(prepare_finalize: Any, experts: Any, case: LayerCase, rank: int, *, positional: bool = False) -> Tensor:
    """prepare -> allocate workspaces full of NaN, the output in the first of them -> apply -> finalize."""
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    inputs = rank_inputs(case, rank)
    w1, w2 = (elements(weight) for weight in rank_weights(case, rank, weight_type_of(experts.quant_config)))
    quant = NOT_QUANT if experts.expects_unquantized_inputs else QUANT
    expert_map = None
    if case.ep > 1:
        expert_map = torch.full((case.num_experts,), -1, dtype=torch.int32)
        local = torch.arange(layout.experts_local, dtype=torch.int32)
        expert_map[layout.first_expert : layout.first_expert + layout.experts_local] = local
    routing = (inputs.top_k_weights, inputs.top_k_ids)
    a, scale, meta, ids, weights = prepare_finalize.prepare(
        inputs.tokens, *routing, case.num_experts, expert_map, False, quant, experts.expects_unquantized_inputs
    )
    sizes = (a.shape[0], w1.shape[1], a.shape[1], ids.shape[1], case.num_experts, w1.shape[0])
    first, second, out = experts.workspace_shapes(*sizes, meta, MoEActivation.SILU)
    workspace13 = torch.full((max(math.prod(first), math.prod(out)),), float("nan"))
    workspace2 = torch.full((math.prod(second),), float("nan")).view(second)
    output = workspace13[: math.prod(out)].view(out)
    arguments = dict(
        output=output, hidden_states=a, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=MoEActivation.SILU,
        global_num_experts=case.num_experts, expert_map=expert_map, a1q_scale=scale, a2_scale=None,
        workspace13=workspace13, workspace2=workspace2, expert_tokens_meta=meta, apply_router_weight_on_input=False,
    )  # fmt: skip
    if positional:
        experts.apply(*arguments.values())
    else:
        experts.apply(**arguments)
    y = torch.full_like(inputs.tokens, float("nan"))
    reduce = experts.finalize_weight_and_reduce_impl()
    prepare_finalize.finalize(y, output, *routing, False, reduce)
    return y


def run_adapted(rank: int, world_size: int, case: LayerCase) -> None:
    install_stub()
    group, config = make_group(case), case.config
    moe_config = types.SimpleNamespace(in_dtype=case.dtype)
    transports = [AllToAll, SymmetricContiguous, *([SingleRank] if world_size == 1 else [])]
    compute = [
        ReferenceExperts(config, group),
        ReferenceExperts(config, group, reduce=DelegateReduce()),
        GroupedContiguous(config, group),
        GroupedContiguous(config, group, reduce=DelegateReduce()),
        GroupedContiguous(config, group, reduce=NoOpReduce()),
        WarpDecodeExperts(config, group),
        DequantizingContiguous(config, group),
    ]
    for transport, weight_type, (index, inner) in itertools.product(transports, WEIGHT_TYPES, enumerate(compute)):
        quant_config = quant_config_of(case, rank, weight_type)
        adapted = adapt_prepare_finalize(transport(config, group)), adapt_experts(inner, moe_config, quant_config)
        y = drive(*adapted, case, rank, positional=index == 2)
        what_is = dict(quantized=inner.takes_fp8, weight_type=weight_type)
        exact, same = (expected(case, rank, dtype, 0, **what_is) for dtype in (torch.float64, case.dtype))
        parts = (transport, type(inner), type(inner.reduce), weight_type)
        assert_as_close(y, exact, same, case.dtype, " + ".join(part.__name__ for part in parts) + f", rank {rank}")
    group.close()


def quant_config_of(case: LayerCase, rank: int, weight_type: type[Weight]) -> Any:
    """vLLM's, which holds the scales of the weights, if they have any."""
    scales = (getattr(weight, "scales", None) for weight in rank_weights(case, rank, weight_type))
    return types.SimpleNamespace(**dict(zip(("w1_scale", "w2_scale"), scales, strict=True)))


def test_adapted_parts_equal_the_reference(stub: None) -> None:
    run_adapted(0, 1, CASE)


def test_adapted_parts_on_two_ranks_with_an_expert_map() -> None:
    run_ranks(run_adapted, 2, LayerCase("vllm ep2", 2, 1, (17, 4), seed=9, routing="masked", top_k=3))


def test_adapters_are_vllm_classes(stub: None, group: ExpertGroup) -> None:
    parts = (
        adapt_prepare_finalize(AllToAll(CASE.config, group)),
        adapt_experts(GroupedContiguous(CASE.config, group), None, None),
    )
    assert isinstance(parts[0], FusedMoEPrepareAndFinalizeModular)
    assert isinstance(parts[1], FusedMoEExpertsModular)
    assert [type(part).__name__ for part in parts] == ["CometAllToAll", "CometGroupedContiguous"]
    assert parts[0].activation_format is parts[1].activation_format() is FusedMoEActivationFormat.Standard
    assert (parts[0].topk_indices_dtype(), parts[0].num_dispatchers()) == (torch.int32, 1)
    assert parts[0].supports_async()
    assert parts[0].output_is_reduced()
    assert parts[0].max_num_tokens_per_rank() is None
    assert parts[1]._supports_activation(MoEActivation.SILU)
    assert not parts[1]._supports_activation(MoEActivation.GELU)
    assert isinstance(parts[1].finalize_weight_and_reduce_impl(), TopKWeightAndReduceContiguous)


def test_without_vllm_the_error_says_what_to_install(group: ExpertGroup) -> None:
    with pytest.raises(UnavailableError, match=r"needs vLLM 0.17 or later: pip install vllm"):
        adapt_prepare_finalize(AllToAll(CASE.config, group))


def test_an_old_vllm_is_named(stub: None, group: ExpertGroup) -> None:
    delattr(sys.modules[f"{PACKAGE}.modular_kernel"], "FusedMoEExpertsModular")
    with pytest.raises(UnavailableError, match=r"needs vLLM 0.17 or later: FusedMoEExpertsModular not found"):
        adapt_experts(GroupedContiguous(CASE.config, group), None, None)


def test_what_is_not_covered_is_refused(stub: None, group: ExpertGroup) -> None:
    config = CASE.config
    with pytest.raises(ValueError, match="SymmetricBatched must work on contiguous rows"):
        adapt_prepare_finalize(SymmetricBatched(config, group))
    with pytest.raises(ValueError, match="GroupedBatched must work on contiguous rows"):
        adapt_experts(GroupedBatched(config, group), None, None)
    adapted = adapt_prepare_finalize(AllToAll(config, group))
    inputs = rank_inputs(CASE, 0)
    arguments = [inputs.tokens, inputs.top_k_weights, inputs.top_k_ids, CASE.num_experts, None, False, NOT_QUANT, False]
    with pytest.raises(ValueError, match="apply_router_weight_on_input=True must be False"):
        adapted.prepare(*arguments[:5], True, *arguments[6:])
    with pytest.raises(ValueError, match="num_experts=9 must be 4"):
        adapted.prepare(*arguments[:3], 9, *arguments[4:])
    per_tensor = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=None)
    with pytest.raises(ValueError, match=r"quant_dtype=torch.float8_e4m3fn with block_shape=None must be"):
        adapted.prepare(*arguments[:6], per_tensor, False)
    inner = SymmetricContiguous(config, group)
    inner.carries_fp8 = False
    with pytest.raises(ValueError, match="SymmetricContiguous cannot send rows in FP8"):
        adapt_prepare_finalize(inner).prepare(*arguments[:6], QUANT, False)
    with pytest.raises(ValueError, match="weight_and_reduce_impl=TopKWeightAndReduceNaiveBatched must be one of"):
        adapted.finalize(None, None, None, None, False, TopKWeightAndReduceNaiveBatched())
    with pytest.raises(ValueError, match="finalize needs the rows of a prepare that came before it"):
        adapted.finalize(None, None, None, None, False, TopKWeightAndReduceNoOP())


def key(group_shape: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """A ``QuantKey`` of vLLM."""
    return types.SimpleNamespace(dtype=dtype, scale=types.SimpleNamespace(group_shape=group_shape))


def test_quant_schemes_are_those_of_the_experts(stub: None, group: ExpertGroup) -> None:
    weights = [None, key((128, 128)), key((1, 32))]
    unscaled = types.SimpleNamespace(dtype=torch.float8_e4m3fn, scale=None)
    refused = [key((-1, -1)), key((1, 128)), key((1, 32), torch.uint8), unscaled]
    for kind, rows in ((GroupedContiguous, None), (DequantizingContiguous, key((1, 128)))):
        adapted = adapt_experts(kind(CASE.config, group), None, None)
        assert all(type(adapted)._supports_quant_scheme(weight, rows) for weight in weights)
        assert not any(adapted._supports_quant_scheme(weight, rows) for weight in refused)
        for other in (None, key((1, 128)), key((1, -1))):
            assert adapted._supports_quant_scheme(None, other) == (other == rows)


def test_weights_that_are_not_covered_are_refused(stub: None, group: ExpertGroup) -> None:
    class PlainOnly(GroupedContiguous):
        weight_types = frozenset({Tensor})

    config = quant_config_of(CASE, 0, MXFP8)
    with pytest.raises(ValueError, match="PlainOnly cannot compute with MXFP8 weights"):
        adapt_experts(PlainOnly(CASE.config, group), None, config)
    w1, w2 = (weight.elements for weight in rank_weights(CASE, 0, MXFP8))
    made = WeightCache(config)
    assert all(first is second for first, second in zip(made(w1, w2), made(w1, w2), strict=True))
    assert made(w1, w2)[0] is not made(w1.clone(), w2)[0]
    config.w2_scale = None
    with pytest.raises(ValueError, match="w1_scale and w2_scale of the quant_config must both be given, or neither"):
        WeightCache(config)(w1, w2)
    per_tensor = types.SimpleNamespace(w1_scale=torch.ones(4), w2_scale=torch.ones(4))
    with pytest.raises(ValueError, match=r"scales of shape \(4,\) must be \(..., N/128, K/128\) = \(4, 1, 1\)"):
        WeightCache(per_tensor)(w1, w2)


def test_global_routing_and_map_ids_examples() -> None:
    layout = ExpertLayout(num_experts=4, top_k=2, ep=2, tp=1, rank=1)
    rows = ContiguousRows(
        tokens=torch.zeros(1, 16),
        top_k_ids=torch.tensor([[1, -1]], dtype=torch.int32),
        top_k_weights=torch.tensor([[0.5, 9.0]]),
    )
    ids, weights = global_routing(rows, layout)
    assert (ids.tolist(), weights.tolist()) == ([[3, 0]], [[0.5, 0.0]])
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    assert map_ids(torch.tensor([[3, 0], [-1, 2]]), expert_map).tolist() == [[1, -1], [-1, 0]]
