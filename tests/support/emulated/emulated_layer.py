"""A whole layer of several ranks, forward and backward, emulated one after the other in one process.

No kernel may wait for a later rank, so every step in which ranks wait for each other runs twice. In the first round
flags pretend that everything has arrived: a rank computes from whatever is there, but what it sends arrives. In the
second round all of it is there, and only those flags are up that a rank has raised in the first. What that leaves is
compared with plain torch; what no rank has written is NaN.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from emulated import emulated_group
from fp8_cases import compare
from kinds import Kind, grad_hidden_in, layer0_in, layer1_in, weights_in
from layer_cases import (
    LayerCase,
    Oracle,
    assert_as_oracles,
    full_weights,
    new_memory_is_nan,
    oracles_of,
    rank_inputs,
    shard,
)
from plan_cases import send_ids
from torch import Tensor

from comet.kernels.layer.triton.gemm_combine import fp8_tile
from comet.kernels.runtime.limits import CHUNK_ROWS, COMBINE_CHUNK_ROWS
from comet.kernels.runtime.recorder import (
    ALIGN_ROUNDS,
    KIND_DISPATCH,
    KIND_FINAL_SUM,
    KIND_LAYER0_TILE,
    KIND_LAYER1_TILE,
    KIND_REDUCE,
    Recorder,
    align,
)
from comet.layer.fused import Fused
from comet.layer.plan import Plan, PlanRules, routed_row_capacity
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8, FP8_BLOCK, quantize_fp8, quantize_rows
from comet.quantization.packed import pack
from comet.schedule.settings import LayerSettings, tile_rows

DEADLINE_S = 600.0  # under a sanitizer a kernel takes up to a hundred times as long
INTERPRETED_S = 0.01  # blocks run one after the other: what is not there when it is waited for never comes
EVENTS = 256
Result = TypeVar("Result")
Found = dict[str, list[Tensor]]
Items = set[tuple[int, int, int]]


@dataclass(frozen=True)
class EmulatedCase(LayerCase):
    """A layer on one GPU, with biases of a type where there is one."""

    dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None


class EmulatedRanks:
    """All ranks of a layer, emulated one after the other.

    Args:
        case: The layer and its tokens.
        device: Where they are emulated.
        record: Record events, and look at them.
        timeout_s: Deadline of a wait; ``None``: long enough for whatever comes.
    """

    def __init__(
        self, case: LayerCase, device: torch.device, *, record: bool = False, timeout_s: float | None = None
    ) -> None:
        self.case, self.device, self.ranks = case, device, range(case.world_size)
        shape = WorkspaceShape.create(case.config, case.world_size, max(case.max_tokens, *case.num_tokens), case.dtype)
        deadline_s = timeout_s or (DEADLINE_S if device.type == "cuda" else INTERPRETED_S)
        self.pools = [Workspace(comm, shape) for comm in emulated_group(case.world_size, device, deadline_s)]
        for pool in self.pools:
            pool.recorder = Recorder.allocate(device, EVENTS) if record else None
        self.backends = [self.backend(rank) for rank in self.ranks]
        self.inputs = [rank_inputs(case, rank, 0, device) for rank in self.ranks]
        self.weights = [weight.to(device) for weight in full_weights(case)]
        shards = [shard(case, rank, *self.weights) for rank in self.ranks]
        self.w1, self.w2 = [w1.flatten(1, 2) for w1, _ in shards], [w2.contiguous() for _, w2 in shards]
        self.b1, self.b2 = ([self._bias(weight, rank) for rank, weight in enumerate(of)] for of in (self.w1, self.w2))
        if len(self.b2) > 1:
            self.b2[1] = None  # tensor parallelism does so
        self.plans = self.plan()

    def _bias(self, weight: Tensor, rank: int) -> Tensor | None:
        """``(e, N)`` for a weight ``(e, N, K)``."""
        dtype = getattr(self.case, "bias", None)
        if dtype is None:
            return None
        return torch.randn(weight.shape[:2], generator=self._drawn(rank), device=self.device).to(dtype)

    def _drawn(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def backend(self, rank: int) -> Fused:
        """The backend of one rank."""
        case, pool = self.case, self.pools[rank]
        layout = ExpertLayout.create(case.config, case.parallel, rank)
        block_rows = tile_rows(pool.comm.device)
        rows = routed_row_capacity(layout, pool.max_tokens, block_rows, None)
        rules = PlanRules.create(block_rows, case.expert_capacity, rows)
        return Fused(layout, pool, rules, LayerSettings.create(case.config, layout, case.overlap, case.dtype))

    def plan(self) -> list[Plan]:
        """The plans of all ranks; all send before the first waits."""
        routings = [(inputs.top_k_ids, inputs.top_k_weights) for inputs in self.inputs]
        for backend, routing in zip(self.backends, routings, strict=True):
            send_ids(backend, *routing)
        return [backend.plan(*routing) for backend, routing in zip(self.backends, routings, strict=True)]

    def twice(self, flags: str, step: Callable[[int], Result]) -> list[Result]:
        """Run a step of all ranks that wait for each other by ``flags``; see the module."""
        for pool in self.pools:
            for rows in (pool.recv_rows, pool.combine_rows, pool.combine_grads):
                rows.local.fill_(torch.nan)
        for pretend in (True, False):
            for rank in self.ranks:
                self.lower(flags, rank, pretend=pretend)
            with new_memory_is_nan():
                results = [step(rank) for rank in self.ranks]
        for pool in self.pools:
            pool.check()
        return results

    def lower(self, flags: str, rank: int, *, pretend: bool = False) -> None:
        """Flags that are not of this epoch are down on a rank, or all ``pretend`` to be up; its own are down.

        The plan's counters and what was recorded are forgotten, too.
        """
        pool, epoch = self.pools[rank], int(self.pools[rank].epoch)
        raised = getattr(pool, flags).local
        raised[(raised != epoch) | pretend] = epoch + 1 if pretend else epoch - 1
        raised[rank] = epoch - 1
        self.plans[rank].counters.zero_()
        if pool.recorder is not None:
            pool.recorder.clear()

    def barrier(self) -> None:
        """Advance the epoch of all ranks."""
        for pool, backend, plan in zip(self.pools, self.backends, self.plans, strict=True):
            pool.barrier_flags.local.fill_(int(pool.epoch) + 1)
            pool.calls.local[:2].fill_(backend.call(trains=True))
            pool.calls.local[2:].copy_(plan.status[3])
        for backend, plan in zip(self.backends, self.plans, strict=True):
            backend.barrier(plan)

    def align(self) -> None:
        """Find how the ranks' clocks differ."""
        for pool in self.pools:
            pool.barrier_flags.local.fill_(int(pool.epoch) + ALIGN_ROUNDS)
        for pool in self.pools:
            align(pool.barrier_flags.pointers, pool.epoch, pool.fault, pool.comm.rank, pool.timeout_ns)

    # ---- steps of one rank

    def layer0(self, rank: int) -> tuple[Tensor | FP8, Tensor | None]:
        w1 = self.fp8_weights(rank)[0] if self.case.fp8 else self.w1[rank]
        given = (self.inputs[rank].tokens, w1, self.plans[rank], self.b1[rank])
        return self.backends[rank].dispatch_gemm(*given, save_pre_activation=self.case.backward)

    def layer1(self, rank: int, hidden: Tensor | FP8) -> Tensor:
        w2 = self.fp8_weights(rank)[1] if self.case.fp8 else self.w2[rank]
        return self.backends[rank].gemm_combine(hidden, w2, self.plans[rank], self.b2[rank])

    def grad_hidden(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.backends[rank].dispatch_dgrad(self.inputs[rank].grad_output, self.w2[rank], self.plans[rank])

    def grad_tokens(self, rank: int, grad_pre: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.backends[rank].dgrad_combine(grad_pre, self.w1[rank], row_weights, self.plans[rank])

    def fp8_weights(self, rank: int) -> tuple[FP8, FP8]:
        """Blocks differ by powers of two, so that the scale of another one is far off."""
        generator = self._drawn(rank)

        def quantised(weight: Tensor) -> FP8:
            blocks = weight.shape[0], weight.shape[1] // FP8_BLOCK, weight.shape[2] // FP8_BLOCK
            factors = torch.randint(-2, 3, blocks, generator=generator, device=self.device).float().exp2()
            spread = factors.repeat_interleave(FP8_BLOCK, dim=1).repeat_interleave(FP8_BLOCK, dim=2)
            return quantize_fp8(weight.float() * spread)

        return quantised(self.w1[rank]), quantised(self.w2[rank])

    # ---- all of them

    def forward(self) -> Found:
        """Output, hidden, and gate | up where there is a backward pass; of routed rows those of experts."""
        layer0 = self.twice("recv_flags", self.layer0)
        self.check_received(lambda sent: sent)
        self.check_events(check_layer0_events)
        keep = zip(self.backends, self.inputs, self.plans, strict=True)
        received = [backend.keep_received(inputs.tokens, plan) for backend, inputs, plan in keep]
        outputs = self.twice("combine_flags", lambda rank: self.layer1(rank, layer0[rank][0]))
        self.check_layer1_events()
        found = {"output": outputs, "hidden": self.of_experts([hidden for hidden, _ in layer0])}
        pre = [each for _, each in layer0 if each is not None]
        return found | {"gate | up": self.of_experts(pre)} | self.backward(received, pre) if pre else found

    def backward(self, received: list[Tensor], pre: list[Tensor]) -> Found:
        """All gradients, from the tokens that arrived and gate | up; ranks ``apart`` find hidden's in Triton."""
        self.barrier()

        def grad_hidden(rank: int) -> tuple[Tensor, Tensor]:
            with grad_hidden_in("triton") if rank in self.apart else nullcontext():
                return self.grad_hidden(rank)

        sent = self.twice("recv_flags", grad_hidden)
        through = [
            backend.activation_backward(of_rank, grads[1], plan)
            for backend, of_rank, grads, plan in zip(self.backends, pre, sent, self.plans, strict=True)
        ]
        homes = self.twice(
            "combine_flags",
            lambda rank: self.grad_tokens(rank, through[rank].pre_activation, through[rank].row_weights),
        )
        parts = list(zip(self.backends, through, received, sent, self.plans, strict=True))
        return {
            "grad_rows": self.of_experts([rows for rows, _ in sent]),
            "grad_hidden": self.of_experts([grads for _, grads in sent]),
            "grad_tokens": [grad for grad, _ in homes],
            "grad_top_k": [grad for _, grad in homes],
            "grad_w1": [each.fc1_wgrad(grads.pre_activation, rows, plan) for each, grads, rows, _, plan in parts],
            "grad_w2": [each.fc2_wgrad(rows[0], grads.weighted_hidden, plan) for each, grads, _, rows, plan in parts],
        }

    def forward_fp8(self) -> Found:
        """The same in block FP8, of which there is no backward pass."""
        hidden = [each for each, _ in self.twice("recv_flags", self.layer0)]
        self.check_received(lambda sent: pack(quantize_rows(sent), sent.dtype), packed=True)
        self.check_events(check_layer0_events)
        outputs = self.twice("combine_flags", lambda rank: self.layer1(rank, hidden[rank]))
        self.check_layer1_events()
        elements, scales = (
            self.of_experts([getattr(each, name) for each in hidden]) for name in ("elements", "scales")
        )
        return {"output": outputs, "elements": elements, "scales": scales}

    def results(self, layer0: Kind, layer1: Kind | None = None, apart: Collection[int] = ()) -> Found:
        """All that the steps leave, by launches of these kinds."""
        layer1, self.apart, case = layer1 or layer0, apart, self.case
        self.layer1_kind = layer1
        with (
            layer0_in(layer0) as of_layer0, grad_hidden_in(layer0) as of_hidden, layer1_in(layer1) as of_layer1,
            weights_in(layer1),
        ):  # fmt: skip
            found = self.forward_fp8() if case.fp8 else self.forward()
        trains, rounds = case.backward and not case.fp8, 2 * len(self.ranks)
        in_cuda = rounds, trains * 2 * (len(self.ranks) - len(apart)), (1 + trains) * rounds
        kinds = layer0, layer0, "triton" if case.dtype == torch.float32 else layer1  # the third adds up the pool
        counts = tuple(spy.call_count for spy in (of_layer0, of_hidden, of_layer1))
        assert counts == tuple(count * (kind == "cuda") for count, kind in zip(in_cuda, kinds, strict=True)), case
        return found

    def run(self, layer0: Kind = "triton") -> None:
        """The whole layer, checked."""
        self.check(self.results(layer0))

    def check(self, found: Found) -> None:
        """Outputs and gradients are those of plain torch."""
        case = self.case
        if case.fp8:
            shards = [self.fp8_weights(rank) for rank in self.ranks]
            for rank, inputs in enumerate(self.inputs):
                where = f"{case.name}, {case.dtype}, rank {rank}"
                compare(case, inputs, shards, found["output"][rank], where)
            return
        exact, same = (oracles_of(case, self.inputs, self.weights, dtype) for dtype in (torch.float64, case.dtype))
        for name in Oracle._fields[: 5 if case.backward else 1]:
            assert_as_oracles(name, found[name], exact, same, case.dtype, case.name)

    def of_experts(self, rows: list[Tensor]) -> list[Tensor]:
        """Return the routed rows that belong to an expert; rows of no tile must not have been written."""
        found = []
        for each, plan in zip(rows, self.plans, strict=True):
            used = int(plan.segment_starts[-1])
            assert each[used:].float().isnan().all(), f"rows of no tile of {plan.layout}"
            words = each.view(torch.uint8) if each.itemsize == 1 else each
            found.append(words[:used][plan.routed_row_ids[:used] >= 0])
        return found

    def sent_to(self, rank: int) -> list[Tensor]:
        """Return the rows that each rank sends to a rank, ``(n, D)``, as they lie there; it sends itself none."""
        return [
            inputs.tokens[plan.send_token_ids[rank, : int(plan.send_counts[rank]) * (source != rank)].long()]
            for source, (inputs, plan) in enumerate(zip(self.inputs, self.plans, strict=True))
        ]

    def check_received(self, form: Callable[[Tensor], Tensor], *, packed: bool = False) -> None:
        """Rows that were sent have arrived in their form, with their flags; neither a row nor a flag more than that.

        Own rows are there where rows are ``packed``.
        """
        for rank, pool in enumerate(self.pools):
            sent = self.sent_to(rank)
            if packed:
                sent[rank] = self.inputs[rank].tokens
            columns = form(self.inputs[rank].tokens[:0]).shape[1]
            rows = torch.full_like(there := pool.recv_rows.with_columns(columns).local, torch.nan)
            rows = rows.unflatten(0, (len(sent), -1))
            flags = torch.full_like(pool.recv_flags.local, int(pool.epoch) - 1)
            for source, arrived in enumerate(sent):
                rows[source, : len(arrived)] = form(arrived)
                flags[source, : -(-len(arrived) // CHUNK_ROWS) * (source != rank)] = int(pool.epoch)
            used = self.case.hidden_size * 33 // 32 if packed else columns * rows.element_size()  # bytes of a row
            found, wanted = (each.view(torch.uint8)[:, :used] for each in (there, rows.flatten(0, 1)))
            assert torch.equal(found, wanted), f"rows of rank {rank} of {self.case}"
            assert torch.equal(pool.recv_flags.local, flags), f"flags of rank {rank} of {self.case}"

    def check_layer1_events(self) -> None:
        settings = self.backends[0].settings
        tile = fp8_tile(settings.tile) if self.case.fp8 and self.layer1_kind == "triton" else settings.tile
        num_cols = -(-self.case.hidden_size // tile.block_n)
        self.check_events(check_layer1_events, num_cols=num_cols, num_panels=settings.num_panels)

    def check_events(self, check: Callable[..., None], **numbers: Any) -> None:
        """Recorded events are the work there was."""
        for pool, plan in zip(self.pools, self.plans, strict=True):
            if pool.recorder is not None:
                check(plan, pool.recorder, epoch=int(pool.epoch), **numbers)


# ---- what launches record: whether it is what there was to do


def recorded_items(recorder: Recorder, epoch: int) -> dict[int, Items]:
    """The three numbers of every work item, by its kind, after a look at counts, epochs and times."""
    events = recorder.events
    assert int(events[:, 0, 0].max()) <= recorder.capacity, "more events than there is room for"
    there = torch.arange(recorder.capacity, device=events.device) < events[:, :1, 0]
    found = events[:, 1:][there]
    begin, ready, end = found[:, 6:].contiguous().view(torch.int64).T
    assert ((begin <= ready) & (ready <= end)).all()
    kinds, epochs, _, *numbers = found[:, :6].T.tolist()
    assert set(epochs) <= {epoch}
    items: dict[int, Items] = {}
    for kind, *item in zip(kinds, *numbers, strict=True):
        items.setdefault(kind, set()).add(tuple(item))
    return items


def check_layer0_events(plan: Plan, recorder: Recorder, epoch: int, *, num_cols: int | None = None) -> None:
    """Every chunk that was sent, and items of every expert with rows: all column blocks, ``num_cols`` where it counts.

    Items name a tile of rows of an expert, or of the plan's tiles, whose numbers go from 0 on either way.
    """
    items, rank = recorded_items(recorder, epoch), plan.layout.rank
    counts = enumerate(plan.send_counts.tolist())
    chunks = {(to, chunk) for to, count in counts if to != rank for chunk in range(-(-count // CHUNK_ROWS))}
    assert {item[:2] for item in items.get(KIND_DISPATCH.value, ())} == chunks
    tiles = items.get(KIND_LAYER0_TILE.value, set())
    check_products(plan, {item[:2] for item in tiles}, num_cols)


def check_layer1_events(plan: Plan, recorder: Recorder, epoch: int, *, num_cols: int, num_panels: int) -> None:
    """Every column block of every expert with rows in one panel, and every reduce and sum of each panel."""
    items, panels = recorded_items(recorder, epoch), range(num_panels)
    tiles = items.get(KIND_LAYER1_TILE.value, set())
    check_products(plan, {item[:2] for item in tiles}, num_cols)
    panel_of = {(col, panel) for _, col, panel in tiles}
    if tiles:
        assert len(panel_of) == num_cols, "a column block belongs to one panel"
        assert sorted({panel for _, panel in panel_of}) == list(panels)
        assert [panel for _, panel in sorted(panel_of)] == sorted(panel for _, panel in panel_of), "from left to right"
    rows = plan.recv_counts.tolist()
    rows[plan.layout.rank] = plan.max_tokens  # all own rows that there may be
    chunks = [(source, chunk) for source, count in enumerate(rows) for chunk in range(-(-count // COMBINE_CHUNK_ROWS))]
    assert items.get(KIND_REDUCE.value, set()) == {(*chunk, panel) for chunk, panel in product(chunks, panels)}
    summed = {
        (token, panel)
        for first, count, panel in items.get(KIND_FINAL_SUM.value, set())
        for token in range(first, min(first + count, plan.num_tokens))
    }
    assert summed == set(product(range(plan.num_tokens), panels))


def check_products(plan: Plan, tiles: set[tuple[int, int]], num_cols: int | None) -> None:
    """Tiles of all experts with rows, in each all columns."""
    if num_cols is None:
        num_cols = 1 + max((col for _, col in tiles), default=-1)
    found = set(zip(experts_of(plan, [tile for tile, _ in tiles]), [col for _, col in tiles], strict=True))
    with_rows = plan.segment_counts.nonzero().flatten().tolist()
    assert found == set(product(with_rows, range(num_cols)))


def experts_of(plan: Plan, tiles: list[int]) -> list[int]:
    """The expert that each tile of rows belongs to."""
    first_rows = torch.tensor([tile * plan.block_rows for tile in tiles]).to(plan.segment_starts)
    experts: Tensor = torch.searchsorted(plan.segment_starts[1:], first_rows, right=True)
    return experts.tolist()
