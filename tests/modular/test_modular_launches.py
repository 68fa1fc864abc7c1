"""How modular layers launch their plan: whole, unless something runs while ids travel; what weights a layer takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_cases import LayerCase, as_strided, rank_inputs
from modular_cases import check_layer, make_group, rank_weights
from plan_cases import noted_launches
from ranks import run_ranks

from comet.modular import (
    DequantizingContiguous,
    FusedExperts,
    FusedPrepareFinalize,
    GroupedBatched,
    GroupedContiguous,
    ModularMoE,
    SymmetricBatched,
    SymmetricContiguous,
)
from comet.utils.streams import SideStream

CASE = LayerCase("launches", 2, 1, (9, 4))
PARTS = {
    "contiguous": (SymmetricContiguous, GroupedContiguous),
    "batched": (SymmetricBatched, GroupedBatched),
    "in FP8": (SymmetricContiguous, DequantizingContiguous),
}


class StreamOfItsOwn(SideStream):
    """Stands for a GPU's: the caller goes on once the work is launched, and nothing comes between its launches."""

    def __init__(self) -> None:
        super().__init__(None)
        self.stream = "not the caller's"

    def start(self, work: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
        return SideStream(None).start(work, *inputs)

    def inserted(self) -> AbstractContextManager[None]:
        return nullcontext()


def launches(rank: int, world_size: int, parts: str, stream: bool) -> tuple[list[str], list[str]]:
    """Launches of a layer's plan, without shared experts, and with them and when they ran; outputs are checked."""
    names = noted_launches()

    def shared(tokens: torch.Tensor) -> torch.Tensor:
        names.append("shared")
        return torch.zeros_like(tokens)

    group = make_group(CASE)
    transport, experts = PARTS[parts]
    used = replace(group, plan_stream=StreamOfItsOwn()) if stream else group
    pair = transport(CASE.config, used, use_kernels=True), experts(CASE.config, used)
    found = []
    for beside in (None, shared):
        names.clear()
        check_layer(ModularMoE(*pair, beside), CASE, rank, f"{parts}, stream={stream}, beside={beside}")
        found.append(list(names))
    group.workspace.check()
    group.close()
    return found[0], found[1]


WHOLE, IN_HALVES = ["all", "place"], ["send", "count", "place"]


@pytest.mark.parametrize(
    ("parts", "stream", "alone", "with_shared"),
    [
        ("contiguous", False, WHOLE, ["send", "shared", "count", "place"]),
        ("contiguous", True, WHOLE, [*WHOLE, "shared"]),
        ("batched", False, WHOLE, ["send", "shared", "count", "place"]),
        ("in FP8", False, IN_HALVES, ["send", "shared", "count", "place"]),
        ("in FP8", True, IN_HALVES, [*IN_HALVES, "shared"]),
    ],
)
def test_a_plan_is_whole_unless_something_runs_while_ids_travel(
    parts: str, stream: bool, alone: list[str], with_shared: list[str]
) -> None:
    assert run_ranks(launches, 2, parts, stream, interpret=True) == [(alone, with_shared)] * 2


def run_strided(rank: int, world_size: int) -> None:
    group, inputs = make_group(CASE), rank_inputs(CASE, rank)
    layer = ModularMoE(FusedPrepareFinalize(CASE.config, group, use_kernels=True), FusedExperts(CASE.config, group))
    weights = rank_weights(CASE, rank, torch.Tensor)
    given = inputs.tokens, inputs.top_k_ids, inputs.top_k_weights
    wanted = layer(*given, *weights)
    assert torch.equal(layer(*given, *map(as_strided, weights)), wanted)
    group.workspace.check()
    group.close()


def test_weights_of_the_fused_layer_need_not_be_contiguous() -> None:
    run_ranks(run_strided, 2, interpret=True)
