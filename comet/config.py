"""Configuration of the MoE layer: frozen dataclasses that validate themselves, so that no bad value travels further.

Letters: T tokens on this rank, K experts per token, D hidden size, F expert feed-forward size,
E experts in all, e experts owned by one EP shard, W ranks in the MoE group = EP x TP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from comet import limits
from comet.capabilities import refuse
from comet.kernels.runtime.activation import SWIGLU, Activation

if TYPE_CHECKING:
    import torch

    MOE_DTYPES: tuple[torch.dtype, ...]

PathName = Literal["fused", "twin", "plain", "reference"]
Score = Literal["softmax", "sigmoid"]
Balance = Literal["aux", "bias", "none"]
SpeculationMode = Literal["off", "conservative", "adaptive"]

MAX_TOP_K = 32
DIM_MULTIPLE = 16
Width = Annotated[int, limits.at_least(DIM_MULTIPLE), limits.multiple_of(DIM_MULTIPLE)]


@functools.cache
def _moe_dtypes() -> tuple[torch.dtype, ...]:
    import torch

    return torch.float32, torch.float16, torch.bfloat16


def __getattr__(name: str) -> object:
    """Return ``MOE_DTYPES``, the types of a layer's tokens, without importing torch before: settings need none."""
    if name == "MOE_DTYPES":
        return _moe_dtypes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise ``ValueError`` with the message, which names field, value and rule, unless ``condition`` holds.

    Checks in every call of a layer pass a function: formatting the text takes longer than the check.
    """
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


# Settings that are gone, and what to use instead.
REMOVED_SETTINGS = {
    "machine": "leave it out: no task predicts times of another machine",
    "transport": "leave it out: rows are always pushed, as by transport=push",
    "num_phases": "leave it out: layer 0 has two phases, own rows and those of others, as by num_phases=2",
    "block_rows": "leave it out: tiles have 128 rows, on a CPU 16",
    "beside": "comm_blocks=0 is beside=true, and comm_blocks=N is beside=false with N comm blocks",
    "link_gb_per_s": "leave it out: nothing is predicted any more, the report has what was measured",
    "memory_gb_per_s": "leave it out: nothing is predicted any more, the report has what was measured",
    "expert_policy": "leave it out: the expert used longest ago loses its slot, as by expert_policy=lru; "
    "expert_prefetch is faster than lfu was",
    "draft_cached_only": "leave it out: drafts choose from all experts, which decodes faster",
}


def check_removed(names: Iterable[str], where: str = "") -> None:
    """Raise ``ValueError`` for a setting that is gone, after the words ``where``; it says what to use instead."""
    for name in names:
        if name in REMOVED_SETTINGS:
            raise ValueError(f"{where}{name} is no longer a setting: {REMOVED_SETTINGS[name]}")


def resolve_kernels(device: torch.device, use_kernels: bool | None) -> bool:
    """Whether kernels do the work, and not plain torch: as asked for, or where there is a GPU."""
    return device.type == "cuda" if use_kernels is None else use_kernels


def check_token_dtype(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless tokens may have this dtype: one of the kernels', or float64 in plain torch."""
    import torch

    known = (*_moe_dtypes(), torch.float64)
    if dtype not in known:  # the message takes longer to make than all else
        raise ValueError(f"tokens of dtype {dtype} must be one of {known}")


