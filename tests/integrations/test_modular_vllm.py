"""The adapters inside vLLM's own kernel, in processes of their own, as importing vLLM changes much."""

import abc
import inspect
import itertools
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from late import hurry
from layer_cases import LayerCase, assert_as_close, rank_inputs
from layer_ranks import open_group
from modular_cases import dequantized_weights, expected, rank_weights
from pages import program
from ranks import in_ranks
from torch import Tensor

from comet.errors import StepFailedError, UnavailableError
from comet.integrations.vllm import adapt_experts, adapt_prepare_finalize
from comet.integrations.vllm.adapters import (
    BASES,
    PACKAGE,
    ExpertsAdapter,
    PrepareFinalizeAdapter,
    WeightCache,
    global_routing,
    map_ids,
    scheme,
)
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup
from comet.layout import Biases, ExpertLayout
from comet.modular import (
    AllToAll,
    ContiguousRows,
    DelegateReduce,
    Experts,
    FusedExperts,
    FusedPrepareFinalize,
    GroupedBatched,
    GroupedContiguous,
    NoOpReduce,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)
from comet.modular.composer import elements
from comet.quantization.formats import FP8, MXFP8, WEIGHT_TYPES, Weight, quantize_rows
from comet.reference.layer import reference_experts

FOLDER = Path(__file__).parents[2] / "build" / "vllm"  # ``make vllm`` installs vLLM there.
WEIGHT_DTYPES = {Tensor: None, FP8: torch.float8_e4m3fn, MXFP8: "mxfp8"}

needs_vllm = pytest.mark.skipif(not (FOLDER / "ready").exists(), reason="needs vLLM in build/vllm: make vllm")

CASE = LayerCase("vllm", 1, 1, (13,), seed=8, routing="masked")
TWO_RANKS = [
    LayerCase("vllm ep2", 2, 1, (17, 4), seed=9, routing="masked", top_k=3),
    LayerCase("vllm, no rows on a rank", 2, 1, (9, 2), seed=10, routing="first_half"),
]


