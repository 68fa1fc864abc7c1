"""The cache of one layer's experts, and decode steps that read from it.

The GPU keeps the cache itself, inside the decode step (``comet.kernels.experts.cache``): it looks up which experts a
step needs, gives the missing ones the slots of those that are worth least, and reads them from pinned host memory. A
hit costs the host nothing, and a step stays one CUDA graph. Results are those of experts that are all in GPU memory,
bit for bit, but for those of longer prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from comet.config import MoEConfig, require
from comet.decode.runners import Runner
from comet.decode.weights import DecodeWeights
from comet.errors import UnavailableError
from comet.experts.host.cores import HostCores
from comet.experts.host.prompts import PromptCores
from comet.experts.store import HeldExperts
from comet.experts.streaming import PinnedSlots, StreamedExperts
from comet.kernels.experts.tables import LAYER, POLICIES, CacheTables, HostExperts, Policy
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layout import Biases, refuse_biases
from comet.quantization.formats import FP8_BLOCK, MX_BLOCK, StoredType

if TYPE_CHECKING:
    from comet.experts.prefetch import Prefetch

# Most tokens of a decode step from caches where the caller does not say. A step has waves for the most experts that its
# tokens may need; streaming visits only those that they do need, but waits for the routing.
CACHED_DECODE_TOKENS = 16
OF_THE_CACHES = ("slots", "prefetch")  # what reports repeat, and do not add up


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """What caches did so far, but for ``OF_THE_CACHES``.

    Args:
        slots: Experts a layer's cache holds.
        needed: Distinct experts that steps needed, summed over steps and layers.
        fetched: How many of them were not there.
        fetched_bytes: Read from host memory.
        fetching_s: Seconds in which a layer's experts travelled, summed over layers; products ran beside.
        prefetched: Experts that began to travel before their step.
        prefetched_needed: How many of them it needed.
        prefetched_bytes: Of these experts, that came before their step; not of those that the step completed, whose
            bytes ``fetched_bytes`` has.
        hosted: Of the needed ones, how many were not there, either, and were computed on the host's cores.
        hosting_s: Seconds of these cores.
        prefetch: Whether experts may travel before their step.
    """

    slots: int
    needed: int
    fetched: int
    fetched_bytes: int
    fetching_s: float
    prefetched: int = 0
    prefetched_needed: int = 0
    prefetched_bytes: int = 0
    hosted: int = 0
    hosting_s: float = 0.0
    prefetch: bool = False

    @property
    def hits(self) -> float:
        """Share of the needed experts that were there; 1 before the first step."""
        return 1 - (self.fetched + self.hosted) / self.needed if self.needed else 1.0

    def since(self, before: Self) -> Self:
        """What was done after another report."""
        first, last = asdict(before), asdict(self)
        return replace(self, **{name: last[name] - first[name] for name in last if name not in OF_THE_CACHES})

    @property
    def prefetch_precision(self) -> float | None:
        """Share of the experts that travelled before their step which it needed; ``None``: none travelled."""
        return self.prefetched_needed / self.prefetched if self.prefetched else None


class ExpertCache:
    """Slots for some experts of a layer on this rank's device.

    Args:
        w1: ``(e, 2F, D)`` the rank's experts in host memory, gate rows first, then up rows; pinned here for a GPU.
            Quantised as those of ``DecodeWeights``.
        w2: ``(e, D, F)``, likewise.
        num_slots: S, at least 1.
        device: Where the slots are.
        policy: Whose slot is given away (``HostExperts``).
        num_experts: E, of all ranks; ``None``: e.
        first_expert: Number of the first of w1 among them.
        w1_scales: Of quantised experts, on the CPU as well.
        w2_scales: Of w2, where w1 has some.
        activation: Of the experts.

    Raises:
        ValueError: If the weights are not on the CPU or do not fit together, there is no slot, or no such policy.
        UnavailableError: If the host's memory cannot be pinned.
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        num_slots: int,
        device: torch.device,
        *,
        policy: Policy = "lru",
        num_experts: int | None = None,
        first_expert: int = 0,
        w1_scales: Tensor | None = None,
        w2_scales: Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> None:
        given = HeldExperts(w1, w2, False, w1_scales, w2_scales)
        for name, weight in given.named_parts.items():
            require(weight.device.type == "cpu", f"device={weight.device} of {name} must be 'cpu': it is the store")
        require(num_slots >= 1, f"num_slots={num_slots} must be at least 1")
        require(policy in POLICIES, f"expert_policy={policy!r} must be one of {', '.join(POLICIES)}")
        self.num_slots, self.first_expert = num_slots, first_expert
        held = (first_expert, first_expert + w1.shape[0])
        self.tables = CacheTables.create(num_experts or w1.shape[0], num_slots, device, held)
        stored = HeldExperts.hold(given.named_parts, device)
        if not stored.readable:
            raise UnavailableError(
                f"{stored.num_bytes:,} bytes of host memory cannot be pinned, which a GPU needs to read from it "
                "(ulimit -l, or a container's limit)"
            )
        host = stored.named_parts
        DecodeWeights(**host, slots=torch.empty(1, dtype=torch.int32))  # looks at scales that were not made here
        self.host = HostExperts(**host, tables=self.tables, policy=policy)
        slots: dict[str, Any] = {
            name: torch.zeros(num_slots, *weight.shape[1:], dtype=weight.dtype, device=device)
            for name, weight in host.items()
        }
        self.weights = DecodeWeights(**slots, slots=self.tables.slots, host=self.host, activation=activation)
        self.cores: HostCores | None = None
        self.layer = 0

    def share_with(self, cores: HostCores, layer: int) -> None:
        """Leave some missing experts to the host's cores, which were started with this store as number ``layer``."""
        self.cores, self.layer = cores, layer
        self.tables.header[LAYER.value] = layer
        self.host = replace(self.host, mail=cores.mail)
        self.weights = replace(self.weights, host=self.host)

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return self.host.expert_bytes

    def expect_prefetch(self, drafts: bool = False) -> None:
        """Let experts travel to the slots before their step, by the routing of ``drafts``, too; before the first."""
        event = torch.cuda.Event() if self.weights.w1.is_cuda else None
        self.host = replace(self.host, prefetched=True, drafted=drafts, fetched=event)
        self.weights = replace(self.weights, host=self.host)


