"""The MoE layer: router -> plan -> layer 0 -> layer 1, over the ranks of an ``ExpertGroup``.

The shared expert and the router's statistics run on another stream than plan, layer 0 and layer 1
(``comet.utils.streams``) in a CUDA graph, and when many tokens are launched. The router cannot: the plan is made of its
ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from comet.comm.handshake import gather
from comet.config import MoEConfig, OverlapConfig, PathName, require
from comet.layer.expert_path import ExpertPath
from comet.layer.group import ExpertGroup
from comet.layer.operator import Operand, call
from comet.layer.paths import make_path
from comet.layer.sharding import (
    GradReduce,
    check_own_part,
    count_writes,
    expert_parameter,
    local,
    local_weights,
    require_held,
)
from comet.layer.shared_expert import SharedExpert
from comet.layout import Biases, RoutedTokens
from comet.router.losses import RouterStats
from comet.router.router import Router
from comet.utils.autocast import in_dtype
from comet.utils.graphs import is_capturing
from comet.utils.streams import SideStream
from comet.utils.uncompiled import uncompiled

# Below this many tokens a launched layer waits for the host, and a second stream only adds launch time.
BESIDE_TOKENS = 4096


class MoE(nn.Module):
    """A distributed Mixture-of-Experts feed-forward layer.

    The weights are ``w1 (E, 2, F, D)`` gate and up projection and ``w2 (E, D, F)`` down projection; with
    ``expert_bias`` there are also ``b1 (E, 2, F)`` and ``b2 (E, D)``, else ``None``. In an MoE group of several
    ranks they are ``DTensor`` parameters, of which a rank holds ``(e, 2, F/TP, D)``, ``(e, D, F/TP)``, ``(e, 2, F/TP)``
    and ``(e, D)``; see ``comet.layer.sharding`` for what torch's tools do with them. After a backward pass their
    gradients are complete for all tokens of the MoE group; the gradients of the router and of the shared expert cover
    this rank's tokens only.

    One thread at a time: where the group is one rank, threads take turns; over ranks a second one is refused.

    Collectives of other streams, such as NCCL's, may come first on one rank and last on another: a launch ends with
    whatever SMs it finds, for its blocks draw their work or never wait. ``reserved_sms`` of the group let both run at
    the same time.

    Args:
        group: The ranks that share the experts, and their memory.
        path: ``fused`` (kernels over symmetric memory), ``twin`` (the same plan in plain torch, for CPUs), ``plain``
            (all-to-all and grouped GEMM), ``reference`` (gathered weights, plain torch), or ``auto``: fused on a GPU,
            twin on a CPU, inside each node where the group spans several (``comet.layer.nodes``), and plain where
            that was measured to be faster or nothing else can run.
        overlap: Split and order of the fused kernels' work, of which other paths have none; where one of those is named
            it warns. ``None`` takes what was measured, else the default.
        seed: Weights depend on (seed, global expert) only, so every EP x TP layout starts from the same model. ``None``
            draws one from torch's generator (``torch.manual_seed``), on rank 0 for all ranks. Give each layer of a
            model another seed, or none.
        param_dtype: Element type of the experts and the shared expert, which are cast to the tokens' type in the
            forward pass; the router's is float32.
        expert_device: The device of w1 and w2, if ``comet.experts`` brings them to the group's device; ``None``: that
            device.

    Raises:
        ValueError: If the configuration does not fit the group, the path is unknown or cannot run on the device.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: ExpertGroup,
        *,
        path: PathName | str = "auto",
        overlap: OverlapConfig | None = None,
        seed: int | None = None,
        param_dtype: torch.dtype = torch.float32,
        expert_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.layout = group.layout(config)
        made = make_path(path, config, group, overlap)
        self.experts: ExpertPath = made
        self.number = group.workspace.layers_made  # equal on all ranks
        # applied to gradients of the expert weights over several ranks (``comet.exclude_experts``)
        self.grad_reduce: GradReduce | None = None
        self.path = made.name  # "auto" has become one of them
        shard: dict[str, Any] = dict(device=group.device, dtype=param_dtype)
        held = shard if expert_device is None else {**shard, "device": expert_device}
        experts, width = self.layout.experts_local, config.ffn_size // self.layout.tp
        self.router = Router(config, device=group.device, dtype=torch.float32)
        self.w1 = expert_parameter(torch.empty(experts, 2, width, config.hidden_size, **held), group.mesh)
        self.w2 = expert_parameter(torch.empty(experts, config.hidden_size, width, **held), group.mesh)
        self.b1 = self.b2 = None
        if config.expert_bias:
            self.b1 = expert_parameter(torch.zeros(experts, 2, width, **held), group.mesh)
            self.b2 = expert_parameter(torch.zeros(experts, config.hidden_size, **held), group.mesh)
        self.shared = None
        if config.shared_ffn_size:
            self.shared = SharedExpert(
                config.hidden_size, config.shared_ffn_size, activation=config.activation, **shard
            )
        if seed is None:
            seed = gather(group.process_group, int(torch.randint(2**31, (), device="cpu")))[0]
            seed = gather(group.expert_data_group, seed)[0]
        self.reset_parameters(seed)
        self.operand = Operand(self)

    @property
    def experts(self) -> ExpertPath:
        """The way that the routed experts run."""
        return self._experts

    @experts.setter
    def experts(self, path: ExpertPath) -> None:
        require(isinstance(path, ExpertPath), f"experts={path!r} must be an ExpertPath: give FunctionPath(function)")
        self._experts = path

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A layer with weights of its own, of the same ranks and by the same path."""
        require_held(self.w1, self.w2)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        require_held(self.w1, self.w2)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *args: Any) -> None:
        require_held(self.w1, self.w2)
        super()._save_to_state_dict(destination, prefix, *args)
        for name, own in self.named_parameters(prefix.removesuffix("."), recurse=False):
            count_writes(destination[name], own)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, own in self.named_parameters(prefix.removesuffix("."), recurse=False):
            check_own_part(name, state_dict.get(name), own)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights from a normal distribution of variance 1 / fan-in, expert by expert; biases become 0."""
        config, layout = self.config, self.layout
        width = config.ffn_size // layout.tp
        columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        mine1, mine2 = self.expert_weights()
        for index in range(layout.experts_local):
            expert = layout.first_expert + index
            w1 = _normal((2, config.ffn_size, config.hidden_size), config.hidden_size, seed, 2 * expert)
            w2 = _normal((config.hidden_size, config.ffn_size), config.ffn_size, seed, 2 * expert + 1)
            mine1[index].copy_(w1[:, columns])
            mine2[index].copy_(w2[:, columns])
        for bias in (self.b1, self.b2, self.router.selection_bias):
            if bias is not None:
                bias.zero_()
        replicated = [self.router.weight, *(self.shared.parameters() if self.shared else ())]
        for index, parameter in enumerate(replicated):
            parameter.copy_(_normal(parameter.shape, parameter.shape[-1], seed, -1 - index))

    def expert_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are sharded over the group: ``w1`` and ``w2``, and ``b1`` and ``b2`` if there are any."""
        return (self.w1, self.w2) if self.b1 is None or self.b2 is None else (self.w1, self.w2, self.b1, self.b2)

    def expert_weights(self) -> tuple[Tensor, Tensor]:
        """This rank's part, ``(e, 2, F/TP, D)`` and ``(e, D, F/TP)``, sharing memory with both; without gradients."""
        return local(self.w1).detach(), local(self.w2).detach()

    def forward(self, x: Tensor, router: Router | None = None) -> tuple[Tensor, RouterStats]:
        """Run the layer.

        What goes wrong on a GPU (a rank that does not come, a capacity that is too small, logits that are not finite)
        shows in ``group.workspace.check()``, which waits for it: call it where the host waits anyway. After a billion
        calls it asks for ``group.workspace.restart()``.

        Args:
            x: ``(..., D)`` this rank's tokens, any number of them, also none.
            router: Routes them in place of the layer's own; ``None``: the layer's own.

        Returns:
            ``(..., D)`` of the same type, and the router's statistics; add ``stats.loss`` to the training loss.
        """
        if router is None and torch.compiler.is_compiling():
            output, *stats = call(self.operand, self, x, num_experts=self.config.num_experts)
            return output, RouterStats(*stats)
        return self.run(x, router)

    @uncompiled
    def run(self, x: Tensor, router: Router | None = None) -> tuple[Tensor, RouterStats]:
        """Run the layer as ``forward`` does, in a compiled model too: behind a graph break."""
        tokens = self.tokens_of(x)
        pays = len(tokens) >= BESIDE_TOKENS or is_capturing(tokens.device)
        side = self.group.side_stream if pays else SideStream(None)
        router = self.router if router is None else router
        routing = router(tokens)
        if router.config.caution and routing.top_k_weights.requires_grad:
            self.group.resolver.warn(router.config.caution)
        # The side stream may take memory that a call on another stream still reads.
        self.group.workspace.join_stream()
        beside = side.start(partial(self._beside, router), tokens, routing.logits, routing.scores, routing.top_k_ids)
        routed = self.routed_experts(tokens, routing.top_k_ids, routing.top_k_weights)
        shared, *stats = beside()
        output = routed if shared is None else routed + shared
        return output.view_as(x).to(x.dtype), RouterStats(*stats)

    def _beside(
        self, router: Router, tokens: Tensor, logits: Tensor, scores: Tensor, top_k_ids: Tensor
    ) -> tuple[Tensor | None, *tuple[Any, ...]]:
        """Run the shared expert, which can fill the GPU while the plan cannot, and make the statistics' fields."""
        shared = None if self.shared is None or self.experts.includes_shared(tokens) else self.shared(tokens)
        stats = router.measure(logits, scores, top_k_ids, largest_logit=self.group.workspace.largest_logit)
        return shared, *stats

    def routed_experts(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """The layer without its router: plan -> layer 0 -> layer 1 for a given routing.

        Args:
            tokens: ``(T, D)``.
            top_k_ids: ``(T, K)`` int32 global expert ids, none twice in a row; -1 masks a slot.
            top_k_weights: ``(T, K)`` float32.

        Raises:
            ValueError: If tokens or routing do not fit the group or each other, or weights are not all there.
        """
        routed = RoutedTokens(tokens, top_k_ids, top_k_weights)
        weights = local_weights(self.w1, self.w2, tokens.dtype, self.grad_reduce)
        if self.b1 is None or self.b2 is None:
            return self.experts(routed, *weights)
        return self.experts(routed, *weights, Biases(*local_weights(self.b1, self.b2, tokens.dtype, self.grad_reduce)))

    def tokens_of(self, x: Tensor) -> Tensor:
        """``(..., D)`` as ``(T, D)``; ValueError if size, device or type are not the layer's."""
        shape, device = self.group.workspace.shape, self.group.device
        require(x.dim() >= 1, f"shape={tuple(x.shape)} of the input must be (..., hidden_size)")
        require(
            x.shape[-1] == self.config.hidden_size,
            f"hidden_size={x.shape[-1]} of the input must be the layer's {self.config.hidden_size}",
        )
        require(x.device == device, f"device={x.device} of the input must be the group's {device}")
        x = in_dtype(x, shape.dtype)
        require(x.dtype == shape.dtype, f"dtype={x.dtype} of the input must be the group's {shape.dtype}")
        return x.reshape(-1, self.config.hidden_size)


def _normal(shape: tuple[int, ...] | torch.Size, fan_in: int, seed: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + stream + 500_000)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn / math.sqrt(fan_in)
