"""A stub of vLLM: names and arguments of its abstract classes, nothing of what they do."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from enum import Enum
from inspect import Parameter, Signature
from typing import Any

PACKAGE = "vllm.model_executor.layers.fused_moe"
APPLY_NAMES = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
).split()


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
