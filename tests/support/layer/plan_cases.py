"""Random routings with all the awkward cases, and a plan written as plain loops: the oracle of the torch twin."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulated import emulated_group
from torch import Tensor

from comet.comm import Communicator
from comet.config import MoEConfig, OverlapConfig
from comet.errors import CapacityError
from comet.layer.backend import Backend
from comet.layer.plan import Plan, PlanRules, routed_row_capacity
from comet.layer.twin.layer import Twin
from comet.layer.twin.plan import plan_tensors
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings

# A routed row's phase, received row, expert slot, weight.
Routed = tuple[int, int, int, float]

MAX_TOKENS = (128, 256, 384)
ROUTINGS = ("uniform", "one expert", "few experts", "masked", "repeated")
FIELDS = (
    "send_token_ids", "send_counts", "send_rows", "recv_counts", "row_slots", "row_weights", "routed_row_ids",
    "routed_slots", "segment_starts", "segment_counts", "tiles",
    "segment_tiles", "tile_starts", "status", "counters",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One geometry with the routing of every rank; ``ids`` and ``weights`` hold one (T_r, K) tensor per rank."""

    num_experts: int
    ep: int
    tp: int
    max_tokens: int
    block_rows: int
    expert_capacity: int | None
    max_routed_rows: int
    ids: list[Tensor]
    weights: list[Tensor]

    @property
    def top_k(self) -> int:
        return self.ids[0].shape[1]

    @property
    def world_size(self) -> int:
        return self.ep * self.tp

    def layout(self, rank: int) -> ExpertLayout:
        return ExpertLayout(num_experts=self.num_experts, top_k=self.top_k, ep=self.ep, tp=self.tp, rank=rank)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "block_rows": self.block_rows,
            "expert_capacity": self.expert_capacity,
            "max_routed_rows": self.max_routed_rows,
        }

    def backend(self, rank: int, pool: Workspace, *, use_kernels: bool = True) -> Backend:
        return plan_backend(self.layout(rank), pool, PlanRules.create(**self.arguments), use_kernels=use_kernels)

    def routing(self, rank: int, pool: Workspace) -> tuple[Tensor, Tensor]:
        device = pool.ids.local.device
        return self.ids[rank].to(device), self.weights[rank].to(device)

    def plan(self, rank: int, pool: Workspace, *, use_kernels: bool = True) -> Plan:
        """The plan of this rank (collective)."""
        return self.backend(rank, pool, use_kernels=use_kernels).plan(*self.routing(rank, pool))

    def send(self, rank: int, pool: Workspace) -> None:
        """Send as the kernels of this rank do: a process that plays all ranks does so before it plans for one."""
        send_ids(self.backend(rank, pool), *self.routing(rank, pool))

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Ids and weights of all ranks, (W, M, K), padded with -1 and 0."""
        ids = torch.full((self.world_size, self.max_tokens, self.top_k), -1, dtype=torch.int32)
        weights = torch.zeros(ids.shape)
        for rank, (own, weight) in enumerate(zip(self.ids, self.weights, strict=True)):
            ids[rank, : len(own)] = own
            weights[rank, : len(own)] = weight
        return ids, weights


def random_case(
    seed: int,
    ep: int,
    tp: int,
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
) -> Case:
    """A case drawn from ``seed``; what is not given is drawn too, with extremes more often than chance has them."""
    draw = random.Random(seed)
    world_size = ep * tp
    num_experts = num_experts or ep * draw.choice((1, 2, 3, 8, 33))
    top_k = top_k or draw.choice((1, min(2, num_experts), min(6, num_experts), min(num_experts, 32)))
    max_tokens = max_tokens or draw.choice(MAX_TOKENS)
    counts = [draw.choice((0, 1, 127, 128, draw.randint(0, max_tokens), max_tokens)) for _ in range(world_size)]
    ids = [_ids(draw, min(count, max_tokens), num_experts, top_k) for count in counts]
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.rand(len(own), top_k, generator=generator) for own in ids]
    block_rows = draw.choice((16, 32, 64, 128))
    layout = ExpertLayout(num_experts=num_experts, top_k=top_k, ep=ep, tp=tp, rank=0)
    # A repeated expert needs up to K rows per token; e = K makes room for them.
    enough = routed_row_capacity(layout, max_tokens, block_rows, None)
    repeated = block_rows * -(-world_size * max_tokens * top_k // block_rows)
    mean = sum(len(own) for own in ids) * top_k // num_experts
    return Case(
        num_experts=num_experts, ep=ep, tp=tp, max_tokens=max_tokens, block_rows=block_rows,
        expert_capacity=draw.choice((None, None, 1, 7, mean + 1)),
        max_routed_rows=draw.choice((enough + repeated, enough + repeated, block_rows, 5 * block_rows)),
        ids=ids, weights=weights,
    )  # fmt: skip


def _ids(draw: random.Random, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    kind = draw.choice(ROUTINGS)
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].int()
    if kind == "one expert":
        ids[:] = -1
        ids[:, draw.randrange(top_k)] = draw.randrange(num_experts)
    elif kind == "few experts":
        ids[ids >= max(1, num_experts // 3)] = -1
    elif kind == "masked":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
    elif kind == "repeated":
        ids[:, -1] = ids[:, 0]
    return ids


def oracle(case: Case, rank: int) -> dict[str, Any]:
    """The plan of one rank as lists and loops, straight from the words of ``comet.layer.plan``."""
    layout, num_ranks, size = case.layout(rank), case.world_size, case.max_tokens
    ids, weights = (tensor.tolist() for tensor in case.gathered())
    mine = range(layout.first_expert, layout.first_expert + layout.experts_local)
    holders = [range(first, first + layout.tp) for first in range(0, num_ranks, layout.tp)]
    goes = [
        [{rank for i in slots if i >= 0 for rank in holders[i // layout.experts_local]} for slots in tokens]
        for tokens in ids
    ]

    def in_order(source: int, target: int) -> list[int]:
        """Tokens that ``source`` sends to ``target``: by bucket of the first expert that needs them, then by number."""
        experts = range(case.layout(target).first_expert, case.layout(target).first_expert + layout.experts_local)
        tokens = [token for token in range(size) if target in goes[source][token]]
        return sorted(tokens, key=lambda token: _bucket(min(i for i in ids[source][token] if i in experts), experts))

    sends = [in_order(rank, target) for target in range(num_ranks)]
    send_rows = [[-1] * num_ranks for _ in range(size)]
    send_token_ids = [[-1] * size for _ in range(num_ranks)]
    for target, tokens in enumerate(sends):
        for i, token in enumerate(tokens):
            place = token if target == rank else i
            send_rows[token][target] = place
            send_token_ids[target][place] = token

    received = [in_order(source, rank) for source in range(num_ranks)]
    phases = [int(source != rank) for source in range(num_ranks)]
    segments: list[list[Routed]] = [[] for _ in range(layout.experts_local)]
    taken, dropped = dict.fromkeys(mine, 0), 0
    for source in range(num_ranks):
        for token in sorted(received[source]):
            i = received[source].index(token)
            row = source * size + (token if source == rank else i)
            for slot, expert in enumerate(ids[source][token]):
                if expert not in mine:
                    continue
                if taken[expert] == case.expert_capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                routed = (phases[source], row, slot, weights[source][token][slot])
                segments[expert - layout.first_expert].append(routed)
    tables = _tables(case, [sorted(rows, key=lambda routed: routed[0]) for rows in segments])
    tables["status"] = [tables["status"][0], dropped, *tables["status"][1:]]
    return tables | {
        "send_token_ids": send_token_ids,
        "send_rows": send_rows,
        "send_counts": [len(tokens) for tokens in sends],
        "recv_counts": [len(tokens) for tokens in received],
        "counters": [0] * (128 + len(received) * (case.max_tokens // 128)),
    }


def _bucket(expert: int, experts: range) -> int:
    """Experts share 31 buckets evenly; fewer experts make as many buckets as the next power of two leaves."""
    buckets = 31 if len(experts) >= 32 else next(2**bits - 1 for bits in range(6) if 2**bits > len(experts))
    return (expert - experts.start) * buckets // len(experts)


def _tables(case: Case, segments: list[list[Routed]]) -> dict[str, Any]:
    limit, block = case.max_routed_rows, case.block_rows
    routed_row_ids, routed_slots = ([-1] * limit for _ in range(2))
    row_slots = [[-1] * case.top_k for _ in range(case.world_size * case.max_tokens)]
    row_weights = [[0.0] * case.top_k for _ in row_slots]
    starts, counts, start = [], [], 0
    tiles: list[list[list[int]]] = [[] for _ in range(min(case.world_size, 2))]
    for expert, rows in enumerate(segments):
        starts.append(min(start, limit))
        counts.append(max(0, min(len(rows), limit - start)))
        for position, (_, row, slot, weight) in enumerate(rows[: counts[-1]]):
            routed = start + position
            routed_row_ids[routed], routed_slots[routed] = row, slot
            row_slots[row][slot], row_weights[row][slot] = routed, weight
        for first in range(0, counts[-1], block):
            valid = min(block, counts[-1] - first)
            phase = rows[first + valid - 1][0]
            tiles[phase].append([expert, start + first, valid, phase])
        start += -(-len(rows) // block) * block
    table = [tile for part in tiles for tile in part]
    tile_starts = [sum(len(part) for part in tiles[:phase]) for phase in range(len(tiles) + 1)]
    return {
        "row_slots": row_slots,
        "row_weights": row_weights,
        "routed_row_ids": routed_row_ids,
        "routed_slots": routed_slots,
        "segment_starts": [*starts, min(start, limit)],
        "segment_counts": counts,
        "tiles": table + [[0, 0, 0, 0]] * (limit // block - len(table)),
        "segment_tiles": sorted(table) + [[0, 0, 0, 0]] * (limit // block - len(table)),
        "tile_starts": tile_starts,
        "status": [start, int(start > limit), 0],
    }


def used_part(plan: Plan, field: str) -> Tensor:
    """Return the specified part of a field: kernels leave routed rows and tiles past the used ones as they were."""
    tensor = getattr(plan, field)
    if field in ("routed_row_ids", "routed_slots"):
        return tensor[: plan.segment_starts[-1]]
    if field == "status":
        return tensor[:3]  # the last entry is the epoch, which a plan alone has not
    return tensor[: plan.tile_starts[-1]] if field in ("tiles", "segment_tiles") else tensor


def assert_same_plan(plan: Plan, expected: Plan, hint: str) -> None:
    """Every specified element of every field is equal, bit for bit."""
    for field in FIELDS:
        ours, theirs = getattr(plan, field), getattr(expected, field)
        assert ours.dtype == theirs.dtype, f"{hint}: dtype of {field}"
        assert ours.shape == theirs.shape, f"{hint}: shape of {field}"
        ours, theirs = used_part(plan, field).cpu(), used_part(expected, field)
        assert torch.equal(ours, theirs), f"{hint}: {field} differs first at {(ours != theirs).nonzero()[0].tolist()}"


def twin_plan(case: Case, rank: int) -> Plan:
    ids, weights = case.gathered()
    return plan_from_ids(ids, weights, case.layout(rank), num_tokens=len(case.ids[rank]), **case.arguments)


def plan_backend(layout: ExpertLayout, workspace: Workspace, rules: PlanRules, *, use_kernels: bool) -> Backend:
    """A backend that is good for plans; its GEMMs are set up for experts of 16 hidden columns."""
    if use_kernels:
        from comet.layer.fused import Fused as Made  # needs Triton
    else:
        Made = Twin
    shape = workspace.shape
    moe = MoEConfig(
        hidden_size=shape.hidden_size, ffn_size=16 * layout.tp, num_experts=layout.num_experts, top_k=layout.top_k
    )
    settings = LayerSettings.create(moe, layout, OverlapConfig(), shape.dtype)
    return Made(layout, workspace, rules, settings)


def plan_from_ids(
    ids: Tensor,
    weights: Tensor,
    layout: ExpertLayout,
    *,
    num_tokens: int,
    block_rows: int,
    max_routed_rows: int,
    expert_capacity: int | None = None,
) -> Plan:
    """One rank's plan from ids and weights ``(W, M, K)`` of all ranks, in plain torch: the specification.

    Ids are -1 in masked slots and past the tokens of a rank. Entries past the used routed rows are -1 and past the used
    tiles 0 (kernels leave them unspecified).
    """
    rules = PlanRules.create(block_rows, expert_capacity, max_routed_rows)
    sizes = dict(num_tokens=num_tokens, max_tokens=ids.shape[1], block_rows=block_rows)
    return Plan(layout=layout, **sizes, **plan_tensors(ids, weights, layout, rules))


def workspace(case: Case, comm: Communicator, *, extra_top_k: int = 0) -> Workspace:
    """A pool for the case, made for layers of up to ``extra_top_k`` more experts per token."""
    shape = WorkspaceShape(
        world_size=case.world_size, max_tokens=case.max_tokens, hidden_size=16, top_k=case.top_k + extra_top_k,
        dtype=torch.float32,
    )  # fmt: skip
    return Workspace(comm, shape)


def plan_all_ranks(case: Case, device: str, *, epochs: int) -> list[list[Plan]]:
    """Plans of all ranks, emulated by this process; same routing each epoch."""
    pools = [workspace(case, comm, extra_top_k=case.top_k % 3) for comm in emulated_group(case.world_size, device)]
    plans = []
    for epoch in range(1, epochs + 1):
        for rank, pool in enumerate(pools):
            case.send(rank, pool)
        plans.append([case.plan(rank, pool) for rank, pool in enumerate(pools)])
        assert [int(pool.epoch) for pool in pools] == [epoch] * case.world_size
        for pool, plan in zip(pools, plans[-1], strict=True):
            check_pool(pool, plan)
    return plans


def check_pool(pool: Workspace, plan: Plan) -> None:
    """No spin was late, and kernels recorded in the pool if Q was too small; where the twin's is, there is no plan."""
    if plan.status[2]:
        with pytest.raises(CapacityError, match=f"needs {int(plan.status[0])} routed rows"):
            pool.check()
        pool.fault.zero_()
    pool.check()


def send_ids(backend: Backend, ids: Tensor, weights: Tensor) -> None:
    """The first programs of a plan's launch by kernels, which never wait.

    This rank's own flags go down again: its plan raises them, once it has zeroed the totals that the flags guard.
    """
    from comet.kernels.plan.metadata import PlanScratch, exchange  # needs triton
    from comet.layer.fused import plan_config, routing_pool

    config, pool = plan_config(backend.layout, backend.rules), routing_pool(backend.layout, backend.workspace)
    scratch = PlanScratch.allocate(pool, config)
    exchange(ids, weights, pool, config, scratch, ids.new_empty(1), sends_only=True)
    pool.tensors.flags[pool.rank].zero_()
