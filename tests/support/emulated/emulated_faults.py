"""What launches of emulated ranks do when another rank does not come, or when this one has failed before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import fp8_launches
import grad_hidden_launches
import gradient_launches
import layer0_launches
import layer1_launches
from emulated_ranks import Counted, EmulatedCase, Kind, fault_of, nobody_came, sent_after
from grad_hidden_launches import grad_hidden_in
from layer0_launches import layer0_in
from layer1_launches import layer1_in

from comet.kernels.runtime.primitives import PLACE_LAYER0, PLACE_LAYER1


@dataclass(frozen=True)
class Waiting:
    """A launch that waits for other ranks: what says which implementation it is in, and of a case what it takes."""

    launched_in: Callable[[Kind], AbstractContextManager[Counted]]
    alone: Callable[[EmulatedCase], tuple[Any, ...]]
    place: int


LAYER0, LAYER1 = PLACE_LAYER0.value, PLACE_LAYER1.value
LAUNCHES = {
    "layer 0": Waiting(layer0_in, layer0_launches.launch_alone, LAYER0),
    "gradient of hidden": Waiting(grad_hidden_in, grad_hidden_launches.launch_alone, LAYER0),
    "layer 0 in FP8": Waiting(layer0_in, fp8_launches.launch_layer0_alone, LAYER0),
    "layer 1": Waiting(layer1_in, layer1_launches.launch_alone, LAYER1),
    "gradients of tokens": Waiting(layer1_in, gradient_launches.launch_alone, LAYER1),
    "layer 1 in FP8": Waiting(layer1_in, fp8_launches.launch_layer1_alone, LAYER1),
}
SENDING = ("gradient of hidden", "layer 1")  # they store other ranks' rows themselves, behind a wait


def check_alone(name: str, case: EmulatedCase, kind: Kind, deadline_ns: int, times: int = 1) -> None:
    """A rank that never comes is named."""
    launch = LAUNCHES[name]
    with launch.launched_in(kind) as spy:
        for _ in range(times):
            assert fault_of(case, *launch.alone(case), deadline_ns) == nobody_came(launch.place), f"{name} in {kind}"
    assert spy.call_count == (times if kind == "cuda" else 0)


def check_failed(name: str, case: EmulatedCase, kind: Kind) -> None:
    """A rank that failed sends nothing."""
    launch = LAUNCHES[name]
    with launch.launched_in(kind) as spy:
        assert sent_after(case, *launch.alone(case)) == [(0, 0)] * (case.world_size - 1), f"{name} in {kind}"
    assert spy.call_count == (kind == "cuda")
