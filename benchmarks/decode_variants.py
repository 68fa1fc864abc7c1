"""Every way to run a decode step, as a function of the number of the step.

On one GPU: warp decode (``comet``, and the trials of ``--try``), the expert-centric paths (``torch``, ``triton0`` ...),
transformers (``transformers_eager`` ...) and Comet's fused path (``fused``). Over ranks, whose tokens are the same:
``comet`` with the all-reduce inside; ``local``, a rank's part alone; ``local_nccl``, that and an all-reduce of
``torch.distributed``; ``fused``, of which every rank takes its slice of the tokens and gathers the results. ``own``
and the others of ``decode_own``: each rank brings its share of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from decode_library import Library
from decode_own import OWN, own_runs
from decode_paths import EXPERT_CONFIGS, torch_experts, triton_experts
from decode_steps import Step, StepRun
from decode_team import Team
from torch import Tensor

from comet.config import MoEConfig, require
from comet.decode import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights, warp_decode
from comet.decode.local import run_kernels
from comet.decode.runners import run_path_on_slices
from comet.kernels.group_gemm import GemmConfig
from comet.kernels.warp_decode_blocks import BlockShape, DecodeConfig, select

Trial = dict[str, str]

ON_ONE_GPU = ("comet", "torch", "triton", "transformers", "fused")
OVER_RANKS = ("comet", "local", "local_nccl", "fused", *OWN)
DECODES = ("comet", "local", "local_nccl")  # for at most MAX_DECODE_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured at every point.

    Args:
        variants: Of ``ON_ONE_GPU`` or ``OVER_RANKS``.
        trials: Fields of the selected blocks to change; a variant each.
        routing: Kind of routing.
        rounds: Counted calls of each variant.
        library: transformers, where it is installed and asked for.
        roof_tbs: What reading memory can reach.
    """

    variants: tuple[str, ...]
    trials: Sequence[Trial] = ()
    routing: str = "uniform"
    rounds: int = 30
    library: Library | None = None
    roof_tbs: float = 1.0


def step_runs(team: Team, steps: Sequence[Step], settings: Settings) -> dict[str, StepRun]:
    """All variants that take so many tokens; past ``MAX_DECODE_TOKENS`` there is no warp decode."""
    found: dict[str, StepRun] = {}
    if len(steps[0].tokens) <= MAX_DECODE_TOKENS:
        found |= decode_runs(team, steps, settings)
    found |= centric_runs(steps, settings.variants)
    if settings.library is not None:
        found |= settings.library.runs(steps)
    if "fused" in settings.variants and team.shared is not None:
        found["fused"] = partial(run_fused, team, steps)
    if not team.is_alone:
        found |= own_runs(team, steps, settings.variants)
    return found


def decode_runs(team: Team, steps: Sequence[Step], settings: Settings) -> dict[str, StepRun]:
    """Warp decode of this rank and over the ranks, and every trial."""
    tokens, weights, model = steps[0].tokens, steps[0].weights, team.config
    local_model = replace(model, ffn_size=weights.ffn_size)
    chosen = configs(
        local_model, len(tokens), tokens.dtype, settings.trials, weights.shared_scale, weights.per_number > 1
    )
    scratch, other_scratch = (
        DecodeScratch.create(weights, model.top_k, tokens.dtype, max_tokens=len(tokens)) for _ in range(2)
    )

    def local(index: int, config: DecodeConfig = chosen["comet"]) -> Tensor:
        arguments = routed(steps[index])
        return run_kernels(*arguments, scratch=scratch, config=config) if tokens.is_cuda else warp_decode(*arguments)

    def over_ranks(index: int, config: DecodeConfig) -> Tensor:
        assert team.shared is not None
        assert team.shared.decode is not None
        return team.shared.decode(*routed(steps[index]), scratch=other_scratch, config=config)

    found: dict[str, StepRun] = {}
    if team.is_alone or team.shared is not None:
        run = local if team.is_alone else over_ranks
        found |= {name: partial(run, config=config) for name, config in chosen.items()}
    if "local" in settings.variants:
        found["local"] = local
    if "local_nccl" in settings.variants:
        found["local_nccl"] = lambda index: team.total(local(index))
    return {name: run for name, run in found.items() if name not in DECODES or name in settings.variants}


def centric_runs(steps: Sequence[Step], variants: Sequence[str]) -> dict[str, StepRun]:
    """The expert-centric paths of ``decode_paths``; of ``triton`` all tile shapes."""
    found: dict[str, StepRun] = {}
    if "torch" in variants:
        found["torch"] = lambda index: torch_experts(*plain(steps[index]))
    if "triton" in variants:
        for number, config in enumerate(EXPERT_CONFIGS):
            found[f"triton{number}"] = partial(run_triton, steps, config)
    return found


def run_triton(steps: Sequence[Step], config: GemmConfig, index: int) -> Tensor:
    """Comet's grouped GEMM in tiles of one shape."""
    return triton_experts(*plain(steps[index]), config)


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
