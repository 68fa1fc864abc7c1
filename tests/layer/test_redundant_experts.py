"""Experts on the right ranks: orders and copies that even out loads, and layers that hold copies."""

import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import in_ranks
from tiers import slow
from training_cases import make_group

import comet
from comet import MoE, MoEConfig
from comet.errors import StepFailedError
from comet.layer.sharding import local
from comet.layout import ExpertLayout
from comet.redundant_experts import holder_ids, holders_of
from comet.schedule.placement import imbalance, pack, place, rank_loads, redundant_experts, shared_loads, who_holds

CONFIG = MoEConfig(hidden_size=16, ffn_size=32, num_experts=8, top_k=2, shared_ffn_size=16, expert_bias=True)
# Most rows go to experts 1 and 6.
LOADS = [1.0, 9.0, 1.0, 1.0, 0.0, 2.0, 7.0, 1.0]


def zipf(num_experts: int, seed: int) -> list[float]:
    loads = [1000 / (1 + index) for index in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


def test_the_examples_of_the_docstrings() -> None:
    assert (rank_loads([5, 4, 1, 2], 2), imbalance([9, 3]), imbalance([0, 0])) == ([9, 3], 1.5, 1.0)
    assert (pack([5, 4, 1, 2], 2), place([5, 4, 1, 2], 2)) == ([[0, 2], [1, 3]], [0, 2, 1, 3])
    assert redundant_experts([4, 1, 1, 2], 2, 1) == [[], [1]]
    assert who_holds(2, 2, [[], [0]]).tolist() == [[True, True], [False, True]]
    layout = ExpertLayout(num_experts=4, top_k=1, ep=2, tp=1, rank=0)
    assert holders_of([[3], []], layout, 1) == [[0], [1], [3], [4, 2]]
    choices, counts = torch.tensor([[0, 0], [1, 0], [3, 0], [4, 2]]), torch.tensor([1, 1, 1, 2])
    ids = holder_ids(torch.tensor([[3], [3], [-1]], dtype=torch.int32), choices, counts, 0)
    assert ids.tolist() == [[4], [2], [-1]]


@pytest.mark.parametrize("seed", range(8))
def test_orders_are_permutations_and_even_out_loads(seed: int) -> None:
    loads, num_ranks = zipf(64, seed), (2, 4, 8)[seed % 3]
    for num_groups in (1, 2, 4, 16):
        order = place(loads, num_ranks, num_groups)
        assert sorted(order) == list(range(64))
        groups = [{expert // (64 // num_groups) for expert in order[first : first + 64 // num_groups]}
                  for first in range(0, 64, 64 // num_groups)]  # fmt: skip
        assert all(len(group) == 1 for group in groups), "a group's experts stay consecutive"
        placed = imbalance(rank_loads([loads[expert] for expert in order], num_ranks))
        assert placed <= imbalance(rank_loads(loads, num_ranks)) + 1e-9


def test_groups_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="ep=4 must divide num_groups=6 or be its multiple"):
        place([1.0] * 24, 4, 6)


@pytest.mark.parametrize("seed", range(8))
def test_copies_never_make_a_rank_heavier_than_the_heaviest_was(seed: int) -> None:
    loads, num_ranks, copies = zipf(32, seed), (2, 4, 8)[seed % 3], 1 + seed % 4
    held = redundant_experts(loads, num_ranks, copies)
    holds = who_holds(32, num_ranks)
    for rank, experts in enumerate(held):
        assert len(experts) <= copies
        assert not holds[experts, rank].any(), "no rank holds an expert twice"
        holds[experts, rank] = True
    assert imbalance(list(shared_loads(np.array(loads), holds))) < imbalance(rank_loads(loads, num_ranks))


def layers(ep: int, tp: int = 1, node_size: int | None = None, config: MoEConfig = CONFIG, **given: Any) -> list[MoE]:
    group = make_group(config, ep=ep, tp=tp, node_size=node_size)
    made = [MoE(config, group, seed=3, **given).requires_grad_(False) for _ in range(2)]
    for layer in made:
        for bias in (layer.b1, layer.b2):
            torch.manual_seed(4)
            local(bias).normal_()
    return made


@pytest.mark.parametrize(
    ("world_size", "layout", "path"),
    [(2, dict(ep=2), "auto"), (2, dict(ep=2), "plain"), slow(4, dict(ep=2, tp=2), "auto"),
     slow(4, dict(ep=4, node_size=2), "auto")],
)  # fmt: skip
@in_ranks("world_size")
def test_outputs_are_those_without_copies(rank: int, world_size: int, layout: dict[str, int], path: str) -> None:
    torch.set_num_threads(1)
    plain, redundant = layers(**layout, path=path)
    held = comet.add_redundant_experts(redundant, LOADS, copies=2)
    assert any(held), "some rank holds a copy"
    for step in range(3):
        tokens = torch.randn(
            0 if (rank, step) == (0, 1) else 20 + rank, 16, generator=torch.Generator().manual_seed(step)
        )
        ids = torch.tensor(random.Random(step).choices([[1, 6], [6, 1], [1, 0], [-1, 6], [5, 2]], k=20 + rank))[
            : len(tokens)
        ]
        weights = torch.rand(len(tokens), 2, generator=torch.Generator().manual_seed(9))
        wanted = plain.routed_experts(tokens, ids.int().view(-1, 2), weights)
        torch.testing.assert_close(redundant.routed_experts(tokens, ids.int().view(-1, 2), weights), wanted)
        with torch.no_grad():
            torch.testing.assert_close(redundant(tokens)[0], plain(tokens)[0])
    assert redundant.w1.full_tensor().equal(plain.w1.full_tensor()), "the parameters are the layer's own experts"


@in_ranks(2)
def test_weights_that_changed_and_training_are_refused(rank: int, world_size: int) -> None:
    plain, layer = layers(2)
    comet.add_redundant_experts(layer, LOADS)
    x = torch.randn(8, 16)
    with torch.no_grad():
        layer(x)
        layer.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
        with pytest.raises(ValueError, match="weights have changed since"):
            layer(x)
        comet.add_redundant_experts(layer, LOADS)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x)[0], plain(x)[0])
    layer.requires_grad_(True)
    with pytest.raises(ValueError, match="is for inference"):
        layer(x)


@in_ranks(2)
def test_what_cannot_have_copies_is_refused(rank: int, world_size: int) -> None:
    other, layer = layers(2)
    before = layer.experts
    for loads, copies, why in (
        (LOADS[:-1], 1, r"loads of shape \(7,\) must be \(8,\)"),
        ([LOADS], 1, r"loads of shape \(1, 8\) must be"),
        ([*LOADS[:-1], -1.0], 1, r"loads={7: -1.0} of these experts must be at least 0 and finite"),
        ([math.nan, *LOADS[1:]], 1, r"loads={0: nan} of these experts must be"),
        ([math.inf] * 8 if rank else LOADS, 1, r"loads={0: inf"),
        (LOADS, 5, "copies=5 must be 0 to 4"),
        (LOADS, 1.5, r"copies=1\.5 must be 0 to 4"),
        (LOADS, 1 + rank, "copies=2 of rank 1 must equal the 1 of rank 0"),
        (LOADS[::-1] if rank else LOADS, 1, "loads=.* of rank 1 must equal"),
    ):
        with pytest.raises(ValueError, match=why):
            comet.add_redundant_experts(layer, loads, copies)
    with pytest.raises(ValueError, match="layer=1 of rank 1 must equal the 2 of rank 0"):
        comet.add_redundant_experts(other if rank else layer, LOADS)
    assert layer.experts is before
    half = MoE(CONFIG, layer.group, param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"param_dtype=torch.* must be the tokens"):
        comet.add_redundant_experts(half, LOADS)


@in_ranks(2)
def test_writes_to_weights_are_noticed_and_an_optimizer_keeps_its_parameters(rank: int, world_size: int) -> None:
    plain, layer = layers(2, path="plain")
    x = torch.randn(8, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def take_a_step() -> None:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    writes: tuple[Callable[[], object], ...] = (
        take_a_step,
        lambda: layer.w1.mul_(2),
        lambda: layer.expert_weights()[1].mul_(2),
        lambda: layer.reset_parameters(9),
        lambda: layer.bfloat16().float(),
    )
    for write in writes:
        for mode in (torch.no_grad, torch.inference_mode):
            plain.load_state_dict(layer.state_dict())
            with mode():
                comet.add_redundant_experts(layer, LOADS, 2)
                torch.testing.assert_close(layer(x)[0], plain(x)[0])
                layer.experts.require_current()
                write()
                with pytest.raises(ValueError, match="weights have changed since"):
                    layer(x)
                with pytest.raises(ValueError, match="weights have changed since"):
                    layer.experts.require_current()
    assert layer.experts.waits_for_counts
    copied = copy.deepcopy(layer)
    with torch.no_grad(), pytest.raises(ValueError, match="weights have changed since"):
        copied(x)


@in_ranks(2)
def test_a_checkpoint_that_is_loaded_in_place_is_noticed(rank: int, world_size: int) -> None:
    """``dcp.load`` writes into the parts of ``state_dict()``, whose writes torch would count apart."""
    plain, layer = layers(2)
    x = torch.randn(8, 16)
    with torch.no_grad(), shared_folder(rank) as folder:
        plain.w2.mul_(2)
        dcp.save(plain.state_dict(), checkpoint_id=folder)
        comet.add_redundant_experts(layer, LOADS, 2)
        dcp.load(layer.state_dict(), checkpoint_id=folder)
        with pytest.raises(ValueError, match="weights have changed since"):
            layer(x)
        comet.add_redundant_experts(layer, LOADS, 2)
        torch.testing.assert_close(layer(x)[0], plain(x)[0])


@contextmanager
def shared_folder(rank: int) -> Iterator[str]:
    """A folder of all ranks, which rank 0 makes and removes."""
    with tempfile.TemporaryDirectory() if rank == 0 else nullcontext("") as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1])
