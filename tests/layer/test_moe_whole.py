"""The whole ``MoE`` layer over ranks, its router and shared expert against the reference; which paths there are."""

from functools import partial
from itertools import product

import pytest
import torch
from layer_cases import LayerCase
from layer_ranks import poison
from ranks import in_ranks, logged, run_ranks
from stream_cases import train_step
from torch import Tensor
from torch.nn.functional import linear, silu
from training_cases import make_group

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.decode import DecodeWeights, RankDecode
from comet.decode.ranks import rank_slots
from comet.layer.paths import make_path
from comet.layer.shared_expert import SharedExpert
from comet.layer.weights import pad_width
from comet.layout import ExpertLayout, RoutedTokens
from comet.moe import MoE
from comet.reference.layer import reference_experts
from comet.router.losses import RouterStats
from comet.schedule.settings import LayerSettings

SEED = 11
CONFIG = MoEConfig(hidden_size=48, ffn_size=64, num_experts=8, top_k=3, shared_ffn_size=32, aux_loss_coef=0.1)
NUM_TOKENS = (21, 0, 34, 9)
MAX_TOKENS = 40


def written_out(layer: MoE, x: Tensor) -> tuple[Tensor, RouterStats]:
    """The layer in plain torch: every expert on every rank, nothing fused."""
    routing = layer.router(x)
    w1, w2 = layer.expert_parameters()
    routed = reference_experts(x, routing.top_k_ids, routing.top_k_weights, w1.flatten(1, 2), w2)
    assert layer.shared is not None
    gate, up = linear(x, layer.shared.w1).chunk(2, dim=1)
    y = routed + linear(silu(gate) * up, layer.shared.w2)
    return y, layer.router.measure(routing.logits, routing.scores, routing.top_k_ids)


def tokens_of(rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS[rank], CONFIG.hidden_size, generator=torch.Generator().manual_seed(SEED + rank))


def in_one_process(world_size: int) -> list[dict[str, Tensor]]:
    """Every rank's step by plain torch, with the expert gradients of all ranks' tokens in every step."""
    layer = MoE(CONFIG, make_group(CONFIG, max_tokens=MAX_TOKENS), seed=SEED)
    steps = [train_step(layer, tokens_of(rank), partial(written_out, layer)) for rank in range(world_size)]
    total = {name: torch.stack([step[name] for step in steps]).sum(0) for name in ("w1", "w2")}
    return [step | total for step in steps]


@pytest.mark.parametrize(("path", "ep", "tp"), [*product(["fused", "twin"], [2], [1, 2]), ("plain", 2, 1)])
@in_ranks("ep tp", interpret="path")
def test_router_and_shared_expert_over_ranks(rank: int, world_size: int, path: str, ep: int, tp: int) -> None:
    group = make_group(CONFIG, ep=ep, tp=tp, max_tokens=MAX_TOKENS)
    poison(group)
    layer, layout = MoE(CONFIG, group, path=path, overlap=OverlapConfig(num_panels=2), seed=SEED), group.layout(CONFIG)
    found, wanted = train_step(layer, tokens_of(rank)), in_one_process(world_size)[rank]
    assert found.keys() == wanted.keys() >= {"x", "router.weight", "shared.w1", "shared.w2", "w1", "w2"}
    for name, tensor in wanted.items():
        part = tensor.chunk(ep)[layout.ep_rank].chunk(tp, dim=2)[layout.tp_rank] if name in ("w1", "w2") else tensor
        said = f"{path}, seed {SEED}, rank {rank}: {name} or its gradient: "
        torch.testing.assert_close(found[name], part, rtol=1e-4, atol=1e-5, msg=said.__add__)
    group.workspace.check()
    group.close()


def test_padding_adds_zero_columns_to_gate_up_and_down() -> None:
    w1, w2 = torch.arange(1.0, 7).view(1, 6, 1), torch.arange(1.0, 4).view(1, 1, 3)
    wide1, wide2, _ = pad_width(w1, w2)
    zeros = [0.0] * 13
    assert wide1.flatten().tolist() == [1, 2, 3, *zeros, 4, 5, 6, *zeros]
    assert wide2.flatten().tolist() == [1, 2, 3, *zeros]
    whole = torch.zeros(1, 32, 1), torch.zeros(1, 1, 16)
    assert all(a is b for a, b in zip(pad_width(*whole)[:2], whole, strict=True)), "a copy that nobody needs"


def test_tiles_are_those_of_the_padded_width() -> None:
    settings = []
    for ffn_size, tp in ((16, 2), (32, 2)):
        config = MoEConfig(hidden_size=64, ffn_size=ffn_size, num_experts=2, top_k=1)
        layout = ExpertLayout.create(config, ParallelConfig(tp=tp), 0)
        settings.append(LayerSettings.create(config, layout, OverlapConfig(), torch.bfloat16))
    assert settings[0] == settings[1]
    assert settings[0].tile.block_k == 16, "tensor cores take no less"


