"""A rank's start from its environment: device, rendezvous store and process group, with guaranteed teardown.

The only place that reads environment variables. They are the ones ``torchrun`` sets for each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from comet.comm.handshake import Host, set_deadline, this_host
from comet.config import require
from comet.errors import CommTimeoutError
from comet.kernels.runtime.process import PARENT, usable_cores
from comet.training.ranks import RankContext

START_S = 300.0  # a rank of another node may import from a slow disk
POLL_S = 0.05
SETTINGS_KEY, WORDS_KEY = "comet/settings", "comet/words"
JOB_KEY, ROUND_KEY, MEMBERS_KEY, SIGN_KEY = "comet/job", "comet/round", "members", "sign"

GPU_LIBRARIES = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext(RankContext):
    """The number of this process among all ranks, and on its node."""

    local_rank: int  # rank on this node; the index of its GPU
    local_world_size: int  # ranks on this node
    node: int  # this node's number
    num_nodes: int  # nodes of the job

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], num_gpus: int) -> LaunchContext:
        """Read what ``torchrun`` says about this rank; without GPUs (``num_gpus=0``) it is on the CPU."""
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            require(environment[name].isdecimal(), f"{name}={environment[name]!r} in the environment must be a number")
        local_rank, local_world_size = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        if 0 < num_gpus < local_world_size:
            raise ValueError(f"nproc={local_world_size} must be at most the {num_gpus} visible GPUs of this machine")
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=local_rank,
            local_world_size=local_world_size,
            node=int(environment.get("GROUP_RANK", "0")),
            num_nodes=int(environment.get("GROUP_WORLD_SIZE", "1")),
            device=torch.device("cuda", local_rank) if num_gpus else torch.device("cpu"),
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A process that is a rank of this attempt: its number, its host, and what no other process has."""

    pid: int
    host: Host
    name: str


def current_context() -> LaunchContext:
    """The context of this process, from its environment; sets what libraries read when they start on a GPU.

    NVLink multicast stays off (not every deployment may switch it on) and cuBLAS works in fixed memory, so that a run
    resumes bit for bit. What the user already chose is kept.
    """
    for name, value in GPU_LIBRARIES.items():
        os.environ.setdefault(name, value)
    return LaunchContext.from_environment(os.environ, torch.cuda.device_count())


def rank_environment(num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment of this machine's ranks: this one, and the loopback interface unless the user chose.

    Other machines can reach neither the ranks nor the store at ``port``. Each rank gets its share of the usable cores.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
    return {
        "OMP_NUM_THREADS": str(max(usable_cores() // num_ranks, 1)),
        **dict.fromkeys(interfaces, loopback),
        **os.environ,
        PARENT: str(os.getpid()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def open_store(context: LaunchContext) -> dist.Store:
    """Connect to the job's rendezvous store."""
    timeout = timedelta(seconds=START_S)
    store, _, _ = next(dist.rendezvous("env://", context.rank, context.world_size, timeout=timeout))
    return store


def another_connection(store: dist.Store) -> dist.Store:
    """The same store through a connection of its own: a wait for a key blocks other threads of a connection."""
    connection: dist.Store = store.clone()  # type: ignore[attr-defined]
    return connection


def join(context: LaunchContext, store: dist.Store) -> tuple[LaunchContext, dist.Store, dict[int, Member]]:
    """Wait for the other ranks of this attempt (collective).

    The store may hold what an earlier attempt left, and agents of several nodes may count attempts differently. So rank
    0 opens a round, which has a part of the store of its own, and names its members.

    Returns:
        The context with the job's name and the number of the attempt, the same on all ranks; the round's part of the
        store; its members.
    """
    mine = json.dumps([context.attempt, asdict(Member(os.getpid(), this_host(), uuid.uuid4().hex))])
    number, texts = (_find_round if context.rank else _open_round)(context, store, mine)
    entries = [json.loads(text) for text in texts]
    attempt = max(number - 1, *(attempt for attempt, _ in entries))
    members = {
        rank: Member(fields["pid"], Host(**fields["host"]), fields["name"]) for rank, (_, fields) in enumerate(entries)
    }
    job = store.get(JOB_KEY).decode() if store.check([JOB_KEY]) else ""
    return replace(context, attempt=attempt, job=job), round_part(store, number), members


def _open_round(context: LaunchContext, store: dist.Store, mine: str) -> tuple[int, list[str]]:
    if context.attempt == 0 and not store.check([JOB_KEY]):  # a later attempt has a new store if the old one died
        store.set(JOB_KEY, uuid.uuid4().hex)
    number = store.add(ROUND_KEY, 1)
    part = round_part(store, number)
    part.set(f"{SIGN_KEY}/0", mine)
    names = [f"{SIGN_KEY}/{rank}" for rank in range(context.world_size)]
    try:
        part.wait(names, timedelta(seconds=START_S))
    except dist.DistStoreError as error:
        late = ", ".join(str(rank) for rank, name in enumerate(names) if not part.check([name]))
        raise CommTimeoutError(f"rank 0 waited {START_S:.0f} s for rank {late} to start") from error
    texts = [part.get(name).decode() for name in names]
    part.set(MEMBERS_KEY, json.dumps(texts))
    return number, texts


def _find_round(context: LaunchContext, store: dist.Store, mine: str) -> tuple[int, list[str]]:
    entered, deadline = 0, time.monotonic() + START_S
    while time.monotonic() < deadline:
        number = store.add(ROUND_KEY, 0)
        part = round_part(store, number)
        if number != entered:
            part.set(f"{SIGN_KEY}/{context.rank}", mine)
            entered = number
        if part.check([MEMBERS_KEY]):
            texts: list[str] = json.loads(part.get(MEMBERS_KEY))
            if texts[context.rank : context.rank + 1] == [mine]:
                return number, texts
        time.sleep(POLL_S)
    raise CommTimeoutError(f"rank {context.rank} waited {START_S:.0f} s for the others to start")


def round_part(store: dist.Store, number: int) -> dist.Store:
    """The part of the store that attempt ``number``, counted from 1, has for itself."""
    return dist.PrefixStore(f"comet/{number}", store)


@contextmanager
def process_group(context: LaunchContext, store: dist.Store, timeout_s: float = START_S) -> Iterator[None]:
    """Set the device and hold the default process group open while the body runs.

    A dead peer fails a collective at once. The group is destroyed when the body ends well. After an error it is left to
    ``leave``: destroying it could wait for peers that are gone.

    Args:
        store: From ``join``; from ``open_store`` where ranks are never restarted.
        timeout_s: How long a collective may wait for a living peer.
    """
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(context.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("comet/group", store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=context.device if on_gpu else None,
    )
    set_deadline(dist.group.WORLD, timeout_s)
    yield
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this rank now, without the shutdown of the interpreter.

    Background threads of a half-broken process group would keep a failed rank alive, and those of a sound one may still
    be dropping a finished collective: one that needs the interpreter while it shuts down aborts the process.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        status = status or 128 + signal.SIGPIPE
    sys.stderr.flush()
    os._exit(status)
