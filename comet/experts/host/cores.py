"""Missing experts computed on the host's cores: the process that does it, and what went wrong with it."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

import torch
from torch import Tensor

from comet.comm.signals import fence
from comet.config import require
from comet.decode.runners import ReplicatedRunner, Runner
from comet.errors import HostComputeError, UnavailableError
from comet.experts.host.profile import HostProfile, HostSizes, measure_host
from comet.experts.host.worker import FilePart, WorkerPlan, refuse_nan
from comet.experts.store import MemoryFile, host_memory
from comet.kernels.experts.mailbox import (
    ANSWERED,
    EXPERTS,
    FAILED,
    LAST_SEQUENCE,
    NUM_EXPERTS,
    OF_LAYER,
    READY,
    STOP,
    Mailbox,
)
from comet.kernels.experts.tables import ExpertParts
from comet.kernels.runtime.faults import Fault, Place
from comet.kernels.runtime.process import usable_cores

logger = logging.getLogger(__name__)

PROGRAM = "from comet.experts.host.worker import main; main()"
START_S = 120.0  # until torch is imported, on a busy machine
POLL_S = 0.01
END_S = 5.0
TIMEOUT_S = 30.0


class HostCores:
    """A process that computes missing experts of all layers of a rank, from the memory they are stored in.

    It starts with ``start``. It ends with ``close``, with the last reference to this object, or with this process.

    Args:
        fault: ``(8,)`` int64 on the device, where spins of the rank record a deadline; ``None``: its own.
        insists: Whether they are to compute whatever it costs.
    """

    def __init__(
        self,
        num_cores: int,
        sizes: HostSizes,
        device: torch.device,
        timeout_s: float,
        fault: Tensor | None = None,
        *,
        insists: bool = True,
    ) -> None:
        self.num_cores, self.sizes, self.device, self.insists = num_cores, sizes, device, insists
        self.file = MemoryFile()  # HeldExperts.fill puts the experts here
        self.profile: HostProfile | None = None  # what experts cost, once it is measured
        tokens, routed = sizes.max_tokens, sizes.max_tokens * sizes.top_k
        words = host_memory((EXPERTS.value + sizes.num_experts + routed,), torch.int32, device, self.file)
        parts = [
            words,
            host_memory((tokens, sizes.hidden_size), sizes.dtype, device, self.file),
            host_memory((routed,), torch.float32, device, self.file),
            host_memory((tokens, sizes.hidden_size), torch.float32, device, self.file),
        ]
        if not all(readable for _, readable in parts):
            raise UnavailableError("memory for requests to the host's cores cannot be pinned: set host_cores=off")
        (self._words, mail_tokens, weights, answer), _ = zip(*parts, strict=True)
        self._counts = host_memory((2,), torch.int64, torch.device("cpu"), self.file)[0]
        # The caches that are served share this mailbox.
        self.mail = Mailbox(
            share=torch.zeros(tokens + 1, sizes.num_experts + 1, dtype=torch.int32, device=device),
            sequence=torch.zeros(1, dtype=torch.int32, device=device),
            words=self._words,
            tokens=mail_tokens,
            weights=weights,
            answer=answer,
            sums=torch.zeros(tokens, sizes.hidden_size, dtype=torch.float32, device=device),
            fault=Fault.allocate(device) if fault is None else fault,
            timeout_ns=int(timeout_s * 1e9),
        )
        self.process: subprocess.Popen[bytes] | None = None  # that computes, once it is started
        self._log: IO[str] | None = None

    def start(self, stores: Sequence[ExpertParts], profile: HostProfile | None = None) -> None:
        """Start the process on the experts of all layers, which are in ``file``, and decide what it is given to do."""
        refuse_nan(stores)
        mail = self.mail
        plan = WorkerPlan(
            file=self.file.descriptor,
            parent=os.getpid(),
            num_cores=self.num_cores,
            num_experts=self.sizes.num_experts,
            first_expert=self.sizes.first_expert,
            layers=[{name: self._place(part) for name, part in store.stored_parts.items()} for store in stores],
            activation=self.sizes.activation,
            mail=[self._place(part) for part in (mail.words, mail.tokens, mail.weights, mail.answer, self._counts)],
        )
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is open as long as the process is
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the process inherits that and keeps it
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[self.file.descriptor],
            )  # fmt: skip
            self._end = weakref.finalize(self, end_process, self.process, self._words, self._log, os.getpid())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        watched = self.process, self._words, mail.answer
        threading.Thread(target=answer_once_dead, args=watched, daemon=True).start()
        try:
            pipe = self.process.stdin
            assert pipe is not None
            with suppress(BrokenPipeError), pipe:  # a process that died says why
                pipe.write(pickle.dumps(plan))
            self._wait_until_ready()
            self.profile = profile or measure_host(mail, stores, self.sizes, self.device)
        except BaseException:
            self.close()
            raise
        self.file.close()
        self._counts.zero_()
        mail.share.copy_(self.profile.share_table(self.sizes.max_tokens, self.sizes.num_experts))
        logger.info("%d cores of the host compute missing experts: %s", self.num_cores, self.facts())

    @property
    def pays(self) -> bool:
        return bool(self.mail.share.any())

    @property
    def counts(self) -> tuple[int, float]:
        """Experts computed so far, and seconds of the process for them."""
        experts, nanoseconds = self._counts.tolist()
        return experts, nanoseconds / 1e9

    def facts(self) -> dict[str, Any]:
        """Cores, what experts cost in microseconds, and how many of 0 to K missing experts of a token they get."""
        assert self.profile is not None, "start measures it"
        costs = {name.replace("_ns", "_us"): round(value / 1e3, 1) for name, value in asdict(self.profile).items()}
        share = self.mail.share[1, : min(self.sizes.top_k, self.sizes.num_experts) + 1].tolist()
        return {"cores": self.num_cores, **costs, "share": share}

    def raise_if_failed(self) -> None:
        """Raise ``HostComputeError`` if the process is gone or a deadline passed; does not wait for the device."""
        if int(self._words[FAILED.value]) or self.process is None or self.process.poll() is not None:
            raise self._error()

    def check(self) -> None:
        """``raise_if_failed`` of all that was launched; waits for the device."""
        fault = Fault.of(self.mail.fault)
        if fault.is_set and fault.place is Place.HOST:
            raise self._error()
        self.raise_if_failed()

    def close(self) -> None:
        self.file.close()
        if self.process is not None:
            self._end()

    def _place(self, part: Tensor) -> FilePart:
        return FilePart(self.file.offset_of(part), part.shape, part.dtype)

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while not int(self._words[READY.value]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise HostComputeError(f"the process for host_cores={self.num_cores} did not start{self._said()}")
            time.sleep(POLL_S)

    def _error(self) -> HostComputeError:
        words = self._words.tolist()
        count = words[NUM_EXPERTS.value]
        experts = words[EXPERTS.value : EXPERTS.value + count]
        status = None if self.process is None else self.process.poll()
        state = "is still at it" if status is None else f"ended with status {status}"
        late = f" within {self.mail.timeout_ns / 1e9:.1f} s" if status is None and words[FAILED.value] else ""
        return HostComputeError(
            f"the host's cores do not compute experts{late}, the last ones asked for were {experts} of layer "
            f"{words[OF_LAYER.value]}: the process {state}{self._said()}; load the model again, or set host_cores=off"
        )

    def _said(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f" ({lines[-1]})" if lines else ""


def answer_once_dead(process: subprocess.Popen[bytes], words: Tensor, answer: Tensor) -> None:
    """Answer requests with NaN once the process has died, so that no step waits for its deadline."""
    numbers, sums = words.numpy(), answer.numpy()
    process.wait()
    while not numbers[STOP.value]:
        sums.fill(math.nan)
        numbers[FAILED.value] = 1
        fence()
        numbers[ANSWERED.value] = LAST_SEQUENCE.value
        time.sleep(POLL_S)


def end_process(process: subprocess.Popen[bytes], words: Tensor, log: IO[str], owner: int) -> None:
    """Tell the process to end, and see to it; nothing in a process that was forked from its owner."""
    if os.getpid() != owner:
        return
    words[STOP.value] = 1
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()


def cores_of(setting: str, ranks: int) -> int:
    """How many cores a rank's process gets; 0: it has none.

    Example: of 16 cores 2 ranks get 7 each with ``auto``, which leaves them one each, and 4 each with ``8``.
    """
    if setting == "off":
        return 0
    usable = usable_cores()
    if setting == "auto":
        return max(usable // ranks - 1, 1)
    require(
        ranks <= int(setting) <= usable,
        f"host_cores={setting!r} must be a number from {ranks}, one for each rank, to {usable}, the cores that this "
        "process may use, auto or off",
    )
    return int(setting) // ranks


def open_cores(
    setting: str, sizes: HostSizes, device: torch.device, *, runner: Runner | None = None
) -> HostCores | None:
    """Return the cores that a setting asks for; ``None`` if it is off, or ``auto`` where cores do not pay."""
    ranks, timeout_s, fault = 1, TIMEOUT_S, None
    if isinstance(runner, ReplicatedRunner):
        group = runner.group
        in_node = group if group.nodes is None else group.nodes.inner
        ranks, timeout_s = in_node.parallel.world_size, group.comm.timeout_s
        fault = None if runner.decode_on_ranks is None else runner.decode_on_ranks.fault
    num_cores = cores_of(setting, ranks)
    if not num_cores:
        return None
    if setting == "auto" and device.type == "cpu":
        logger.info("host_cores=auto leaves the host's cores out: the device is the host itself")
        return None
    return HostCores(num_cores, sizes, device, timeout_s, fault, insists=setting != "auto")


def started(cores: HostCores | None, stores: Sequence[ExpertParts]) -> HostCores | None:
    """The cores, started on the experts of all layers; ``None``, and closed, where they do not pay and need not be."""
    if cores is None:
        return None
    cores.start(stores)
    if cores.insists or cores.pays:
        return cores
    logger.info("host_cores=auto leaves the host's cores out: the link alone is faster")
    cores.close()
    return None
