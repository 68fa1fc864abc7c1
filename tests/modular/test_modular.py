"""Modular layers: every combination on real ranks against the reference, and what is refused."""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from activation_cases import ACTIVATIONS
from layer_cases import LayerCase, as_strided, assert_as_close, full_biases, full_weights, oracle, rank_inputs, shard
from layer_ranks import open_group
from modular_cases import (
    Combination,
    attacks,
    check_layer,
    combinations,
    compose,
    rank_weights,
    run_combinations,
)
from ranks import in_ranks
from torch import Tensor

import comet.modular
from comet.config import MoEConfig
from comet.errors import CapacityError
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup
from comet.layout import Biases
from comet.modular import (
    EXPERTS,
    ActivationFormat,
    AllToAll,
    BatchedRows,
    DelegateReduce,
    Experts,
    FusedExperts,
    FusedPrepareFinalize,
    GroupedBatched,
    GroupedContiguous,
    ModularMoE,
    NoOpReduce,
    PrepareFinalize,
    Received,
    RoutedTokens,
    SingleRank,
    SymmetricBatched,
    SymmetricContiguous,
    WarpDecodeExperts,
)
from comet.moe import MoE
from comet.quantization.formats import FP8, MXFP8, Weight

SMALL = LayerCase("small", 1, 1, (9,))


@pytest.mark.slow
def test_every_combination_on_one_rank() -> None:
    cases = [*attacks(1, seed=11), replace(SMALL, name="bfloat16", dtype=torch.bfloat16, seed=4)]
    cases += [replace(SMALL, name="biases", activation=each, ffn_size=48, expert_bias=True) for each in ACTIVATIONS]
    outcome = run_combinations(0, 1, cases, {})
    assert len(outcome) == len(combinations())
    assert all(name in outcome[str(pair)] for pair in combinations() if outcome[str(pair)] for name in names(pair))


def names(pair: Combination) -> list[str]:
    return [pair.prepare_finalize.__name__, pair.experts.__name__]


@pytest.mark.slow
@in_ranks(2, interpret=True, timeout=300)
def test_two_ranks_all_combinations_and_kernels(rank: int, world_size: int) -> None:
    """Both run in one pair of processes, because starting processes costs more than running them."""
    cases = [*attacks(2, seed=12), LayerCase("tp2", 1, 2, (31, 0), ffn_size=64, seed=13, calls=2)]
    run_combinations(rank, world_size, cases, {})
    run_kernels(rank, LayerCase("kernels", 2, 1, (21, 5), seed=15))


@pytest.mark.slow
@in_ranks(4)
def test_every_combination_on_ep_x_tp(rank: int, world_size: int) -> None:
    case = LayerCase("ep2 x tp2", 2, 2, (14, 0, 5, 9), ffn_size=64, seed=14)
    biased = replace(case, name="biases", ffn_size=48, routing="masked", activation=ACTIVATIONS[-1], expert_bias=True)
    run_combinations(rank, world_size, [case, biased], {})


def run_kernels(rank: int, case: LayerCase) -> None:
    """Triton kernels under the interpreter: dispatch, both ways to combine, both grouped GEMMs, warp decode."""
    group = open_group(case)
    pairs = [
        Combination(SymmetricContiguous, GroupedContiguous, DelegateReduce),
        Combination(SymmetricBatched, GroupedBatched, NoOpReduce),
        Combination(AllToAll, WarpDecodeExperts, NoOpReduce),
        Combination(SymmetricContiguous, GroupedContiguous, DelegateReduce, MXFP8),
        Combination(SymmetricBatched, GroupedBatched, NoOpReduce, FP8),
        Combination(SymmetricContiguous, WarpDecodeExperts, NoOpReduce, FP8),
        Combination(AllToAll, WarpDecodeExperts, NoOpReduce, MXFP8),
    ]
    for pair in pairs:
        layer = compose(pair, case, group, use_kernels=True, overlap=case.overlap)
        check_layer(layer, case, rank, f"kernels, {pair}")
        layer.shared = torch.zeros_like  # runs while rows travel
        check_layer(layer, case, rank, f"kernels, {pair}, shared")
    fused = ModularMoE(FusedPrepareFinalize(case.config, group, use_kernels=True), FusedExperts(case.config, group))
    inputs, weights = rank_inputs(case, rank), rank_weights(case, rank, torch.Tensor)
    given = inputs.routed
    assert torch.equal(fused(given, *map(as_strided, weights)), fused(given, *weights)), "weights in any stride"
    biased = replace(case.config, expert_bias=True)
    fused = ModularMoE(FusedPrepareFinalize(biased, group, use_kernels=True), FusedExperts(biased, group))
    biases = Biases(*(torch.randn(weight.shape[:2], dtype=weight.dtype) for weight in weights))
    strided = Biases(*map(as_strided, biases))
    assert torch.equal(fused(given, *weights, strided), fused(given, *weights, biases)), "biases in any stride"
    group.workspace.check()
    group.close()


