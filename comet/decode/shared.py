"""A shared expert among the experts of a decode step: pieces of it in slots of their own, which every token names.

Experts are sums over their neurons: a shared expert n times as wide as a routed one is n always-on experts,
which the two launches of warp decode then read beside the routed ones. Over ranks the pieces are F/TP wide, the ranks
hold them in turn, and the all-reduce is the one that a step has anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from comet.config import MAX_TOP_K, require
from comet.decode.ranks import rank_slots
from comet.decode.runners import ReplicatedRunner, Runner
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeWeights
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layer.sharding import local, version_of
from comet.layer.shared_expert import SharedExpert, joins_step
from comet.layout import Biases, ExpertLayout, RoutedTokens
from comet.utils.graphs import is_capturing
from comet.utils.hooks import are_unaltered
from comet.utils.uncompiled import uncompiled


class SharedMatrices(NamedTuple):
    """A whole shared expert: gate and up ``(F_shared, D)``, down ``(D, F_shared)``."""

    gate: Tensor
    up: Tensor
    down: Tensor


def shared_columns(layout: ExpertLayout, ffn_size: int, shared_ffn_size: int) -> int:
    """How many more experts every token names for a shared one; 0 where there is none or it cannot join.

    It can where its width is a multiple of F/TP, the width of a routed expert on one rank, and K has room.

    Example: EP = 2, TP = 2, F = 32, F_shared = 64: four pieces of 16, one on each rank: 1. On one rank two of 32: 2.
    """
    width = ffn_size // layout.tp
    columns = -(-(shared_ffn_size // width) // layout.world_size)
    return columns if shared_ffn_size % width == 0 and layout.top_k + columns <= MAX_TOP_K else 0


def held_pieces(layout: ExpertLayout, width: int, shared_ffn_size: int) -> range:
    """Numbers of the pieces, each ``width`` wide, of a shared expert that this rank holds.

    Example: F_shared = 48 in pieces of 16 over two ranks: rank 0 holds 0 and 2, rank 1 holds 1.
    """
    return range(layout.rank, shared_ffn_size // width, layout.world_size)


class SharedSlots:
    """Joins a layer's shared expert to the routed experts that this rank holds.

    Both lie in one tensor, made at the first step (which takes the memory of a layer for a moment) and again where
    somebody moved the layer's weights; these become views of it. The pieces are copies, made anew where the shared
    expert was written to: in place, as under ``torch.no_grad``, or by giving it other tensors. torch counts no writes
    through ``.data``.

    Steps read matrices and run no module: one with hooks and the like (``are_unaltered``) runs itself instead.

    Args:
        activation: Of the shared and the routed experts, which have no biases.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        columns: int,
        module: nn.Module,
        matrices: Callable[[nn.Module], SharedMatrices],
        activation: Activation = SWIGLU,
    ) -> None:
        self.layout = layout
        self.columns = columns
        self._ids = torch.empty(0, dtype=torch.int32)
        self._ones = torch.empty(0, dtype=torch.float32)
        self.activation = activation
        self.module = module
        self.joined = False  # what ``joins`` answered last
        self._children = dict(module._modules)
        self._watched = (module, *module.children())
        self._matrices = matrices
        self._joined: DecodeWeights | None = None
        self._state: list[tuple[int, int]] = []
        self._counted: list[Tensor] = []
        self._versions: list[int] = []

    def watch(self, stand_in: nn.Module) -> None:
        """Let ``joins`` look at what stands in the place of the module, too."""
        self._watched += (stand_in,)

    @uncompiled  # which would not look at hooks again
    def joins(self) -> bool:
        """Whether a step includes the shared expert; asked once a pass, before its module would run.

        Whoever comes later in the pass reads ``joined``: a hook may have removed itself.
        """
        self.joined = self.module._modules == self._children and are_unaltered(self._watched)
        return self.joined

    def table(self, held: int, device: torch.device) -> Tensor:
        """Slots ``(E + columns,)`` int32 where ``held`` pieces stand behind this rank's experts; before ``routing``."""
        layout = self.layout
        slots = torch.full((layout.num_experts + self.columns,), -1, dtype=torch.int32)
        slots[: layout.num_experts] = rank_slots(layout, "cpu")
        slots[layout.num_experts :][:held] = torch.arange(layout.experts_local, layout.experts_local + held)
        behind = torch.arange(layout.num_experts, len(slots), dtype=torch.int32)
        self._ids = behind.expand(MAX_DECODE_TOKENS, -1).contiguous().to(device)
        self._ones = torch.ones(self._ids.shape, dtype=torch.float32, device=device)
        return slots.to(device)

    def routing(self, top_k_ids: Tensor, top_k_weights: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids ``(T, K)`` int32 and weights ``(T, K)`` with the pieces behind, whose weight is ``gate (T, 1)``, or 1."""
        num_tokens = top_k_ids.shape[0]
        always = self._ones[:num_tokens] if gate is None else gate.expand(num_tokens, self.columns)
        ids, weights = (top_k_ids, self._ids[:num_tokens]), (top_k_weights, always.to(top_k_weights.dtype))
        return torch.cat(ids, dim=1), torch.cat(weights, dim=1)

    def weights(self, w1: Tensor, w2: Tensor) -> DecodeWeights:
        """What a step reads: the layer's ``(e, 2F/TP, D)`` or ``(e, 2, F/TP, D)``, ``(e, D, F/TP)``, then pieces."""
        parts, joined = self._matrices(self.module), self._joined
        if joined is None or joined.w1.data_ptr() != w1.data_ptr() or joined.w2.data_ptr() != w2.data_ptr():
            require(
                not is_capturing(w1.device),
                "a decode step must run once before a CUDA graph of it is captured: it moves the layer's weights",
            )
            self._joined = joined = self._join(w1, w2)
        elif state_of(parts) != self._state:
            self._fill(joined)
        else:
            return joined
        self._note(parts)
        return joined

    def refresh(self) -> None:
        """Copy the pieces anew if the shared expert was written to in place: before a captured step is replayed."""
        if self._joined is not None and [part._version for part in self._counted] != self._versions:
            self._fill(self._joined)
            self._note(self._matrices(self.module))

    def _note(self, parts: SharedMatrices) -> None:
        self._state = state_of(parts)
        self._counted = [part if part._base is None else part._base for part in parts if not part.is_inference()]
        self._versions = [part._version for part in self._counted]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _join(self, w1: Tensor, w2: Tensor) -> DecodeWeights:
        experts, hidden_size, width = w2.shape
        held = len(self._pieces(width))
        all_w1 = with_room(w1, (experts + held, 2 * width, hidden_size))
        all_w2 = with_room(w2, (experts + held, hidden_size, width))
        joined = DecodeWeights(w1=all_w1, w2=all_w2, slots=self.table(held, w1.device), activation=self.activation)
        self._fill(joined)
        return joined

    def _pieces(self, width: int) -> range:
        return held_pieces(self.layout, width, self._matrices(self.module).gate.shape[0])

    @torch.no_grad()
    def _fill(self, joined: DecodeWeights) -> None:
        gate, up, down = self._matrices(self.module)
        width = joined.ffn_size
        pieces = self._pieces(width)
        first = joined.w1.shape[0] - len(pieces)
        for slot, piece in enumerate(pieces, start=first):
            columns = slice(piece * width, (piece + 1) * width)
            joined.w1[slot, :width] = gate[columns]
            joined.w1[slot, width:] = up[columns]
            joined.w2[slot] = down[:, columns]


def state_of(parts: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What changes where somebody writes to tensors, but for ``.data``, or puts others in their place.

    torch counts what is written to a ``DTensor`` there, not in what this rank holds of it.
    """
    return [(version_of(part), local(part).data_ptr()) for part in parts]


def before_replay(runners: Iterable[Runner], shared: Iterable[SharedSlots | None]) -> None:
    """What the host does before it replays a decode step: each runner's, and current pieces of each shared expert."""
    for runner in runners:
        runner.before_replay()
    for slots in shared:
        if slots is not None:
            slots.refresh()


def with_room(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Move a layer's weights to the front of a tensor of this shape, of which they become a view."""
    if weight.shape[0] == shape[0]:  # no piece is held here
        return weight.data.view(shape)
    room = weight.new_empty(shape)
    front = room[: weight.shape[0]].view(weight.shape)
    front.copy_(weight)
    weight.data = front
    return room


def matrices_of(module: nn.Module) -> SharedMatrices:
    """Those of a ``SharedExpert``."""
    assert isinstance(module, SharedExpert)
    gate, up = module.w1.chunk(2)
    return SharedMatrices(gate, up, module.w2)


class FrozenExperts:
    """Routed experts of a layer whose tokens all ranks hold, in decode steps with its shared expert; for inference.

    A ``comet.layer.paths.ExpertPath``.

    Args:
        parameters: w1 and w2 of the layer, in the dtype of the products; only read with ``shared``.
    """

    def __init__(
        self, runner: ReplicatedRunner, parameters: Sequence[Tensor] = (), shared: SharedSlots | None = None
    ) -> None:
        self.runner, self.parameters, self.shared = runner, parameters, shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Those of a copied layer."""
        return type(self)(self.runner, *copy.deepcopy((self.parameters, self.shared), memo))

    def includes_shared(self, tokens: Tensor) -> bool:
        """Whether the next call, with tokens ``(T, D)``, includes the layer's shared expert: ``MoE`` leaves it out."""
        return self.shared is not None and joins_step(tokens, self.runner.decode.max_tokens) and self.shared.joins()

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        experts, tokens = None, routed.tokens
        if self.shared is not None and joins_step(tokens, self.runner.decode.max_tokens) and self.shared.joined:
            own1, own2 = map(local, self.parameters)  # moved in place, as parameters are
            experts = self.shared.weights(own1, own2)
            routed = RoutedTokens(tokens, *self.shared.routing(*routed[1:]))
        with torch.autocast(tokens.device.type, enabled=False):  # decode rounds where it means to
            return self.runner(routed, w1, w2, biases, experts=experts)
