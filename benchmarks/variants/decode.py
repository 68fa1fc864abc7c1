"""Every way to run a decode step, as a function of the number of the step.

On one GPU: warp decode (``comet``, and the trials of ``--try``), the expert-centric paths (``torch``, ``triton0`` ...:
sort, pad, grouped GEMMs, weighted sum, no host sync), transformers (``transformers_eager`` ...) and Comet's fused path
(``fused``). Over ranks, whose tokens are the same: ``comet`` with the all-reduce inside; ``local``, a rank's part
alone; ``local_nccl``, that and an all-reduce of ``torch.distributed``; ``fused``, of which every rank takes its slice
of the tokens and gathers the results.

Over ranks that do not share their tokens (data-parallel attention) a step has the same batch, but each rank brings its
share of it and gets the output of that. So ``local``, a rank's part of the batch, is contained in ``own`` and
``own_nccl``: what they take longer is the cost of bringing tokens together and sums back. ``own`` is
``RankDecode(replicated=False)``; ``own_nccl`` an all-gather by NCCL, the local step and a reduce-scatter by NCCL;
``own_fused`` the fused path, which takes the shares as they are.

Letters: T tokens, K, D, F, E experts (all held), J = T * K routed rows, B rows of a tile.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from comet.config import MoEConfig, require
from comet.decode import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights, warp_decode
from comet.decode.local import run_kernels
from comet.decode.runners import rank_slice, run_path_on_slices
from comet.kernels.decode.blocks import BlockShape, DecodeConfig, select
from comet.kernels.decode.step import Batch
from comet.layout import ExpertLayout

from baselines.decode import EXPERT_CONFIGS, torch_experts, triton_experts
from lib.decode.report import OWN
from lib.decode.steps import Step, StepRun, Team


def own_runs(team: Team, steps: Sequence[Step], variants: Sequence[str]) -> dict[str, StepRun]:
    """The variants of ``OWN`` that are asked for; without warp decode where W equal shares have no room in it."""
    num_tokens, ranks, group = len(steps[0].tokens), team.layout.world_size, team.ranks.process_group
    mine, slots = share_of(num_tokens, team.layout), slots_of(num_tokens, team.layout)
    shares = [Batch(step.tokens[mine], step.ids[mine], step.routing_weights[mine]) for step in steps]
    filled = [fill(share, slots) for share in shares]
    step, rows = steps[0], min(slots * ranks, MAX_DECODE_TOKENS)
    scratch, other_scratch = (
        DecodeScratch.create(step.weights, team.config.top_k, step.tokens.dtype, max_tokens=rows) for _ in range(2)
    )

    def own(index: int) -> Tensor:
        return team.own_decode(slots)(*shares[index], steps[index].weights, scratch=scratch)

    def own_nccl(index: int) -> Tensor:
        """One launch of NCCL gathers tokens, ids and routing weights, the next one scatters the sums."""
        batch = Batch(*(tensor.new_empty(ranks * len(tensor), tensor.shape[1]) for tensor in filled[index]))
        with dist._coalescing_manager(group):
            for gathered, part in zip(batch, filled[index], strict=True):
                dist.all_gather_into_tensor(gathered, part, group=group)
        sums = warp_decode(*batch, steps[index].weights, scratch=other_scratch)
        output = torch.empty_like(filled[index].tokens)
        dist.reduce_scatter_tensor(output, sums, group=group)
        return output[: mine.stop - mine.start]

    def own_fused(index: int) -> Tensor:
        assert team.shared is not None
        weights = steps[index].set.plain
        return team.shared.fused(*shares[index], weights.w1, weights.w2)

    has_room = slots * ranks <= MAX_DECODE_TOKENS
    found: dict[str, StepRun] = {"own_nccl": own_nccl} if has_room else {}
    if team.shared is not None:
        found |= {"own": own, "own_fused": own_fused} if has_room else {"own_fused": own_fused}
    return {name: found[name] for name in OWN if name in found and name in variants}


def share_of(num_tokens: int, layout: ExpertLayout) -> slice:
    """Which tokens of a batch this rank brings; of 5 over 4 ranks: 0..1, 2..3, 4, none."""
    return rank_slice(0, num_tokens, layout.rank, layout.world_size)


def slots_of(num_tokens: int, layout: ExpertLayout) -> int:
    """Most tokens that a rank brings: a step has room for as many of every rank; of 5 over 4 ranks: 2."""
    return -(-num_tokens // layout.world_size)


def fill(share: Batch, slots: int) -> Batch:
    """``slots`` tokens, the last ones without experts: NCCL gathers equally many of every rank."""
    rows = (0, 0, 0, slots - len(share.tokens))
    return Batch(pad(share.tokens, rows), pad(share.ids, rows, value=-1), pad(share.routing_weights, rows))


def in_place(output: Tensor, exact: Tensor, layout: ExpertLayout) -> Tensor:
    """This rank's output among zeros for the tokens of the others, in float64; the sum over ranks is the whole one."""
    whole = torch.zeros_like(exact)
    whole[share_of(len(exact), layout)] = output.double()
    return whole


Trial = dict[str, str]
ON_ONE_GPU = ("comet", "torch", "triton", "transformers", "fused")
OVER_RANKS = ("comet", "local", "local_nccl", "fused", *OWN)
DECODES = ("comet", "local", "local_nccl")  # for at most MAX_DECODE_TOKENS


