"""The list of tokens that travel to other nodes, under the interpreter: the worked example, and random routing."""

import torch
from ranks import in_ranks

from comet.kernels.network.legs import HEADER, LegShape, SendLists
from comet.kernels.network.listing import list_tokens


def listed(ids: torch.Tensor, weights: torch.Tensor, *, num_nodes: int, node: int, experts: int) -> SendLists:
    slots, rows, top_k = num_nodes - 1, 256, ids.shape[1]
    shape = LegShape(
        num_nodes=num_nodes, num_chunks=2, chunk=128, slot_words=HEADER + rows * 2 * top_k, header=HEADER,
        is_home=False, interpret=True,
    )  # fmt: skip
    sizes = ((slots, rows), (slots, rows), (slots,), (slots, rows, 2 * top_k))
    lists = SendLists(*(torch.full(size, -7, dtype=torch.int32) for size in sizes))
    list_tokens(ids, weights, lists, node, experts // num_nodes, shape)
    return lists


@in_ranks(1, interpret=True)
def test_listing_of_tokens_is_that_of_a_loop(rank: int, world_size: int) -> None:
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]], dtype=torch.int32)
    lists = listed(ids, torch.rand(3, 2), num_nodes=2, node=0, experts=4)
    assert lists.tokens[0, :2].tolist() == [1, 2]
    assert lists.places[0, :3].tolist() == [-1, 0, 1]
    assert lists.counts.tolist() == [2]
    assert lists.words[0, :2, :2].tolist() == [[-1, 1], [0, 1]]
    for seed in range(3):
        print("seed", seed)
        draw = torch.Generator().manual_seed(seed)
        num_nodes, node, experts = 4, seed, 8
        ids = torch.randint(-1, experts, (150, 3), generator=draw, dtype=torch.int32)
        weights = torch.rand(150, 3, generator=draw)
        lists = listed(ids, weights, num_nodes=num_nodes, node=node, experts=experts)
        for slot in range(num_nodes - 1):
            first = (node + 1 + slot) % num_nodes * 2
            local = torch.where((ids >= first) & (ids < first + 2), ids - first, -1)
            travel = (local >= 0).any(1).nonzero().flatten()
            assert lists.counts[slot] == len(travel)
            assert torch.equal(lists.tokens[slot, : len(travel)], travel.int())
            places = torch.full((150,), -1, dtype=torch.int32)
            places[travel] = torch.arange(len(travel), dtype=torch.int32)
            assert torch.equal(lists.places[slot, :150], places)
            words = torch.cat([local[travel], weights[travel].view(torch.int32)], dim=1)
            assert torch.equal(lists.words[slot, : len(travel)], words)
