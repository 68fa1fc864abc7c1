"""A CUDA graph's rules on a CPU: a capture records operations without their effect, a replay repeats just these.

Whatever a step keeps in Python (a counted position, a new tensor under an old name, a value read from the device)
stands still between replays, as it would in a graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comet.decode import DecodeWeights
from comet.layout import RoutedTokens

ATEN = torch.ops.aten
WAITS_FOR_THE_DEVICE = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.equal.default,
    ATEN._unique2.default,
    ATEN.lift_fresh.default,  # a tensor made of numbers of the host
}
NOT_PERMITTED = "operation not permitted when stream is capturing"


class Recorder(TorchDispatchMode):
    """Records operations; what they write is put back by ``restore``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._known: set[int] = set()
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        masks = func in (ATEN.index.Tensor, ATEN.index_put_.default) and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)
        )
        if func in WAITS_FOR_THE_DEVICE or masks:
            raise RuntimeError(f"{func}: {NOT_PERMITTED}")
        for leaf in leaves:
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in self._known and func._schema.is_mutable:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._written.setdefault(storage.data_ptr(), (whole, whole.clone()))
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):  # tensors that the capture made need no restoring
            if isinstance(leaf, Tensor) and not any(_shared(leaf, given) for given in leaves):
                self._known.add(leaf.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, result))
        return result

    def restore(self) -> None:
        for memory, before in self._written.values():
            memory.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            # The record has the operations of autocast and autograd, too.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def _shared(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


class Captures:
    """Stands in for ``comet.utils.graphs.capture`` and counts."""

    def __init__(self) -> None:
        self.count = 0
        self.replays = 0

    def __call__(
        self, run: Callable[[], Any], stream: object, keep: list[object], pool: object = None
    ) -> tuple[Callable[[], None], Any]:
        self.count += 1
        recorder = Recorder()
        try:
            with recorder:
                result = run()
        finally:
            recorder.restore()

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay, result


def graphs_on_cpu(monkeypatch: Any) -> Captures:
    """Let ``Replayed`` capture on a CPU; returns what counts its captures."""
    captures = Captures()
    monkeypatch.setattr("comet.utils.graphs.capture", captures)
    monkeypatch.setattr("comet.utils.graphs.device_obstacle", lambda device: "")
    # On a CPU these ask the tensors; on a GPU an assertion of the device and kernels take their place.
    monkeypatch.setattr("comet.router.router.check_finite", lambda logits: None)
    for runner in ("LocalRunner", "ReplicatedRunner"):
        monkeypatch.setattr(f"comet.decode.runners.{runner}.__call__", all_experts)
    return captures


def all_experts(
    runner: object,
    routed: RoutedTokens,
    w1: Tensor,
    w2: Tensor,
    biases: object = None,
    *,
    experts: DecodeWeights | None = None,
) -> Tensor:
    """A ``Runner`` on one rank: every expert for every token, so that no id is read; slots are in the order of ids."""
    tokens, top_k_ids, top_k_weights = routed
    w1, w2 = (w1, w2) if experts is None else (experts.w1, experts.w2)
    gate, up = torch.einsum("td,efd->tef", tokens, w1).chunk(2, dim=2)
    outputs = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, w2)
    shares = torch.zeros(tokens.shape[0], w1.shape[0], dtype=tokens.dtype)
    shares = shares.scatter(1, top_k_ids.long(), top_k_weights.to(tokens.dtype))
    return (shares[:, :, None] * outputs).sum(1)


@torch.no_grad()
def greedy_tokens(model: Any, prompts: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """``(B, steps)`` tokens, each from a forward pass over its whole sequence, one sequence at a time."""
    made = []
    for prompt, length in zip(prompts, lengths.tolist(), strict=True):
        ids = prompt[:length].tolist()
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        made.append(ids[length:])
    return torch.tensor(made)


def drafting_rounds(engine: Any, count: int) -> list[Tensor]:
    """Logits of two prompts, and of rounds of drafts, verification and a step, which keep various numbers of tokens."""
    prompts, lengths = torch.tensor([[5, 6, 7, 8, 9], [11, 3, 0, 0, 0]]), torch.tensor([5, 2])
    made = [engine.prefill(prompts.to(engine.device), lengths.to(engine.device), 100)]
    drawn = torch.Generator().manual_seed(3)
    for number in range(count):
        tokens, before = torch.randint(64, (2, 3), generator=drawn).to(engine.device), engine.lengths.clone()
        made += [engine.draft(tokens[:, 0]), engine.draft(tokens[:, 1])]
        engine.rewind(before)
        made.append(engine.verify(tokens))
        engine.rewind(before + torch.tensor([1 + number % 3, 2], device=engine.device))
        made.append(engine.decode(tokens[:, 2]))
    return made
