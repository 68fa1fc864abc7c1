"""Rows of the fault matrix that are calls in a program: ranks catch what is raised, call again, and start again.

Each rank makes four calls and compares what they return with the reference. The fault comes in the second; the third is
refused or right; before the last all that are still alive start again, as their path says.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from decode_cases import FOLD, DecodeCase
from decode_ranks import compare_step, gathered_inputs, open_rank
from fault_rows import PLACES, SENT, SIGNALS, STRUCK, Finding, Order, await_file, note, set_trap, strike, unnamed
from gpus import ON_GPUS, backend_of
from layer_cases import LayerCase, complaints
from layer_ranks import build_layer, check_call, train_call
from ranks import run_ranks

from comet.comm.handshake import set_deadline
from comet.config import OverlapConfig
from comet.decode import RankDecode
from comet.schedule.choice import Problem
from comet.tuner.layers import measure_layer

START_S = 240.0  # until the ranks meet for the first time, kernels compiled: not counted
PATIENCE_S = 120.0  # deadline of the calls before and after the fault
STACK_S = 5.0  # beyond the limit; then a rank is taken to hang, and its stack printed
HEALTHY, FIRST, SECOND, LAST = range(4)


@dataclass
class Attempt:
    """One call as a rank saw it: what it raised, what is wrong with its result, when it ended and how long it took."""

    said: str
    wrong: list[str]
    at: float
    seconds: float


Life = dict[int, Attempt]  # the calls of a rank after the healthy one, by number


class LayerCalls:
    def __init__(self, order: Order, rank: int) -> None:
        self.order, self.rank, self.device = order, rank, order.device
        self.case = layer_case(order)
        self._build()

    def _build(self) -> None:
        self.moe = build_layer(self.case, self.rank, self.order.row.path, self.device)

    def wait_at_most(self, seconds: float) -> None:
        group = self.moe.group
        group.comm.timeout_s = seconds
        for each in group.process_groups:
            set_deadline(each, seconds)

    def call(self, number: int) -> list[str]:
        found = train_call(self.moe, self.case, self.rank, number)
        self.moe.group.workspace.check()
        return complaints(check_call, self.case, self.rank, number, found)

    def recover(self) -> None:
        """Start again by a restart, or by a new group of new process groups if a collective broke off."""
        if self.order.row.path in ("twin", "fused"):
            self.moe.group.workspace.restart()
        else:
            renew_process_group(self.order, self.rank)
            self._build()


class DecodeCalls:
    """Decode steps: of tokens that all ranks have by the twin, of each rank's own by kernels."""

    def __init__(self, order: Order, rank: int) -> None:
        self.rank, self.device, ranks = rank, order.device, order.world_size
        on_gpu, with_kernels = order.device == "cuda", order.row.path == "fused"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        size = 512 if on_gpu else 16
        self.case = DecodeCase(name="faults", T=1, K=2, E=2 * ranks, D=size, F=size, routing="masked", seed=3)
        self.config = FOLD if with_kernels and not on_gpu else None
        self.comm, self.weights = open_rank(rank, ranks, self.case, 1, self.dtype, self.device)
        self.counts = (1,) * ranks
        settings = dict(replicated=not with_kernels, use_kernels=with_kernels)
        self.decode = RankDecode(self.comm, hidden_size=size, max_tokens=1, **settings)
        self.place = rank if with_kernels else 0

    def wait_at_most(self, seconds: float) -> None:
        self.comm.timeout_s = seconds

    def call(self, number: int) -> list[str]:
        inputs = gathered_inputs(self.case, number, self.counts, self.dtype)[self.place]
        output = self.decode(*(each.to(self.device) for each in inputs), self.weights, config=self.config)
        self.decode.check()
        return complaints(compare_step, self.case, output, inputs, self.dtype, f"call {number}")

    def recover(self) -> None:
        self.decode.restart()


class TuneCalls(LayerCalls):
    """Measurements of three candidates, the plain path among them."""

    def _build(self) -> None:
        path = "fused" if self.device != "cpu" else "twin"
        self.moe = build_layer(self.case, self.rank, path, self.device)
        tokens = max(self.case.num_tokens)
        self.problem = Problem(self.case.config, self.case.parallel, tokens, self.case.dtype)
        self.settings = [OverlapConfig(num_panels=1), OverlapConfig(num_panels=2), None]

    def call(self, number: int) -> list[str]:
        """Raises what one candidate failed by; the others have their times."""
        measured = measure_layer(self.problem, self.settings, self.moe.group, rounds=2, seed=number)
        failures = [item.failure for item in measured if item.ms is None]
        if len(failures) > 1:
            return [f"{len(failures)} of {len(self.settings)} candidates failed: {failures}"]
        if failures:
            raise RuntimeError(failures[0])
        return []


USES: dict[str, Callable[[Order, int], Any]] = {"decode": DecodeCalls, "tune": TuneCalls}


def layer_case(order: Order) -> LayerCase:
    ranks = order.world_size
    if order.device == "cuda":
        sizes = dict(hidden_size=512, ffn_size=512, dtype=torch.bfloat16)
        return LayerCase("faults", ranks, 1, (700, 690, 710, 701)[:ranks], num_experts=4 * ranks, **sizes)
    return LayerCase("faults", ranks, 1, (40, 33, 21, 37)[:ranks], num_experts=2 * ranks)


def is_interpreted(order: Order) -> bool:
    return order.row.path == "fused" and order.device == "cpu"