def modules() -> tuple[Any, Any]:
    """vLLM's ``modular_kernel`` and ``config``; whatever Comet has installed itself comes first."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    from vllm.model_executor.layers.fused_moe import config, modular_kernel

    return modular_kernel, config


def moe_config_of(case: LayerCase, activation: str = "silu", **fields: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    _, config = modules()
    parallel = config.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=case.ep, ep_size=case.ep, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=case.ep > 1, all2all_backend="naive", enable_eplb=False,
    )  # fmt: skip
    return config.FusedMoEConfig(
        num_experts=case.num_experts, num_logical_experts=case.num_experts, experts_per_token=case.top_k,
        num_local_experts=case.num_experts // case.ep, hidden_dim=case.hidden_size, intermediate_size=case.ffn_size,
        activation=MoEActivation(activation), device="cpu", routing_method=config.RoutingMethodType.Default,
        moe_parallel_config=parallel, in_dtype=case.dtype, **fields,
    )  # fmt: skip


def quant_config_of(
    case: LayerCase, rank: int, weight_type: type[Weight], *, fp8_rows: bool = False, **fields: Any
) -> Any:
    w1, w2 = (getattr(weight, "scales", None) for weight in rank_weights(case, rank, weight_type))
    rows = dict(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128]) if fp8_rows else {}
    weight_dtype: Any = WEIGHT_DTYPES[weight_type]
    scales = {"w1_scale": w1, "w2_scale": w2} | fields
    return modules()[1].FusedMoEQuantConfig.make(**rows, weight_dtype=weight_dtype, **scales)


def expert_map_of(case: LayerCase, rank: int) -> Tensor | None:
    if case.ep == 1:
        return None
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    found = torch.full((case.num_experts,), -1, dtype=torch.int32)
    local = torch.arange(layout.experts_local, dtype=torch.int32)
    found[layout.first_expert : layout.first_expert + layout.experts_local] = local
    return found


def contract_breaches(adapted: type) -> list[str]:
    """Return the methods that an adapter ``(mixin, abstract class)`` lacks, and arguments that differ."""
    mixin, base = adapted.__bases__
    found = [f"{name} is missing" for name in sorted(getattr(adapted, "__abstractmethods__", ()))]
    for name, ours in vars(mixin).items():
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None or name.startswith("__"):
            continue
        if isinstance(theirs, property) or isinstance(ours, property):
            same = isinstance(theirs, property) and isinstance(ours, property)
        else:
            same = arguments(getattr(mixin, name)) == arguments(getattr(base, name))
        if not same:
            found.append(f"{name} differs")
    halves = ("prepare_async", "finalize_async")
    if hasattr(base, halves[0]) and adapted.supports_async is not base.supports_async:
        found += [f"{half} is missing" for half in halves if getattr(adapted, half) is getattr(base, half)]
    return found


def arguments(method: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(method).parameters.values()]


def contiguous_experts(case: LayerCase, group: ExpertGroup) -> list[Experts]:
    config = case.config
    return [
        GroupedContiguous(config, group),
        GroupedContiguous(config, group, reduce=DelegateReduce()),
        GroupedContiguous(config, group, reduce=NoOpReduce()),
        WarpDecodeExperts(config, group),
    ]


def batched_experts(case: LayerCase, group: ExpertGroup) -> list[Experts]:
    config = case.config
    return [
        GroupedBatched(config, group),
        GroupedBatched(config, group, reduce=DelegateReduce()),
    ]


def make_kernel(transport, inner, case, rank, weight_type=Tensor, activation="silu", **fields) -> Any:
    quant_config = quant_config_of(case, rank, weight_type, **fields)
    dispatch = adapt_prepare_finalize(transport)
    experts = adapt_experts(inner, moe_config_of(case, activation), quant_config, dispatch.max_num_tokens_per_rank())
    return modules()[0].FusedMoEKernel(dispatch, experts)


def run_kernel(kernel, case, rank, weight_type=Tensor, activation="silu", held=None) -> Tensor:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    inputs = rank_inputs(case, rank)
    w1, w2 = held or (elements(weight) for weight in rank_weights(case, rank, weight_type))
    return kernel.apply(
        inputs.tokens.clone(), w1, w2, inputs.top_k_weights, inputs.top_k_ids, MoEActivation(activation),
        case.num_experts, expert_map_of(case, rank), False,
    )  # fmt: skip


def start_vllm() -> None:
    modules()
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory, vLLM's workspaces too, with NaN
    torch.accelerator.empty_cache = lambda: None  # which vLLM calls when its workspace grows, and needs a GPU
    init_workspace_manager(torch.device("cpu"))


def check_kernels(rank: int, cases: list[LayerCase]) -> None:
    for case in cases:
        group, config = open_group(case), case.config
        rows = [AllToAll, SymmetricContiguous, *([SingleRank] if case.world_size == 1 else [])]
        pairs = [*itertools.product(rows, contiguous_experts(case, group))]
        pairs += itertools.product([SymmetricBatched], batched_experts(case, group))
        for (transport, inner), weight_type in itertools.product(pairs, WEIGHT_TYPES):
            kernel = make_kernel(transport(config, group), inner, case, rank, weight_type)
            dtypes = (torch.float64, case.dtype)
            exact, same = (expected(case, rank, dtype, 0, weight_type=weight_type) for dtype in dtypes)
            parts = (transport, type(inner), type(inner.reduce), weight_type)
            what = " + ".join(part.__name__ for part in parts) + f", {case.name}, rank {rank}"
            for call in range(2):
                y = run_kernel(kernel, case, rank, weight_type)
                assert_as_close(y, exact, same, case.dtype, f"{what}, call {call}")
        group.close()


@pytest.mark.slow
@needs_vllm
@in_ranks(2, timeout=400)
def test_the_kernel_of_vllm_on_two_ranks_with_an_expert_map(rank: int, world_size: int) -> None:
    start_vllm()
    check_kernels(rank, TWO_RANKS)


def check_parts(kernel: Any, kinds: dict[type, Any]) -> None:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reductions
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    rows, batches = kernel.FusedMoEActivationFormat.Standard, kernel.FusedMoEActivationFormat.BatchedExperts
    assert kinds[AllToAll].activation_format is kinds[GroupedContiguous].activation_format() is rows
    assert kinds[SymmetricBatched].activation_format is kinds[GroupedBatched].activation_format() is batches
    assert type(kinds[AllToAll]).__name__ == "CometAllToAll"
    assert (kinds[AllToAll].topk_indices_dtype(), kinds[AllToAll].num_dispatchers()) == (torch.int32, 1)
    assert not kinds[AllToAll].supports_async()
    assert not kinds[AllToAll].supports_dbo()
    assert kinds[AllToAll].output_is_reduced()
    assert kinds[AllToAll].max_num_tokens_per_rank() is None
    assert kinds[SymmetricBatched].max_num_tokens_per_rank() == 128
    assert kinds[GroupedContiguous]._supports_activation(MoEActivation.SILU)
    assert not kinds[GroupedContiguous]._supports_activation(MoEActivation.GELU)
    assert kinds[GroupedBatched].finalize_weight_and_reduce_impl() == reductions.TopKWeightAndReduceNaiveBatched(0)
    wanted = reductions.TopKWeightAndReduceContiguous()
    assert kinds[GroupedContiguous].finalize_weight_and_reduce_impl() == wanted


def check_refusals(group: ExpertGroup) -> None:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reductions

    config = CASE.config
    with pytest.raises(ValueError, match="FusedPrepareFinalize must hand out rows to be adapted to vLLM"):
        adapt_prepare_finalize(FusedPrepareFinalize(config, group))
    with pytest.raises(ValueError, match="FusedExperts must take rows to be adapted to vLLM"):
        adapt_experts(FusedExperts(config, group), None, None)
    with pytest.raises(ValueError, match="reduce=NoOpReduce of GroupedBatched must be BatchedReduce or DelegateReduce"):
        adapt_experts(GroupedBatched(config, group, reduce=NoOpReduce()), None, None)
    adapted = adapt_prepare_finalize(AllToAll(config, group))
    inputs = rank_inputs(CASE, 0)
    plain, fp8 = (quant_config_of(CASE, 0, Tensor, fp8_rows=quantized) for quantized in (False, True))
    arguments = [inputs.tokens, inputs.top_k_weights, inputs.top_k_ids, CASE.num_experts, None, False, plain, False]
    with pytest.raises(ValueError, match="apply_router_weight_on_input=True must be left out with vLLM: weights"):
        adapted.prepare(*arguments[:5], True, *arguments[6:])
    with pytest.raises(ValueError, match="num_experts=9 must be 4"):
        adapted.prepare(*arguments[:3], 9, *arguments[4:])
    per_tensor = modules()[1].FusedMoEQuantConfig.make(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"quant_dtype=torch.float8_e4m3fn with block_shape=None must be"):
        adapted.prepare(*arguments[:6], per_tensor, False)
    rows, scales, *_ = adapt_prepare_finalize(SingleRank(config, group)).prepare(*arguments[:6], fp8, False)
    packed = quantize_rows(inputs.tokens)
    assert torch.equal(rows.view(torch.uint8), packed.elements.view(torch.uint8)), "experts of vLLM want rows in FP8"
    assert torch.equal(scales, packed.scales)
    rows = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="weight_and_reduce_impl=TopKWeightAndReduceNaiveBatched must be one of"):
        adapted.finalize(None, rows, None, None, False, reductions.TopKWeightAndReduceNaiveBatched(0))
    with pytest.raises(ValueError, match="finalize needs the rows of a prepare that came before it"):
        adapted.finalize(None, rows, None, None, False, reductions.TopKWeightAndReduceNoOP())

    grouped = GroupedContiguous(config, group)
    one_bias = quant_config_of(CASE, 0, Tensor, w2_bias=torch.zeros(1))
    block_fp8 = quant_config_of(CASE, 0, FP8)
    clamped = GroupedContiguous(replace(config, activation=Activation("clamped_swiglu")), group)
    for inner, activation, fields, quant_config, message in (
        (grouped, "silu", {"swiglu_limit": 7.0}, plain, "gemm1_clamp_limit=7.0 must be left out with vLLM"),
        (grouped, "silu", {}, one_bias, "w1_bias and w2_bias of the quant_config must both be given, or neither"),
        (grouped, "gelu", {}, plain, "activation=gelu of the moe_config must be one of silu, gelu_tanh, swigluoai, "),
        (grouped, "swigluoai", {}, plain, r"activation=.*'swiglu'.* of GroupedContiguous must be vLLM's .*'clamped_sw"),
        (clamped, "swigluoai", {}, block_fp8, "activation='swigluoai' must be left out with vLLM in block FP8: gate"),
        (clamped, "swigluoai_uninterleave", {}, plain, "gemm1_clamp_limit=None must be given"),
        (clamped, "swigluoai_uninterleave", {"swiglu_limit": 7.0}, plain, "gemm1_beta=0.0 must be 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt_experts(inner, moe_config_of(CASE, activation, **fields), quant_config)

    class GateFirst(GroupedContiguous):
        takes_interleaved = False

    with pytest.raises(ValueError, match="GateFirst cannot read w1 of activation=swigluoai, gate and up rows in turn"):
        adapt_experts(
            GateFirst(replace(config, activation=clamped.activation), group), moe_config_of(CASE, "swigluoai"), plain
        )

    class PlainOnly(GroupedContiguous):
        weight_types = frozenset({Tensor})

    with pytest.raises(ValueError, match="PlainOnly cannot compute with MXFP8 weights"):
        adapt_experts(PlainOnly(config, group), moe_config_of(CASE), quant_config_of(CASE, 0, MXFP8))


def check_schemes(kinds: dict[type, Any]) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    weights = [None, keys.kFp8Static128BlockSym, keys.kMxfp8Static]
    refused = [keys.kFp8StaticTensorSym, keys.kFp8StaticChannelSym, keys.kFp8Static128BlockE8M0Sym, keys.kMxfp4Static]
    supports = type(kinds[GroupedContiguous])._supports_quant_scheme
    assert all(supports(weight, None) for weight in weights)
    assert not any(supports(weight, None) for weight in refused)
    assert not any(supports(None, rows) for rows in (keys.kFp8Dynamic128Sym, keys.kFp8DynamicTokenSym))


def check_activations_and_biases() -> None:
    """gpt-oss's layers, as vLLM has them: biases, and w1 in either order; and GeGLU."""
    from vllm.model_executor.layers.activation import SwigluOAIAndMul

    rows = 8 * torch.randn(5, 2 * CASE.ffn_size)
    theirs = SwigluOAIAndMul.forward_native(types.SimpleNamespace(alpha=1.702, limit=7.0), rows)  # type: ignore[arg-type]
    torch.testing.assert_close(theirs, Activation("clamped_swiglu").forward(rows[:, ::2], rows[:, 1::2]))
    gentle = Activation("clamped_swiglu", alpha=1.5, limit=0.5)
    limits = dict(gemm1_alpha=1.5, gemm1_clamp_limit=0.5, gemm1_beta=1.0)
    layers: list[tuple[str, Activation, dict[str, Any]]] = [
        ("swigluoai", Activation("clamped_swiglu"), {}),
        ("swigluoai", gentle, limits),
        ("swigluoai_uninterleave", gentle, limits),
        ("gelu_tanh", Activation("geglu"), {}),
    ]
    kinds = [
        (SymmetricContiguous, GroupedContiguous),
        (SingleRank, WarpDecodeExperts),
        (SymmetricBatched, GroupedBatched),
    ]
    for (name, activation, fields), weight_type in itertools.product(layers, (Tensor, MXFP8)):
        config = replace(CASE.config, activation=activation, expert_bias=True)
        group, inputs = open_group(CASE), rank_inputs(CASE, 0)
        b1, b2 = torch.randn(CASE.num_experts, 2 * CASE.ffn_size), torch.randn(CASE.num_experts, CASE.hidden_size)
        w1, *others = [weight.float() for weight in dequantized_weights(CASE, weight_type)]
        routed, of_layer = (inputs.top_k_ids, inputs.top_k_weights), (w1.flatten(1, 2), *others)
        wanted = [
            reference_experts(
                inputs.tokens, *routed, *(each.flip(0) if moved else each for each in of_layer), activation=activation,
                biases=Biases(b1.flip(0), b2.flip(0)) if moved else Biases(b1, b2),
            )
            for moved in (False, True)
        ]  # fmt: skip
        order = torch.arange(2 * CASE.ffn_size)
        if name == "swigluoai":
            order = order.view(2, -1).T.flatten()
        stored = rank_weights(CASE, 0, weight_type)
        for transport, kind in kinds:
            if kind is WarpDecodeExperts and weight_type is not Tensor:
                continue  # Warp decode refuses biases of quantised weights by name.
            held = elements(stored[0])[:, order], elements(stored[1]).clone()
            given = dict(w1_bias=b1[:, order], w2_bias=b2.clone())
            if weight_type is MXFP8:
                given |= dict(w1_scale=stored[0].scales[:, order], w2_scale=stored[1].scales.clone())
            kernel = make_kernel(
                transport(config, group), kind(config, group), CASE, 0, weight_type, name, **given, **fields
            )
            for expected_output in wanted:
                found = run_kernel(kernel, CASE, 0, weight_type, name, held)
                what = f"{kind.__name__}, {name}, {weight_type.__name__}: "
                torch.testing.assert_close(found, expected_output, rtol=1e-4, atol=1e-4, msg=what.__add__)
                for each in (*held, *given.values()):  # vLLM reloads weights like this, and no version counts it.
                    each.data.view(torch.uint8).copy_(each.view(torch.uint8).flip(0))
        group.close()


