"""vLLM's abstract classes in terms of Comet's interfaces, and what its configurations say of a layer's weights."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from copy import copy
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comet import modular
from comet.capabilities import refuse
from comet.config import require
from comet.errors import StepFailedError, UnavailableError
from comet.kernels.runtime.activation import Activation, ActivationName
from comet.layout import Biases, ExpertLayout
from comet.modular import BatchedReduce, NoOpReduce
from comet.modular.interfaces import (
    ActivationFormat,
    BatchedRows,
    ContiguousRows,
    Experts,
    PrepareFinalize,
    Received,
    RoutedTokens,
    Rows,
)
from comet.modular.symmetric import SymmetricBatched
from comet.quantization.formats import FP8, FP8_BLOCK, MX_BLOCK, MXFP8, Weight, quantize_rows

PACKAGE = "vllm.model_executor.layers.fused_moe"
NEEDS = "comet.integrations.vllm needs vLLM 0.25 to 0.33"
BASES = ("FusedMoEPrepareAndFinalizeModular", "FusedMoEExpertsModular", "FusedMoEActivationFormat")
REDUCTIONS = {name: kind for kind, name in modular.REDUCTIONS.items()}
FORMATS = {ActivationFormat.CONTIGUOUS: "Standard", ActivationFormat.BATCHED: "BatchedExperts"}

APPLY_NAMES = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
)
APPLY = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in APPLY_NAMES.split()])

# Rows, their scales, ExpertTokensMetadata, ids and weights.
Prepared = tuple[Tensor, Tensor | None, Any, Tensor | None, Tensor | None]
# Names of activations for the values of vLLM's ``MoEActivation``; ``swigluoai`` has gate and up of w1 in turn.
ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
    "swigluoai": "clamped_swiglu",
    "swigluoai_uninterleave": "clamped_swiglu",
}
# Parameters of SwiGLU: a field of the quant_config, and the field of the moe_config that holds where it is not set.
CLAMPS = {"gemm1_clamp_limit": "swiglu_limit", "gemm1_alpha": "swiglu_alpha", "gemm1_beta": "swiglu_beta"}
# Their values where neither says anything, as vLLM's kernels have them.
DEFAULTS: dict[str, tuple[float | None, float, float]] = {
    "swigluoai": (7.0, 1.702, 1.0),
    "swigluoai_uninterleave": (None, 1.0, 0.0),
}
SOURCES = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
Weights = tuple[Weight, Weight, Biases | None]


def adapt_prepare_finalize(inner: PrepareFinalize, moe_config: Any = None, quant_config: Any = None) -> Any:
    """Wrap a prepare/finalize that hands out rows as a ``FusedMoEPrepareAndFinalizeModular`` of vLLM."""
    name = type(inner).__name__
    require(inner.activation_format in FORMATS, f"{name} must hand out rows to be adapted to vLLM, not a handle")
    kernel = load_vllm()
    kind = _subclass(name, PrepareFinalizeAdapter, kernel.FusedMoEPrepareAndFinalizeModular, vllm=kernel)
    return kind(inner, moe_config, quant_config)


def adapt_experts(inner: Experts, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None) -> Any:
    """Wrap experts that take rows, contiguous or batched, as a ``FusedMoEExpertsModular`` of vLLM.

    Args:
        quant_config: vLLM's; holds the scales of quantised weights.
        max_num_tokens: For batched rows: ``max_num_tokens_per_rank()`` of the prepare/finalize.
    """
    name = type(inner).__name__
    formats = [item for item in FORMATS if item in inner.formats & inner.reduce.formats]
    require(bool(formats), f"{name} must take rows to be adapted to vLLM, not a handle")
    batched = formats[0] is ActivationFormat.BATCHED
    require(
        not (batched and isinstance(inner.reduce, NoOpReduce)),
        f"reduce={type(inner.reduce).__name__} of {name} must be BatchedReduce or DelegateReduce to be adapted to vLLM",
    )
    kernel = load_vllm()
    ours = getattr(kernel.FusedMoEActivationFormat, FORMATS[formats[0]])
    supports = dict(weight_types=inner.weight_types, computes=inner.activation)
    shape = staticmethod(lambda: ours)
    base = kernel.FusedMoEExpertsModular
    kind = _subclass(name, ExpertsAdapter, base, vllm=kernel, activation_format=shape, **supports)
    return kind(inner, moe_config, quant_config, max_num_tokens, inner.layout.world_size if batched else None)


def load_vllm() -> Any:
    """vLLM's module of abstract classes; raises ``UnavailableError`` where it is missing or too old."""
    try:
        kernel = importlib.import_module(f"{PACKAGE}.modular_kernel")
    except ImportError as error:
        raise UnavailableError(f"{NEEDS}: pip install vllm") from error
    missing = [name for name in BASES if not hasattr(kernel, name)]
    if missing:
        raise UnavailableError(f"{NEEDS}: {', '.join(missing)} not found")
    return kernel


