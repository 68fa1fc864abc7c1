"""A shared expert among the experts of a decode step: pieces of it in slots of their own, which every token names.

Experts are sums over their neurons: a shared expert n times as wide as a routed one is n always-on experts,
which the two launches of warp decode then read with the routed ones. Over ranks the pieces are F/TP wide, the ranks
hold them in turn, and the all-reduce is the one that a step has anyway.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from comet.config import MAX_TOP_K, require
from comet.decode.ranks import rank_slots
from comet.decode.runners import ReplicatedRunner, Runner
from comet.decode.weights import MAX_DECODE_TOKENS, DecodeWeights
from comet.kernels.runtime.activation import SWIGLU, Activation
from comet.layer.expert_path import ExpertPath
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
    """Numbers of a shared expert's pieces that this rank holds: of 3 pieces over two ranks, rank 0 holds 0 and 2."""
    return range(layout.rank, shared_ffn_size // width, layout.world_size)


class SequenceClock:
    """The prompts of a model and the steps that follow them, by which copies of weights know their age.

    torch counts neither writes through ``.data``, by which PEFT merges adapters, nor those to tensors of inference
    mode. So a copy is renewed in each pass, unless the pass was announced as a step behind a prompt that renewed it.
    """

    def __init__(self) -> None:
        self.prompt, self.step = object(), object()
        self._next = weakref.WeakKeyDictionary[Any, int]()  # transformers' caches, with the places of their next tokens
        self._owned = weakref.WeakSet[Any]()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copied model starts with a prompt

    def start(self) -> None:
        """Note that the next passes belong to another sequence."""
        self.prompt = object()

    def proceed(self) -> None:
        """Announce one pass that only appends to sequences whose prompts were noted."""
        self.step = object()

    def adopt(self, cache: Any) -> None:
        """Let all passes with this cache be steps, also of several tokens: its owner calls ``start`` at prompts."""
        self._owned.add(cache)

    @uncompiled
    def observe(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at a pass of a decoder of transformers: one token behind the last of a seen cache is a step.

        A cache that was emptied or shortened starts with a prompt, also where that is one token. On a GPU a static
        cache of inference mode does not tell: there such a prompt looks like a step.
        """
        cache, ids = given.get("past_key_values"), given.get("input_ids")
        if cache is None or cache in self._owned:
            (self.start if cache is None else self.proceed)()
            return
        num_tokens = 0 if ids is None else ids.shape[1]
        place, behind = place_in(cache, num_tokens)
        (self.proceed if num_tokens == 1 and self._next.get(cache) == place else self.start)()
        self._next[cache] = behind


def place_in(cache: Any, num_tokens: int) -> tuple[int, int]:
    """Return at which place a cache of transformers is, and will be behind the next tokens; waits for no GPU.

    There a static cache keeps its length, which is written to once a pass: the place is the number of these writes.
    """
    length = cache.get_seq_length()
    if not isinstance(length, Tensor) or length.is_cpu:
        return int(length), int(length) + num_tokens
    return (0, 0) if length.is_inference() else (length._version, length._version + 1)


class SharedSlots:
    """Joins a layer's shared expert to the routed experts that this rank holds.

    Both lie in one tensor, made at the first step (which takes the memory of a layer for a moment) and again when the
    layer's weights were moved; these become views of it. The pieces are copies. A write to the shared expert reaches
    them at the next prompt, and at the next step if torch counts the write or the tensor is another one.

    Steps read matrices and run no module. A module that was replaced, or has hooks and the like (``are_unaltered``),
    runs itself instead.

    Args:
        activation: Of the shared and the routed experts, which have no biases.
        clock: Announces the steps; ``None``: each call renews the pieces.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        columns: int,
        module: nn.Module,
        matrices: Callable[[nn.Module], SharedMatrices],
        activation: Activation = SWIGLU,
        clock: SequenceClock | None = None,
    ) -> None:
        self.layout = layout
        self.columns = columns
        self._ids = torch.empty(0, dtype=torch.int32)
        self._ones = torch.empty(0, dtype=torch.float32)
        self.activation = activation
        self.module = module
        self.clock = clock or SequenceClock()
        self._prompt = self._step = object()  # times of the clock: of the copies, and of the last call
        self._joins = False  # the last answer of ``joins``, until it is taken
        self._children = dict(module._modules)
        self._watched: tuple[nn.Module, ...] = (module, *module.children())
        self.neighbours: dict[str, nn.Module | None] = {}  # present submodules of the layer
        self._expected: dict[str, nn.Module] = {}
        self._matrices = matrices
        self._joined: DecodeWeights | None = None
        self._state: list[tuple[int, int]] = []
        self._counted: list[Tensor] = []
        self._versions: list[int] = []

    def expect(self, layer: nn.Module, **modules: nn.Module) -> None:
        """Let ``joins`` look whether these are still the layer's submodules, of these names, and unaltered."""
        self.neighbours, self._expected = layer._modules, modules
        self._watched += tuple(modules.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the slots of a copied layer. No step includes a module that was copied without its layer."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        alone = self._expected and id(self.neighbours) not in memo
        lost = dict(neighbours={}, _joins=False, _joined=None)
        vars(copied).update(vars(self) | lost if alone else copy.deepcopy(vars(self), memo))
        return copied

    @uncompiled  # a compiled call would not look at hooks again
    def joins(self) -> bool:
        """Whether a step includes the shared expert; asked once a pass, before its module would run.

        Code later in the pass takes this answer (``taken``): a hook may have removed itself.
        """
        self._joins = False
        for name, module in self._expected.items():
            if self.neighbours.get(name) is not module:
                return False
        self._joins = self.module._modules == self._children and are_unaltered(self._watched)
        return self._joins

    def taken(self) -> bool:
        joins, self._joins = self._joins, False
        return joins

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
        """Return the weights of a step: ``(e, 2F/TP, D)`` or ``(e, 2, F/TP, D)``, ``(e, D, F/TP)``, then the pieces."""
        parts, joined, clock = self._matrices(self.module), self._joined, self.clock
        announced, self._step = clock.step is not self._step, clock.step
        if joined is None or joined.w1.data_ptr() != w1.data_ptr() or joined.w2.data_ptr() != w2.data_ptr():
            rule = "must run once before a CUDA graph of it is captured: it moves the layer's weights"
            require(not is_capturing(w1.device), f"a decode step {rule}")
            self._joined = joined = self._join(w1, w2)
        elif announced and clock.prompt is self._prompt and state_of(parts) == self._state:
            return joined
        self._renew(joined, parts)
        return joined

    def refresh(self) -> None:
        """Renew the pieces before a captured step is replayed, unless nothing can have changed since the prompt."""
        counted = [part._version for part in self._counted]
        if self._joined is not None and (self.clock.prompt is not self._prompt or counted != self._versions):
            self._renew(self._joined, self._matrices(self.module))

    def _renew(self, joined: DecodeWeights, parts: SharedMatrices) -> None:
        self._fill(joined)
        self._prompt, self._state = self.clock.prompt, state_of(parts)
        self._counted = [part if part._base is None else part._base for part in parts if not part.is_inference()]
        self._versions = [part._version for part in self._counted]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _join(self, w1: Tensor, w2: Tensor) -> DecodeWeights:
        experts, hidden_size, width = w2.shape
        held = len(self._pieces(width))
        all_w1 = with_room(w1, (experts + held, 2 * width, hidden_size))
        all_w2 = with_room(w2, (experts + held, hidden_size, width))
        return DecodeWeights(w1=all_w1, w2=all_w2, slots=self.table(held, w1.device), activation=self.activation)

    def _pieces(self, width: int) -> range:
        return held_pieces(self.layout, width, self._matrices(self.module).gate.shape[0])

    @torch.inference_mode()  # only there all tensors can be written to
    def _fill(self, joined: DecodeWeights) -> None:
        for part, source in self._parts(joined.w1, joined.w2):
            part.copy_(source)

    def _parts(self, w1: Tensor, w2: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of the pieces, which are the last slots of these weights, with the parts of the module."""
        gate, up, down = self._matrices(self.module)
        width = w2.shape[2]
        pieces = self._pieces(width)
        for slot, piece in enumerate(pieces, start=w1.shape[0] - len(pieces)):
            columns = slice(piece * width, (piece + 1) * width)
            yield w1[slot, :width], gate[columns]
            yield w1[slot, width:], up[columns]
            yield w2[slot], down[:, columns]


def state_of(parts: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return torch's version counters and addresses of tensors, which writes through ``.data`` do not change."""
    return [(version_of(part), local(part).data_ptr()) for part in parts]


def before_replay(runners: Iterable[Runner], shared: Iterable[SharedSlots | None]) -> None:
    """Prepare the replay of a decode step: each runner, and the pieces of each shared expert."""
    for runner in runners:
        runner.before_replay()
    for slots in shared:
        if slots is not None:
            slots.refresh()


def with_room(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Move a layer's weights to the front of a tensor of this shape, of which they become a view."""
    if weight.shape[0] == shape[0]:  # no piece is held here
        return weight.data.view(shape)
    # torch refuses most views of a tensor whose data is of the other mode; leaving a mode records gradients.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        room = weight.new_empty(shape)
        front = room[: weight.shape[0]].view(weight.shape)
        front.copy_(weight)
        weight.data = front
    return room


def matrices_of(module: nn.Module) -> SharedMatrices:
    assert isinstance(module, SharedExpert)
    gate, up = module.w1.chunk(2)
    return SharedMatrices(gate, up, module.w2)


class FrozenExperts(ExpertPath):
    """Routed experts of a layer whose tokens all ranks hold, in decode steps with its shared expert; for inference.

    Args:
        layer: The ``MoE``, whose w1 and w2 are in the dtype of the products; only read with ``shared``.
    """

    def __init__(self, runner: ReplicatedRunner, layer: Any = None, shared: SharedSlots | None = None) -> None:
        self.runner, self.layer, self.shared = runner, layer, shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.runner, *copy.deepcopy((self.layer, self.shared), memo))

    def includes_shared(self, tokens: Tensor) -> bool:
        return self.shared is not None and joins_step(tokens, self.runner.decode.max_tokens) and self.shared.joins()

    def __call__(self, routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
        experts, tokens = None, routed.tokens
        joined = self.shared is not None and self.shared.taken()
        if self.shared is not None and joined and joins_step(tokens, self.runner.decode.max_tokens):
            experts = self.shared.weights(local(self.layer.w1), local(self.layer.w2))  # these are moved in place
            routed = RoutedTokens(tokens, *self.shared.routing(*routed[1:]))
        with torch.autocast(tokens.device.type, enabled=False):  # decode rounds where it means to
            return self.runner(routed, w1, w2, biases, experts=experts)