def check_contracts() -> None:
    """Adapters keep to the abstract classes of vLLM."""
    kernel, _ = modules()
    group, config = open_group(CASE), CASE.config
    transports = [AllToAll, SingleRank, SymmetricContiguous, SymmetricBatched]
    kinds: dict[type, Any] = {kind: adapt_prepare_finalize(kind(config, group)) for kind in transports}
    for max_num_tokens, found in ((None, contiguous_experts(CASE, group)), (13, batched_experts(CASE, group))):
        for inner in found:
            quant_config = quant_config_of(CASE, 0, Tensor)
            part = adapt_experts(inner, moe_config_of(CASE), quant_config, max_num_tokens)
            kinds.setdefault(type(inner), part)  # with the reduction that is the default
    for part in kinds.values():
        assert not contract_breaches(type(part)), f"{type(part).__name__}: {contract_breaches(type(part))}"
    check_parts(kernel, kinds)
    check_refusals(group)
    check_schemes(kinds)
    group.close()


@pytest.mark.slow
@needs_vllm
@in_ranks(1, timeout=400)
def test_the_kernel_of_vllm_equals_the_reference(rank: int, world_size: int) -> None:
    """All cases run in one process, as importing vLLM takes most of the time."""
    start_vllm()
    check_contracts()
    check_activations_and_biases()
    check_kernels(rank, [CASE])
    exec(program("docs/howto/vllm.md"), page := {})
    configs = (moe_config_of(CASE), quant_config_of(CASE, 0, Tensor))
    assert page["make_kernel"](CASE.config, open_group(CASE), *configs)


