"""Cases and the oracle for whole-layer tests: every rank's inputs follow from one seed, so any rank knows them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from activation_cases import draw_biases
from torch import Tensor

from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layer.sharding import local
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.reference.layer import reference_experts
from comet.utils.choices import CommBackend

MASKED, MASKED_SHARE, ZIPF_EXPONENT = -1, 0.4, 1.5
FEW_ELEMENTS = 64
# So many times the roundings for gradients of routing weights, where large terms cancel: four of 8,000 random cases
# were 27 and 19 roundings off in float32, and 2.5 and 1.6 in float16, and plain torch by luck far less.
CANCELLING = 8
# With the weights below one gate in thirty is past the limit, and few are a rounding away from it.
GPT_OSS = Activation("clamped_swiglu", limit=3.0)
EDGE_ROWS = (0, 1, 63, 64, 65, 127, 128, 129, 300)  # numbers of rows around the heights of pieces and tiles


@dataclass(frozen=True)
class LayerCase:
    """One layer call on all ranks."""

    name: str
    ep: int
    tp: int
    num_tokens: tuple[int, ...]  # one entry per rank
    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 32
    ffn_size: int = 32
    routing: str = "uniform"
    dtype: torch.dtype = torch.float32
    num_panels: int = 2
    comm_blocks: int = 0
    seed: int = 0
    calls: int = 1
    strided: bool = False  # whether inputs and weights of the layer are not contiguous
    relabel: int = 0  # seed of a random relabelling of the experts, by which they move to other ranks; 0: none
    activation: Activation = SWIGLU
    expert_bias: bool = False  # whether experts have biases
    fp8: bool = False  # whether experts' weights are in block FP8, which has no backward pass
    backward: bool = True
    capacity_factor: float | None = None
    max_tokens: int = 128  # the pool's, unless a rank has more tokens
    weight_seed: int | None = None  # seed of the experts' weights; ``None``: ``seed``
    delay_s: float = 0.0  # the longest time by which a pass of a rank comes late
    node_size: int | None = None  # consecutive ranks that are a node
    backend: CommBackend = "auto"  # of the group's memory

    @property
    def world_size(self) -> int:
        return self.ep * self.tp

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            hidden_size=self.hidden_size, ffn_size=self.ffn_size, num_experts=self.num_experts, top_k=self.top_k,
            activation=self.activation, expert_bias=self.expert_bias, capacity_factor=self.capacity_factor,
        )  # fmt: skip

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(ep=self.ep, tp=self.tp, node_size=self.node_size)

    @property
    def overlap(self) -> OverlapConfig:
        return OverlapConfig(comm_blocks=self.comm_blocks, num_panels=self.num_panels)

    @property
    def expert_capacity(self) -> int | None:
        """Routed rows an expert keeps; ``None``: all."""
        if self.capacity_factor is None:
            return None
        routed = self.world_size * self.max_tokens * self.top_k
        return math.ceil(Decimal(str(self.capacity_factor)) * routed / self.num_experts)

    @property
    def placed_experts(self) -> Tensor:
        """``(E,)`` the expert, as inputs and oracle number them, at each id of the layer."""
        if not self.relabel:
            return torch.arange(self.num_experts)
        return torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(self.relabel))

    def relabelled(self, ids: Tensor) -> Tensor:
        places = self.placed_experts.argsort().to(ids.device, ids.dtype)
        return torch.where(ids < 0, ids, places[ids.clamp(min=0).long()])


@dataclass(frozen=True)
class RankInputs:
    """One rank's inputs of the layer, and the gradient of its output."""

    tokens: Tensor
    top_k_ids: Tensor
    top_k_weights: Tensor
    grad_output: Tensor

    @property
    def routed(self) -> RoutedTokens:
        """The arguments of an experts' path without the weights."""
        return RoutedTokens(self.tokens, self.top_k_ids, self.top_k_weights)

    def to(self, device: str | torch.device) -> RankInputs:
        return RankInputs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def rank_inputs(case: LayerCase, rank: int, call: int = 0, device: str | torch.device = "cpu") -> RankInputs:
    """Drawn on a device, each of which draws other numbers."""
    drawn = torch.Generator(device).manual_seed(case.seed * 7919 + call * 101 + rank)
    tokens, like = case.num_tokens[rank], dict(generator=drawn, device=device)
    ids = draw_ids(case, tokens, like) if case.routing != "edges" else edge_ids(case, call)[rank].to(device)
    x, grad = (torch.randn(tokens, case.hidden_size, **like).to(case.dtype) for _ in range(2))
    return RankInputs(x, ids, torch.rand(tokens, case.top_k, **like), grad)


