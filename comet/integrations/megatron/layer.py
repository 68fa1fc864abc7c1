"""Megatron's MoE layer with Comet between router and output, in a model's spec."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comet.config import OverlapConfig, Path, require
from comet.errors import UnavailableError
from comet.integrations.megatron.experts import Choices, CometExperts
from comet.integrations.megatron.rules import check_config, check_ranks
from comet.layer.group import ExpertGroup


class CometMoELayer:
    """Router, load-balancing losses and shared experts of Megatron's ``MoELayer``; routed experts of Comet.

    ``moe_layer_class`` mixes it into ``MoELayer``, which cannot be imported everywhere. Tokens dropped by an expert
    capacity skip the expert, and padding counts in no loss but goes through the experts, both as in Megatron.

    Args:
        submodules: Router and shared experts; the experts in it are not built.
        layer_number: Of the transformer layer.
        process_groups: Taken where ``pg_collection`` is ``None``: Megatron-core 0.16 does not hand its own to layers it
            does not know.
        **kwargs: What newer versions give to ``MoELayer``.

    Raises:
        ValueError: If Comet cannot do what the configuration says, or the group has other ranks than Megatron's.
    """

    experts: CometExperts
    route: Any
    shared_experts_compute: Any

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        choices: Choices,
        process_groups: Any = None,
        **kwargs: Any,
    ) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.spec_utils import ModuleSpec

        process_groups = pg_collection or process_groups or get_default_pg_collection()
        check_config(config, choices.group)
        check_ranks(process_groups, choices.group)
        submodules = replace(submodules, experts=ModuleSpec(module=CometExperts, params={"choices": choices}))
        super().__init__(config, submodules, layer_number, process_groups, **kwargs)  # type: ignore[call-arg]
        # Steps of MoELayer that are not called any more fail with it, instead of computing something else.
        self.token_dispatcher = None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Run the layer.

        Args:
            hidden_states: ``(s, b, h)``, at most ``max_tokens`` of the group.
            intermediate_tensors: ``None``; Megatron's own layer resumes from them after a part in a CUDA graph.
            padding_mask: ``(b, s)``, true where a token is padding.

        Raises:
            ValueError: If the tokens do not fit the group, or in training with tensor parallelism without sequence
                parallelism, where ranks would train experts on the same tokens twice.
        """
        require(intermediate_tensors is None, "intermediate_tensors must be None: the layer runs as a whole")
        self._check_training()
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute:  # type: ignore[attr-defined]
            from megatron.core.tensor_parallel import checkpoint

            return checkpoint(self._compute, False, hidden_states, mask), None
        return self._compute(hidden_states, mask), None

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Nothing is left to do: ``delay_wgrad_compute`` is off."""

    def _check_training(self) -> None:
        ranks, sequence = self.attn_tp_group.size(), self.config.sequence_parallel  # type: ignore[attr-defined]
        require(
            sequence or ranks == 1 or not self.training,  # type: ignore[attr-defined]
            f"sequence_parallel={sequence} must be True in training with tensor_model_parallel_size={ranks}",
        )

    def _compute(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        ids, weights = top_k_of(probs, routing_map, self.experts.layout.top_k)
        routed = self.experts(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)
        return routed if shared is None else routed + shared


def top_k_of(probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Megatron's routing as Comet takes it: ids and weights, largest first, differentiable in ``probs``.

    Example: probs ``[[0, 0.3, 0.7], [0, 0, 0.6]]``, true in the map where positive, K=2: ids ``[[2, 1], [2, -1]]``,
    weights ``[[0.7, 0.3], [0.6, 0]]``; the second token was dropped by one of its experts.

    Returns:
        ``(T, K)`` int32, -1 for slots without an expert, and ``(T, K)`` float32.
    """
    require(
        routing_map.dtype == torch.bool and routing_map.shape == probs.shape,
        f"routing_map of {routing_map.dtype} and shape={tuple(routing_map.shape)} must be bool {tuple(probs.shape)}",
    )
    ids = probs.detach().masked_fill(~routing_map, -torch.inf).topk(top_k, dim=1).indices
    dropped = ~routing_map.gather(1, ids)
    weights = probs.gather(1, ids).masked_fill(dropped, 0.0)
    return ids.masked_fill(dropped, -1).int(), weights.float()


def moe_layer_class() -> type:
    """``CometMoELayer`` as a subclass of Megatron's ``MoELayer``."""
    stock = stock_layer_class()
    return type(CometMoELayer.__name__, (CometMoELayer, stock), {"__doc__": CometMoELayer.__doc__})


def stock_layer_class() -> type:
    """Megatron's ``MoELayer``; raises ``UnavailableError`` where Megatron-core is not importable."""
    try:
        return importlib.import_module("megatron.core.transformer.moe.moe_layer").MoELayer
    except ImportError as error:
        raise UnavailableError(
            "comet.integrations.megatron needs Megatron-core 0.16.1 or later: pip install 'comet-moe[megatron]'"
        ) from error


def with_comet(
    spec: Any,
    group: ExpertGroup,
    *,
    path: Path | str = "auto",
    overlap: OverlapConfig | None = None,
    max_imbalance: float | None = None,
    process_groups: Any = None,
) -> Any:
    """A spec whose MoE layers are Comet's, with ``path``, ``overlap`` as of ``MoE`` and ``max_imbalance`` of
    ``MoEConfig``.

    On a GPU what goes wrong in a layer shows in ``group.workspace.check()``, which waits for it: call it once per step.
    Where gradients are reduced beside the layers (``overlap_grad_reduce``), ``reserved_sms`` of the group let
    NCCL run beside layer 1 and not behind it; with ``comm_blocks`` of ``overlap`` they are needed (see ``MoE``).

    Args:
        spec: Of a transformer layer (``get_gpt_layer_local_spec`` and the like), or of a block of such layers
            (``get_gpt_decoder_block_spec``); layers without experts stay.
        group: Made by ``make_expert_group(moe_config(config), ...)``, for the ranks of Megatron's expert groups.
        process_groups: The ``ProcessGroupCollection`` that the model is built with, where it is not Megatron's global
            one: Megatron-core 0.16 does not pass it on.

    Raises:
        ValueError: If no layer of the spec is a plain ``MoELayer``.
        UnavailableError: If Megatron-core is not importable.
    """
    choices = Choices(group=group, path=path, overlap=overlap, max_imbalance=max_imbalance)
    settings = dict(choices=choices, process_groups=process_groups)
    layers = getattr(spec, "layer_specs", None)
    made = [_layer_with_comet(layer, settings) for layer in ([spec] if layers is None else layers)]
    require(
        any(layer is not None for layer in made),
        "spec must have a layer whose mlp is Megatron's MoELayer: num_experts of the spec is not set",
    )
    if layers is None:
        return made[0]
    return replace(spec, layer_specs=[new or old for new, old in zip(made, layers, strict=True)])


def _layer_with_comet(layer: Any, settings: dict[str, Any]) -> Any:
    """A transformer layer's spec with Comet; ``None`` if it has no MoE layer."""
    stock, mlp = stock_layer_class(), layer.submodules.mlp
    if getattr(mlp, "module", None) is stock:
        new = replace(mlp, module=moe_layer_class(), params={**mlp.params, **settings})
    elif isinstance(mlp, functools.partial) and mlp.func is stock:  # Megatron-core 0.17 and later
        new = functools.partial(moe_layer_class(), *mlp.args, **mlp.keywords, **settings)
    else:
        return None
    return replace(layer, submodules=replace(layer.submodules, mlp=new))
