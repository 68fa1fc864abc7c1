"""Several ranks on one device, each over its own buffers: how launches of layer 0 and of layer 1 are tried on one GPU.

A launch takes the whole GPU, so ranks run one after the other, twice. In the first round flags of other ranks pretend
that everything has arrived: a rank computes from whatever is there, but what it sends arrives. In the second round all
of it is there, and only those flags are up that a rank has raised in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Literal, TypeVar
from unittest.mock import patch

import torch
from layer_cases import MASKED, LayerCase, rank_inputs
from rank_plans import plan_from_ids
from torch import Tensor

from comet.kernels.runtime.arguments import SymmBuffer
from comet.layer.plan import Plan, routed_row_capacity
from comet.layout import CHUNK_ROWS, ExpertLayout, round_up

Kind = Literal["cuda", "triton"]
Result = TypeVar("Result")
# Under the interpreter blocks run one after the other: what is not there when it is waited for never comes.
DEADLINE_NS = {"cuda": 10_000_000_000, "cpu": 10_000_000}
EPOCH = 7
PRETENDED = EPOCH + 1  # as good as EPOCH to whoever waits for that


@dataclass(frozen=True)
class EmulatedCase(LayerCase):
    """A layer of which one launch is emulated, on one device; experts are not split (TP = 1)."""

    dtype: torch.dtype = torch.bfloat16
    block_rows: int = 128
    device: str = "cuda"


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.call_count = function, 0

    def __call__(self, *arguments: object, **options: object) -> None:
        self.call_count += 1
        self.function(*arguments, **options)


@contextmanager
def launched_in(kind: Kind, module: ModuleType, function: str) -> Iterator[Counted]:
    """Launches in CUDA C++, where ``module.function`` can run, or in Triton; yields what counts the former."""
    spy = Counted(getattr(module, function))
    refusal = {"can_run": lambda *_, **__: False} if kind == "triton" else {}
    with patch.multiple(module, **{function: spy}, **refusal):
        yield spy


def max_tokens(case: LayerCase) -> int:
    """M."""
    return round_up(max(1, *case.num_tokens), CHUNK_ROWS)


def plans_of(case: EmulatedCase) -> list[Plan]:
    """The plans of all ranks, on the device."""
    shape = (case.world_size, max_tokens(case), case.top_k)
    ids, weights = torch.full(shape, MASKED, dtype=torch.int32), torch.zeros(shape)
    for rank, num_tokens in enumerate(case.num_tokens):
        inputs = rank_inputs(case, rank)
        ids[rank, :num_tokens], weights[rank, :num_tokens] = inputs.top_k_ids, inputs.top_k_weights
    return [plan_of(case, rank, ids, weights) for rank in range(case.world_size)]


def plan_of(case: EmulatedCase, rank: int, ids: Tensor, weights: Tensor) -> Plan:
    """The rank's plan, on the device, from the ids and weights ``(W, M, K)`` of all ranks."""
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    plan = plan_from_ids(
        ids,
        weights,
        layout,
        num_tokens=case.num_tokens[rank],
        block_rows=case.block_rows,
        max_routed_rows=routed_row_capacity(layout, max_tokens(case), case.block_rows, None),
    )
    tensors = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return replace(plan, **{name: t.to(case.device) for name, t in tensors.items() if isinstance(t, Tensor)})


def unwritten(case: EmulatedCase, *shape: int) -> Tensor:
    """Of the case's type, NaN until a launch writes to it."""
    return torch.full(shape, torch.nan, dtype=case.dtype, device=case.device)


def fresh(plan: Plan) -> Plan:
    """The plan with counters that no launch has used up."""
    return replace(plan, counters=torch.zeros_like(plan.counters))