@in_ranks(2)
def test_ids_of_no_expert_are_refused_as_they_are_without_copies(rank: int, world_size: int, bad: int) -> None:
    plain, redundant = layers(2)
    comet.add_redundant_experts(redundant, LOADS, 2)
    for layer in (plain, redundant):
        ids = torch.tensor([[1, bad if rank == 0 else 6]], dtype=torch.int32)
        with pytest.raises((ValueError, StepFailedError), match="contain"):
            layer.routed_experts(torch.randn(1, 16), ids, torch.ones(1, 2))
        layer.group.workspace.restart()
        with pytest.raises((ValueError, StepFailedError), match="int32"):
            layer.routed_experts(torch.randn(1, 16), ids.clamp(0, 7).long(), torch.ones(1, 2))
        layer.group.workspace.restart()


def test_holders_of_many_ranks_take_little_memory() -> None:
    """Numbers of holders without common divisors: their least common multiple is 1,506,960."""
    layout = ExpertLayout(num_experts=256, top_k=8, ep=256, tp=1, rank=0)
    held: list[list[int]] = [[] for _ in range(256)]
    for expert, copies in enumerate((1, 2, 3, 4, 5, 6, 8, 15, 22, 25)):
        for rank in range(100, 100 + copies):
            held[rank].append(expert)
    holders = holders_of(held, layout, 10)
    assert (max(map(len, holders)), sum(map(len, holders))) == (26, 256 + 91)


def test_one_shard_is_refused() -> None:
    layer = MoE(CONFIG, make_group(CONFIG))
    with pytest.raises(ValueError, match="ep=1 must be at least 2"):
        comet.add_redundant_experts(layer, LOADS)
