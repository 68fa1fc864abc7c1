"""A layer as one operator of ``torch.library``, so that ``torch.compile`` has no graph break where it is called.

Compiled code gives the operator the tokens and every tensor that the layer holds. The layer itself is an object that
torch does not look into: the operator runs it as it stands. Under autograd it returns a *record* with the results, a
tensor of one byte. The byte's memory owns what autograd recorded, and the backward operator finds it by its address.
Where no backward pass comes (a checkpoint computes the layer again), the byte is freed, and the record with it.

Compiled code may write into results and into tensors that it needs no more. So no result is kept by what autograd
recorded (``tests/layer/test_operator.py`` overwrites them), and tokens and weights are inputs of the backward operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.distributed.tensor import DTensor

from comet.config import require
from comet.layer.sharding import local


class Layer(Protocol):
    """A module whose ``run(tokens (..., D), *others)`` gives ``(..., D)``, and statistics such as ``comet.MoE``'s."""

    @property
    def run(self) -> Callable[..., tuple[Tensor, Sequence[Tensor]]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def buffers(self) -> Iterator[Tensor]: ...


class Operand(OpaqueBase):
    """A layer as an operand of the operator, and the records of its calls that a backward pass may still need."""

    def __init__(self, layer: Layer) -> None:
        _operators()
        self._layer = weakref.ref(layer)
        self.records: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()

    @property
    def layer(self) -> Layer:
        """The layer itself, which an operand does not keep alive."""
        layer = self._layer()
        require(layer is not None, "model of compiled or exported code must still exist: keep it as long as its code")
        assert layer is not None
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Operand:
        return Operand(memo.get(id(self.layer), self.layer))  # torch copies it alone


class _Record(bytearray):
    """The memory of a record's byte: it lives as long as the tensor, and owns inputs and results of a call."""

    inputs: list[Tensor]
    results: list[Tensor]


def call(operand: Operand, layer: Layer, *inputs: Tensor, num_experts: int = 0) -> tuple[Tensor, ...]:
    """Call a layer in code that is compiled.

    Args:
        operand: The layer's.
        inputs: Arguments of ``layer.run``.
        num_experts: E of a layer with the three statistics of ``RouterStats``; 0: it has none.

    Returns:
        The result, and its statistics.
    """
    tensors = [*layer.parameters(), *layer.buffers()]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    trains = torch.is_grad_enabled()
    wanted = [trains and each.requires_grad for each in (*inputs, *tensors)]
    kind = inputs[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    # The compiler merges calls of equal arguments, and a record serves one call. It never merges calls of torch.empty.
    once = torch.empty(0, device="cpu")
    *results, _ = torch.ops.comet.layer(inputs, held, wanted, autocast, num_experts, operand, once)
    return tuple(results)


@cache
def _operators() -> torch.library.Library | None:
    """Define ``comet::layer`` and its backward pass once: at the first layer, so that an import changes nothing.

    A process may have imported another copy of this package before, to compare the two. Then torch has that copy's
    operator, and refuses to compile layers of this one.
    """
    if hasattr(torch.ops.comet, "layer"):
        return None
    register_opaque_type(Operand, typ="reference")
    library = torch.library.Library("comet", "FRAGMENT")
    layer = f"{get_opaque_type_name(Operand)} layer"
    given = "Tensor[] inputs, Tensor[] held, bool[] wanted"
    library.define(f"layer({given}, ScalarType? autocast, int num_experts, {layer}, Tensor once) -> Tensor[]")
    library.define(f"layer_backward(Tensor[] grads, Tensor record, {given}, {layer}) -> Tensor[]")
    library.impl("layer", _forward, "CompositeExplicitAutograd")
    library.impl("layer_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("comet::layer", _fake_forward, lib=library)
    torch.library.register_fake("comet::layer_backward", _fake_backward, lib=library)
    torch.library.register_autograd("comet::layer", _differentiate, setup_context=_save, lib=library)
    return library


def _forward(
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    wanted: Sequence[bool],
    autocast: torch.dtype | None,
    num_experts: int,
    operand: Operand,
    once: Tensor,
) -> list[Tensor]:
    layer, record = operand.layer, _Record(1)
    tensors = [*layer.parameters(), *layer.buffers()]
    same = len(held) == len(tensors) and all(
        local(own).data_ptr() == given.data_ptr() for own, given in zip(tensors, held, strict=True)
    )
    require(same, "weights of a compiled layer must be its own: torch.func.functional_call needs it uncompiled")
    with nullcontext() if autocast is None else torch.autocast(inputs[0].device.type, autocast):
        if not any(wanted):
            output, stats = layer.run(*inputs)
        else:
            with _recording():
                own = [each.detach().requires_grad_(wants) for each, wants in zip(inputs, wanted, strict=False)]
                output, stats = layer.run(*own)
            record.inputs = [each for each, wants in zip((*own, *tensors), wanted, strict=True) if wants]
            record.results = [output, *stats]
    byte = torch.frombuffer(record, dtype=torch.uint8)
    operand.records[byte.data_ptr()] = record
    return [output.detach().contiguous(), *(each.detach().clone() for each in stats), byte]


def _fake_forward(
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    wanted: Sequence[bool],
    autocast: object,
    num_experts: int,
    operand: object,
    once: Tensor,
) -> list[Tensor]:
    x, *_ = inputs
    stats = [x.new_empty(shape, dtype=torch.float32) for shape in ((), (), (num_experts,))] if num_experts else []
    return [x.new_empty(x.shape), *stats, torch.empty(1, dtype=torch.uint8, device="cpu")]


def _backward(
    grads: Sequence[Tensor],
    byte: Tensor,
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    wanted: Sequence[bool],
    operand: Operand,
) -> list[Tensor]:
    record = operand.records[byte.data_ptr()]
    pairs = [(result, grad) for result, grad in zip(record.results, grads, strict=True) if result.requires_grad]
    with _recording(), _without_hooks(record.inputs):
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            record.inputs,
            [grad for _, grad in pairs],
            retain_graph=torch._C._autograd._get_current_graph_task_keep_graph(),
            allow_unused=True,
            materialize_grads=True,
        )
    return [local(each).detach().contiguous() for each in found]


def _fake_backward(
    grads: Sequence[Tensor],
    byte: Tensor,
    inputs: Sequence[Tensor],
    held: Sequence[Tensor],
    wanted: Sequence[bool],
    operand: object,
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each, wants in zip((*inputs, *held), wanted, strict=True) if wants]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, held, ctx.wanted, _, num_experts, ctx.operand, _ = inputs
    ctx.mark_non_differentiable(*output[-2 if num_experts else -1 :])  # loads of experts, and the record
    ctx.num_inputs = len(given)
    ctx.save_for_backward(output[-1], *given, *held)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    byte, *saved = ctx.saved_tensors
    given, held = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
    found = iter(torch.ops.comet.layer_backward(grads[:-1], byte, given, held, ctx.wanted, ctx.operand))
    each = [next(found) if wants else None for wants in ctx.wanted]
    return each[: ctx.num_inputs], each[ctx.num_inputs :], None, None, None, None, None


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside an operator, where torch's dispatcher has switched it off."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Suspend the hooks of tensors: the backward pass around the operator calls them, and would call them twice."""
    hooks = [(each._backward_hooks, dict(each._backward_hooks)) for each in tensors if each._backward_hooks]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)
