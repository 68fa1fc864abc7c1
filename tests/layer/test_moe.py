"""The layer of routed experts with real ranks, forward and backward, every path against the one-process oracle."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from activation_cases import ACTIVATIONS
from fp8_cases import check_pack, fp8_shard
from layer_cases import LayerCase, rank_inputs
from layer_ranks import build_layer, check_call, poison, run_case, run_cases, train_call
from ranks import in_ranks, run_ranks
from tiers import slow
from torch import Tensor
from training_cases import make_group

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.errors import CommTimeoutError
from comet.kernels.runtime.activation import DEFINITIONS, Activation, Definition
from comet.layer.backend import expert_capacity
from comet.layer.routed_experts import SymmetricPath
from comet.layout import Biases, RoutedTokens
from comet.modular import FusedPrepareFinalize
from comet.moe import MoE

CASES = [
    LayerCase("one rank", 1, 1, (37,)),
    LayerCase("ep2", 2, 1, (40, 40)),
    LayerCase("ep2 unequal", 2, 1, (150, 3)),
    LayerCase("ep2 no tokens on rank 1", 2, 1, (33, 0)),
    LayerCase("ep2 no tokens at all", 2, 1, (0, 0)),
    LayerCase("ep2 one expert takes all", 2, 1, (30, 20), routing="one"),
    LayerCase("ep2 masked slots", 2, 1, (30, 45), top_k=4, routing="masked"),
    LayerCase("ep2 idle experts", 2, 1, (21, 17), num_experts=8, routing="first_half"),
    LayerCase("ep2 all experts", 2, 1, (19, 23), top_k=4),
    LayerCase("ep2 odd widths", 2, 1, (18, 11), hidden_size=48, ffn_size=80, num_panels=3),
    LayerCase("tp2", 1, 2, (31, 29)),
    LayerCase("ep2 three calls", 2, 1, (25, 14), calls=3, delay_s=0.05),
    LayerCase("one rank, ten experts each", 1, 1, (21,), num_experts=12, top_k=10),
    LayerCase("ep2 strided", 2, 1, (37, 150), top_k=3, routing="masked", strided=True, calls=2),
    LayerCase("ep2 experts anywhere", 2, 1, (40, 29), num_experts=8, top_k=3, routing="first_half", relabel=5),
    LayerCase("tp2 of 24 columns", 1, 2, (31, 29), ffn_size=48),
    LayerCase("ep2 split", 2, 1, (40, 70), top_k=3, num_panels=3, hidden_size=48, comm_blocks=2),
    LayerCase("ep2 panel in 6 parts", 2, 1, (40, 31), hidden_size=416, num_panels=1, top_k=3, routing="masked"),
    LayerCase("ep2 float16", 2, 1, (30, 22), dtype=torch.float16),
    LayerCase("ep2 panels in 4 parts", 2, 1, (30, 3), hidden_size=1040, num_panels=4),
]
WIDE = dict(hidden_size=128, ffn_size=128, fp8=True)
FP8_CASES = [
    LayerCase("fp8", 1, 1, (37,), hidden_size=384, ffn_size=256, fp8=True),
    LayerCase("fp8 ep2", 2, 1, (40, 40), hidden_size=256, ffn_size=256, fp8=True),
    LayerCase("fp8 ep2 no tokens at all", 2, 1, (0, 0), **WIDE),
    LayerCase("fp8 ep2 masked", 2, 1, (30, 45), top_k=4, routing="masked", hidden_size=256, ffn_size=128, fp8=True),
    LayerCase("fp8 ep2 strided", 2, 1, (37, 150), top_k=3, routing="masked", strided=True, calls=2, **WIDE),
    LayerCase("fp8 tp2", 1, 2, (31, 29), hidden_size=128, ffn_size=512, fp8=True),
    LayerCase("fp8 ep2 float16", 2, 1, (30, 22), dtype=torch.float16, hidden_size=256, ffn_size=128, fp8=True),
    LayerCase("fp8 ep2 x tp2", 2, 2, (14, 22, 0, 9), hidden_size=128, ffn_size=256, relabel=3, fp8=True),
]
WIDE_CASES = [
    LayerCase("ep4", 4, 1, (20, 9, 0, 31), num_experts=8),
    LayerCase("tp4", 1, 4, (10, 12, 9, 8), ffn_size=64),
    LayerCase("ep2 x tp2", 2, 2, (14, 22, 5, 9), ffn_size=64),
    LayerCase("ep2 x tp2 of 8 columns", 2, 2, (14, 22, 5, 9), ffn_size=16, relabel=3),
    LayerCase("tp4 of 20 columns", 1, 4, (10, 12, 9, 8), ffn_size=80, top_k=3, hidden_size=48),
]
ALL_CASES = CASES + WIDE_CASES + FP8_CASES
QUICK = (
    "one rank", "ep2 no tokens at all", "ep2 masked slots", "ep2 odd widths", "ep2 split", "ep2 experts anywhere",
    "ep2 x tp2 of 8 columns", "ep2 float16", "fp8", "fp8 ep2 no tokens at all", "fp8 ep2 masked", "fp8 ep2 x tp2",
)  # fmt: skip
LATE_S = {"twin": 0.5, "fused": 1.0}  # many times what the other rank needs to come to where it must wait


@pytest.mark.parametrize("is_quick", [True, slow(False)], ids=["quick", "others"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_kernels_in_the_interpreter(world_size: int, is_quick: bool) -> None:
    cases = [case for case in ALL_CASES if case.world_size == world_size and (case.name in QUICK) == is_quick]
    run_ranks(run_cases, world_size, cases, "fused", interpret=True)


@pytest.mark.parametrize("path", ["reference", "plain", "twin"])
@pytest.mark.parametrize("world_size", [1, 2, slow(4)])
def test_torch_with_all_activations(path: str, world_size: int) -> None:
    """Paths run without kernels; with TP = 2 a rank pads its 8 columns."""
    base = LayerCase(
        "bf16", 1, world_size, (14, 22, 0, 9)[:world_size], ffn_size=80, dtype=torch.bfloat16, strided=True
    )
    cases = [base, replace(base, name="all slots masked", routing="none", dtype=torch.float32)]
    cases += [case for case in ALL_CASES if case.world_size == world_size and (path == "twin" or not case.fp8)]
    cases += {1: activated(1, 1), 2: [], 4: activated(2, 2)}[world_size]
    run_ranks(run_cases, world_size, cases, path)


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 2)])
def test_kernels_with_all_activations(ep: int, tp: int) -> None:
    """All run in one rank, and one over ranks that pad their 8 columns."""
    cases = activated(ep, tp)
    run_ranks(run_cases, ep * tp, cases[::4] + cases[3::4] if ep == 1 else cases[-1:], "fused", interpret=True)


def activated(ep: int, tp: int) -> list[LayerCase]:
    """Every activation, with biases, of whole tiles and of less."""
    base = LayerCase("", ep, tp, (11, 20, 29, 38)[: ep * tp], routing="masked", expert_bias=True)
    return [
        replace(base, name=f"{activation.name}, F={ffn_size}", activation=activation, ffn_size=ffn_size)
        for activation in ACTIVATIONS
        for ffn_size in (32, 16)
    ]


def cosine(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return gate.cos() + up


def cosine_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    return gate.cos() + up, -grad * gate.sin(), grad


@pytest.mark.parametrize("path", ["reference", "plain", "twin"])
@in_ranks(2)
def test_an_activation_that_is_not_0_at_0_may_be_padded(rank: int, world_size: int, path: str) -> None:
    """cos(gate) + up: each padded column of hidden is 1, meets zeros of w2, and its gradients are dropped."""
    DEFINITIONS["reglu"] = Definition(cosine, cosine_backward, {})  # this rank ends with the test
    run_case(rank, world_size, replace(activated(1, 2)[1], activation=Activation("reglu")), path)


def test_a_call_with_biases_must_fit_the_layer() -> None:
    case = LayerCase("plain", 1, 1, (2,))
    layer = MoE(case.config, make_group(case.config, max_tokens=16), path="plain")
    assert layer.b1 is None
    routed = RoutedTokens(torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))
    weights, biases = (layer.w1.flatten(1, 2), layer.w2), Biases(torch.zeros(4, 64), torch.zeros(4, 32))
    with pytest.raises(ValueError, match="biases=True of the call must be the layer's expert_bias=False"):
        layer.experts(routed, *weights, biases)


@pytest.mark.parametrize(
    ("factor", "ep", "max_tokens", "top_k", "num_experts", "capacity"),
    [(1.25, 2, 100, 2, 8, 63), (1.1, 1, 500, 6, 60, 55), (1, 1, 100, 2, 8, 25), (1e-5, 1, 100, 2, 8, 1)],
)
def test_capacity_of_the_worked_examples(
    factor: float, ep: int, max_tokens: int, top_k: int, num_experts: int, capacity: int
) -> None:
    config = MoEConfig(hidden_size=16, ffn_size=16, num_experts=num_experts, top_k=top_k, capacity_factor=factor)
    group = replace(make_group(config, max_tokens=max_tokens), parallel=ParallelConfig(ep=ep))
    assert expert_capacity(config, group) == capacity


def late(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return called


@pytest.mark.parametrize("path", ["twin", "fused"])
@in_ranks(2, interpret="path")
def test_a_late_rank_is_waited_for_in_each_step(rank: int, world_size: int, path: str) -> None:
    """Rank 1 is late in each step, and receive buffers are full of NaN: reads that come too early show."""
    case = LayerCase("ep2", 2, 1, (40, 40))
    moe = build_layer(case, rank, path)
    assert isinstance(moe.experts, SymmetricPath)
    backend = moe.experts.backend
    for step in ("dispatch_gemm", "gemm_combine", "keep_received", "dispatch_dgrad", "dgrad_combine"):
        setattr(backend, step, late(getattr(backend, step), LATE_S[path] * rank))
    found = train_call(moe, case, rank, 0)
    moe.group.workspace.check()
    check_call(case, rank, 0, found)


@pytest.mark.parametrize("comm_blocks", [0, 2])
@in_ranks(1, interpret=True)
def test_a_reduce_waits_for_the_gemm_of_its_rank(rank: int, world_size: int, comm_blocks: int) -> None:
    """The compute blocks do nothing."""
    from comet.kernels.layer.triton import gemm_combine, gemm_panels

    for module in (gemm_panels, gemm_combine):
        module.gemm_panels = lambda *args, **options: 0  # the interpreter looks a device function up where it is called
    case = LayerCase("one rank", 1, 1, (37,), comm_blocks=comm_blocks)
    moe, inputs = build_layer(case, rank, "fused"), rank_inputs(case, rank)
    moe.group.comm.timeout_s = 0.02
    with torch.no_grad():
        moe.routed_experts(*inputs.routed)
    assert moe.group.workspace.timeout().startswith("rank 0 waited 0.0 s for rank 0 (layer 1 panel")
    assert not moe.group.workspace.combine_flags.local.any(), "a panel that never came was summed up and sent"


@pytest.mark.parametrize("path", ["twin", "fused"])
@pytest.mark.parametrize("place", ["layer 0 dispatch", "layer 1 combine"])
@in_ranks(2, interpret="path")
def test_a_rank_that_stops_is_named(rank: int, world_size: int, path: str, place: str) -> None:
    """Rank 1 takes part in the plan, and in layer 0 if rank 0 is to wait in layer 1, then does no more."""
    case = LayerCase("ep2", 2, 1, (40, 40))
    moe = build_layer(case, rank, path)
    group = moe.group
    assert isinstance(moe.experts, SymmetricPath)
    backend = moe.experts.backend
    inputs = rank_inputs(case, rank)
    plan = backend.plan(inputs.top_k_ids, inputs.top_k_weights)
    w1, w2 = moe.expert_weights()
    dist.barrier()
    given = inputs.tokens, w1.flatten(1, 2), plan
    if place == "layer 1 combine":
        hidden, _ = backend.dispatch_gemm(*given, save_pre_activation=False)
        dist.barrier()
    group.comm.timeout_s = 0.02  # only here: rank 1 may have been slow before

    def go_on() -> None:
        rows = hidden if place == "layer 1 combine" else backend.dispatch_gemm(*given, save_pre_activation=False)[0]
        backend.gemm_combine(rows, w2, plan)
        group.workspace.check()

    if rank == 0:
        said = rf"^rank 0 waited 0\.0 s for rank 1 \({place}, chunk 0, epoch 1, saw 0\)$"
        with pytest.raises(CommTimeoutError, match=said):
            go_on()


@pytest.mark.parametrize("path", ["twin", "fused"])
def test_too_little_reserved_memory_is_an_error_that_names_the_setting(path: str) -> None:
    said = "more than max_imbalance reserves; raise max_imbalance or leave it unset, and let no token name an"
    with pytest.raises(AssertionError, match=said):
        run_ranks(overflow, 2, path, interpret=path == "fused")


def overflow(rank: int, world_size: int, path: str) -> None:
    config = MoEConfig(hidden_size=16, ffn_size=16, num_experts=4, top_k=2, max_imbalance=1.0)
    group = make_group(config, ep=world_size, max_tokens=128, timeout_s=20.0)
    moe = MoE(config, group, path=path, overlap=OverlapConfig(), seed=0)
    ids = torch.tensor([[0, 1]], dtype=torch.int32).repeat(128, 1)  # everything goes to rank 0
    moe.routed_experts(torch.randn(128, 16), ids, torch.ones(128, 2))
    group.workspace.check()


def drop_on_rank(rank: int, world_size: int, path: str) -> list[torch.Tensor]:
    """Output and gradients of two calls that drop most rows, on a pool full of NaN."""
    config = MoEConfig(hidden_size=32, ffn_size=16, num_experts=4, top_k=2, capacity_factor=0.25)
    group = make_group(config, ep=world_size, max_tokens=64, timeout_s=60.0)
    poison(group)
    moe, found = MoE(config, group, path=path, overlap=OverlapConfig(), seed=0), []
    for call, num_tokens in enumerate((64, 40)):
        generator = torch.Generator().manual_seed(7 * call + rank)
        x = torch.randn(num_tokens, 32, generator=generator).requires_grad_()
        ids = torch.rand(num_tokens, 4, generator=generator).topk(2).indices.int()
        y = moe.routed_experts(x, ids, torch.ones(num_tokens, 2))
        y.sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    group.close()
    return found


def test_a_token_whose_rows_were_all_dropped_gets_zero_not_what_was_there() -> None:
    fused = run_ranks(drop_on_rank, 2, "fused", interpret=True)
    for found, wanted in zip(fused, run_ranks(drop_on_rank, 2, "twin"), strict=True):
        for actual, expected in zip(found, wanted, strict=True):
            assert (expected == 0).all(dim=1).any(), "some token lost all its rows"
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 48), "hidden_size=48 of the input must be the layer's 32"),
        (torch.zeros(3, 32, dtype=torch.float64), "dtype=torch.float64 of the input must be the group's torch.float32"),
        (torch.zeros(3, 32, device="meta"), "device=meta of the input must be the group's cpu"),
        (torch.zeros(65, 32).repeat(2, 1), "max_tokens"),
    ],
)
def test_bad_inputs_are_named(x: torch.Tensor, message: str) -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
    with pytest.raises(ValueError, match=message):
        MoE(config, make_group(config, max_tokens=64))(x)


def moe_config(**changes: object) -> MoEConfig:
    sizes: dict[str, Any] = dict(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
    return MoEConfig(**sizes | changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: moe_config(hidden_size=64.0),
            "hidden_size=64.0 must be a whole number and at least 16 and a multiple of 16",
        ),
        (
            lambda: moe_config(hidden_size="64"),
            "hidden_size='64' must be a whole number and at least 16 and a multiple of 16",
        ),
        (
            lambda: moe_config(top_k=1.5),
            "top_k=1.5 must be a whole number and at least 1 and at most num_experts=4 and at most 32",
        ),
        (lambda: moe_config(renormalize="false"), "renormalize='false' must be True or False"),
        (lambda: moe_config(routed_scale=math.nan), "routed_scale=nan must be a finite number and above 0"),
        (lambda: moe_config(routed_scale=0.0), "routed_scale=0.0 must be above 0"),
        (lambda: moe_config(routed_scale=-2.5), "routed_scale=-2.5 must be above 0"),
        (lambda: moe_config(aux_loss_coef=-0.01), "aux_loss_coef=-0.01 must be at least 0"),
        (lambda: moe_config(aux_loss_coef=math.inf), "aux_loss_coef=inf must be a finite number and at least 0"),
        (lambda: moe_config(balance="none", z_loss_coef=-1), "z_loss_coef=-1 must be at least 0"),
        (lambda: moe_config(balance="bias", bias_update_rate=-1e-3), "bias_update_rate=-0.001 must be at least 0"),
        (
            lambda: moe_config(max_imbalance=math.inf),
            "max_imbalance=inf must be a finite number and at least 1, or None",
        ),
        (lambda: moe_config(max_imbalance=0.5), "max_imbalance=0.5 must be at least 1, or None"),
        (lambda: moe_config(activation=3), "activation=3 must be an Activation, its name or its fields"),
        (lambda: ParallelConfig(ep=2.0), "ep=2.0 must be a whole number and at least 1"),
        (lambda: OverlapConfig(num_panels=None), "num_panels=None must be a whole number and at least 1"),
        (lambda: make_group(moe_config(), max_tokens=1.5), "max_tokens=1.5 must be a whole number and at least 1"),
    ],
)
def test_numbers_that_a_setting_cannot_have_are_named(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_losses_and_the_bias_may_be_off() -> None:
    off = dict.fromkeys(("aux_loss_coef", "z_loss_coef", "bias_update_rate"), 0)
    for balance in ("aux", "bias", "none"):
        moe_config(balance=balance, **off)


@pytest.mark.parametrize("trains", [False, True])
def test_only_a_forward_pass_that_records_gradients_keeps_rows(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """Parameters require gradients under ``no_grad``, too; keeping rows would cost a copy and a slower layer 0."""
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2)
    moe = MoE(config, make_group(config), path="twin")
    kept: list[bool] = []
    assert isinstance(moe.experts, SymmetricPath)
    backend = moe.experts.backend
    dispatch_gemm, keep_received = backend.dispatch_gemm, backend.keep_received

    def spy(*arguments: Any, save_pre_activation: bool) -> Any:
        kept.append(save_pre_activation)
        return dispatch_gemm(*arguments, save_pre_activation=save_pre_activation)

    monkeypatch.setattr(backend, "dispatch_gemm", spy)
    monkeypatch.setattr(backend, "keep_received", lambda *a: kept.append(True) or keep_received(*a))
    with torch.set_grad_enabled(trains):
        output, _ = moe(torch.randn(9, 32))
    assert kept == ([True, True] if trains else [False])
    assert output.requires_grad == trains


# ---- in block FP8


@pytest.mark.parametrize("path", ["twin", slow("fused")])
@in_ranks(2, interpret="path")
def test_delayed_ranks_and_a_layer_in_between_whose_rows_are_not_packed(rank: int, world_size: int, path: str) -> None:
    """Packed and plain rows alternate in the same memory, with different layouts."""
    case = LayerCase("ep2", 2, 1, (140, 20), calls=3, seed=3, delay_s=0.05, **WIDE)
    moe, (w1, w2) = build_layer(case, rank, path), fp8_shard(case, rank)
    experts, group = moe.experts, moe.group
    plain, given = (w1.dequantize(), w2.dequantize()), rank_inputs(case, rank).routed
    first = experts.fp8(given, w1, w2), experts(given, *plain)
    for _ in range(2):
        assert torch.equal(experts.fp8(given, w1, w2), first[0])
        assert torch.equal(experts(given, *plain), first[1])
    group.workspace.check()
    group.close()
    run_case(rank, world_size, case, path)


def hard_numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of all magnitudes float32 has, among them zeros, ties of e4m3 and numbers that become subnormal there."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values[1] = torch.arange(columns) % 449 / 16
    values[2] = 0
    values[3, ::3] = -0.0
    values[4] *= 2.0 ** torch.randint(-30, 30, (columns,), generator=generator)
    values[5] = 2.0 ** torch.arange(columns).sub(columns // 2).clamp(-126, 120)
    values[6] = 1e-37
    values[7] = 448 * 2.0**-7
    return values


@in_ranks(1, interpret=True)
def test_the_kernel_that_packs_gives_the_bits_of_the_quantiser(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for seed, columns in enumerate((128, 256, 896)):
            check_pack(hard_numbers(67, columns, seed).to(dtype).nan_to_num())


@pytest.mark.parametrize(
    ("hidden_size", "ffn_size", "message"),
    [
        (144, 128, "hidden_size=144 must be a multiple of 128 for experts in block FP8"),
        (128, 192, "ffn_size / tp=192 must be a multiple of 128 for experts in block FP8"),
    ],
)
def test_widths_that_are_no_whole_blocks(hidden_size: int, ffn_size: int, message: str) -> None:
    case = LayerCase("odd", 1, 1, (4,), hidden_size=hidden_size, ffn_size=ffn_size)
    inputs, experts = rank_inputs(case, 0), build_layer(case, 0, "twin").experts
    with pytest.raises(ValueError, match=message):
        experts.fp8(inputs.routed, *fp8_shard(case, 0))


def test_gradients_are_refused() -> None:
    case = LayerCase("one rank", 1, 1, (4,), **WIDE)
    inputs, experts = rank_inputs(case, 0), build_layer(case, 0, "twin").experts
    inputs.tokens.requires_grad_()
    with pytest.raises(ValueError, match="requires_grad=True of tokens or top_k_weights must be False"):
        experts.fp8(inputs.routed, *fp8_shard(case, 0))
    with torch.no_grad():
        experts.fp8(inputs.routed, *fp8_shard(case, 0))


# ---- tokens a layer must not run on: kernels read as many rows as there are ids, of the pool's width and type

CASE = LayerCase("one rank", 1, 1, (40,), hidden_size=128, ffn_size=128)
MISFITS = [
    (torch.zeros(40, 128), r"shape=\(40, 128\) of tokens must be \(T, hidden_size=128\), with the T of .*\(100, 2\)"),
    (torch.zeros(100, 64), r"shape=\(100, 64\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(100, 256), r"shape=\(100, 256\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(4, 25, 128), r"shape=\(4, 25, 128\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(12_800), r"shape=\(12800,\) of tokens must be \(T, hidden_size=128\)"),
    (torch.zeros(100, 128).half(), r"dtype=torch\.float16 of tokens must be the group's torch\.float32"),
    (torch.zeros(100, 128, device="meta"), r"device=meta of tokens must be the group's cpu"),
]


ROUTING = torch.zeros(100, 2, dtype=torch.int32), torch.ones(100, 2)


def make_layer(path: str) -> MoE:
    return MoE(CASE.config, make_group(CASE.config, max_tokens=128), path=path, overlap=CASE.overlap, seed=0)


def by_layer(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    layer.routed_experts(tokens, ids, weights)


def by_experts_in_fp8(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    assert isinstance(layer.experts, SymmetricPath)
    with torch.no_grad():
        layer.experts.fp8(RoutedTokens(tokens, ids, weights), *fp8_shard(CASE, 0))


def by_the_modular_layer(layer: MoE, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
    modular = FusedPrepareFinalize(CASE.config, layer.group, overlap=CASE.overlap, use_kernels=False)
    modular.prepare(RoutedTokens(tokens, ids, weights))


@pytest.mark.parametrize("path", ["twin", "fused"])
@pytest.mark.parametrize("call", [by_layer, by_experts_in_fp8, by_the_modular_layer])
@pytest.mark.parametrize(("tokens", "message"), MISFITS)
@pytest.mark.usefixtures("interpreted")
def test_tokens_that_do_not_fit_pool_and_ids_are_named(
    path: str, call: Callable[..., None], tokens: Tensor, message: str
) -> None:
    layer = make_layer(path)
    with pytest.raises(ValueError, match=message):
        call(layer, tokens, *ROUTING)
    assert not layer.group.workspace.epoch, "no rank waits for ids of this call"


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        (None, "biases=False of the call must be the layer's expert_bias=True"),
        (Biases(torch.zeros(4, 128), torch.zeros(4, 128)), r"b1 of shape \(4, 128\) must be \(e, 2F\) = \(4, 256\)"),
        (Biases(torch.zeros(4, 256), torch.zeros(4, 256)[:, ::2]), r"b2 of shape \(4, 128\) must be contiguous"),
        (Biases(torch.zeros(4, 256), torch.zeros(4, 128).half()), r"b2 of dtype torch\.float16 must be torch\.float32"),
    ],
)
def test_so_are_biases_beside_experts_in_fp8(biases: Biases | None, message: str) -> None:
    config = replace(CASE.config, expert_bias=True)
    layer = MoE(config, make_group(config, max_tokens=128), path="twin", overlap=CASE.overlap)
    assert isinstance(layer.experts, SymmetricPath)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        layer.experts.fp8(RoutedTokens(torch.zeros(100, 128), *ROUTING), *fp8_shard(CASE, 0), biases)
    assert not layer.group.workspace.epoch


def test_ids_without_an_axis_are_named() -> None:
    with pytest.raises(ValueError, match=r"shape=\(100, 128\) of tokens .* with the T of top_k_ids of shape=\(\)"):
        make_layer("twin").routed_experts(torch.zeros(100, 128), torch.tensor(0), torch.tensor(1.0))


def test_a_number_is_no_token() -> None:
    with pytest.raises(ValueError, match=r"shape=\(\) of the input must be \(\.\.\., hidden_size\)"):
        make_layer("twin")(torch.tensor(1.0))
