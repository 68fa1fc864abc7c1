"""Ctrl-C, or any exception, in the middle of a step from caches: the next generation is right all the same."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from cache_cases import CASE, SLOW_LINK, hosted_cache, leave_all_to, set_deadline
from tiers import slow
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import MODEL, MOE, awake_model, nearly_equal, slots_of

from comet.decode.runners import LocalRunner
from comet.errors import HostComputeError
from comet.experts.cached import CachedExperts
from comet.experts.host import cores as host_cores
from comet.experts.host.cores import HostCores
from comet.experts.store import HeldExperts
from comet.generation.engine import GPTEngine
from comet.kernels.runtime.faults import Place
from comet.layout import RoutedTokens

SEED = random.randrange(10**6)


class Interrupt(TorchDispatchMode):
    """Raises KeyboardInterrupt in the place of an operation, by its number."""

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def texts(engine: GPTEngine, prompt: int) -> list[torch.Tensor]:
    """Logits of a prompt and of three steps behind it."""
    ids = torch.arange(prompt).view(1, prompt) * 7 % 256
    found = [engine.prefill(ids, torch.tensor([prompt]), prompt + 3)]
    return [*found, *(engine.decode(torch.tensor([step * 11])) for step in range(3))]


def in_pageable_memory(parts: dict[str, torch.Tensor], device: torch.device, file: object = None) -> HeldExperts:
    return HeldExperts(*(part.contiguous() for part in parts.values()), readable=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_slots=MOE.top_k),
        dict(num_slots=MOE.top_k + 1, expert_prefetch=True),
        dict(num_slots=MOE.top_k + 1, host_cores="1"),
        slow(dict(num_slots=MOE.top_k + 1, host_cores="1", expert_dtype="mxfp8")),
        dict(num_slots=MOE.top_k, staged=True),
    ],
    ids=str,
)
def test_a_generation_behind_an_interrupted_one_is_right(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "staged" in settings:
        settings = dict(num_slots=MOE.top_k)
        monkeypatch.setattr(HeldExperts, "hold", in_pageable_memory)
    draw = random.Random(SEED)
    model, group = awake_model(MODEL, None, in_slots=True, sharpness=1.0)
    engine = GPTEngine(model, group, store=slots_of(**settings))
    if engine.cores is not None:
        leave_all_to(engine.cores)
    for prompt in (3, 20):  # a step in waves, and streamed
        expected = texts(engine, prompt)
        with Interrupt() as counted:
            texts(engine, prompt)
        for number in sorted(draw.sample(range(1, counted.count), 12)):
            with suppress(KeyboardInterrupt), Interrupt(number):  # how often the host is polled varies
                texts(engine, prompt)
            for mine, right in zip(texts(engine, prompt), expected, strict=True):
                nearly_equal(mine, right, msg=lambda text, at=number: f"{SEED=}, interrupted at {at}: {text}")
    engine.check()


def path_with_cores() -> tuple[CachedExperts, HostCores, RoutedTokens]:
    """A path whose step asks the host's cores, and that step."""
    cache, cores = hosted_cache(CASE, CASE.K, SLOW_LINK)
    cache.share_with(cores, 0)
    ids = torch.arange(CASE.K, dtype=torch.int32).view(1, CASE.K)
    step = RoutedTokens(torch.ones(1, CASE.D), ids, torch.ones(1, CASE.K))
    return CachedExperts(cache, LocalRunner(CASE.K, 1), CASE.K), cores, step


def call(path: CachedExperts, step: RoutedTokens) -> torch.Tensor:
    return path(step, path.cache.host.w1, path.cache.host.w2)


def test_the_process_on_the_hosts_cores_leaves_ctrl_c_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends SIGINT to all processes in the foreground, at any time."""
    popen = subprocess.Popen

    def interrupted_at_once(*given: Any, **named: Any) -> Any:
        process = popen(*given, **named)
        os.kill(process.pid, signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted_at_once)
    path, cores, step = path_with_cores()
    expected = call(path, step)
    os.kill(cores.process.pid, signal.SIGINT)
    path.cache.clear()
    assert torch.equal(call(path, step), expected)
    assert torch.isfinite(expected).all()
    assert cores.process.poll() is None
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "this process still takes it"
    cores.close()


def test_a_process_that_dies_in_the_middle_of_a_step_is_named_at_once() -> None:
    path, cores, step = path_with_cores()
    set_deadline(path.cache, cores, 10**15)
    os.kill(cores.process.pid, signal.SIGSTOP)  # it does not answer
    killer = threading.Timer(0.2, cores.process.kill)
    killer.start()
    with pytest.raises(HostComputeError, match=r"compute experts, the last ones .* of layer 0: the process ended with"):
        call(path, step)
    with pytest.raises(HostComputeError, match="the process ended with status -9"):
        call(path, step)
    killer.join()
    cores.close()


def test_loading_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupt(cores: HostCores) -> None:
        started.append(cores.process)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostCores, "_wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hosted_cache(CASE, CASE.K, SLOW_LINK)
    assert started[0].returncode is not None


def test_a_process_that_dies_while_it_imports_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before it has read its plan, which is larger than a pipe."""
    monkeypatch.setattr(host_cores, "PROGRAM", "raise ImportError('no torch for this Python')")
    monkeypatch.setattr(pickle, "dumps", lambda _: bytes(2**24))
    with pytest.raises(HostComputeError, match=r"did not start \(ImportError: no torch for this Python\)"):
        hosted_cache(CASE, CASE.K, SLOW_LINK)


@pytest.mark.parametrize("host_cores", ["off", "1"])
def test_a_model_that_is_loaded_again_does_not_inherit_cores_that_failed(host_cores: str) -> None:
    """The second model uses the same group, whose steps share a record of missed deadlines."""
    model, group = awake_model(MODEL, None, in_slots=True, sharpness=1.0)
    engine = GPTEngine(model, group, store=slots_of(MOE.top_k + 1, host_cores="1"))
    expected = texts(engine, 3)
    engine.cores.mail.fault[:2] = torch.tensor([1, Place.HOST])  # A step writes this at the deadline.
    with pytest.raises(HostComputeError):
        engine.check()
    engine.cores.close()
    model, _ = awake_model(MODEL, group, in_slots=True, sharpness=1.0)
    again = GPTEngine(model, group, store=slots_of(MOE.top_k + 1, host_cores=host_cores))
    for mine, right in zip(texts(again, 3), expected, strict=True):
        nearly_equal(mine, right)
    again.check()