def test_registries_hold_every_part() -> None:
    modules = [
        importlib.import_module(info.name) for info in pkgutil.iter_modules(comet.modular.__path__, "comet.modular.")
    ]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    for base, parts in ((PrepareFinalize, comet.modular.PREPARE_FINALIZE), (Experts, comet.modular.EXPERTS)):
        assert {kind for kind in kinds if issubclass(kind, base) and not inspect.isabstract(kind)} == set(parts)
    reductions = {kind for name, kind in vars(comet.modular).items() if name.endswith("Reduce")}
    assert reductions == {*comet.modular.REDUCTIONS, comet.modular.TopKReduce}


def test_every_part_has_a_name_of_vllm_of_its_own() -> None:
    names = [*comet.modular.PREPARE_FINALIZE.values(), *EXPERTS.values(), *comet.modular.REDUCTIONS.values()]
    assert len(set(names)) == len(names)
    assert [kind for kind, name in EXPERTS.items() if not name] == [WarpDecodeExperts]


@pytest.mark.parametrize("weight_type", [Tensor, MXFP8])
def test_gate_and_up_rows_in_turn_give_the_same_bits(weight_type: type[Weight]) -> None:
    """Rows alternate in ``w1``, its scales and ``b1``; warp decode takes biases of plain weights alone."""
    case = replace(SMALL, ffn_size=64, activation=ACTIVATIONS[-1], expert_bias=weight_type is Tensor)
    group, routed, (w1, w2) = open_group(case), rank_inputs(case, 0).routed, rank_weights(case, 0, weight_type)
    order = torch.arange(2 * case.ffn_size).view(2, -1).T.flatten()
    if isinstance(w1, MXFP8):
        turned: Weight = MXFP8(elements=w1.elements[:, order], scales=w1.scales[:, order])
    else:
        assert isinstance(w1, Tensor)
        turned = w1[:, order]
    biases = [bias.flatten(1) for bias in full_biases(case)]
    first = [Biases(*biases)] if biases else []
    in_turn = [Biases(biases[0][:, order], biases[1])] if biases else []
    for kind in (each for each in EXPERTS if each is not FusedExperts):
        transport = SymmetricContiguous if ActivationFormat.CONTIGUOUS in kind.formats else SymmetricBatched
        layer = ModularMoE(transport(case.config, group), kind(case.config, group), weight_type=weight_type)
        wanted = layer(routed, w1, w2, *first)
        layer.experts.interleaved = layer.experts.takes_interleaved
        assert torch.equal(layer(routed, turned, w2, *in_turn), wanted), kind.__name__
        if weight_type is Tensor and layer.experts.interleaved:
            with pytest.raises(ValueError, match="F/TP=56 of interleaved w1 must be a multiple of 16"):
                layer(routed, turned[:, :112], w2[..., :56], *in_turn)
    group.close()


@pytest.fixture
def group() -> ExpertGroup:
    return open_group(SMALL)


def call(layer: Any, case: LayerCase = SMALL, rank: int = 0) -> torch.Tensor:
    inputs, (w1, w2) = rank_inputs(case, rank), shard(case, rank, *full_weights(case))
    return layer(inputs.routed, w1.flatten(1, 2), w2)


def test_is_a_path_of_the_layer(group: ExpertGroup) -> None:
    config = replace(SMALL.config, shared_ffn_size=16)
    torch.manual_seed(0)
    moe = MoE(config, group, path="reference", seed=2)
    x = torch.randn(3, 7, 32)
    with torch.no_grad():
        wanted, _ = moe(x)
        for pair in ((SingleRank, GroupedContiguous), (FusedPrepareFinalize, FusedExperts)):
            moe.experts = ModularMoE(*(kind(config, group) for kind in pair))
            torch.testing.assert_close(moe(x)[0], wanted, rtol=1e-5, atol=1e-5)


def test_gradients_are_refused_and_no_grad_is_not(group: ExpertGroup) -> None:
    layer = ModularMoE(SingleRank(SMALL.config, group), GroupedContiguous(SMALL.config, group))
    inputs, (w1, w2) = rank_inputs(SMALL, 0), shard(SMALL, 0, *full_weights(SMALL))
    arguments = [inputs.routed, w1.flatten(1, 2), w2.requires_grad_()]
    with pytest.raises(ValueError, match=r"w2.requires_grad=True must be False: ModularMoE has no backward pass"):
        layer(*arguments)
    with torch.no_grad():
        assert layer(*arguments).shape == (9, 32)


def test_shared_experts_run_while_rows_travel(group: ExpertGroup) -> None:
    events: list[str] = []

    class Recording(SingleRank):
        def prepare_no_receive(self, routed: RoutedTokens) -> Any:
            events.append("sent")
            receive = super().prepare_no_receive(routed)

            def receiver() -> Received:
                events.append("received")
                return receive()

            return receiver

    def shared(tokens: torch.Tensor) -> torch.Tensor:
        events.append("shared")
        return 3 * tokens

    parts = (Recording(SMALL.config, group), GroupedContiguous(SMALL.config, group))
    with_shared, without = call(ModularMoE(*parts, shared=shared)), call(ModularMoE(*parts))
    assert events == ["sent", "shared", "received", "sent", "received"]
    torch.testing.assert_close(with_shared, without + 3 * rank_inputs(SMALL, 0).tokens)