def wait_s(order: Order) -> float:
    """The deadline that ranks are given: the interpreter's clock counts polls as 20 us each, which take it longer.

    Ten times as long where the culprit reports its fault: on a busy machine it may come to it after the others' polls.
    """
    shorter = 10 if order.row.fault in ("exception", "out of memory") else 100
    return order.deadline_s / shorter if is_interpreted(order) else order.deadline_s


def renew_process_group(order: Order, rank: int) -> None:
    backend = backend_of(order.world_size) if order.device == "cuda" else "gloo"
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        init_method=f"file://{order.folder}/again",
        rank=rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=START_S),
    )


def live_through(rank: int, world_size: int, order: Order) -> Life:
    life: Life = {}
    is_culprit = rank == order.culprit
    calls = USES.get(order.row.phase, LayerCalls)(order, rank)
    calls.wait_at_most(PATIENCE_S)
    wrong = calls.call(HEALTHY)
    assert not wrong, f"before the fault: {wrong}"
    meet(order, rank, "healthy", range(world_size))
    calls.wait_at_most(wait_s(order))
    if is_culprit:
        set_trap(PLACES[order.row.phase, order.row.path], lambda: strike(order, calls.device))
    alive = order.survivors if order.row.fault == "SIGKILL" else range(world_size)
    for number in (FIRST, SECOND):
        life[number] = attempt(calls, number, order, watched=not (is_culprit and number == FIRST))
        meet(order, rank, f"call{number}", alive)
    if len(alive) == world_size:
        calls.wait_at_most(PATIENCE_S)
        life[LAST] = attempt(calls, LAST, order, watched=True)
        meet(order, rank, f"call{LAST}", alive)
    return life


def attempt(calls: Any, number: int, order: Order, *, watched: bool) -> Attempt:
    began, said, wrong = time.monotonic(), "", []
    with watch(order, watched):
        try:
            if number == LAST:
                calls.recover()
                calls.wait_at_most(PATIENCE_S)  # also in a new group
            wrong = calls.call(number)
        except (RuntimeError, ValueError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
    return Attempt(said, wrong, time.monotonic(), time.monotonic() - began)


@contextmanager
def watch(order: Order, watched: bool) -> Iterator[None]:
    """End the process with its stacks in the log when the body hangs; not that of one that is stopped."""
    if watched:
        faulthandler.dump_traceback_later(order.limit_s + STACK_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def meet(order: Order, rank: int, where: str, ranks: Any) -> None:
    """Wait for the others by files: nothing of the product is in it."""
    note(order.folder / f"{where}.{rank}")
    end = time.monotonic() + START_S
    for other in ranks:
        await_file(order.folder / f"{where}.{other}", until=lambda: time.monotonic() > end)


def send_signals(order: Order, is_over: Callable[[], bool]) -> None:
    """The parent's part: send the row's signal once the culprit is where it shall hit, and let a stopped rank go on."""
    struck = await_file(order.folder / STRUCK, is_over)
    if order.row.fault not in SIGNALS or not struck:
        return
    pid = int(struck.split()[0])
    os.kill(pid, getattr(signal, order.row.fault))
    note(order.folder / SENT, str(time.monotonic()))
    if order.row.fault == "SIGSTOP":
        for rank in order.survivors:
            await_file(order.folder / f"call{FIRST}.{rank}", is_over)
        if not is_over():
            os.kill(pid, signal.SIGCONT)


def run_calls(order: Order) -> Finding:
    over = threading.Event()
    sender = threading.Thread(target=send_signals, args=(order, over.is_set))
    sender.start()
    try:
        lives = run_ranks(
            live_through,
            order.world_size,
            order,
            interpret=is_interpreted(order),
            timeout=START_S + 4 * order.limit_s,
            backend=ON_GPUS if order.device == "cuda" else "gloo",
            may_die=[order.culprit] if order.row.fault == "SIGKILL" else [],
        )
    except AssertionError as error:
        return Finding(order.row, wrong=[str(error)])
    finally:
        over.set()
        sender.join()
    return judge(order, lives)


def fault_time(order: Order) -> float | None:
    for name in (SENT, STRUCK):
        if (order.folder / name).exists():
            return float((order.folder / name).read_text().split()[-1])
    return None


def judge(order: Order, lives: list[Life | None]) -> Finding:
    row, at = order.row, fault_time(order)
    finding = Finding(row)
    if at is None:
        finding.wrong.append("the fault did not happen: the phase was not reached")
        return finding
    survivors = [life for rank in order.survivors if (life := lives[rank]) is not None]
    ends = [life[FIRST].at - at for life in survivors]
    finding.seconds = max(ends)
    if finding.seconds > order.limit_s:
        finding.wrong.append(f"a survivor went on for {finding.seconds:.1f} s, allowed are {order.limit_s:.1f} s")
    known = row.fault not in SIGNALS
    for life in survivors:
        said = life[FIRST].said or life[SECOND].said
        finding.said = finding.said or said
        finding.wrong += unnamed(order, said, reason=known)
    for rank, life in enumerate(lives):
        for number, each in (life or {}).items():
            finding.wrong += [f"rank {rank}: {what}" for what in each.wrong]
            if number == SECOND and each.seconds > order.limit_s:
                finding.wrong.append(f"rank {rank} was refused only after {each.seconds:.1f} s")
            if number == LAST and each.said:
                finding.wrong.append(f"rank {rank} after starting anew: {each.said}")
    return finding