def make_narrow(rank: int, world_size: int, ffn_size: int) -> tuple[list[str], list[list[int]]]:
    """Make two layers and call them; return the lines of the log and the shapes of the parameters."""
    told = logged("comet")
    config = MoEConfig(hidden_size=16, ffn_size=ffn_size, num_experts=2, top_k=1, renormalize=False)
    group = make_group(config, tp=world_size, max_tokens=4)
    layers = [MoE(config, group) for _ in range(2)]
    for layer in (*layers, *layers):
        layer(torch.randn(3, 16))
    group.close()
    return told, [list(weight.shape) for weight in layers[0].expert_weights()]


def test_padding_is_told_once_by_one_rank_and_parameters_stay_narrow() -> None:
    (told, shapes), (told_by_other, _) = run_ranks(make_narrow, 2, 48)
    assert told == [
        "WARNING ffn_size=48 over tp=2 is 24 columns per rank, no multiple of 16: every call copies the rank's expert "
        "weights, padded to 32 columns"
    ]
    assert told_by_other == []
    assert shapes == [[2, 2, 24, 16], [2, 16, 24]]
    assert run_ranks(make_narrow, 2, 64)[0][0] == []


# ---- the shared expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_expert_is_one_expert_of_weight_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shared = SharedExpert(16, 48, dtype=dtype)
    assert shared.w1.shape == (96, 16)
    assert shared.w2.shape == (16, 48)
    tokens = torch.randn(9, 16, dtype=dtype)
    ids, weights = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1, dtype=dtype)
    expected = reference_experts(tokens, ids, weights, shared.w1[None], shared.w2[None])
    torch.testing.assert_close(shared(tokens), expected)


def test_shared_expert_gradients_edges_and_errors() -> None:
    shared = SharedExpert(16, 16, dtype=torch.float64)
    tokens = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(shared, (tokens,))
    assert shared(torch.empty(0, 16, dtype=torch.float64)).shape == (0, 16)
    with pytest.raises(ValueError, match=r"tokens of shape \(3, 8\) must be \(T, D\) with D = hidden_size=16"):
        shared(torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"shared_ffn_size=0 must be positive"):
        SharedExpert(16, 0)
    with pytest.raises(ValueError, match=r"hidden_size=-1 must be positive"):
        SharedExpert(-1, 16)


# ---- paths


def test_unknown_path_and_capacity_where_it_cannot_work() -> None:
    config = MoEConfig(hidden_size=32, ffn_size=32, num_experts=4, top_k=2, capacity_factor=1.0)
    with pytest.raises(ValueError, match="path='fast' must be 'auto' or one of"):
        MoE(config, make_group(config), path="fast")
    with pytest.raises(ValueError, match=r"capacity_factor=1\.0 needs path 'fused' or 'twin'; 'plain' is dropless"):
        MoE(config, make_group(config), path="plain")


@pytest.mark.slow
@in_ranks(2, interpret=True)
def test_partial_sums_past_float16_are_infinite_or_added_first(rank: int, world_size: int) -> None:
    """Two tokens whose experts give 29696, weighted: 4 and -2 on ranks 0 and 1, then 2 and -1.

    118784 - 59392 = 59392 is a float16, a partial sum of 118784 is none: where it is rounded the result says so.
    """
    case = LayerCase("float16", 2, 1, (2, 2), num_experts=2, hidden_size=16, ffn_size=16, dtype=torch.float16)
    group = make_group(case.config, ep=2, max_tokens=2, dtype=case.dtype)
    tokens, ids = torch.zeros(2, 16).half(), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    tokens[:, 0] = 1
    weights = torch.tensor([[4.0, -2.0], [-1.0, 2.0]])
    w1, w2 = torch.zeros(1, 32, 16).half(), torch.full((1, 16, 16), 58.0).half()
    w1[:, :16, 0], w1[:, 16:, 0] = 32, 1  # hidden is 32, an output 16 * 32 * 58
    outcome = {}
    for path in ("reference", "plain", "twin", "fused"):
        y = make_path(path, case.config, group, case.overlap)(RoutedTokens(tokens, ids, weights), w1, w2)
        assert torch.equal(y, y[:, :1].expand(2, 16))
        outcome[path] = y[:, 0].tolist()
    decode = RankDecode(group.comm, hidden_size=16)
    held = DecodeWeights(w1=w1, w2=w2, slots=rank_slots(group.layout(case.config), "cpu"))
    outcome["decode"] = decode(tokens, ids, weights, held)[:, 0].tolist()
    group.close()
    rounds_partial_sums = [float("inf"), 29696.0]
    assert [outcome[path] for path in ("reference", "twin", "fused")] == [rounds_partial_sums] * 3
    assert outcome["plain"] == outcome["decode"] == [59392.0, 29696.0]


@pytest.mark.usefixtures("interpreted")
def test_paths_know_the_names_they_are_made_by() -> None:
    names = ("fused", "twin", "plain", "reference")
    assert tuple(make_path(name, CONFIG, make_group(CONFIG)).name for name in names) == names
