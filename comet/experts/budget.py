"""Plan where experts are by a budget of GPU memory."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from comet.config import DIM_MULTIPLE, MoEConfig, ParallelConfig, require
from comet.decode.nodes import decode_obstacle
from comet.experts.options import StoreOptions
from comet.layer.group import ExpertGroup
from comet.quantization.formats import FP8_BLOCK, MX_BLOCK, StoredType

ALONE = ParallelConfig()
# Most tokens of a decode step from caches where the caller does not say. A step has waves for the most experts that its
# tokens may need; streaming visits only those that they do need, but waits for the routing.
CACHED_DECODE_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBudget:
    """The places of the experts of a model's layers; all of them are in the store."""

    options: StoreOptions
    num_layers: int  # L, that have experts
    num_held: int  # experts of each on one rank, the only one but for a host store
    expert_bytes: int  # of one expert, or of a rank's slice of it, as it is stored
    num_slots: int  # S, experts of each layer on the device
    num_places: int  # experts of all layers together in host memory

    @property
    def device_bytes(self) -> int:
        return self.num_layers * self.num_slots * self.expert_bytes

    @property
    def host_bytes(self) -> int:
        return self.num_places * self.expert_bytes

    @property
    def store_bytes(self) -> int:
        return self.num_layers * self.num_held * self.expert_bytes


def most_tokens(options: StoreOptions, decode_tokens: int | None, group: ExpertGroup | None) -> int | None:
    """Most tokens of a decode step; ``None``: the runner's default, which only steps from a store do not have."""
    if not options.in_store:
        return decode_tokens
    obstacle = "" if group is None else decode_obstacle(group)
    if obstacle:
        raise NotImplementedError(f"expert_budget needs warp decode on all ranks: {obstacle}")
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
    if options.expert_budget is None:
        return None
    held, width = config.num_experts // parallel.ep, config.ffn_size // parallel.tp
    rule = f"must be a multiple of {DIM_MULTIPLE} with an expert_budget, whose steps take warp decode"
    require(width % DIM_MULTIPLE == 0, f"ffn_size={config.ffn_size} / tp={parallel.tp} = {width} {rule}")
    for name, size in {"hidden_size": config.hidden_size, "ffn_size / tp": width}.items():
        rule = f"takes a {name} that is a multiple of {MX_BLOCK}, not {size}"
        is_whole = options.expert_dtype is None or size % MX_BLOCK == 0
        require(is_whole, f"expert_dtype={options.expert_dtype} {rule}")
    expert, in_files = bytes_of_expert(config.hidden_size, width, dtype, options.stored), options.host_budget
    least = 1 if in_files is None else min(config.top_k, held)  # a GPU that brings them itself has waves for the others
    num_slots = experts_within(options.expert_budget, held, max(num_layers, 1) * expert)
    require(
        num_slots >= least,
        f"expert_budget={options.expert_budget} holds {num_slots} experts of each of {num_layers} layers, and must "
        f"hold {least}: {num_layers * least * expert:,} bytes, or a share of {share_of_experts(least, held)}",
    )
    num_slots, num_places = min(num_slots, held), num_layers * held
    if in_files is not None:
        fitting = experts_within(in_files, num_places, expert)
        require(
            fitting >= num_slots,
            f"host_budget={in_files} holds {fitting} experts, and must hold the {num_slots} that a layer has slots "
            f"for: {num_slots * expert:,} bytes, or a share of {share_of_experts(num_slots, num_places)}",
        )
        num_places = min(num_places, fitting)
    return ExpertBudget(
        options=options, num_layers=num_layers, num_held=held, expert_bytes=expert, num_slots=num_slots,
        num_places=num_places,
    )  # fmt: skip


def experts_within(budget: float, num_experts: int, expert_bytes: int) -> int:
    """How many experts fit a budget: up to 1 a share of ``num_experts``, a decimal number or a quotient, else bytes.

    Example: 0.58 of 50 are 29, and 3 / 7 of 7 are 3; in floats 0.58 * 50 is a little less.
    """
    if budget > 1:
        return int(budget // expert_bytes)
    return bisect_right(range(1, num_experts + 1), budget, key=lambda number: number / num_experts)


def share_of_experts(number: int, num_experts: int) -> float:
    """A share that holds ``number`` of so many experts, short enough to read: rounded up, 1 / 3 is 0.33334."""
    return -(-number * 10**5 // num_experts) / 10**5


def bytes_of_expert(hidden_size: int, ffn_size: int, dtype: torch.dtype, stored: StoredType | None = None) -> int:
    """Return the bytes of w1 ``(2F, D)`` and w2 ``(D, F)``, with their scales where they are quantised.

    Example (D = 256, F = 128): 98,304 numbers are 196,608 bytes in bfloat16, 101,376 in MXFP8, 52,224 in MXFP4 and
    98,328 in block FP8, which has 2 * 2 + 2 * 1 scales of 4 bytes.
    """
    numbers = 3 * hidden_size * ffn_size
    if stored is None:
        return numbers * dtype.itemsize
    if stored == "fp8":
        deep, wide = -(-hidden_size // FP8_BLOCK), -(-ffn_size // FP8_BLOCK)
        return numbers + 4 * deep * (-(-2 * ffn_size // FP8_BLOCK) + wide)
    return numbers // (2 if stored == "mxfp4" else 1) + numbers // MX_BLOCK
