"""What Comet can take of a ``TransformerConfig`` and of Megatron's process groups."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import relu, silu

from comet.config import MoEConfig, require
from comet.kernels.runtime.activation import Activation, ActivationName
from comet.layer.group import ExpertGroup

DISPATCHERS = ("allgather", "alltoall")
# Fields that have to be off, and why; those that a version of Megatron-core does not have count as off.
OFF = {
    "fp8": "experts train in the type of the tokens",
    "fp4": "experts train in the type of the tokens",
    "moe_use_legacy_grouped_gemm": "Comet's kernels multiply, and its checkpoints are those of SequentialMLP",
    "moe_latent_size": "tokens travel in the model's hidden size",
    "moe_apply_probs_on_input": "routing weights go on outputs",
    "moe_shared_expert_overlap": "the shared expert runs before the routed ones",
    "moe_pad_expert_input_to_capacity": "experts are not padded",
    "moe_router_padding_for_quantization": "experts are not padded",
    "moe_router_padding_for_fp8": "experts are not padded",
    "overlap_moe_expert_parallel_comm": "Comet overlaps inside the layer",
    "overlap_dispatch_backward_with_experts_wgrad": "Comet overlaps inside the layer",
    "delay_wgrad_compute": "the backward pass makes all gradients at once",
    "init_model_with_meta_device": "weights are made where they stay",
}


def moe_config(config: Any, *, max_imbalance: float | None = None) -> MoEConfig:
    """The shape of a Megatron model's MoE layers, for ``make_expert_group``; Megatron does the routing.

    Raises:
        ValueError: If the model has no experts, or sizes that Comet cannot take.
    """
    experts = config.num_moe_experts
    require(bool(experts), f"num_moe_experts={experts} must be at least 1: the model has no MoE layers")
    return MoEConfig(
        hidden_size=config.hidden_size,
        ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        num_experts=experts,
        top_k=config.moe_router_topk,
        balance="none",
        max_imbalance=max_imbalance,
        activation=activation_of(config),
        expert_bias=bool(config.add_bias_linear),
    )


def activation_of(config: Any) -> Activation:
    """How gate and up become hidden in a Megatron model."""
    gated, function = config.gated_linear_unit, config.activation_func
    require(gated, f"gated_linear_unit={gated} must be True: experts have a gate")
    names = gate_functions()
    require(
        function in names,
        f"activation_func={getattr(function, '__name__', function)} must be silu, relu, or fast_gelu (of tanh) or "
        "quick_gelu of megatron.core.activations",
    )
    limit = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0) or 0.0
    if names[function] == "clamped_swiglu":
        require(bool(limit), f"activation_func_clamp_value={limit} must be above 0 for activation_func=quick_gelu")
        require(offset == 1, f"glu_linear_offset={offset} must be 1.0 for activation_func=quick_gelu")
        return Activation("clamped_swiglu", limit=limit)
    require(not limit, f"activation_func_clamp_value={limit} must be None but for activation_func=quick_gelu")
    require(not offset, f"glu_linear_offset={offset} must be 0.0 but for activation_func=quick_gelu")
    return Activation(names[function])


def gate_functions() -> dict[Any, ActivationName]:
    """The activations by what Megatron calls on the gate; its own functions only where it is importable."""
    found: dict[Any, ActivationName] = {silu: "swiglu", relu: "reglu"}
    with suppress(ImportError):
        theirs = importlib.import_module("megatron.core.activations")
        found |= {theirs.fast_gelu: "geglu", theirs.quick_gelu: "clamped_swiglu"}
    return found


def check_config(config: Any, group: ExpertGroup) -> None:
    """Raise ``ValueError``, naming field, value and rule, for what Comet's experts would compute otherwise."""
    for name, reason in OFF.items():
        value = getattr(config, name, None)
        require(not value, f"{name}={value} must be off: {reason}")
    activation_of(config)
    dispatcher = config.moe_token_dispatcher_type
    require(
        dispatcher in DISPATCHERS,
        f"moe_token_dispatcher_type={dispatcher!r} must be one of {DISPATCHERS}; whichever, Comet dispatches instead",
    )
    graphs = config.cuda_graph_impl
    require(graphs == "none", f"cuda_graph_impl={graphs!r} must be 'none': Megatron's graphs cut the layer in pieces")
    dtype, wanted = token_dtype(config), group.workspace.shape.dtype
    require(dtype == wanted, f"dtype={dtype} of the model's tokens must be the group's {wanted}")


def token_dtype(config: Any) -> torch.dtype:
    """The type of hidden states: ``bf16`` and ``fp16`` of the configuration come before ``params_dtype``."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else config.params_dtype


def check_ranks(process_groups: Any, group: ExpertGroup) -> None:
    """Raise ``ValueError`` unless Megatron gives experts to the same ranks, in the same order, as Comet's group.

    Example: EP=2 and TP=2 over the ranks 4..7: rank 6 has the EP ranks [4, 6] and the expert TP ranks [6, 7].
    """
    ep, tp = group.parallel.ep, group.parallel.tp
    first, shard, column = group.world_rank - group.rank, *divmod(group.rank, tp)
    wanted = {
        "ep": ("expert_model_parallel_size", [first + tp * other + column for other in range(ep)]),
        "expt_tp": ("expert_tensor_parallel_size", [first + tp * shard + other for other in range(tp)]),
    }
    for name in (*wanted, "expt_dp"):
        given = getattr(process_groups, name, None)
        require(given is not None, f"{name} of the process groups must be given: experts live in it")
    for name, (size, ranks) in wanted.items():
        found = dist.get_process_group_ranks(getattr(process_groups, name))
        require(
            len(found) == len(ranks),
            f"{size}={len(found)} must be {len(ranks)}, as in Comet's group of ep={ep} and tp={tp}",
        )
        require(found == ranks, f"ranks={found} of Megatron's {name} group must be {ranks}, those of Comet's group")