def _subclass(name: str, mixin: type, base: Any, **attributes: Any) -> Any:
    """A class of vLLM's kind; raises ``UnavailableError`` where that has methods which are not adapted."""
    kind = type(f"Comet{name}", (mixin, base), attributes)
    missing = getattr(kind, "__abstractmethods__", ())
    if missing:
        raise UnavailableError(f"{NEEDS}: this one has other methods: {', '.join(sorted(missing))}")
    return kind


class PrepareFinalizeAdapter:
    """vLLM's calls in terms of ``PrepareFinalize``; mixed into vLLM's abstract class by ``adapt_prepare_finalize``."""

    vllm: Any

    def __init__(self, inner: PrepareFinalize, moe_config: Any, quant_config: Any) -> None:
        self.inner = inner
        self.moe_config = moe_config
        self.quant_config = quant_config
        self._received: Received | None = None
        self._map: Tensor | None = None  # the last one that was looked at

    @property
    def activation_format(self) -> Any:
        return getattr(self.vllm.FusedMoEActivationFormat, FORMATS[self.inner.activation_format])

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """M for batches, which have room for W * M rows each; else no limit of its own: the group's memory has one."""
        return self.inner.workspace.max_tokens if isinstance(self.inner, SymmetricBatched) else None

    def num_dispatchers(self) -> int:
        return self.inner.layout.world_size

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Prepared:
        """Send the tokens and wait for those of all ranks."""
        refuse("with vLLM", apply_router_weight_on_input=apply_router_weight_on_input)
        layout = self.inner.layout
        require(num_experts == layout.num_experts, f"num_experts={num_experts} must be {layout.num_experts}")
        self._require_contiguous(expert_map)
        quantize = wants_fp8(quant_config, defer_input_quant)
        routed = RoutedTokens(tokens=a1, top_k_ids=topk_ids, top_k_weights=topk_weights)
        with self._step("dispatch"):
            if self._received is not None:  # a combine is missing: this rank failed, and the others must know
                self._received = None
                with self.inner.comm.in_flight:
                    raise StepFailedError("the layer before failed after its dispatch: its combine is missing")
            receive = self.inner.prepare_no_receive(routed)
            with self.inner.comm.in_flight:
                self._received = receive()
        return self._handed_out(self._received.rows, quantize)

    def _require_contiguous(self, expert_map: Tensor | None) -> None:
        """Rows go to the rank that has their expert where each has a range of them; looks once, and waits for it."""
        layout = self.inner.layout
        require_map(expert_map, layout)
        if expert_map is None or expert_map is self._map:
            return
        local = torch.arange(layout.num_experts) - layout.first_expert
        local[(local < 0) | (local >= layout.experts_local)] = -1
        rule = f"must be {local.tolist()}: --expert-placement-strategy linear"
        require(torch.equal(expert_map.cpu().long(), local), f"expert_map={expert_map.tolist()} {rule}")
        self._map = expert_map

    def _step(self, half: str) -> Any:
        """One half of the layer as a step of the group; see ``ModularMoE``."""
        return self.inner.comm.step(f"{half} of a layer in vLLM", collectives=self.inner.uses_collectives)

    def _handed_out(self, rows: Rows, quantize: bool) -> Prepared:
        """Rows as vLLM wants them; the ids of batched rows, which lie by expert, are those it has.

        Rows are quantised where they arrive. What is not finite makes NaN of the row it is in.
        """
        assert isinstance(rows, ContiguousRows | BatchedRows)
        tokens, scales = rows.tokens, None
        if quantize:
            packed = quantize_rows(tokens, trusted=True)
            tokens, scales = packed.elements, packed.scales
        if isinstance(rows, BatchedRows):
            meta = self.vllm.ExpertTokensMetadata(expert_num_tokens=rows.counts, expert_num_tokens_cpu=None)
            return tokens, scales, meta, None, None
        return tokens, scales, None, *global_routing(rows, self.inner.layout)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Reduce, send home and add up, into ``output (T, D)``."""
        refuse("with vLLM", apply_router_weight_on_input=apply_router_weight_on_input)
        name = type(weight_and_reduce_impl).__name__
        fitting = [known for known, kind in REDUCTIONS.items() if self.inner.activation_format in kind.formats]
        require(name in fitting, f"weight_and_reduce_impl={name} must be one of {', '.join(fitting)}")
        received, self._received = self._received, None
        require(received is not None, "finalize needs the rows of a prepare that came before it")
        assert received is not None
        reduce = REDUCTIONS[name]() if fused_expert_output.numel() else NoOpReduce()  # vLLM runs no experts on no rows
        with self._step("combine"), self.inner.comm.in_flight:
            output.copy_(self.inner.finalize(fused_expert_output, received, reduce))


class ExpertsAdapter:
    """vLLM's calls in terms of ``Experts``; mixed into vLLM's abstract class by ``adapt_experts``."""

    vllm: Any
    weight_types: frozenset[type[Weight]]
    computes: Activation
    activation_format: Callable[[], Any]

    def __init__(
        self,
        inner: Experts,
        moe_config: Any,
        quant_config: Any,
        max_num_tokens: int | None,
        num_dispatchers: int | None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)  # type: ignore[call-arg]
        self.inner = inner
        kind, name = weight_type_of(quant_config), type(inner).__name__
        require(kind in inner.weight_types, f"{name} cannot compute with {kind.__name__} weights")
        wanted, interleaved = activation_of(moe_config, quant_config)
        require(self.computes == wanted, f"activation={self.computes} of {name} must be vLLM's {wanted}")
        refuse("with vLLM in block FP8", activation="swigluoai" if interleaved and kind is FP8 else None)
        b1, b2 = (getattr(quant_config, bias, None) is None for bias in ("w1_bias", "w2_bias"))
        require(b1 == b2, "w1_bias and w2_bias of the quant_config must both be given, or neither")
        if interleaved:
            require(inner.takes_interleaved, f"{name} cannot read w1 of activation=swigluoai, gate and up rows in turn")
            self.inner = copy(inner)  # the caller's may also be that of other layers
            self.inner.interleaved = True
        self._weights = WeightCache(quant_config)

    @staticmethod
    def _supports_current_device() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        shared: dict[type[Weight], tuple[int, ...] | None] = {
            Tensor: None,
            FP8: (FP8_BLOCK, FP8_BLOCK),
            MXFP8: (1, MX_BLOCK),
        }
        return activation_key is None and scheme(weight_key) in [shared[kind] for kind in cls.weight_types]

    @classmethod
    def _supports_activation(cls, activation: Any) -> bool:
        return ACTIVATIONS.get(getattr(activation, "value", activation)) == cls.computes.name

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """vLLM's class for the reduction that is left to do."""
        reductions = importlib.import_module(f"{PACKAGE}.topk_weight_and_reduce")
        ours = type(self.inner.reduce)
        name = next(name for name, kind in REDUCTIONS.items() if kind is ours)
        return getattr(reductions, name)(*([self.inner.layout.ep_rank] if ours is BatchedReduce else []))

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of vLLM's two workspaces, which stay empty, and of the output; M is N or B of the rows.

        Comet takes what lies between from torch's allocator, as a CUDA graph does from its own.
        """
        if isinstance(self.inner.reduce, NoOpReduce):
            return (0,), (0,), (M, K)
        return (0,), (0,), ((local_num_experts, M, K) if self._is_batched else (M, topk, K))

    def apply(self, *args: Any, **kwargs: Any) -> None:
        """Compute the outputs into ``output``; arguments as vLLM's class names them."""
        call = SimpleNamespace(**APPLY.bind(self, *args, **kwargs).arguments)
        refuse("with vLLM", apply_router_weight_on_input=call.apply_router_weight_on_input)
        wanted = self.moe_config.activation  # type: ignore[attr-defined]
        require(call.activation == wanted, f"activation={call.activation} must be the moe_config's {wanted}")
        require(call.a1q_scale is None, f"{type(self.inner).__name__} takes rows that are not quantised")
        rows = self._rows(call, call.hidden_states)
        w1, w2, biases = self._weights(call.w1, call.w2)
        added = () if biases is None else (Biases(*(bias.to(call.output.dtype) for bias in biases)),)
        outputs = self.inner.apply(rows, w1, w2, call.output, *added)
        if outputs is not call.output:
            call.output.copy_(outputs)

    apply.__signature__ = APPLY  # type: ignore[attr-defined]

    @property
    def _is_batched(self) -> bool:
        return bool(self.activation_format() is self.vllm.FusedMoEActivationFormat.BatchedExperts)

    def _rows(self, call: Any, tokens: Tensor) -> ContiguousRows | BatchedRows:
        weights = call.topk_weights.float()
        if not self._is_batched:
            require_map(call.expert_map, self.inner.layout)
            ids = map_ids(call.topk_ids, call.expert_map)
            return ContiguousRows(tokens=tokens, top_k_ids=ids, top_k_weights=weights)
        # The rows' tokens are left out: the reduction knows them, and experts do not ask.
        counts = call.expert_tokens_meta.expert_num_tokens
        return BatchedRows(tokens=tokens, counts=counts, row_slots=call.topk_ids, top_k_weights=weights)


