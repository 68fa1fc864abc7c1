"""Plan where experts are by a budget of GPU memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch

from comet.config import DIM_MULTIPLE, MoEConfig, ParallelConfig, require
from comet.experts.cache import (
    CACHED_DECODE_TOKENS,
    bytes_of_expert,
    experts_within,
    share_of_experts,
    slots_of_budget,
)
from comet.experts.options import ExpertStoreKind, StoreOptions
from comet.layer.group import ExpertGroup
from comet.quantization.formats import MX_BLOCK, MXType, StoredType

ALONE = ParallelConfig()
UNIT = "a share of all experts, or bytes above 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBudget:
    """The places of the experts of a model's layers; all of them are in the store."""

    # host: all experts are in host memory. file: they stay in their files, and host memory holds some
    store: ExpertStoreKind
    num_layers: int  # L, that have experts
    held: int  # experts of each on one rank, the only one but for host
    expert_bytes: int  # of one expert, or of a rank's slice of it, as it is stored
    slots: int  # S, experts of each layer on the device
    places: int  # experts of all layers together in host memory
    stored: StoredType | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots of all layers."""
        return self.num_layers * self.slots * self.expert_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the experts in host memory."""
        return self.places * self.expert_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes of all experts of the rank."""
        return self.num_layers * self.held * self.expert_bytes


def _check_blocks(expert_dtype: MXType | None, config: MoEConfig, width: int) -> None:
    """Raise ``ValueError`` unless the sizes of experts that are quantised so are whole blocks."""
    for name, size in {"hidden_size": config.hidden_size, "ffn_size / tp": width}.items():
        rule = f"takes a {name} that is a multiple of {MX_BLOCK}, not {size}"
        require(expert_dtype is None or size % MX_BLOCK == 0, f"expert_dtype={expert_dtype} {rule}")


def _places(host_budget: float | None, num_experts: int, slots: int, expert_bytes: int) -> int:
    """Experts in host memory, of all ``num_experts``; raises ``ValueError`` unless one layer's slots can be filled."""
    require(
        host_budget is not None and 0 < host_budget < math.inf,
        f"host_budget={host_budget} must be given with expert_store='file', finite and above 0: {UNIT}, that host "
        "memory holds",
    )
    assert host_budget is not None
    places = experts_within(host_budget, num_experts, expert_bytes)
    require(
        places >= slots,
        f"host_budget={host_budget} holds {places} experts, and must hold the {slots} that a layer has slots for: "
        f"{slots * expert_bytes:,} bytes, or a share of {share_of_experts(slots, num_experts)}",
    )
    return min(num_experts, places)


def most_tokens(options: StoreOptions, decode_tokens: int | None, group: ExpertGroup | None) -> int | None:
    """Most tokens of a decode step; ``None``: the runner's default, which only steps from a store do not have."""
    if not options.in_store:
        return decode_tokens
    if group is not None and group.comm.memory_obstacle:
        raise NotImplementedError(f"expert_budget needs warp decode on all ranks: {group.comm.memory_obstacle}")
    require(
        decode_tokens is None or decode_tokens >= 1,
        f"decode_tokens={decode_tokens} must be at least 1 with an expert_budget",
    )
    return decode_tokens or CACHED_DECODE_TOKENS


def plan_budget(
    options: StoreOptions, config: MoEConfig, num_layers: int, dtype: torch.dtype, parallel: ParallelConfig = ALONE
) -> ExpertBudget | None:
    """Turn shares or bytes into experts; over ranks, what each has. ``None``: all experts are on the device.

    Example: 4 layers of 64 experts of 98,304 bytes, ``expert_budget=0.25``: 16 slots a layer, 6,291,456 bytes on
    the device. In host memory all 256 experts, or with ``expert_store="file", host_budget=0.5`` any 128.
    """
    budget, store, stored = options.expert_budget, options.expert_store, options.stored
    if budget is None:
        return None
    kinds = get_args(ExpertStoreKind)
    require(store in kinds, f"expert_store={store!r} must be one of {', '.join(kinds)}")
    require(math.isfinite(budget), f"expert_budget={budget} must be finite: {UNIT}")
    held, width = config.num_experts // parallel.ep, config.ffn_size // parallel.tp
    rule = f"must be a multiple of {DIM_MULTIPLE} with an expert_budget, whose steps take warp decode"
    require(width % DIM_MULTIPLE == 0, f"ffn_size={config.ffn_size} / tp={parallel.tp} = {width} {rule}")
    mine = MoEConfig(hidden_size=config.hidden_size, ffn_size=width, num_experts=held, top_k=min(config.top_k, held))
    _check_blocks(options.expert_dtype, config, width)
    least = mine.top_k if store == "file" else 1  # a GPU that brings them itself has waves for the others
    slots = slots_of_budget(budget, mine, num_layers, dtype, stored, least=least)
    expert = bytes_of_expert(config.hidden_size, width, dtype, stored)
    places = num_layers * held
    if store == "file":
        places = _places(options.host_budget, places, slots, expert)
    else:
        given = options.host_budget
        require(given is None, f"host_budget={given} must be None where host memory holds all experts")
    return ExpertBudget(
        store=store, num_layers=num_layers, held=held, expert_bytes=expert, slots=slots, places=places,
        stored=stored,
    )  # fmt: skip
