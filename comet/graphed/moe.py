"""An MoE layer that the host launches as CUDA graphs instead of kernel by kernel, for inference and for training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from comet.comm.collectives import wants_grad
from comet.config import require
from comet.graphed.training import TrainingGraphs
from comet.layer.sharding import local
from comet.moe import MoE
from comet.router.losses import RouterStats
from comet.utils.graphs import capture, device_obstacle, first_line, release_random_numbers, run_beside
from comet.utils.renamed import warn_renamed
from comet.utils.uncompiled import uncompiled

logger = logging.getLogger(__name__)

Output = tuple[Tensor, RouterStats]
Replay = Callable[[Tensor], tuple[Tensor, ...]]  # of the tokens (T, D); TrainingGraphs where there are gradients


@dataclass(frozen=True, slots=True)
class _Call:
    """What calls have in common that replay the same graphs: numbers of tokens, gradients wanted, autocast's type."""

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
    nothing a caller sees. Hooks, ``.grad`` and the gradients of ``stats.loss`` are autograd's as ever. A pair of graphs
    keeps one set of what the forward pass saves, so micro-batches go forward, backward, forward, backward; a call that
    comes while the backward pass of an earlier one may still follow (the layer twice in a step, two micro-batches at
    once) is launched kernel by kernel, right but slower, which is logged once. A second backward pass of one call
    raises ``RuntimeError``. Each number of tokens keeps, for training, the memory of one forward and backward pass, and
    of the experts' weights in the type of the tokens, if theirs is another.

    On a CPU, where the layer cannot be captured (the plain path asks the GPU for counts) and for more different numbers
    of tokens than ``max_graphs``, calls run the layer as it stands; the reason is logged once.

    Args:
        layer: The layer. Its parameters may change in place but not be replaced: calls with gradients then run the
            layer as it stands, others must not come.
        max_graphs: Numbers of tokens that are captured, at least 1; with and without gradients they count apart.
    """

    def __init__(self, layer: MoE, *, max_graphs: int = 16) -> None:
        require(max_graphs >= 1, f"max_graphs={max_graphs} must be at least 1")
        self.layer = layer
        self.max_graphs = max_graphs
        device = layer.group.device
        self._reason = device_obstacle(device)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._flat = _Flat(layer)
        self._replays: dict[_Call, Replay | None] = {}
        self._trained: set[_Call] = set()  # whose backward pass has run
        self._addresses: tuple[int, ...] = ()
        self._told: set[str] = set()

    @property
    def graph_fallback_reason(self) -> str:
        """Why calls run the layer as it stands; empty while graphs are replayed."""
        return self._reason

    @property
    def why_eager(self) -> str:
        """Former name of ``graph_fallback_reason``."""
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
        output, *stats = replay(tokens)
        return output.view_as(x), RouterStats(*stats)

    def _call_of(self, tokens: Tensor) -> _Call:
        device = tokens.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        inputs = (tokens, *self.layer.parameters()) if torch.is_grad_enabled() else ()
        flags = tuple(each.requires_grad for each in inputs) if wants_grad(*inputs) else ()
        if flags:
            self._check_addresses(tuple(local(each).data_ptr() for each in inputs[1:]))
        return _Call(tokens.shape[0], flags, autocast)

    def _check_addresses(self, addresses: tuple[int, ...]) -> None:
        """Stop replaying once a graph would read what was a parameter."""
        if self._addresses not in ((), addresses) and not self._reason:
            self._stop("parameters of the layer have been replaced")
        self._addresses = addresses

    def _launch(self, call: _Call, x: Tensor) -> Output:
        if not call.wants_grad:
            eager = partial(self.layer, x)
            return eager() if self._stream is None else run_beside(eager, self._stream)
        output, stats = self.layer(x)
        if not self._reason and output.requires_grad:
            output.register_hook(lambda _: self._trained.add(call))
        return output, stats

    def _replay_of(self, call: _Call, tokens: Tensor) -> Replay | None:
        """The graphs of such a call, captured at the second one; ``None`` runs the layer as it stands."""
        if self._reason:
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
        device = tokens.device
        try:
            # Casts that autocast keeps would be of no capture, or of another one.
            with torch.autocast(device.type, enabled=call.autocast is not None, cache_enabled=False):
                if call.wants_grad:
                    self._warm_router(tokens)
                    return TrainingGraphs(self._flat, self.layer, (tokens,), self._stream, self._graphs)
                own = torch.empty_like(tokens)
                run, results = capture(partial(self._flat, own), self._stream, self._graphs, self._pool)

                def replay(tokens: Tensor) -> tuple[Tensor, ...]:
                    own.copy_(tokens)
                    run()
                    return tuple(value.clone() for value in results)

                return replay
        except RuntimeError as error:  # what torch raises for a call that a capture does not permit
            release_random_numbers(device)
            self._stop(f"the layer cannot be captured: {first_line(error)}")
            return None

    def _warm_router(self, tokens: Tensor) -> None:
        """Compile what the captured backward pass has and one that left out the statistics had not."""
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
