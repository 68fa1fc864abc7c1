"""Checks of launches of emulated ranks when another rank never comes, or after the rank itself has failed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from emulated_layer import EmulatedCase, EmulatedRanks
from kinds import Kind, grad_hidden_in, layer0_in, layer1_in

from comet.kernels.runtime.primitives import PLACE_LAYER0, PLACE_LAYER1
from comet.quantization.formats import FP8, FP8_BLOCK


def rows_like(ranks: EmulatedRanks, *columns: int) -> tuple[torch.Tensor, ...]:
    """``(Q, n)`` of rank 0, for each number of columns."""
    num_rows = ranks.plans[0].routed_row_ids.numel()
    return tuple(torch.zeros(num_rows, each, dtype=ranks.case.dtype, device=ranks.device) for each in columns)


def fp8_hidden(ranks: EmulatedRanks) -> FP8:
    elements, scales = rows_like(ranks, ranks.case.ffn_size, ranks.case.ffn_size // FP8_BLOCK)
    return FP8(elements=elements.to(torch.float8_e4m3fn), scales=scales.float(), block_rows=1, trusted=True)


def grad_tokens(ranks: EmulatedRanks) -> None:
    ranks.grad_tokens(0, *rows_like(ranks, 2 * ranks.case.ffn_size), torch.zeros_like(ranks.plans[0].row_weights))


# A launch of rank 0, what says which implementation it is in, and by which flags it waits.
LAUNCHES: dict[str, tuple[Callable[[EmulatedRanks], Any], Any, str]] = {
    "layer 0": (lambda ranks: ranks.layer0(0), layer0_in, "recv_flags"),
    "gradient of hidden": (lambda ranks: ranks.grad_hidden(0), grad_hidden_in, "recv_flags"),
    "layer 0 in FP8": (lambda ranks: ranks.layer0(0), layer0_in, "recv_flags"),
    "layer 1": (lambda ranks: ranks.layer1(0, *rows_like(ranks, ranks.case.ffn_size)), layer1_in, "combine_flags"),
    "gradients of tokens": (grad_tokens, layer1_in, "combine_flags"),
    "layer 1 in FP8": (lambda ranks: ranks.layer1(0, fp8_hidden(ranks)), layer1_in, "combine_flags"),
}
SENDING = ("gradient of hidden", "layer 1")  # they store other ranks' rows themselves, behind a wait


def check_alone(name: str, case: EmulatedCase, device: str, kind: Kind, timeout_s: float, times: int = 1) -> None:
    """Rank 0 gives up on a rank that never comes; the fault has the place, both ranks, the epoch and the flag."""
    launch, launched_in, flags = LAUNCHES[name]
    ranks = EmulatedRanks(replace(case, fp8="FP8" in name), torch.device(device), timeout_s=timeout_s)
    place = PLACE_LAYER0 if flags == "recv_flags" else PLACE_LAYER1
    epoch, fault = int(ranks.pools[0].epoch), ranks.pools[0].fault
    with launched_in(kind) as spy:
        for _ in range(times):
            fault.zero_()
            ranks.lower(flags, 0)
            launch(ranks)
            assert fault[[0, 1, 2, 4, 5]].tolist() == [1, place.value, 1, epoch, epoch - 1], f"{name} in {kind}"
    assert spy.call_count == (times if kind == "cuda" else 0)


def check_failed(name: str, case: EmulatedCase, device: str, kind: Kind) -> None:
    """A rank that failed sends nothing."""
    launch, launched_in, flags = LAUNCHES[name]
    ranks = EmulatedRanks(case, torch.device(device), timeout_s=0.001)
    for rank, pool in enumerate(ranks.pools):
        ranks.lower(flags, rank)
        for rows in (pool.recv_rows, pool.combine_rows):
            rows.local.fill_(torch.nan)
    ranks.pools[0].fault[0] = 1
    with launched_in(kind) as spy:
        launch(ranks)
    assert spy.call_count == (kind == "cuda")
    for pool in ranks.pools[1:]:
        assert not (getattr(pool, flags).local == int(pool.epoch)).any(), f"{name} in {kind}"
        assert not any(rows.local.isfinite().any() for rows in (pool.recv_rows, pool.combine_rows)), f"{name} in {kind}"