def report_of(caches: Sequence[ExpertCache]) -> CacheReport:
    """What the caches of all layers did so far; waits for their device."""
    totals = torch.stack([cache.tables.totals for cache in caches]).sum(0).tolist()
    needed, fetched, nanoseconds, _, begun, useful, words, hosted = totals
    return CacheReport(
        slots=caches[0].num_slots,
        needed=needed,
        fetched=fetched,
        fetched_bytes=fetched * caches[0].expert_bytes,
        fetching_s=nanoseconds / 1e9,
        prefetched=begun,
        prefetched_needed=useful,
        prefetched_bytes=8 * words,
        hosted=hosted,
        hosting_s=0.0 if caches[0].cores is None else caches[0].cores.counts[1],
        prefetch=caches[0].host.prefetched,
    )


class CachedExperts:
    """Routed experts of a layer, from its cache; an ``ExpertPath``, for inference.

    A step that may need more experts than there are slots runs in waves (``comet.kernels.experts.waves``). Of more
    tokens than the runner decodes, missing experts stream through the slots (``comet.experts.streaming``), for which
    the host waits for the device.

    Args:
        cache: The layer's; over ranks this rank's, of as many slots as those of the others.
        runner: Serves all layers, and adds up what the ranks contribute.
        top_k: K, at most the number of slots, or all experts of the rank have one.

    Attributes:
        prefetch: Brings experts of this layer before its step, if anything does.
    """

    prefetch: Prefetch | None = None

    def __init__(self, cache: ExpertCache, runner: Runner, top_k: int) -> None:
        stream = runner.decode.copy_stream(cache.weights.w1.device)
        cores = None
        if cache.cores is not None:
            cores = PromptCores(cache.cores, cache.layer, cache.tables, cache.first_expert)
        self.stream = StreamedExperts(PinnedSlots(cache.host, cache.weights, cache.first_expert, stream), cores)
        self.cache = cache
        self.runner = runner
        self.top_k = top_k
        least = min(top_k, cache.host.w1.shape[0])
        require(least <= cache.num_slots, f"num_slots={cache.num_slots} must be at least top_k={top_k}")

    def __call__(
        self,
        tokens: Tensor,
        top_k_ids: Tensor,
        top_k_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        biases: Biases | None = None,
    ) -> Tensor:
        """See ``ExpertPath``; the weights of the layer are those of the cache."""
        refuse_biases(biases, "an expert cache")
        if self.cache.cores is not None and self.cache.layer == 0:  # once a pass is enough
            self.cache.cores.raise_if_failed()
        if tokens.shape[0] > self.runner.decode.max_tokens:
            return self.runner.add_up(self.stream(tokens, top_k_ids, top_k_weights)).to(tokens.dtype)
        if self.prefetch is not None:
            self.prefetch.before_step(tokens, top_k_ids.shape[1])
        with torch.autocast(tokens.device.type, enabled=False):  # decode rounds where it means to
            output = self.runner(tokens, top_k_ids.contiguous(), top_k_weights, w1, w2, experts=self.cache.weights)
        if self.prefetch is not None:
            self.prefetch.after_step(tokens, top_k_ids.shape[1])
        return output


def slots_of_budget(
    budget: float, config: MoEConfig, num_layers: int, dtype: torch.dtype, stored: StoredType | None = None
) -> int:
    """Experts of each layer that a budget holds.

    Example: 4 layers of 64 experts of D = 128, F = 64, float32 (98,304 bytes each): 0.25 holds 16, 10_000_000 bytes 25;
    in MXFP4 (13,056 bytes each) 1_000_000 bytes hold 19.

    Args:
        budget: Share of all experts, above 0 and up to 1; or bytes for all layers, above 1.
        config: Of the layers.
        num_layers: That have experts.
        dtype: Of the weights.
        stored: What they are quantised to; ``None``: not.

    Raises:
        ValueError: If a layer's top-k experts do not fit.
    """
    require(budget > 0, f"expert_budget={budget} must be above 0: a share of all experts, or bytes above 1")
    expert = bytes_of_expert(config.hidden_size, config.ffn_size, dtype, stored)
    slots = int(budget * config.num_experts) if budget <= 1 else int(budget // (max(num_layers, 1) * expert))
    needed, share = num_layers * config.top_k * expert, config.top_k / config.num_experts
    require(
        slots >= config.top_k,
        f"expert_budget={budget} holds {slots} experts of each of {num_layers} layers, and must hold top_k="
        f"{config.top_k}: {needed:,} bytes, or a share of {share:.3f}",
    )
    return min(slots, config.num_experts)


def bytes_of_expert(hidden_size: int, ffn_size: int, dtype: torch.dtype, stored: StoredType | None = None) -> int:
    """Of w1 ``(2F, D)`` and w2 ``(D, F)``, with their scales where they are quantised.

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