def global_routing(rows: ContiguousRows, layout: ExpertLayout) -> tuple[Tensor, Tensor]:
    """Local ids and their weights as vLLM's experts expect them: global ids, all of them in range.

    A slot that is not computed here names an expert of another rank, which the expert map leaves out, with weight 0;
    without other shards it stays -1.

    Example: e = 2 on shard 1 of 2: ids ``[[1, -1]]``, weights ``[[0.5, 9]]`` give ``[[3, 0]]`` and ``[[0.5, 0]]``.
    """
    elsewhere = rows.top_k_ids < 0
    other = -1 if layout.ep == 1 else (layout.first_expert + layout.experts_local) % layout.num_experts
    return (rows.top_k_ids + layout.first_expert).masked_fill(elsewhere, other), rows.top_k_weights.masked_fill(
        elsewhere, 0.0
    )


def require_map(expert_map: Tensor | None, layout: ExpertLayout) -> None:
    """Raise ``ValueError`` where ids are global and no map makes them local; vLLM has a map where EP > 1."""
    require(expert_map is not None or layout.ep == 1, f"expert_map=None must be given with ep={layout.ep}")


def map_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Global ids as local ones: map ``[-1, -1, 0, 1]`` and ids ``[[3, 0], [-1, 2]]`` give ``[[1, -1], [-1, 0]]``."""
    if expert_map is None:
        return topk_ids.int()
    return expert_map[topk_ids.clamp(min=0).long()].masked_fill(topk_ids < 0, -1).int()


class WeightCache:
    """vLLM's weights with the scales and biases of its quant_config.

    Made once, because looking at scales waits for the device, and again when vLLM puts another tensor in place of one
    of them. Nothing is copied: what vLLM writes into them, as it does to reload or to move experts, counts at once.
    """

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        self._sources: tuple[Tensor | None, ...] = ()
        self._made: Weights | None = None

    def __call__(self, w1: Tensor, w2: Tensor) -> Weights:
        """w1 and w2, as they are or in the type that their scales say; and their biases."""
        of_config = [getattr(self.quant_config, name, None) for name in SOURCES]
        sources = (w1, w2, *of_config)
        if self._made is None or any(map(operator.is_not, sources, self._sources)):
            self._made, self._sources = self._make(w1, w2, *of_config), sources
        return self._made

    def _make(self, w1: Tensor, w2: Tensor, *of_config: Tensor | None) -> Weights:
        w1_scale, w2_scale, b1, b2 = of_config
        biases = None if b1 is None or b2 is None else Biases(b1, b2)
        if weight_type_of(self.quant_config) is Tensor:
            return w1, w2, biases
        return quantized(w1, w1_scale), quantized(w2, w2_scale), biases


def activation_of(moe_config: Any, quant_config: Any) -> tuple[Activation, bool]:
    """Return the activation of a layer of vLLM, and whether gate and up rows of w1 are in turn."""
    value = getattr(moe_config.activation, "value", moe_config.activation)
    require(value in ACTIVATIONS, f"activation={value} of the moe_config must be one of {', '.join(ACTIVATIONS)}")
    name, defaults = ACTIVATIONS[value], DEFAULTS.get(value, (None, None, None))
    given = {}
    for (field, other), default in zip(CLAMPS.items(), defaults, strict=True):
        found = (getattr(quant_config, field, None), getattr(moe_config, other, None), default)
        given[field] = next((number for number in found if number is not None), None)
    if name != "clamped_swiglu":
        refuse("with vLLM", **given)
        return Activation(name), False
    limit, alpha, beta = given.values()
    require(limit is not None, f"gemm1_clamp_limit={limit} must be given for activation={value}")
    require(beta == 1, f"gemm1_beta={beta} must be 1.0 for activation={value}: it is added to up")
    return Activation(name, alpha=alpha, limit=limit), value == "swigluoai"


def quantized(elements: Tensor, scales: Tensor | None) -> FP8 | MXFP8:
    """Elements with their scales, in the type that the scales' dtype says."""
    if scales is None:
        raise ValueError("w1_scale and w2_scale of the quant_config must both be given, or neither")
    if scales.dtype == torch.uint8:
        return MXFP8(elements=elements, scales=scales)
    return FP8(elements=elements, scales=scales)


