"""torchtitan's routed experts computed by one of Comet's paths, over torchtitan's own EP mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module

from comet.config import MoEConfig, require
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup, join_expert_group
from comet.layer.operator import Operand, call
from comet.layer.paths import ExpertPath, make_path
from comet.layout import Biases, RoutedTokens
from comet.limits import Limited, Natural, Positive, at_least, one_of
from comet.utils.graphs import is_capturing

DTYPE = torch.bfloat16  # torchtitan's own experts multiply in it, whatever the type of the tokens and the weights

Weights = tuple[Tensor, Tensor, Biases | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(Limited):
    """Options of Comet's experts in a torchtitan model.

    Args:
        path: As of ``comet.MoE``.
        reserved_sms: SMs that layer 1 leaves to kernels of other streams, as of ``comet.make_expert_group``. FSDP
            gathers and reduces while the layer runs.
        timeout_s: Deadline of every wait for another rank, in seconds.
        max_imbalance: As of ``comet.MoEConfig``: bounds the memory that is reserved for routed rows.
    """

    path: Annotated[str, one_of("auto", "fused", "twin", "plain", "reference")] = "auto"
    reserved_sms: Natural = 0
    timeout_s: Positive = 60.0
    max_imbalance: Annotated[float, at_least(1)] | None = None

    @classmethod
    def of(cls, **given: Any) -> Options:
        """Return the options of these names; raises ``ValueError`` for a name that is none of them."""
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            require(name in known, f"{name}={value!r} must be one of the options {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Family:
    """How torchtitan's experts of one kind are read: their activation, and their parameters in Comet's order."""

    names: tuple[str, ...]
    activation: Callable[[Any], Activation]
    weights: Callable[..., Weights]  # called with this rank's parts of the parameters, in the order of ``names``
    has_bias: bool = False


def _swiglu_weights(gate: Tensor, down: Tensor, up: Tensor) -> Weights:
    """Join ``(e, F, D)`` gate and up to ``(e, 2F, D)``."""
    return torch.cat((gate.to(DTYPE), up.to(DTYPE)), dim=1), down.to(DTYPE), None


def _gpt_oss_weights(gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Weights:
    """Order the rows of ``(e, 2F, D)``, which are gate and up in turn: all gate rows, then all up rows."""
    w1, b1 = (torch.cat((each[:, ::2], each[:, 1::2]), dim=1) for each in (gate_up.to(DTYPE), gate_up_bias.to(DTYPE)))
    return w1, down.to(DTYPE), Biases(b1, down_bias.to(DTYPE))


FAMILIES: dict[type, Family] = {
    GroupedExperts.Config: Family(("w1_EFD", "w2_EDF", "w3_EFD"), lambda _: Activation("swiglu"), _swiglu_weights),
    GptOssGroupedExperts.Config: Family(
        ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"),
        lambda config: Activation("clamped_swiglu", limit=config.swiglu_limit),
        _gpt_oss_weights,
        has_bias=True,
    ),
}


def family_of(inner_experts: Any) -> Family:
    """Return how to read the experts of a configuration; raises ``ValueError`` for a class that Comet does not know.

    A subclass is another class: one of torchtitan's multiplies in other types.
    """
    known = ", ".join(each.__qualname__ for each in FAMILIES)
    name = type(inner_experts).__qualname__
    rule = f"must be one of {known}: leave out converters that quantise experts, and other models"
    require(type(inner_experts) in FAMILIES, f"inner_experts={name} {rule}")
    return FAMILIES[type(inner_experts)]


@cache
def group_of(
    process_group: ProcessGroup | None, moe: MoEConfig, max_tokens: int, device: torch.device, options: Options
) -> ExpertGroup:
    """Make the group of the EP ranks, which all layers of a shape share (collective at the first call).

    torchtitan has no place that all layers of a model share, and closes nothing of theirs: the group stays until the
    process ends.
    """
    return join_expert_group(
        process_group,
        moe,
        max_tokens=max_tokens,
        dtype=DTYPE,
        device=device,
        timeout_s=options.timeout_s,
        reserved_sms=options.reserved_sms,
    )


class CometRoutedExperts(RoutedExperts):
    """torchtitan's ``RoutedExperts`` with Comet between its inputs and its output.

    The parameters are those of ``inner_experts``, where FSDP and checkpoints look for them. Memory is made in the first
    forward pass, and again where a later one has more tokens. All ranks of an EP group have equally many: torchtitan
    pads them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's configuration of a layer's routed experts, with Comet's options."""

        options: Options = field(default_factory=Options)

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        experts = config.inner_experts
        self.inner_experts = experts.build()
        self.family, self.options = family_of(experts), config.options
        self.moe = MoEConfig(
            hidden_size=experts.dim,
            ffn_size=experts.hidden_dim,
            num_experts=experts.num_experts,
            top_k=config.token_dispatcher.top_k,
            balance="none",
            max_imbalance=config.options.max_imbalance,
            activation=self.family.activation(experts),
            expert_bias=self.family.has_bias,
        )
        self.operand = Operand(self)
        self.ep_mesh: Any = None
        self.max_tokens = 0
        self.path: ExpertPath | None = None
        self.checked: ExpertGroup | None = None  # the group that this layer looks after, being its first

    def parallelize(self, parallel_dims: Any) -> None:
        """Place the parameters as torchtitan does, and take its EP mesh."""
        Module.parallelize(self, parallel_dims)
        self.ep_mesh = parallel_dims.get_optional_mesh("ep")
        require(
            self.ep_mesh is not None or not parallel_dims.tp_enabled,
            f"parallelism.expert_parallel_degree=1 must be at least 2 with tensor_parallel_degree={parallel_dims.tp}: "
            "Comet's experts in torchtitan are whole",
        )

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Return ``(B, L, D)``, the weighted sum of each token's experts; arguments and names are torchtitan's."""
        del num_local_tokens_per_expert_E  # the plan counts
        routed = x_BLD, topk_scores_BLK, topk_expert_ids_BLK
        if torch.compiler.is_compiling():
            return call(self.operand, self, *routed)[0]
        return self.run(*routed)[0]

    def run(self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor) -> tuple[Tensor, tuple[()]]:
        """Run the layer as ``forward`` does, with no statistics: in compiled code an operator calls this."""
        tokens, top_k = x_BLD.flatten(0, 1), topk_expert_ids_BLK.shape[-1]
        path = self._path_for(tokens)
        held = [getattr(self.inner_experts, name) for name in self.family.names]
        parameters = [each.to_local() if isinstance(each, DTensor) else each for each in held]
        w1, w2, biases = self.family.weights(*parameters)
        ids, scores = topk_expert_ids_BLK.view(-1, top_k), topk_scores_BLK.view(-1, top_k)
        routed = RoutedTokens(tokens.to(DTYPE), ids.int(), scores.float())
        return path(routed, w1, w2, biases).to(x_BLD.dtype).view_as(x_BLD), ()

    def _path_for(self, tokens: Tensor) -> ExpertPath:
        """Return the path, after a look at what went wrong before; make it where there is none for so many tokens."""
        require(
            not is_capturing(tokens.device),
            "training.disable_cuda_graphs=False must be True: torchtitan's graph would hold Comet's waits for ranks",
        )
        if self.checked is not None:
            self.checked.workspace.check()  # the host waits: torchtitan's own dispatcher does so in every layer
        if self.path is None or len(tokens) > self.max_tokens:
            for name in self.family.names:
                check_mesh(name, getattr(self.inner_experts, name), self.ep_mesh)
            self.max_tokens = max(1, len(tokens))
            ranks = None if self.ep_mesh is None else self.ep_mesh.get_group()
            group = group_of(ranks, self.moe, self.max_tokens, tokens.device, self.options)
            self.path = make_path(self.options.path, self.moe, group)
            self.checked = group if group.workspace.layers_made == 1 else None
        return self.path


def check_mesh(name: str, weight: Tensor, ep_mesh: Any) -> None:
    """Raise ``ValueError`` unless a parameter is whole, or one that each EP rank has its experts of."""
    if not isinstance(weight, DTensor):
        return
    names = weight.device_mesh.mesh_dim_names or ()
    parts = {name: each for name, each in zip(names, weight.placements, strict=True) if not each.is_replicate()}
    found = "ep" in parts and weight.device_mesh["ep"]
    require(
        parts == {"ep": Shard(0)} and found == ep_mesh,
        f"{name} on {weight.device_mesh} with {weight.placements} must be split by Shard(0) over {ep_mesh}, "
        "torchtitan's EP mesh alone",
    )
