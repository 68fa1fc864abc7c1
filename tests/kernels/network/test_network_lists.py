"""The lists of tokens that travel to other nodes, under the interpreter, against a loop over the tokens."""

import random

import pytest
import torch
from ranks import in_ranks

from comet.kernels.network.legs import LegShape, SendLists
from comet.kernels.network.listing import list_tokens
from comet.kernels.runtime.faults import Place

CHUNK = 128


def listed(ids: torch.Tensor, weights: torch.Tensor, num_nodes: int, node: int, per_node: int) -> SendLists:
    num_tokens, top_k = ids.shape
    most, slots = -(-num_tokens // CHUNK) * CHUNK, num_nodes - 1
    sizes = dict(ring=slots, num_chunks=most // CHUNK, chunk=CHUNK, slot_words=0, header=0)
    shape = LegShape(num_nodes, **sizes, place=Place.GUESTS, is_home=False, interpret=True)
    sizes_of = ((slots, most), (slots, most), (slots,), (slots, most, 2 * top_k))
    lists = SendLists(*(torch.full(size, -7, dtype=torch.int32) for size in sizes_of))
    list_tokens(ids, weights, lists, node, per_node, shape)
    return lists


@in_ranks(1, interpret=True)
def test_the_example(rank: int, world_size: int) -> None:
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]], dtype=torch.int32)
    lists = listed(ids, torch.rand(3, 2), num_nodes=2, node=0, per_node=2)
    assert lists.counts.tolist() == [2]
    assert lists.tokens[0, :2].tolist() == [1, 2]
    assert lists.places[0, :3].tolist() == [-1, 0, 1]
    assert lists.words[0, :2, :2].tolist() == [[-1, 1], [0, 1]]


@pytest.mark.parametrize(("num_nodes", "num_tokens", "top_k"), [(2, 1, 1), (3, 150, 3), (4, 40, 8)])
@in_ranks(1, interpret=True)
def test_lists_have_every_token_of_another_node_once(
    rank: int, world_size: int, num_nodes: int, num_tokens: int, top_k: int
) -> None:
    torch.manual_seed(seed := random.randrange(10**6))
    print(f"seed {seed}")
    per_node, node = 8, num_nodes - 1
    ids = torch.rand(num_tokens, per_node * num_nodes).topk(top_k, dim=1).indices.int()
    ids[torch.rand(num_tokens, top_k) < 0.3] = -1
    weights = torch.rand(num_tokens, top_k)
    lists = listed(ids, weights, num_nodes, node, per_node)
    for slot in range(num_nodes - 1):
        local = ids - (node + 1 + slot) % num_nodes * per_node
        local[(ids < 0) | (local < 0) | (local >= per_node)] = -1
        travels = (local >= 0).any(dim=1)
        tokens = travels.nonzero().flatten()
        assert int(lists.counts[slot]) == len(tokens)
        assert torch.equal(lists.tokens[slot, : len(tokens)].long(), tokens)
        places = torch.where(travels, travels.cumsum(0) - 1, -1)
        assert torch.equal(lists.places[slot, :num_tokens].long(), places)
        words = torch.cat([local, weights.view(torch.int32)], dim=1)[tokens]
        assert torch.equal(lists.words[slot, : len(tokens)], words)
