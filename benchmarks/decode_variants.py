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

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from decode_steps import Step, StepRun, Team
from points import FAILURES
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from comet.config import MoEConfig, require
from comet.decode import MAX_DECODE_TOKENS, DecodeScratch, DecodeWeights, warp_decode
from comet.decode.gathered import Batch
from comet.decode.local import run_kernels
from comet.decode.runners import rank_slice, run_path_on_slices
from comet.kernels.arguments import TileTable
from comet.kernels.group_gemm import GemmConfig, group_gemm, group_gemm_torch
from comet.kernels.warp_decode_blocks import BlockShape, DecodeConfig, select
from comet.layout import ExpertLayout

PREFIX = "transformers_"
LOOP = "eager"  # the module's own loop over experts, under no name in the registry
OURS = "comet"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed transformers: its version and the names of its experts implementations.

    ``unavailable`` collects, during a run, those that cannot work here, and why: they are not tried again.
    """

    version: str
    names: tuple[str, ...]
    unavailable: dict[str, str] = field(default_factory=dict)

    def runs(self, steps: Sequence[Step]) -> dict[str, Callable[[int], Tensor]]:
        """Every implementation as a function of the number of the step."""
        ids = [step.ids.long() for step in steps]  # what the library's routers give
        return {f"{PREFIX}{name}": self._run(name, steps, ids) for name in self.names}

    def _run(self, name: str, steps: Sequence[Step], ids: Sequence[Tensor]) -> Callable[[int], Tensor]:
        modules = [make_experts(name, step) for step in steps]

        def run(index: int) -> Tensor:
            if name in self.unavailable:
                raise RuntimeError(self.unavailable[name])
            try:
                output: Tensor = modules[index](steps[index].tokens, ids[index], steps[index].routing_weights)
            except (RuntimeError, ValueError):
                raise  # this shape, or the memory of this moment
            except Exception as error:  # a package or a downloaded kernel is missing: anything may be raised
                lines = str(error).strip().splitlines() or [""]
                self.unavailable[name] = f"{type(error).__name__}: {lines[0]}"
                raise RuntimeError(self.unavailable[name]) from error
            return output

        return run


def find_library() -> Library | None:
    """The transformers installed here; ``None``, and a line that says so, without one that has implementations."""
    try:
        import transformers
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except FAILURES as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        print(f"no columns of transformers: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        return None
    assert issubclass(Qwen3MoeExperts, nn.Module)
    names = [name for name in ALL_EXPERTS_FUNCTIONS if name not in (LOOP, OURS)]
    return Library(transformers.__version__, (LOOP, *names))


def make_experts(name: str, step: Step) -> nn.Module:
    """The library's module over the weights of a step, not a copy, that computes by the implementation ``name``."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    weights = step.set.plain
    config = Qwen3MoeConfig(
        num_experts=weights.num_experts,
        num_experts_per_tok=step.ids.shape[1],
        hidden_size=weights.hidden_size,
        moe_intermediate_size=weights.ffn_size,
        hidden_act="silu",
    )
    config._experts_implementation = name
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    for field_name, weight in (("gate_up_proj", weights.w1), ("down_proj", weights.w2)):
        wanted = tuple(getattr(experts, field_name).shape)
        if wanted != tuple(weight.shape):
            raise ValueError(f"{field_name} of shape {tuple(weight.shape)} must be {wanted} for transformers")
        setattr(experts, field_name, nn.Parameter(weight, requires_grad=False))
    module: nn.Module = experts.eval()
    return module


BLOCK_ROWS = 16
# Tile shapes that are all timed; the fastest counts.
EXPERT_CONFIGS = (
    GemmConfig(block_n=64, block_k=64, num_stages=5, num_warps=4),
    GemmConfig(block_n=128, block_k=64, num_stages=4, num_warps=4),
    GemmConfig(block_n=128, block_k=128, num_stages=3, num_warps=8),
)


