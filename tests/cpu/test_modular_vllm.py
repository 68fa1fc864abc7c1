"""The adapters to vLLM against a stub of its signatures, driven in the order its kernel drives them."""

from __future__ import annotations

import math
import sys
import types
from abc import ABC, abstractmethod
from enum import Enum
from inspect import Parameter, Signature
from typing import Any

import pytest
import torch
from layer_cases import LayerCase, assert_as_close, full_weights, rank_inputs, shard
from modular_cases import expected, make_group
from ranks import run_ranks
from torch import Tensor

from comet.errors import UnavailableError
from comet.group import ExpertGroup
from comet.integrations.vllm import adapt_experts, adapt_prepare_finalize, global_routing, map_ids
from comet.layout import ExpertLayout
from comet.modular import (
    AllToAll,
    ContiguousRows,
    DelegateReduce,
    DequantizingExperts,
    GroupedBatched,
    GroupedContiguous,
    NoOpReduce,
    ReferenceExperts,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)

PACKAGE = "vllm.model_executor.layers.fused_moe"
CASE = LayerCase("vllm", 1, 1, (13,), seed=8, routing="masked")


APPLY_NAMES = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
).split()


# ---- the stub: names and arguments of vLLM's classes, nothing of what they do
class FusedMoEActivationFormat(Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"


class FusedMoEPrepareAndFinalizeModular(ABC):
    def __init__(self, moe_config, quant_config) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    def post_init_setup(self, fused_experts) -> None:
        return

    @property
    @abstractmethod
    def activation_format(self): ...

    @abstractmethod
    def topk_indices_dtype(self): ...

    @abstractmethod
    def max_num_tokens_per_rank(self): ...

    @abstractmethod
    def num_dispatchers(self): ...

    @abstractmethod
    def output_is_reduced(self): ...

    def supports_async(self):
        return False

    @abstractmethod
    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
        defer_input_quant,
    ): ...  # fmt: skip

    @abstractmethod
    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ): ...


class FusedMoEExpertsModular(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None) -> None:
        assert self.activation_format() is FusedMoEActivationFormat.Standard
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    @abstractmethod
    def activation_format(): ...

    @staticmethod
    @abstractmethod
    def _supports_current_device(): ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul(): ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key): ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation): ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config): ...

    @abstractmethod
    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ): ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self): ...

    @abstractmethod
    def apply(self, *args, **kwargs): ...

    apply.__signature__ = Signature(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in APPLY_NAMES)


class TopKWeightAndReduceNoOP: ...


class TopKWeightAndReduceContiguous: ...


class TopKWeightAndReduceDelegate: ...


class TopKWeightAndReduceNaiveBatched: ...


def install_stub(setitem: Any = None) -> None:
    """Put the stub into ``sys.modules`` under vLLM's names."""
    setitem = setitem or (lambda modules, name, module: modules.__setitem__(name, module))
    parts = PACKAGE.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        setitem(sys.modules, name, types.ModuleType(name))
    kernel, reduce = (types.ModuleType(f"{PACKAGE}.{name}") for name in ("modular_kernel", "topk_weight_and_reduce"))
    for kind in (FusedMoEActivationFormat, FusedMoEPrepareAndFinalizeModular, FusedMoEExpertsModular):
        setattr(kernel, kind.__name__, kind)
    for kind in (TopKWeightAndReduceNoOP, TopKWeightAndReduceContiguous, TopKWeightAndReduceDelegate):
        setattr(reduce, kind.__name__, kind)
    for module in (kernel, reduce):
        setitem(sys.modules, module.__name__, module)


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
    inputs, (w1, w2) = rank_inputs(case, rank), shard(case, rank, *full_weights(case))
    w1 = w1.flatten(1, 2)
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
        DequantizingExperts(config, group),
    ]
    for transport in transports:
        for index, inner in enumerate(compute):
            if inner.takes_fp8 and not transport.carries_fp8:
                continue
            adapted = adapt_prepare_finalize(transport(config, group)), adapt_experts(inner, moe_config, None)
            y = drive(*adapted, case, rank, positional=index == 2)
            exact, same = (
                expected(case, rank, dtype, 0, quantized=inner.takes_fp8) for dtype in (torch.float64, case.dtype)
            )
            what = f"{transport.__name__} + {type(inner).__name__} {type(inner.reduce).__name__}, rank {rank}"
            assert_as_close(y, exact, same, case.dtype, what)
    group.close()


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
    assert not parts[1]._supports_quant_scheme("fp8", None)
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
    with pytest.raises(ValueError, match="SymmetricContiguous cannot send rows in FP8"):
        adapt_prepare_finalize(SymmetricContiguous(config, group)).prepare(*arguments[:6], QUANT, False)
    with pytest.raises(ValueError, match="weight_and_reduce_impl=TopKWeightAndReduceNaiveBatched must be one of"):
        adapted.finalize(None, None, None, None, False, TopKWeightAndReduceNaiveBatched())
    with pytest.raises(ValueError, match="finalize needs the rows of a prepare that came before it"):
        adapted.finalize(None, None, None, None, False, TopKWeightAndReduceNoOP())


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