def weight_type_of(quant_config: Any) -> type[Weight]:
    """The type of the weights of a layer, by its scales: none, uint8 (MXFP8) or anything else, which has to be FP8."""
    scales = getattr(quant_config, "w1_scale", None)
    if scales is None:
        return Tensor
    return MXFP8 if scales.dtype == torch.uint8 else FP8


def scheme(key: Any) -> tuple[int, ...] | None:
    """Rows and columns that share a scale, of a ``QuantKey`` of vLLM in e4m3; ``(0, 0)`` for what is not known here."""
    if key is None:
        return None
    shape = tuple(getattr(key.scale, "group_shape", (0, 0)))
    scales = torch.uint8 if shape == (1, MX_BLOCK) else torch.float32
    return shape if key.dtype == torch.float8_e4m3fn and getattr(key.scale, "dtype", None) == scales else (0, 0)


def wants_fp8(quant_config: Any, defer_input_quant: bool) -> bool:
    """Whether experts of vLLM want rows in FP8; raises ``ValueError`` where it would not be our way."""
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None or defer_input_quant:
        return False
    block = getattr(quant_config, "block_shape", None)
    require(
        dtype == torch.float8_e4m3fn and block is not None and list(block) == [FP8_BLOCK, FP8_BLOCK],
        f"quant_dtype={dtype} with block_shape={block} must be {torch.float8_e4m3fn} with [{FP8_BLOCK}, {FP8_BLOCK}]",
    )
    return True
