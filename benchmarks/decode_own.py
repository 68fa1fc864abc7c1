"""Decode of tokens that the ranks do not share (data-parallel attention), as variants of the decode benchmark.

A step has the batch of all other variants, but each rank brings its share of the tokens and gets the output of that. So
``local``, a rank's part of the batch, is contained in ``own`` and ``own_nccl``: what they take longer is the cost of
bringing tokens together and sums back. ``own`` is ``RankDecode(replicated=False)``; ``own_nccl`` an all-gather by NCCL,
the local step and a reduce-scatter by NCCL; ``own_fused`` the fused path, which takes the shares as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from decode_steps import Step, StepRun
from decode_team import Team
from torch import Tensor
from torch.nn.functional import pad

from comet.decode import MAX_DECODE_TOKENS, DecodeScratch, warp_decode
from comet.decode.gathered import Batch
from comet.decode.runners import rank_slice
from comet.layout import ExpertLayout

OWN = ("own", "own_nccl", "own_fused")


def own_runs(team: Team, steps: Sequence[Step], variants: Sequence[str]) -> dict[str, StepRun]:
    """The variants of ``OWN`` that are asked for; without warp decode where W equal shares have no room in it."""
    num_tokens = len(steps[0].tokens)
    mine, slots = share_of(num_tokens, team.layout), slots_of(num_tokens, team.layout)
    shares = [Batch(step.tokens[mine], step.ids[mine], step.routing_weights[mine]) for step in steps]
    has_room = slots * team.layout.world_size <= MAX_DECODE_TOKENS
    found: dict[str, StepRun] = {}
    if "own" in variants and has_room and team.shared is not None:
        found["own"] = partial(run_own, team, steps, shares, slots, scratch_of(team, steps, slots))
    if "own_nccl" in variants and has_room:
        filled = [fill(share, slots) for share in shares]
        found["own_nccl"] = partial(run_own_nccl, team, steps, filled, scratch_of(team, steps, slots))
    if "own_fused" in variants and team.shared is not None:
        found["own_fused"] = partial(run_own_fused, team, steps, shares)
    return found


def share_of(num_tokens: int, layout: ExpertLayout) -> slice:
    """Which tokens of a batch this rank brings; of 5 over 4 ranks: 0..1, 2..3, 4, none."""
    return rank_slice(0, num_tokens, layout.rank, layout.world_size)


def slots_of(num_tokens: int, layout: ExpertLayout) -> int:
    """Most tokens that a rank brings: a step has room for as many of every rank; of 5 over 4 ranks: 2."""
    return -(-num_tokens // layout.world_size)


def scratch_of(team: Team, steps: Sequence[Step], slots: int) -> DecodeScratch:
    """Memory between the kernels of a step with that many slots of every rank."""
    step, rows = steps[0], slots * team.layout.world_size
    return DecodeScratch.create(step.weights, team.config.top_k, step.tokens.dtype, max_tokens=rows)


def fill(share: Batch, slots: int) -> Batch:
    """``slots`` tokens, the last ones without experts: NCCL gathers equally many of every rank."""
    rows = (0, 0, 0, slots - len(share.tokens))
    return Batch(pad(share.tokens, rows), pad(share.top_k_ids, rows, value=-1), pad(share.top_k_weights, rows))


def run_own(
    team: Team, steps: Sequence[Step], shares: Sequence[Batch], slots: int, scratch: DecodeScratch, index: int
) -> Tensor:
    """Comet's decode over ranks: a kernel gathers the tokens, the all-reduce goes to the rank of each."""
    return team.own_decode(slots)(*shares[index], steps[index].weights, scratch=scratch)


def run_own_nccl(
    team: Team, steps: Sequence[Step], filled: Sequence[Batch], scratch: DecodeScratch, index: int
) -> Tensor:
    """One launch of NCCL gathers tokens, ids and routing weights, the next one scatters the sums."""
    group = team.ranks.process_group
    ranks = team.layout.world_size
    batch = Batch(*(tensor.new_empty(ranks * len(tensor), tensor.shape[1]) for tensor in filled[index]))
    with dist._coalescing_manager(group):
        for gathered, own in zip(batch, filled[index], strict=True):
            dist.all_gather_into_tensor(gathered, own, group=group)
    part = warp_decode(*batch, steps[index].weights, scratch=scratch)
    output = torch.empty_like(filled[index].tokens)
    dist.reduce_scatter_tensor(output, part, group=group)
    mine = share_of(len(steps[index].tokens), team.layout)
    return output[: mine.stop - mine.start]


def run_own_fused(team: Team, steps: Sequence[Step], shares: Sequence[Batch], index: int) -> Tensor:
    """The fused path, which above 64 / W tokens of a rank is the layer's own (see ``OwnTokensRunner``)."""
    assert team.shared is not None
    weights = steps[index].set.plain
    return team.shared.fused(*shares[index], weights.w1, weights.w2)


def in_place(output: Tensor, exact: Tensor, layout: ExpertLayout) -> Tensor:
    """This rank's output among zeros for the tokens of the others, in float64; the sum over ranks is the whole one."""
    whole = torch.zeros_like(exact)
    whole[share_of(len(exact), layout)] = output.double()
    return whole