@pytest.mark.parametrize(
    ("transport", "experts"), [(SymmetricContiguous, GroupedContiguous), (SymmetricBatched, GroupedBatched)]
)
def test_capacity_drops_as_the_reference_does(transport: type, experts: type) -> None:
    case = replace(SMALL, num_tokens=(40,), max_tokens=40, capacity_factor=0.5)
    group = open_group(case)
    exact, same = (oracle(case, 0, dtype).output for dtype in (torch.float64, torch.float32))
    y = call(ModularMoE(transport(case.config, group), experts(case.config, group)), case)
    assert_as_close(y, exact, same, torch.float32, "capacity")
    for kind in (SingleRank, AllToAll):
        with pytest.raises(ValueError, match=rf"capacity_factor=0.5 must be None: {kind.__name__} is dropless"):
            kind(case.config, group)


def test_a_batch_that_overflows_is_an_error_not_a_loss() -> None:
    case = replace(SMALL, num_tokens=(100,))
    group = open_group(case)
    layer = ModularMoE(SymmetricBatched(case.config, group), GroupedBatched(case.config, group))
    routed, (w1, w2) = rank_inputs(case, 0).routed, full_weights(case)
    routed.top_k_ids.zero_()
    with pytest.raises(CapacityError, match=r"rank 0 got 200 rows for one expert, more than the 128"):
        layer(routed, w1.flatten(1, 2), w2)
    assert group.workspace.fault.tolist() == [0, 0, 0, 0, 0, 0, 0, 200], "as a GPU reports it"


def test_rows_past_a_batch_are_left_out_until_the_host_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host does not wait for the check: no tile and no slot lies behind the batches."""
    monkeypatch.setattr(SymmetricBatched, "_check_room", lambda *_: None)
    case = replace(SMALL, num_tokens=(100,))
    group = open_group(case)
    routed = rank_inputs(case, 0).routed
    routed.top_k_ids.fill_(case.config.num_experts - 1)
    rows = SymmetricBatched(case.config, group).prepare(routed).rows
    assert isinstance(rows, BatchedRows)
    experts, batch_rows, _ = rows.tokens.shape
    assert rows.counts.tolist() == [0] * (experts - 1) + [batch_rows]
    kept = rows.row_slots[rows.row_slots >= 0]
    assert kept.sort().values.tolist() == list(range((experts - 1) * batch_rows, experts * batch_rows))
    group.close()


def test_halves_of_the_fused_layer_have_one_activation(group: ExpertGroup) -> None:
    config = replace(SMALL.config, activation=Activation("geglu"))
    layer = ModularMoE(FusedPrepareFinalize(SMALL.config, group), FusedExperts(config, group))
    with pytest.raises(ValueError, match=r"^activation=.*geglu.* of FusedExperts must be that .*, .*swiglu"):
        layer(rank_inputs(SMALL, 0).routed, *rank_weights(SMALL, 0, torch.Tensor))


def test_layouts_must_agree(group: ExpertGroup) -> None:
    other = MoEConfig(hidden_size=32, ffn_size=32, num_experts=8, top_k=2)
    with pytest.raises(ValueError, match="SingleRank and GroupedContiguous do not go together: SingleRank is made"):
        ModularMoE(SingleRank(SMALL.config, group), GroupedContiguous(other, group))


@pytest.mark.parametrize("kind", [SingleRank, AllToAll])
@pytest.mark.parametrize("bad", [4, -2])
def test_bad_ids_are_named(group: ExpertGroup, kind: type, bad: int) -> None:
    routed = rank_inputs(SMALL, 0).routed
    routed.top_k_ids[3, 1] = bad
    with pytest.raises(ValueError, match=rf"contain (1 bad ids|{bad}); every id must be -1 .masked. or in "):
        kind(SMALL.config, group).prepare(routed)


def test_wrong_dtypes_and_biases_are_named(group: ExpertGroup) -> None:
    inputs = rank_inputs(SMALL, 0)
    w1, w2 = full_weights(SMALL)
    symmetric = ModularMoE(SymmetricContiguous(SMALL.config, group), GroupedContiguous(SMALL.config, group))
    half = [tensor.half() for tensor in (inputs.tokens, w1.flatten(1, 2), w2)]
    with pytest.raises(ValueError, match=r"dtype=torch.float16 of tokens must be the group's torch.float32"):
        symmetric(inputs.routed._replace(tokens=half[0]), half[1], half[2])
    biased = replace(SMALL.config, expert_bias=True)
    with pytest.raises(ValueError, match="biases=False of the call must be the layer's expert_bias=True"):
        call(ModularMoE(SingleRank(biased, group), GroupedContiguous(biased, group)))
    with pytest.raises(ValueError, match=r"dtype=torch.int64 of top_k_ids must be torch.int32"):
        symmetric(inputs.routed._replace(top_k_ids=inputs.top_k_ids.long()), w1.flatten(1, 2), w2)
