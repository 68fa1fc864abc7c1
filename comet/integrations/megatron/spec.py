"""Comet in a Megatron model's spec."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from comet.config import OverlapConfig, Path, require
from comet.group import ExpertGroup
from comet.integrations.megatron.experts import Choices
from comet.integrations.megatron.layer import moe_layer_class, stock_layer_class


def with_comet(
    spec: Any,
    group: ExpertGroup,
    *,
    path: Path | str = "auto",
    overlap: OverlapConfig | None = None,
    max_imbalance: float | None = None,
    process_groups: Any = None,
) -> Any:
    """A spec whose MoE layers are Comet's; the given one stays as it is.

    On a GPU what goes wrong in a layer shows in ``group.workspace.check()``, which waits for it: call it once per step.
    Where gradients are reduced beside the layers (``overlap_grad_reduce``), ``spare_multiprocessors`` of the group let
    NCCL run beside layer 1 and not behind it; with ``beside=False`` of ``overlap`` they are needed (see ``MoE``).

    Args:
        spec: Of a transformer layer (``get_gpt_layer_local_spec`` and the like), or of a block of such layers
            (``get_gpt_decoder_block_spec``); layers without experts stay.
        group: Made by ``make_expert_group(moe_config(config), ...)``, for the ranks of Megatron's expert groups.
        path: See ``MoE``.
        overlap: See ``MoE``.
        max_imbalance: See ``MoEConfig``.
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