def step_runs(team: Team, steps: Sequence[Step], arguments: argparse.Namespace) -> dict[str, StepRun]:
    """All variants that take so many tokens; past ``MAX_DECODE_TOKENS`` there is no warp decode.

    Args:
        arguments: ``variants``, ``trials`` and ``library``, which is ``None`` where none is wanted.
    """
    found: dict[str, StepRun] = {}
    if len(steps[0].tokens) <= MAX_DECODE_TOKENS:
        found |= decode_runs(team, steps, arguments)
    found |= centric_runs(steps, arguments.variants)
    if arguments.library is not None:
        found |= arguments.library.runs(steps)
    if "fused" in arguments.variants and team.shared is not None:
        found["fused"] = partial(run_fused, team, steps)
    if not team.is_alone:
        found |= own_runs(team, steps, arguments.variants)
    return found


def decode_runs(team: Team, steps: Sequence[Step], arguments: argparse.Namespace) -> dict[str, StepRun]:
    """Warp decode of this rank and over the ranks, and every trial."""
    tokens, weights, model = steps[0].tokens, steps[0].weights, team.config
    local_model = replace(model, ffn_size=weights.ffn_size)
    chosen = configs(
        local_model, len(tokens), tokens.dtype, arguments.trials, weights.shared_scale, weights.per_number > 1
    )
    scratch, other_scratch = (
        DecodeScratch.create(weights, model.top_k, tokens.dtype, max_tokens=len(tokens)) for _ in range(2)
    )

    def local(index: int, config: DecodeConfig = chosen["comet"]) -> Tensor:
        inputs = routed(steps[index])
        return run_kernels(*inputs, scratch=scratch, config=config) if tokens.is_cuda else warp_decode(*inputs)

    def over_ranks(index: int, config: DecodeConfig) -> Tensor:
        assert team.shared is not None
        assert team.shared.decode is not None
        return team.shared.decode(*routed(steps[index]), scratch=other_scratch, config=config)

    found: dict[str, StepRun] = {}
    if team.is_alone or team.shared is not None:
        run = local if team.is_alone else over_ranks
        found |= {name: partial(run, config=config) for name, config in chosen.items()}
    if "local" in arguments.variants:
        found["local"] = local
    if "local_nccl" in arguments.variants:
        found["local_nccl"] = lambda index: team.total(local(index))
    return {name: run for name, run in found.items() if name not in DECODES or name in arguments.variants}


def centric_runs(steps: Sequence[Step], variants: Sequence[str]) -> dict[str, StepRun]:
    """The expert-centric paths here; of ``triton`` all tile shapes."""
    found: dict[str, StepRun] = {}
    if "torch" in variants:
        found["torch"] = lambda index: torch_experts(*plain(steps[index]))
    if "triton" in variants:
        for number, config in enumerate(EXPERT_CONFIGS):
            found[f"triton{number}"] = lambda index, config=config: triton_experts(*plain(steps[index]), config)  # type: ignore[misc]
    return found


def run_fused(team: Team, steps: Sequence[Step], index: int) -> Tensor:
    """Comet's fused path; a rank alone has no slices to take or to gather."""
    assert team.shared is not None
    step, path = steps[index], team.shared.fused
    if team.is_alone:
        return path(*plain(step))
    compute = partial(path, w1=step.set.plain.w1, w2=step.set.plain.w2)
    return run_path_on_slices(step.tokens, step.ids, step.routing_weights, compute, team.shared.group)


def routed(step: Step) -> tuple[Tensor, Tensor, Tensor, DecodeWeights]:
    """Arguments of warp decode."""
    return step.tokens, step.ids, step.routing_weights, step.weights


def plain(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of paths that take no quantised weights."""
    return step.tokens, step.ids, step.routing_weights, step.set.plain.w1, step.set.plain.w2


def configs(
    model: MoEConfig,
    num_tokens: int,
    dtype: torch.dtype,
    trials: Sequence[Trial],
    shared_scale: int = 0,
    four_bits: bool = False,
) -> dict[str, DecodeConfig]:
    """The selected blocks as ``comet``, and every trial under its text; a trial may name the form to start at."""
    choose = partial(select, dtype, shared_scale=shared_scale, four_bits=four_bits)
    shape = (model.top_k, model.hidden_size, model.ffn_size)
    found = {"comet": choose(num_tokens, *shape)}
    for trial in trials:
        tokens_of_form = {"vector": min(num_tokens, 2), "matrix": max(num_tokens, 3)}
        base = choose(tokens_of_form.get(trial.get("form", ""), num_tokens), *shape)
        changed = change(base, trial).fit(model.hidden_size, model.ffn_size)
        found[",".join(f"{name}={value}" for name, value in trial.items())] = changed
    return found


def change(config: DecodeConfig, trial: Trial) -> DecodeConfig:
    """``config`` with fields set as ``{"gate_up.rows": "8", "fold": "1"}`` says; ``ValueError`` for one that is not."""
    known = [field.name for field in fields(DecodeConfig) if field.name not in ("gate_up", "down")]
    known += [f"{block}.{field.name}" for block in ("gate_up", "down") for field in fields(BlockShape)]
    for name, value in trial.items():
        require(name in known, f"--try {name}={value}: the field must be one of {', '.join(known)}")
        block, _, field = name.rpartition(".")
        if block:
            config = replace(config, **{block: replace(getattr(config, block), **{field: int(value)})})
        elif name == "form":
            continue
        else:
            config = replace(config, **{name: type(getattr(config, name))(int(value))})
    return config