@dataclass(frozen=True)
class Buffers:
    """What the other ranks write to: rows and flags of every rank."""

    rows: list[Tensor]
    flags: list[Tensor]

    @classmethod
    def allocate(cls, case: EmulatedCase, *flags_of_source: int, columns: int | None = None) -> Buffers:
        """Rows of NaN, so that nothing counts that was not sent, and flags ``(W, *flags_of_source)`` not raised.

        Rows have D columns, or ``columns`` where it is given.
        """
        ranks, device = range(case.world_size), case.device
        rows = case.world_size * max_tokens(case), columns or case.hidden_size
        flags = case.world_size, *flags_of_source
        return cls(
            rows=[unwritten(case, *rows) for _ in ranks],
            flags=[torch.full(flags, EPOCH - 1, dtype=torch.int32, device=device) for _ in ranks],
        )

    def pretend(self) -> None:
        """Let all look as if it had arrived from other ranks, and nothing from a rank itself."""
        for rank, flags in enumerate(self.flags):
            flags.fill_(PRETENDED)
            flags[rank] = EPOCH - 1

    def stop_pretending(self) -> None:
        """Leave those flags up that another rank has raised."""
        for rank, flags in enumerate(self.flags):
            flags[flags != EPOCH] = EPOCH - 1
            flags[rank] = EPOCH - 1

    def symm(self, rank: int, fault: Tensor, deadline_ns: int) -> SymmBuffer:
        """As rank ``rank`` sees them."""
        rows, flags = (
            torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=fault.device)
            for tensors in (self.rows, self.flags)
        )
        return SymmBuffer(
            rows=self.rows[rank],
            row_pointers=rows,
            flags=self.flags[rank],
            flag_pointers=flags,
            epoch=torch.tensor([EPOCH], dtype=torch.int32, device=fault.device),
            fault=fault,
            rank=rank,
            max_tokens=self.rows[rank].shape[0] // len(self.rows),
            timeout_ns=deadline_ns,
        )


def play(case: EmulatedCase, buffers: Buffers, launch: Callable[[int, SymmBuffer], Result]) -> list[Result]:
    """What ``launch`` of a rank returns for every rank in the second round; no spin may give up in it."""
    results, ranks = [], range(case.world_size)
    faults = [torch.zeros(8, dtype=torch.int64, device=case.device) for _ in ranks]
    for lie_or_not in (buffers.pretend, buffers.stop_pretending):
        lie_or_not()
        results = [launch(rank, buffers.symm(rank, faults[rank], DEADLINE_NS[case.device])) for rank in ranks]
        synchronize(case)
    for rank, fault in enumerate(faults):
        assert not fault.any(), f"rank {rank}: {fault.tolist()}"
    return results


def synchronize(case: EmulatedCase) -> None:
    """Wait until the launches are done."""
    if case.device == "cuda":
        torch.cuda.synchronize()


def fault_of(
    case: EmulatedCase, buffers: Buffers, launch: Callable[[int, SymmBuffer], object], deadline_ns: int
) -> list[int]:
    """What rank 0 records when no other rank ever comes: that it gave up, where, for whom, the epoch, what it saw."""
    fault = torch.zeros(8, dtype=torch.int64, device=case.device)
    launch(0, buffers.symm(0, fault, deadline_ns))
    synchronize(case)
    return fault[[0, 1, 2, 4, 5]].tolist()


def nobody_came(place: int) -> list[int]:
    """What ``fault_of`` is to find, at ``PLACE_LAYER0`` or ``PLACE_LAYER1``."""
    return [1, place, 1, EPOCH, EPOCH - 1]


def sent_after(
    case: EmulatedCase, buffers: Buffers, launch: Callable[[int, SymmBuffer], object]
) -> list[tuple[int, int]]:
    """Values that rank 0 stored for each other rank, and flags that it raised there, if a wait had failed before."""
    fault = torch.zeros(8, dtype=torch.int64, device=case.device)
    fault[0] = 1
    launch(0, buffers.symm(0, fault, deadline_ns=1_000_000))
    return [
        (int(rows.isfinite().sum()), int((flags == EPOCH).sum()))
        for rows, flags in zip(buffers.rows[1:], buffers.flags[1:], strict=True)
    ]
