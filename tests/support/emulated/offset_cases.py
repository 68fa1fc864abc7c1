"""Tokens of one rank go to the only expert of another and come back unchanged, both ranks emulated by one process.

The expert is the identity, exactly: gate is 32 everywhere (silu(32) = 32), up is the token, and w2 is 1/32. Rows name
their token, so a row that came from or went to a wrong address shows. Nothing waits in vain although the ranks take
turns: rank 1 sends first and rank 0 computes first.
"""

import torch
from emulated import emulated_group
from plan_cases import send_ids
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.runtime.limits import CHUNK_ROWS
from comet.layer.fused import Fused
from comet.layer.plan import Plan, PlanRules
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout, round_up
from comet.schedule.settings import LayerSettings

SOURCE, COMPUTES = 1, 0
PARALLEL = ParallelConfig(ep=2)
ROUTED_EVERYWHERE_BUT = 97  # every 97th token is masked, so that rows and tokens are not numbered alike
ROWS_AT_ONCE = 4096


def layer_config(hidden_size: int) -> MoEConfig:
    """Two experts as wide as a token, of which a token takes one."""
    return MoEConfig(hidden_size=hidden_size, ffn_size=hidden_size, num_experts=2, top_k=1)


def pool_shape(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> WorkspaceShape:
    """The pool of one rank: ``2 x num_tokens x hidden_size`` elements of received rows, as many of combine rows."""
    return WorkspaceShape.create(layer_config(hidden_size), PARALLEL.world_size, num_tokens, dtype)


def numbered_rows(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str) -> Tensor:
    """``(T, D)`` small integers: 1, the token's number in three digits of base 128, then noise."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_tokens, hidden_size)
    rows = torch.randint(-120, 121, shape, dtype=torch.int8, device=device, generator=generator).to(dtype)
    tokens = torch.arange(num_tokens, device=device)
    for column, digit in enumerate((torch.ones_like(tokens), tokens, tokens // 128, tokens // 128**2)):
        rows[:, column] = digit % 128
    return rows


def identity_expert(hidden_size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """w1 ``(1, 2D, D)`` and w2 ``(1, D, D)`` of an expert that returns every row whose first element is 1."""
    w1 = torch.zeros(1, 2 * hidden_size, hidden_size, dtype=dtype, device=device)
    w1[0, :hidden_size, 0] = 32
    w1[0, hidden_size:].fill_diagonal_(1)
    w2 = torch.zeros(1, hidden_size, hidden_size, dtype=dtype, device=device)
    w2[0].fill_diagonal_(1 / 32)
    return w1, w2


def check_rows_return(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str, block_rows: int) -> None:
    """Layer 0, layer 1 and the dispatch of the backward pass: every row is where it belongs, bit for bit."""
    shape = pool_shape(num_tokens, hidden_size, dtype)
    pools = [Workspace(comm, shape) for comm in emulated_group(PARALLEL.world_size, device, timeout_s=60.0)]
    for pool in pools:
        pool.recv_rows.local.fill_(float("nan"))
        pool.combine_rows.local.fill_(float("nan"))
    x = numbered_rows(num_tokens, hidden_size, dtype, device)
    tokens = [x[:0], x]
    backends = _backends(pools, [len(rows) for rows in tokens], dtype, block_rows)
    plans = _plans(backends, [len(rows) for rows in tokens], device)
    w1, w2 = identity_expert(hidden_size, dtype, device)

    hidden = {
        rank: backends[rank].dispatch_gemm(tokens[rank], w1, plans[rank], save_pre_activation=False)[0]
        for rank in (SOURCE, COMPUTES)
    }
    _check_received(pools, plans, x, "layer 0")
    outputs = {rank: backends[rank].gemm_combine(hidden[rank], w2, plans[rank]) for rank in (COMPUTES, SOURCE)}
    del hidden
    for first in range(0, num_tokens, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        expected = x[rows].where(_routed(num_tokens, device)[rows, None], 0)
        assert torch.equal(outputs[SOURCE][rows], expected), f"layer 1 returned another row for a token of {rows}"

    for pool in pools:
        pool.epoch.add_(1)  # in place of the barrier: ranks that take turns cannot pass one
        pool.recv_rows.local.fill_(float("nan"))
    for rank in (SOURCE, COMPUTES):
        backends[rank].dispatch(tokens[rank], plans[rank].for_backward(plans[rank].memory))
    _check_received(pools, plans, x, "dispatch")
    for pool in pools:
        pool.check()


def _routed(num_tokens: int, device: str) -> Tensor:
    return torch.arange(num_tokens, device=device) % ROUTED_EVERYWHERE_BUT != 0


def _backends(pools: list[Workspace], num_tokens: list[int], dtype: torch.dtype, block_rows: int) -> list[Fused]:
    """Return the backends of both ranks; rank 0 has room for all tokens of rank 1."""
    backends = []
    for rank, pool in enumerate(pools):
        layout = ExpertLayout(num_experts=2, top_k=1, ep=2, tp=1, rank=rank)
        settings = LayerSettings.create(layer_config(pool.shape.hidden_size), layout, OverlapConfig(), dtype)
        rows = round_up(num_tokens[SOURCE], CHUNK_ROWS) if rank == COMPUTES else CHUNK_ROWS
        backends.append(Fused(layout, pool, PlanRules.create(block_rows, None, rows), settings))
    return backends


def _plans(backends: list[Fused], num_tokens: list[int], device: str) -> list[Plan]:
    """Rank 1's tokens go to expert 0, which rank 0 holds."""
    routings = []
    for rank, backend in enumerate(backends):
        ids = torch.full((num_tokens[rank], 1), -1, dtype=torch.int32, device=device)
        ids[_routed(num_tokens[rank], device)] = 0
        routings.append((ids, torch.ones(ids.shape, device=device)))
        send_ids(backend, *routings[-1])
    return [backend.plan(*routing) for backend, routing in zip(backends, routings, strict=True)]


def _check_received(pools: list[Workspace], plans: list[Plan], x: Tensor, what: str) -> None:
    """Rank 0 has the routed tokens of rank 1, in order and without gaps, behind its own rows."""
    routed = _routed(len(x), str(x.device)).nonzero().flatten()
    assert int(plans[COMPUTES].recv_counts[SOURCE]) == len(routed)
    received = pools[COMPUTES].recv_rows.local[SOURCE * pools[COMPUTES].max_tokens :]
    for first in range(0, len(routed), ROWS_AT_ONCE):
        sent = routed[first : first + ROWS_AT_ONCE]
        found = received[first : first + len(sent)]
        assert torch.equal(found, x[sent]), f"{what}: rows from {first} on are not those of tokens from {sent[0]} on"
