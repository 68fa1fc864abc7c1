"""The script for compute-sanitizer runs under the interpreter, launches every kernel, and notices a wrong number."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import sanitize
import torch
from played_layer import PlayedRanks
from ranks import run_ranks
from stress_cases import StressCase
from triton.runtime import interpreter

import comet.kernels

CPU = torch.device("cpu")


def kernels() -> dict[str, interpreter.InterpretedFunction]:
    """Every function that can be launched, by name."""
    modules = [
        importlib.import_module(found.name) for found in pkgutil.walk_packages(comet.kernels.__path__, "comet.kernels.")
    ]
    functions = {id(value): value for module in modules for value in vars(module).values()}
    return {
        name: fn
        for fn in functions.values()
        if isinstance(fn, interpreter.InterpretedFunction) and (name := fn.fn.__name__).endswith("_kernel")
    }


def launched_kernels(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """The kernels there are, and those the script launches."""
    known, launched = kernels(), set()
    run = interpreter.InterpretedFunction.run

    def noted(self: interpreter.InterpretedFunction, *arguments: object, **options: object) -> object:
        launched.add(self.fn.__name__)
        return run(self, *arguments, **options)

    interpreter.InterpretedFunction.run = noted  # type: ignore[method-assign]
    assert sanitize.main(["--device", "cpu"]) == 0
    return set(known), launched


def test_every_kernel_is_launched_and_all_numbers_are_right() -> None:
    known, launched = run_ranks(launched_kernels, 1, interpret=True, timeout=500)[0]
    assert len(known) > 10
    assert launched == known


def two_ranks_without_the_second_pass(rank: int, world_size: int) -> str:
    case = StressCase("once", 2, 1, (5, 3), 4, 2, 16, 16, backward=False, max_tokens=8, beside=False)
    played = PlayedRanks(case, CPU)
    twice = PlayedRanks.twice

    def once(self: PlayedRanks, flags: str, step: object) -> list:
        for pool in self.pools:
            getattr(pool, flags).local.fill_(int(pool.epoch))
        return [step(index) for index in self.ranks]  # type: ignore[operator]

    played.run()
    PlayedRanks.twice = once  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError, match="once: output") as caught:
            PlayedRanks(case, CPU).run()
    finally:
        PlayedRanks.twice = twice  # type: ignore[method-assign]
    return str(caught.value)


def test_rows_that_never_arrived_are_noticed() -> None:
    assert "output" in run_ranks(two_ranks_without_the_second_pass, 1, interpret=True, timeout=300)[0]
