"""A whole layer of several ranks, forward and backward, emulated one after the other in one process.

No kernel may wait for a later rank, so every step in which ranks wait for each other runs twice: first with flags that
pretend everything has arrived, while the ranks send what they have to send; then again, with everything there. What the
second run leaves is compared with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from emulated import emulated_group
from layer_cases import assert_as_close
from layer_cases import shard as shard_layer
from stress_cases import StressCase
from stress_numbers import FullWeights, expected, stress_inputs
from torch import Tensor

from comet.kernels.runtime.recorder import ALIGN_ROUNDS, Recorder, align
from comet.layer.fused import Fused
from comet.layer.plan import Plan, PlanRules, routed_row_capacity
from comet.layer.workspace import Workspace, WorkspaceShape
from comet.layout import ExpertLayout
from comet.schedule.settings import LayerSettings, tile_rows

DEADLINE_S = 600.0  # under a sanitizer a kernel takes up to a hundred times as long
EVENTS = 64
Result = TypeVar("Result")


class EmulatedRanks:
    """All ranks of a layer, emulated one after the other.

    Args:
        case: The layer and its tokens; ``inputs`` and delays are not used.
        device: Where they are emulated.
        record: Record events, too.
    """

    def __init__(self, case: StressCase, device: torch.device, *, record: bool = False) -> None:
        self.case, self.device, self.ranks = case, device, range(case.world_size)
        shape = WorkspaceShape.create(case.config, case.world_size, case.max_tokens, case.dtype)
        self.pools = [Workspace(comm, shape) for comm in emulated_group(case.world_size, device, DEADLINE_S)]
        for pool in self.pools:
            pool.recorder = Recorder.allocate(device, EVENTS) if record else None
        self.backends = [self.backend(rank) for rank in self.ranks]
        self.inputs = [stress_inputs(case, rank, 0, device) for rank in self.ranks]
        self.weights = FullWeights.draw(case, device)
        shards = [shard_layer(case, rank, self.weights.w1, self.weights.w2) for rank in self.ranks]
        self.w1, self.w2 = [w1.flatten(1, 2) for w1, _ in shards], [w2.contiguous() for _, w2 in shards]
        self.plans = self.plan()

    def backend(self, rank: int) -> Fused:
        """The backend of one rank."""
        case, pool = self.case, self.pools[rank]
        layout = ExpertLayout.create(case.config, case.parallel, rank)
        block_rows = tile_rows(pool.comm.device)
        rows = routed_row_capacity(layout, pool.max_tokens, block_rows, None)
        rules = PlanRules.create(block_rows, case.expert_capacity, rows)
        return Fused(layout, pool, rules, LayerSettings.create(case.config, layout, case.overlap, case.dtype))

    def plan(self) -> list[Plan]:
        """The plans of all ranks; all begin before the first finishes."""
        routings = [(inputs.top_k_ids, inputs.top_k_weights) for inputs in self.inputs]
        pending = [backend.begin_plan(*routing) for backend, routing in zip(self.backends, routings, strict=True)]
        return [each.finish() for each in pending]

    def twice(self, flags: str, step: Callable[[int], Result]) -> list[Result]:
        """Run a step of all ranks that wait for each other by ``flags``; see the module."""
        for pool in self.pools:
            getattr(pool, flags).local.fill_(int(pool.epoch))
        for _ in range(2):
            for plan in self.plans:
                plan.counters.zero_()
            results = [step(rank) for rank in self.ranks]
        return results

    def barrier(self) -> None:
        """Advance the epoch of all ranks."""
        for pool in self.pools:
            pool.barrier_flags.local.fill_(int(pool.epoch) + 1)
        for backend in self.backends:
            backend.barrier()

    def align(self) -> None:
        """Find how the ranks' clocks differ."""
        for pool in self.pools:
            pool.barrier_flags.local.fill_(int(pool.epoch) + ALIGN_ROUNDS)
        for pool in self.pools:
            align(pool.barrier_flags.pointers, pool.epoch, pool.fault, pool.comm.rank, pool.timeout_ns)

    def forward(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs, and gate | up where there is a backward pass."""
        plans, backends, save = self.plans, self.backends, self.case.backward
        layer0 = self.twice(
            "recv_flags",
            lambda r: backends[r].dispatch_gemm(self.inputs[r].tokens, self.w1[r], plans[r], save_pre_activation=save),
        )
        outputs = self.twice("combine_flags", lambda r: backends[r].gemm_combine(layer0[r][0], self.w2[r], plans[r]))
        return outputs, [pre for _, pre in layer0]

    def backward(self, rows: list[Tensor], pre: list[Tensor | None]) -> dict[str, list[Tensor]]:
        """All gradients, from the received rows and gate | up of the forward pass."""
        plans, backends = self.plans, self.backends
        self.barrier()
        sent = self.twice(
            "recv_flags", lambda r: backends[r].dispatch_dgrad(self.inputs[r].grad_output, self.w2[r], plans[r])
        )
        through = [backends[r].activation_backward(_there(pre[r]), sent[r][1], plans[r]) for r in self.ranks]
        homes = self.twice(
            "combine_flags",
            lambda r: backends[r].dgrad_combine(
                through[r].pre_activation, self.w1[r], through[r].row_weights, plans[r]
            ),
        )
        return {
            "grad_tokens": [grad for grad, _ in homes],
            "grad_top_k_weights": [grad for _, grad in homes],
            "grad_w1": [backends[r].fc1_wgrad(through[r].pre_activation, rows[r], plans[r]) for r in self.ranks],
            "grad_w2": [backends[r].fc2_wgrad(sent[r][0], through[r].weighted_hidden, plans[r]) for r in self.ranks],
        }

    def run(self) -> None:
        """The whole layer, checked."""
        outputs, pre = self.forward()
        found = {"output": outputs}
        if self.case.backward:
            rows = [pool.recv_rows.local.clone() for pool in self.pools]
            for rank, plan in enumerate(self.plans):  # own tokens do not travel in layer 0
                rows[rank][rank * plan.max_tokens :][: plan.num_tokens] = self.inputs[rank].tokens
            found |= self.backward(rows, pre)
        for pool in self.pools:
            pool.check()
        wanted, same = (
            expected(self.case, self.inputs, self.weights, dtype) for dtype in (torch.float64, self.case.dtype)
        )
        for name, parts in found.items():
            vectors = (torch.cat([part.flatten().double() for part in of]) for of in (parts, wanted[name], same[name]))
            assert_as_close(*vectors, self.case.dtype, f"{self.case.name}: {name}")


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "layer 0 kept no gate | up"
    return tensor
