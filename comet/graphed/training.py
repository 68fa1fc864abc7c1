"""A module's forward pass replayed from one CUDA graph, and its backward pass from a second one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from comet.layer.routed_experts import DeferredWgrad, SymmetricPath
from comet.layer.sharding import global_grad, local
from comet.moe import MoE
from comet.utils.graphs import capture


class _Turn:
    """One forward pass: alive for as long as a backward pass may follow it."""

    __slots__ = ("__weakref__",)


class TrainingGraphs:
    """A differentiable function, made of a module by capturing its forward and its backward pass; computes nothing yet.

    What the forward pass saves stays in the memory of its graph, so each pair of graphs has memory of its own, of which
    no other graph uses any, and a forward pass may come only when the backward pass of the one before has run or cannot
    run any more (``awaits_backward``). What is returned is nobody's but the caller's: results and gradients are copies.
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
        self._workspace = layer.group.workspace
        self._parameters = tuple(module.parameters())
        self._inputs = tuple(_like(each).requires_grad_(each.requires_grad) for each in inputs)
        own = {
            name: local(each).detach().requires_grad_(each.requires_grad) for name, each in module.named_parameters()
        }
        with _deferred(layer) as deferred:
            self._run_forward, results = record(partial(functional_call, module, own, self._inputs))
            self._has_grad = tuple(each.requires_grad for each in results)
            roots = [each for each in results if each.requires_grad]
            self._root_grads = tuple(map(_like, roots))
            leaves = [each if each.requires_grad else None for each in (*self._inputs, *own.values())]
            self._run_backward, self._grads = record(partial(_gradients, roots, self._root_grads, leaves))
        self._results = tuple(each.detach() for each in results)
        places = {id(each): place for place, each in enumerate(self._parameters, start=len(inputs))}
        makers = () if deferred.last is None else (deferred.last.w1, deferred.last.w2)
        pairs = zip(layer.expert_parameters(), makers, strict=False)
        self._deferred = [(places[id(each)], make) for each, make in pairs if each.requires_grad]
        self._turn: weakref.ref[_Turn] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward pass for inputs like those of the capture; not while ``awaits_backward``."""
        assert not self.awaits_backward, "the backward pass of an earlier call still needs what that one saved"
        results: tuple[Tensor, ...] = _Replayed.apply(self, *inputs, *self._parameters)
        return results

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward pass of a call may still come."""
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
            found[place] = global_grad(found[place], parameter)
        return found

    def mark(self, ctx: Any, results: Sequence[Tensor]) -> None:
        """Tell autograd which results have no gradient, and to let the parameters stay as they are until backward."""
        ctx.mark_non_differentiable(
            *(each for each, has_grad in zip(results, self._has_grad, strict=True) if not has_grad)
        )
        ctx.save_for_backward(*self._parameters)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: TrainingGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        ctx.turn, results = graphs.forward(tensors)
        graphs.mark(ctx, results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if a parameter has changed since the forward pass
        return None, *ctx.graphs.backward(ctx.turn, grads)


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _deferred(layer: MoE) -> AbstractContextManager[DeferredWgrad]:
    """Where a backward pass captured inside leaves its weight gradients; other paths leave nothing."""
    experts = layer.experts
    return experts.defer_wgrad() if isinstance(experts, SymmetricPath) else nullcontext(DeferredWgrad())


def _gradients(
    roots: Sequence[Tensor], root_grads: Sequence[Tensor], leaves: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of each leaf; ``None`` for a leaf that is ``None`` or that nothing depends on. Never under autocast."""
    wanted = [leaf for leaf in leaves if leaf is not None]
    with torch.autocast(roots[0].device.type, enabled=False):
        found = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    return [None if leaf is None else next(found) for leaf in leaves]