@pytest.mark.slow
@needs_vllm
@in_ranks(2, timeout=400)
def test_a_rank_that_fails_between_the_halves_is_noted(rank: int, world_size: int) -> None:
    """Rank 1 fails between dispatch and combine; both refuse to go on, until they restart."""
    start_vllm()
    case = TWO_RANKS[0]
    group = open_group(case)
    inner = GroupedContiguous(case.config, group)
    kernel = make_kernel(SymmetricContiguous(case.config, group), inner, case, rank)
    right = run_kernel(kernel, case, rank)
    hurry(group.comm, 3.0)
    if rank == 1:
        inner.apply = lambda *_: (_ for _ in ()).throw(MemoryError("out of memory"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError if rank == 1 else (RuntimeError, StepFailedError)):
        run_kernel(kernel, case, rank)
    with pytest.raises(StepFailedError, match=r"in vLLM failed on rank|its combine is missing"):
        run_kernel(kernel, case, rank)
    vars(inner).pop("apply", None)
    group.comm.timeout_s = 60.0
    group.workspace.restart()
    assert torch.equal(run_kernel(kernel, case, rank), right)
    group.close()


@pytest.fixture
def group() -> ExpertGroup:
    return open_group(CASE)


def test_without_vllm_the_error_says_what_to_install(group: ExpertGroup) -> None:
    with pytest.raises(UnavailableError, match=r"needs vLLM 0.25 to 0.33: pip install vllm"):
        adapt_prepare_finalize(AllToAll(CASE.config, group))


def test_a_vllm_that_demands_more_is_named(group: ExpertGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = f"{PACKAGE}.modular_kernel".split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(UnavailableError, match=r"needs vLLM 0.25 to 0.33: FusedMoE.*Modular.* not found"):
        adapt_prepare_finalize(AllToAll(CASE.config, group))

    class Demanding(abc.ABC):
        @abc.abstractmethod
        def supports_chunking(self) -> bool: ...

    for name in BASES:
        monkeypatch.setattr(sys.modules[f"{PACKAGE}.modular_kernel"], name, Demanding, raising=False)
    with pytest.raises(UnavailableError, match=r"0.25 to 0.33: this one has other methods: supports_chunking"):
        adapt_prepare_finalize(AllToAll(CASE.config, group))


def test_weights_are_made_anew_when_anything_is_replaced() -> None:
    w1, w2 = rank_weights(CASE, 0, MXFP8)
    config = types.SimpleNamespace(w1_scale=w1.scales, w2_scale=w2.scales)
    made = WeightCache(config)
    first = made(w1.elements, w2.elements)
    assert made(w1.elements, w2.elements) is first
    assert made(w1.elements.clone(), w2.elements) is not first
    first = made(w1.elements, w2.elements)
    config.w2_scale = w2.scales + 1
    again = made(w1.elements, w2.elements)
    assert again[1].scales is config.w2_scale
    assert made(w1.elements, w2.elements) is again is not first
    config.w2_scale = None
    with pytest.raises(ValueError, match="w1_scale and w2_scale of the quant_config must both be given, or neither"):
        WeightCache(config)(w1.elements, w2.elements)
    per_tensor = types.SimpleNamespace(w1_scale=torch.ones(4), w2_scale=torch.ones(4))
    with pytest.raises(ValueError, match=r"scales of shape \(4,\) must be \(..., N/128, K/128\) = \(4, 1, 1\)"):
        WeightCache(per_tensor)(w1.elements, w2.elements)
    assert scheme(types.SimpleNamespace(dtype=torch.float8_e4m3fn, scale=None)) == (0, 0)


def test_experts_of_a_rank_have_to_be_a_range() -> None:
    """``--expert-placement-strategy round_robin`` has no range; a map that was checked once is not checked again."""
    layout = ExpertLayout(num_experts=4, top_k=2, ep=2, tp=1, rank=1)
    adapter = PrepareFinalizeAdapter(types.SimpleNamespace(layout=layout), None, None)
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    adapter._require_contiguous(expert_map)
    with pytest.raises(
        ValueError, match=r"expert_map=\[-1, 0, -1, 1\] must be \[-1, -1, 0, 1\]: --expert-placement-strat"
    ):
        adapter._require_contiguous(torch.tensor([-1, 0, -1, 1], dtype=torch.int32))
    experts: Any = types.SimpleNamespace(inner=adapter.inner, _is_batched=False)
    call = types.SimpleNamespace(topk_ids=torch.zeros(1, 2), topk_weights=torch.ones(1, 2), expert_map=None)
    for ask in (partial(adapter._require_contiguous, None), partial(ExpertsAdapter._rows, experts, call, expert_map)):
        with pytest.raises(ValueError, match="expert_map=None must be given with ep=2"):
            ask()


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
