"""An MoE layer that the host launches as CUDA graphs instead of kernel by kernel, for inference and for training."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from comet.comm.collectives import wants_grad
from comet.config import require
from comet.layer.expert_path import ExpertPath
from comet.layer.sharding import global_grad, local
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.utils.derivatives import first_only
from comet.utils.graphs import capture, device_obstacle, first_line, release_random_numbers
from comet.utils.hooks import hook_tables
from comet.utils.renamed import warn_renamed
from comet.utils.streams import SideStream
from comet.utils.uncompiled import uncompiled

logger = logging.getLogger(__name__)

Output = tuple[Tensor, RouterStats]
Replay = Callable[[Tensor], tuple[Tensor, ...]]  # takes tokens (T, D); TrainingGraphs where there are gradients

HOOKED = "its modules have hooks, which a graph would leave out"


class _Turn:
    """One forward pass: alive for as long as a backward pass may follow it."""

    __slots__ = ("__weakref__",)


class TrainingGraphs:
    """A differentiable function, made of a module by capturing its forward and its backward pass; computes nothing yet.

    What the forward pass saves stays in the memory of its graph, so each pair of graphs has memory of its own, of which
    no other graph uses any, and a forward pass may come only when the backward pass of the one before has run or cannot
    run any more (``awaits_backward``). Results and gradients are copies, which the caller owns.
    Only the gradients of the experts, which are large, are not copied: the backward graph stops short of them, and two
    launches behind it make them in new memory. So autograd may keep each as ``.grad``, which no replay overwrites.

    A backward pass that does not start from the first result is refused: as it stands, the module would leave out what
    other ranks wait for, and give other parameters no gradient rather than zeros.

    The captured module has leaves of its own that share the memory of the parameters. So the parameters' hooks, and
    where autograd adds to ``.grad``, are those of the calls, as DDP needs them.

    Args:
        module: Returns a tuple of tensors, the first of which has a gradient. Its kernels must have run before, in both
            directions.
        inputs: Of a call; their numbers do not matter. Gradients are made for those that require them now.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: MoE,
        inputs: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        graphs: list[torch.cuda.CUDAGraph],
    ) -> None:
        pool = None if stream is None else torch.cuda.graph_pool_handle()
        record = partial(capture, stream=stream, keep=graphs, pool=pool)
        self._layer, self._workspace = layer, layer.group.workspace
        self._parameters = tuple(module.parameters())
        self._inputs = tuple(_like(each).requires_grad_(each.requires_grad) for each in inputs)
        own = {
            name: local(each).detach().requires_grad_(each.requires_grad) for name, each in module.named_parameters()
        }
        with layer.experts.defer_wgrad() as deferred:
            self._run_forward, results = record(partial(functional_call, module, own, self._inputs))
            self._has_grad = tuple(each.requires_grad for each in results)
            roots = [each for each in results if each.requires_grad]
            self._root_grads = tuple(map(_like, roots))
            leaves = [each if each.requires_grad else None for each in (*self._inputs, *own.values())]
            self._run_backward, self._grads = record(partial(_gradients, roots, self._root_grads, leaves))
        self._results = tuple(each.detach() for each in results)
        places = {id(each): place for place, each in enumerate(self._parameters, start=len(inputs))}
        pairs = zip(layer.expert_parameters(), deferred, strict=False)
        self._deferred = [(places[id(each)], make) for each, make in pairs if each.requires_grad]
        self._turn: weakref.ref[_Turn] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward pass for inputs like those of the capture; not while ``awaits_backward``."""
        assert not self.awaits_backward, "the backward pass of an earlier call still needs what that one saved"
        results: tuple[Tensor, ...] = _Replayed.apply(self, *inputs, *self._parameters)
        return results

    @property
    def awaits_backward(self) -> bool:
        return self._turn is not None and self._turn() is not None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[_Turn, tuple[Tensor, ...]]:
        """Replay the forward pass: whose turn it is, and copies of the results."""
        for own, given in zip(self._inputs, inputs, strict=False):
            own.copy_(given)
        self._run_forward()
        turn = _Turn()
        self._turn = weakref.ref(turn)
        return turn, tuple(each.clone() for each in self._results)

    def backward(self, turn: _Turn, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward pass of a turn, once: new gradients of inputs and parameters."""
        self._workspace.join_stream()
        if self._turn is None or self._turn() is not turn:
            raise RuntimeError(
                "a forward pass replayed from a graph has one backward pass; where a second one is needed "
                "(retain_graph=True), call the layer itself"
            )
        if grads[0] is None:
            raise RuntimeError(
                "the backward pass of a call replayed from a graph must start from its output, not only from the "
                "router's statistics; for that, call the layer itself"
            )
        self._turn = None
        given = (grad for grad, has_grad in zip(grads, self._has_grad, strict=True) if has_grad)
        for own, grad in zip(self._root_grads, given, strict=True):
            _ = own.zero_() if grad is None else own.copy_(grad)
        self._run_backward()
        found = [None if each is None else each.clone() for each in self._grads]
        for place, make in self._deferred:
            found[place] = make()
        for place, parameter in enumerate(self._parameters, start=len(self._inputs)):
            found[place] = global_grad(found[place], parameter, self._layer.grad_reduce)
        return found


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: TrainingGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        ctx.turn, results = graphs.forward(tensors)
        constants = (each for each, has_grad in zip(results, graphs._has_grad, strict=True) if not has_grad)
        ctx.mark_non_differentiable(*constants)
        ctx.save_for_backward(*graphs._parameters)  # parameters have to stay as they are until then
        return results

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if a parameter has changed since the forward pass
        return None, *ctx.graphs.backward(ctx.turn, grads)


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _gradients(
    roots: Sequence[Tensor], root_grads: Sequence[Tensor], leaves: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradient of each leaf, ``None`` for ``None`` and where nothing depends on it. Never under autocast."""
    wanted = [leaf for leaf in leaves if leaf is not None]
    with torch.autocast(roots[0].device.type, enabled=False):
        found = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    return [None if leaf is None else next(found) for leaf in leaves]


class _Call(NamedTuple):
    """The properties that calls share if they replay the same graphs."""

    num_tokens: int
    wants_grad: tuple[bool, ...]
    autocast: torch.dtype | None


class _Flat(nn.Module):
    """The layer, whose output and statistics are one tuple of tensors."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        output, stats = self.layer(tokens)
        return output, *stats


class GraphedMoE:
    """A layer replayed from CUDA graphs for each number of tokens, without gradients or with them.

    Few tokens take a layer less time than the host takes to launch its kernels. The first call with a number of tokens
    runs as it stands; the second captures the layer, which computes nothing, and replays it. So every call runs the
    layer exactly once, and ranks may meet with different numbers of tokens. Routing may change from call to call. All
    graphs of calls without gradients share one memory of intermediate results.

    Where gradients are recorded, a call replays the forward pass from one graph, and autograd the backward pass from a
    second one, captured together once a backward pass has run as it stands. One class for both, as they differ in
    nothing a caller sees. Hooks of tensors, ``.grad`` and the gradients of ``stats.loss`` are autograd's as ever. A
    pair of graphs keeps one set of what the forward pass saves, so micro-batches go forward, backward, forward,
    backward; a call that comes while the backward pass of an earlier one may still follow (the layer twice in a step,
    two micro-batches at once) is launched kernel by kernel, right but slower, which is logged once. A second backward
    pass of one call raises ``RuntimeError``. Each number of tokens keeps, for training, the memory of one forward and
    backward pass, and of the experts' weights in the type of the tokens, if theirs is another.

    On a CPU, where the layer cannot be captured (the plain path asks the GPU for counts), while a module of the layer
    has forward or backward hooks, and for more different numbers of tokens than ``max_graphs``, calls run the layer as
    it stands; the reason is logged once.

    Args:
        layer: The layer. Its parameters and buffers may change in place; once one of them or a module is replaced,
            calls run the layer as it stands.
        max_graphs: Numbers of tokens that are captured, at least 1; with and without gradients they count apart.
    """

    def __init__(self, layer: MoE, *, max_graphs: int = 16) -> None:
        require(max_graphs >= 1, f"max_graphs={max_graphs} must be at least 1")
        self.layer = layer
        self.max_graphs = max_graphs
        device = layer.group.device
        self._reason = device_obstacle(device)
        self._side = SideStream.create(device)
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._flat = _Flat(layer)
        modules = list(layer.modules())  # to walk them in each call takes as long as a launch
        self._owned = [owned for each in modules for owned in (each._parameters, each._buffers) if owned]
        self._children = [each._modules for each in modules if each._modules]
        self._known_children = [dict(each) for each in self._children]
        self._hooks = hook_tables(modules)
        self._replays: dict[_Call, Replay | None] = {}
        self._trained: set[_Call] = set()  # calls like these have run a backward pass
        self._places: list[int] = []  # identities and addresses of the last call's tensors
        self._experts: ExpertPath | None = None  # of the last call
        self._told: set[str] = set()

    @property
    def graph_fallback_reason(self) -> str:
        """The reason why calls run the layer as it stands; empty while graphs are replayed."""
        return self._reason or (HOOKED if any(self._hooks) else "")

    @property
    def why_eager(self) -> str:
        warn_renamed("why_eager", "graph_fallback_reason")
        return self.graph_fallback_reason

    @uncompiled
    def __call__(self, x: Tensor) -> Output:
        """``MoE.forward``: ``(..., D)`` and the router's statistics, which no later call overwrites."""
        self.layer.group.workspace.join_stream()
        tokens = self.layer.tokens_of(x)
        call = self._call_of(tokens)
        replay = self._replay_of(call, tokens)
        if replay is None:
            return self._launch(call, x)
        self.layer.experts.require_current()
        output, *stats = replay(tokens)
        return output.view_as(x).to(x.dtype), RouterStats(*stats)

    def _call_of(self, tokens: Tensor) -> _Call:
        device = tokens.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        tensors = [each for owned in self._owned for each in owned.values() if each is not None]
        inputs = (tokens, *tensors)
        flags = tuple([each.requires_grad for each in inputs]) if wants_grad(*inputs) else ()
        if not self._reason:
            places = [*map(id, tensors), *[local(each).data_ptr() for each in tensors]]
            kept = self._children == self._known_children and self._experts in (None, self.layer.experts)
            if self._places not in ([], places) or not kept:
                self._stop("parameters, buffers or modules of the layer have been replaced")  # a graph would read those
            self._places, self._experts = places, self.layer.experts
        return _Call(tokens.shape[0], flags, autocast)

    def _launch(self, call: _Call, x: Tensor) -> Output:
        if not call.wants_grad:
            with self._side.inserted():
                return self.layer(x)
        output, stats = self.layer(x)
        if not self._reason and output.requires_grad:
            output.register_hook(lambda _: self._trained.add(call))
        return output, stats

    def _replay_of(self, call: _Call, tokens: Tensor) -> Replay | None:
        """The graphs of such a call, captured at the second one; ``None`` runs the layer as it stands."""
        if self._reason:
            return None
        if any(self._hooks):
            self._tell(f"the layer is launched kernel by kernel: {HOOKED}", "module hooks")
            return None
        if call.wants_grad and _has_hooks():
            self._tell("calls under hooks of saved tensors, as of checkpoints, are launched kernel by kernel", "hooks")
            return None
        if call not in self._replays:
            alike = sum(bool(other.wants_grad) == bool(call.wants_grad) for other in self._replays)
            if alike < self.max_graphs:
                self._replays[call] = None
            else:
                self._tell(
                    f"no graph for {call.num_tokens} tokens: max_graphs={self.max_graphs} others came first", "full"
                )
            return None
        if self._replays[call] is None and (not call.wants_grad or call in self._trained):
            self._replays[call] = self._capture(call, tokens)
        replay = self._replays[call]
        if isinstance(replay, TrainingGraphs) and replay.awaits_backward:
            self._tell(
                f"a call with {call.num_tokens} tokens is launched kernel by kernel: the backward pass of the one "
                "before is still to come", "busy",
            )  # fmt: skip
            return None
        return replay

    def _capture(self, call: _Call, tokens: Tensor) -> Replay | None:
        device, grad = tokens.device, torch.is_grad_enabled()
        try:
            # Casts that autocast keeps would be of no capture, or of another one; and what inference mode makes is no
            # memory for calls outside of it.
            with (
                torch.inference_mode(False),  # this turns gradients on
                torch.set_grad_enabled(grad),
                torch.autocast(device.type, enabled=call.autocast is not None, cache_enabled=False),
            ):
                if call.wants_grad:
                    self._warm_router(tokens)
                    return TrainingGraphs(self._flat, self.layer, (tokens,), self._side.stream, self._graphs)
                own = torch.empty_like(tokens)
                run, results = capture(partial(self._flat, own), self._side.stream, self._graphs, self._pool)

                def replay(tokens: Tensor) -> tuple[Tensor, ...]:
                    own.copy_(tokens)
                    run()
                    return tuple(value.clone() for value in results)

                return replay
        except RuntimeError as error:  # torch raises it for a call that a capture does not permit
            release_random_numbers(device)
            self._stop(f"the layer cannot be captured: {first_line(error)}")
            return None

    def _warm_router(self, tokens: Tensor) -> None:
        """Compile the router's kernels with statistics, which a captured backward pass has and an eager one may not."""
        router, largest_logit = self.layer.router, self.layer.group.workspace.largest_logit
        leaves = [each.detach().requires_grad_() for each in (tokens, router.weight)]  # no hook of a parameter runs
        routing = functional_call(router, {"weight": leaves[1]}, (leaves[0],))
        stats = router.measure(routing.logits, routing.scores, routing.top_k_ids, largest_logit=largest_logit)
        torch.autograd.grad(routing.top_k_weights.sum() + stats.loss, leaves)

    def _stop(self, reason: str) -> None:
        self._reason = reason
        self._tell(f"the layer is launched kernel by kernel: {reason}", "stopped")

    def _tell(self, message: str, kind: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message)


def _has_hooks() -> bool:
    """Whether hooks change what autograd saves: a graph saves nothing there, and what is captured has to stay."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("only asked whether there are any"):
            return False
    except RuntimeError:
        return True