def torch_experts(tokens: Tensor, ids: Tensor, routing_weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Sort the routed rows by expert, two of torch's grouped GEMMs, weighted sum.

    Args:
        tokens: ``(T, D)``.
        ids: ``(T, K)`` int32 in ``[0, E)``.
        routing_weights: ``(T, K)`` float32.
        w1: ``(E, 2F, D)``.
        w2: ``(E, D, F)``.

    Returns:
        ``(T, D)``.
    """
    order = ids.flatten().argsort(stable=True)
    ends = expert_counts(ids, w1.shape[0]).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(tokens[order // ids.shape[1]], w1.mT, offs=ends).chunk(2, dim=1)
    rows = torch._grouped_mm(silu(gate) * up, w2.mT, offs=ends)
    outputs = torch.empty_like(rows)
    outputs[order] = rows
    return weighted_sum(outputs, routing_weights)


def triton_experts(
    tokens: Tensor, ids: Tensor, routing_weights: Tensor, w1: Tensor, w2: Tensor, config: GemmConfig
) -> Tensor:
    """Sort and pad the routed rows into tiles, Comet's grouped GEMM twice, weighted sum; see ``torch_experts``."""
    gemm = group_gemm if tokens.is_cuda else group_gemm_torch
    table, places = tile_table(ids, w1.shape[0])
    num_rows = table.row_ids.shape[0]
    pre = tokens.new_empty(num_rows, w1.shape[1])
    gemm(tokens, w1, pre, table, gather=True, layout="nk", config=config)
    gate, up = pre.chunk(2, dim=1)
    rows = tokens.new_empty(num_rows, w2.shape[1])
    gemm(silu(gate) * up, w2, rows, table, gather=False, layout="nk", config=config)
    return weighted_sum(rows[places], routing_weights)


def weighted_sum(outputs: Tensor, routing_weights: Tensor) -> Tensor:
    """``(J, D)`` outputs in (token, k) order, weighted in float32 and added per token."""
    by_token = outputs.view(*routing_weights.shape, -1).float()
    return (by_token * routing_weights[..., None]).sum(1).to(outputs.dtype)


def expert_counts(ids: Tensor, num_experts: int) -> Tensor:
    """``(E,)`` routed rows of each expert, on the device; ids ``[[2, 0], [2, 1]]`` of 4 give ``[1, 1, 2, 0]``."""
    experts = torch.arange(num_experts, device=ids.device)
    return (ids.flatten()[:, None] == experts).sum(0)


def tile_table(ids: Tensor, num_experts: int) -> tuple[TileTable, Tensor]:
    """Tiles of 16 rows, expert by expert, without asking the device how many there are.

    Example: ids ``[[2, 0], [2, 1]]``: tiles (expert, first row, rows) (0, 0, 1), (1, 16, 1), (2, 32, 2), row ids
    0, 1 at 32 and 33, places ``[32, 0, 33, 16]``.

    Returns:
        The table, and ``(J,)`` where each routed row's output is.
    """
    num_rows, top_k = ids.numel(), ids.shape[1]
    most_tiles = min(num_rows, num_experts) + num_rows // BLOCK_ROWS
    counts = expert_counts(ids, num_experts)
    tiles_of = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    tile_ends = tiles_of.cumsum(0)
    tile = torch.arange(most_tiles, device=ids.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=num_experts - 1)
    in_expert = tile - (tile_ends - tiles_of)[expert]
    valid = (counts[expert] - in_expert * BLOCK_ROWS).clamp(0, BLOCK_ROWS)
    order = ids.flatten().argsort(stable=True)
    sorted_ids = ids.flatten()[order].long()
    rank = torch.arange(num_rows, device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
    sorted_places = (tile_ends - tiles_of)[sorted_ids] * BLOCK_ROWS + rank
    row_ids = torch.zeros(most_tiles * BLOCK_ROWS, dtype=torch.int32, device=ids.device)
    row_ids[sorted_places] = (order // top_k).to(torch.int32)
    places = torch.empty_like(order)
    places[order] = sorted_places
    table = TileTable(
        tiles=torch.stack([expert, tile * BLOCK_ROWS, valid, torch.zeros_like(tile)], dim=1).to(torch.int32),
        num_tiles=tile_ends[-1:].to(torch.int32),
        row_ids=row_ids,
        counters=row_ids[:0],
        block_rows=BLOCK_ROWS,
    )
    return table, places


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
    """The expert-centric paths here; of ``triton`` all tile shapes."""
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