def check_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` unless kernels run on the device, and compute right with tokens of this dtype.

    On a CPU they run under Triton's interpreter, which computes with the bits of bfloat16 as if they were integers.
    """
    import torch

    known = _moe_dtypes()
    require(dtype in known, lambda: f"tokens of dtype {dtype} must be one of {known} for the kernels")
    if device.type != "cpu":
        return
    from triton import knobs  # The kernels need Triton, too.

    refuse("on a CPU", kernels=not knobs.runtime.interpret)
    refuse("in kernels on a CPU", dtype=dtype if dtype == torch.bfloat16 else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Shape and routing of one MoE layer.

    Args:
        hidden_size: D, the width of a token.
        ffn_size: F, the width of one expert; gate and up are each F wide.
        num_experts: E, the experts of all ranks.
        top_k: K, experts per token.
        score: How router logits become scores: ``softmax`` over all experts or an independent ``sigmoid``.
        renormalize: Divide the K chosen scores by their sum.
        num_groups: Groups of consecutive experts for group-limited top-k (DeepSeek-V3); 1 switches it off.
        top_groups: Groups a token may choose experts from.
        routed_scale: Factor on the final routing weights.
        balance: ``aux`` adds the load-balancing loss, ``bias`` moves a per-expert selection bias instead, or ``none``.
        aux_loss_coef: Weight of the load-balancing loss (used when ``balance`` is ``aux``).
        z_loss_coef: Weight of the router z-loss.
        bias_update_rate: Step of the selection bias per update (used when ``balance`` is ``bias``).
        shared_ffn_size: Width of the shared expert every token goes through; 0 means there is none.
        capacity_factor: Each expert takes at most ``ceil(capacity_factor * W * max_tokens * K / E)`` routed rows of a
            call, of however many tokens, and drops the rest (counted in training); ``None`` never drops.
        activation: Of the routed and the shared experts: its name, or its fields by name.
        expert_bias: Whether the routed experts add a bias to both projections.
        max_imbalance: Reserve memory for at most this many times the balanced number of routed rows on a rank; a step
            that needs more ends with ``CapacityError``, nothing is dropped. ``None`` reserves for any routing.
    """

    hidden_size: Width
    ffn_size: Width
    num_experts: limits.Count
    top_k: Annotated[int, limits.at_least(1), limits.at_most("num_experts"), limits.at_most(MAX_TOP_K)]
    score: Score = "softmax"
    renormalize: bool = True
    num_groups: Annotated[int, limits.divisor_of("num_experts")] = 1
    top_groups: Annotated[int, limits.at_least(1), limits.at_most("num_groups")] = 1
    routed_scale: limits.Positive = 1.0
    balance: Balance = "aux"
    aux_loss_coef: limits.NonNegative = 1e-2
    z_loss_coef: limits.NonNegative = 1e-3
    bias_update_rate: limits.NonNegative = 1e-3
    shared_ffn_size: Annotated[int, limits.at_least(0), limits.multiple_of(DIM_MULTIPLE)] = 0
    capacity_factor: limits.Positive | None = None
    max_imbalance: Annotated[float, limits.at_least(1)] | None = None
    activation: Activation = SWIGLU
    expert_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation", _activation(self.activation))
        limits.check(self)
        reachable = self.num_experts // self.num_groups * self.top_groups
        limits.check_values(limits.at_most(reachable, f"experts of top_groups={self.top_groups}"), top_k=self.top_k)

    @property
    def caution(self) -> str:
        """The reason why the router learns nothing from the task, in words; empty if it does."""
        is_constant = self.top_k == 1 < self.num_experts and self.renormalize
        return is_constant * (
            f"top_k=1 with renormalize=true makes every routing weight routed_scale={self.routed_scale:g}, whatever "
            f"the {self.score} scores: the task gives the router no gradient, and it learns from its losses only; set "
            "renormalize=false"
        )


def _activation(given: Any) -> Activation:
    """An activation, its name, or its fields as a stored configuration holds them."""
    if isinstance(given, str):
        return Activation(given)  # type: ignore[arg-type]  # which checks the name
    if isinstance(given, Mapping):
        return Activation(**given)
    require(isinstance(given, Activation), f"activation={given!r} must be an Activation, its name or its fields")
    return given


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the MoE group of W = ep x tp ranks shares the experts.

    Args:
        ep: Expert-parallel shards; must divide ``num_experts``.
        tp: Ranks each expert's F is split over; must divide ``ffn_size``. Where F / TP is no multiple of 16, each call
            pads the weights (``comet.layer.weights.pad_width``).
        node_size: Consecutive ranks that reach each other's memory, a multiple or a divisor of ep x tp; ``None``: the
            ranks of a host. The layers of a group over several nodes run inside each node, where tokens of the other
            nodes are guests (``comet.layer.nodes``); where that cannot be, they run ``plain``.
    """

    ep: limits.Count = 1
    tp: limits.Count = 1
    node_size: limits.Count | None = None

    def __post_init__(self) -> None:
        limits.check(self)
        if self.node_size is not None:
            require(
                self.node_size % self.world_size == 0 or self.world_size % self.node_size == 0,
                f"node_size={self.node_size} must be a multiple or a divisor of ep x tp = {self.world_size}, so that "
                "all groups lie in one node or all in several",
            )

    @property
    def world_size(self) -> int:
        return self.ep * self.tp

    @property
    def declares_nodes(self) -> bool:
        """Whether ``node_size`` says that a group spans several nodes."""
        return self.node_size is not None and self.node_size < self.world_size

    @property
    def ranks_with_memory(self) -> int:
        """Ranks that share a pool, which are the group or its part in a declared node; 0 where ``tp`` spans nodes."""
        if self.node_size is None or not self.declares_nodes:
            return self.world_size
        return 0 if self.node_size % self.tp else self.node_size

    def check(self, moe: MoEConfig) -> None:
        """Raise ``ValueError`` unless the experts and their width divide over the ranks."""
        require(moe.num_experts % self.ep == 0, f"num_experts={moe.num_experts} must be divisible by ep={self.ep}")
        require(moe.ffn_size % self.tp == 0, f"ffn_size={moe.ffn_size} must be divisible by tp={self.tp}")

    def check_world(self, world_size: int) -> None:
        """Raise ``ValueError`` unless so many ranks divide into MoE groups."""
        group = f"ep x tp = {self.ep} x {self.tp} = {self.world_size}"
        require(world_size % self.world_size == 0, f"world_size={world_size} must be divisible by {group}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapConfig(limits.Limited):
    """How a fused kernel shares its thread blocks and orders its work.

    Args:
        comm_blocks: 0: communication is colocated with compute, on every SM: a warp or more of each block of a kernel
            in CUDA C++; in Triton 16 blocks. N: N blocks of layer 0 push rows and then compute; in layer 1 N blocks
            only combine, and the others do when they have computed. Over NVLink no N is faster by more than 0.4 %
            (``benchmarks/results/layer.md``): it is for slower links.
        num_panels: Layer 1: column panels of the hidden dimension.
    """

    comm_blocks: limits.Natural = 0
    num_panels: limits.Count = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig(limits.Limited):
    """How tokens are drafted with few experts and verified with all K (``comet.generation.speculation``).

    Args:
        draft_experts: r, experts of a token in a draft, below the model's top_k: ``[2]`` for all MoE layers, or one
            number for each; none: half of top_k.
        draft_tokens: Longest draft.
        tau: A draft ends after a token whose probability is below it; 0: never.
        adaptive_tolerance: T: ``adaptive`` accepts a draft of probability q > tau where its true probability p is above
            (1 - T) * q.
    """

    speculate: SpeculationMode = "conservative"
    draft_experts: tuple[limits.Count, ...] = ()
    draft_tokens: limits.Count = 4
    tau: limits.Share = 0.5
    adaptive_tolerance: limits.Share = 0.3

    def experts_per_layer(self, top_k: int, num_layers: int) -> tuple[int, ...]:
        """The r of every MoE layer, of a model with K = ``top_k``.

        Example: K = 6, 3 layers: ``()`` gives ``(3, 3, 3)``, ``(2,)`` gives ``(2, 2, 2)``, ``(1, 2, 5)`` stays.
        """
        require(top_k >= 2, f"speculate={self.speculate!r} must be 'off': top_k={top_k} leaves no fewer experts")
        require(num_layers >= 1, f"speculate={self.speculate!r} must be 'off': the model has no MoE layer")
        chosen = self.draft_experts or (top_k // 2,)
        require(
            len(chosen) in (1, num_layers),
            f"draft_experts={list(chosen)} must be one number, or one for each of the {num_layers} MoE layers",
        )
        require(max(chosen) < top_k, f"draft_experts={list(chosen)} must be below top_k={top_k} of the model")
        return chosen if len(chosen) == num_layers else chosen * num_layers