def draw_ids(case: LayerCase, num_tokens: int, like: dict[str, Any]) -> Tensor:
    """``(T, K)`` int32 of the case's routing; the popular experts of a case are the same for all ranks."""
    keys, popular = torch.rand(num_tokens, case.num_experts, **like), (case.seed - 1) % case.num_experts
    if case.routing == "zipf":  # the smallest are a draw without repetition in proportion to 1 / (1 + order) ** 1.5
        order = torch.randperm(case.num_experts, generator=torch.Generator().manual_seed(case.seed)).to(keys.device)
        keys = -keys.clamp(min=1e-6).log() * (1 + order) ** ZIPF_EXPONENT
    ids = keys.argsort(dim=1)[:, : case.top_k].to(torch.int32)
    if case.routing in ("one", "none"):
        ids.fill_(MASKED)
    if case.routing in ("one", "hot"):  # some tokens name a hot expert twice
        ids[:, 0] = popular
    elif case.routing == "masked":
        ids[torch.rand(ids.shape, **like) < MASKED_SHARE] = MASKED
    elif case.routing == "first_half":
        ids = ids % max(1, case.num_experts // 2)
    if case.num_experts // case.ep < case.top_k:
        # Rows are reserved for K distinct experts: a rank with fewer has no room for a token that names one twice.
        same = ids[:, :, None] == ids[:, None, :]
        ids = ids.masked_fill(same.tril(-1).any(dim=2), MASKED)
    return ids.contiguous()


def edge_ids(case: LayerCase, call: int = 0) -> list[Tensor]:
    """``(T, K)`` of every rank: expert e has exactly ``EDGE_ROWS[e % 9]`` rows of them all; a token may name it twice.

    Example: 9 experts have 877 rows, so 300 + 150 tokens with K = 2 leave 23 of their slots masked.
    """
    rows = [EDGE_ROWS[expert % len(EDGE_ROWS)] for expert in range(case.num_experts)]
    slots = case.top_k * sum(case.num_tokens)
    assert slots >= sum(rows), f"{slots} slots are too few for {sum(rows)} rows"
    ids = torch.full((slots,), MASKED, dtype=torch.int32)
    ids[: sum(rows)] = torch.arange(case.num_experts, dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    generator = torch.Generator().manual_seed(case.seed * 7919 + call * 101)
    shuffled = ids[torch.randperm(slots, generator=generator)]
    assert shuffled[shuffled >= 0].bincount(minlength=len(rows)).tolist() == rows
    return list(shuffled.view(-1, case.top_k).split(case.num_tokens))


def full_weights(case: LayerCase) -> tuple[Tensor, Tensor]:
    """w1 ``(E, 2, F, D)`` and w2 ``(E, D, F)`` of all experts."""
    generator = torch.Generator().manual_seed(case.seed + 13 if case.weight_seed is None else case.weight_seed)
    w1 = torch.randn(case.num_experts, 2, case.ffn_size, case.hidden_size, generator=generator) / 4
    w2 = torch.randn(case.num_experts, case.hidden_size, case.ffn_size, generator=generator) / 4
    return w1.to(case.dtype), w2.to(case.dtype)


def full_biases(case: LayerCase) -> tuple[Tensor, ...]:
    """b1 ``(E, 2, F)`` and b2 ``(E, D)`` of all experts, if they have them."""
    if not case.expert_bias:
        return ()
    b1, b2 = draw_biases(case.num_experts, case.ffn_size, case.hidden_size, case.dtype, case.seed)
    return b1.unflatten(1, (2, -1)), b2


def shard(case: LayerCase, rank: int, w1: Tensor, w2: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    """The part of full weights that ``rank`` owns: ``(e, 2, F/TP, D)``, ``(e, D, F/TP)``, and of biases."""
    layout = ExpertLayout.create(case.config, case.parallel, rank)
    experts = case.placed_experts[layout.first_expert : layout.first_expert + layout.experts_local]
    width = case.ffn_size // case.tp
    columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
    weights = w1[experts][:, :, columns].contiguous(), w2[experts][:, :, columns].contiguous()
    return (*weights, biases[0][experts][:, :, columns], biases[1][experts]) if biases else weights


def as_strided(tensor: Tensor) -> Tensor:
    """The same numbers as every other column of a wider matrix, whose other columns are NaN or no id at all."""
    poison = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    wide = tensor.new_full((*tensor.shape, 2), poison)
    wide[..., 0] = tensor
    return wide[..., 0]


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Let torch fill uninitialised memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Oracle(NamedTuple):
    """Output and, with a backward pass, gradients of one rank."""

    output: Tensor
    grad_tokens: Tensor | None = None
    grad_top_k: Tensor | None = None
    grad_w1: Tensor | None = None
    grad_w2: Tensor | None = None
    grad_b1: Tensor | None = None
    grad_b2: Tensor | None = None


def oracle(case: LayerCase, rank: int, dtype: torch.dtype, call: int = 0) -> Oracle:
    return oracles(case, dtype, call)[rank]


def oracles(case: LayerCase, dtype: torch.dtype, call: int = 0) -> list[Oracle]:
    """Return the oracles of all ranks for the inputs and weights of the case."""
    inputs = [rank_inputs(case, source, call) for source in range(case.world_size)]
    return oracles_of(case, inputs, (*full_weights(case), *full_biases(case)), dtype)


def oracles_of(
    case: LayerCase, inputs: Sequence[RankInputs], weights: Sequence[Tensor], dtype: torch.dtype
) -> list[Oracle]:
    """The layer in one process, in ``dtype``: all ranks' tokens through all experts, of which a token needs no other.

    ``weights``: those of all experts, and biases if they have them.
    """
    leaves = [each.detach().to(dtype).requires_grad_(case.backward) for each in weights]
    tokens, ids, routing, grad = (
        torch.cat(parts) for parts in zip(*(vars(each).values() for each in inputs), strict=True)
    )
    x = tokens.to(dtype).requires_grad_(case.backward)
    of_slots = routing.to(torch.promote_types(dtype, torch.float32)).requires_grad_(case.backward)
    w1, w2, *biases = leaves
    y = reference_experts(
        x, ids, of_slots, w1.flatten(1, 2), w2, ep=case.ep, tp=case.tp, activation=case.activation,
        biases=Biases(biases[0].flatten(1), biases[1]) if biases else None, expert_capacity=case.expert_capacity,
    )  # fmt: skip
    found = [y.detach()]
    if case.backward:
        y.backward(grad.to(dtype))
        found += [gradient(leaf) for leaf in (x, of_slots)]
        grads = [gradient(leaf) for leaf in leaves]
    of_ranks = zip(*(each.split([len(mine.tokens) for mine in inputs]) for each in found), strict=True)
    return [Oracle(*mine, *(shard(case, rank, *grads) if case.backward else ())) for rank, mine in enumerate(of_ranks)]


def gradient(leaf: Tensor) -> Tensor:
    """Return this rank's part of a leaf's gradient."""
    assert leaf.grad is not None, f"no gradient reached a leaf of shape {tuple(leaf.shape)}"
    return local(leaf.grad)


def complaints(check: Callable[..., None], *given: Any) -> list[str]:
    """Return the message of a failing check in a list, or an empty list."""
    try:
        check(*given)
    except AssertionError as error:
        return [str(error)]
    return []


def wrong_numbers(
    case: LayerCase, rank: int, found: dict[str, Tensor], exact: list[Oracle], same: list[Oracle], where: str
) -> list[str]:
    """Compare a rank's tensors, named as in ``Oracle``, with the oracles in float64 and in the case's type.

    Plain torch's deviation is taken over the elements of all ranks: over the few elements of one rank it would be luck.
    """
    wrong = []
    for name, tensor in found.items():
        parts = [getattr(of_rank, name) for of_rank in exact]
        parts[rank] = tensor.to(parts[rank].device)
        # Over nodes each node's sum is rounded once more, before it travels home.
        roundings = 1 if case.node_size is None else 2
        wrong += complaints(assert_as_oracles, name, parts, exact, same, case.dtype, where, roundings)
    return wrong


def assert_as_oracles(
    name: str,
    parts: Sequence[Tensor],
    exact: list[Oracle],
    same: list[Oracle],
    dtype: torch.dtype,
    where: str,
    roundings: int = 1,
) -> None:
    """All ranks' tensors of a name are right."""
    oracles = ([getattr(of_rank, name) for of_rank in of] for of in (exact, same))
    vectors = (torch.cat([part.flatten().double() for part in of]) for of in (parts, *oracles))
    assert_as_close(*vectors, dtype, f"{where}: {name}", CANCELLING if name == "grad_top_k" else roundings)


def assert_as_close(
    actual: Tensor, exact: Tensor, same_dtype: Tensor, dtype: torch.dtype, what: str, roundings: float = 1
) -> None:
    """The error to fp64 is at most twice that of plain torch in the same dtype, plus roundings of the largest value.

    In float32 four times as many, and in every type more for a handful of elements, over which plain torch's own error
    is luck: 3000 random cases had one of 8 elements where it was a fifth of ours. ``dtype`` is the one the layer
    computes in: gradients of routing weights are float32 numbers made of products in that type.
    """
    error, allowed = (value.double() - exact.double() for value in (actual.to(exact.device), same_dtype))
    if exact.numel() == 0:
        assert actual.shape == exact.shape, what
        return
    few = max(1.0, math.sqrt(FEW_ELEMENTS / exact.numel()))
    rounding = (
        roundings * few * (4 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps * float(exact.abs().max())
    )
    worst = int(error.abs().argmax())
    limit = 2 * float(allowed.abs().max()) + rounding
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    assert float(error.abs().max()) <= limit, (
        f"{what}: error {float(error.abs().max()):.3e} > {limit:.3e} "
        f"at element {worst} of shape {tuple(actual.shape)}: "
        f"{float(actual.flatten()[worst])} instead of {float(exact.flatten()[worst])}"
    )
    rms, allowed_rms = (float(value.square().mean().sqrt()) for value in (error, allowed))
    assert rms <= 2 * allowed_rms + rounding, f"{what}: RMS error {rms:.3e}, plain torch {allowed_rms:.3e}"
