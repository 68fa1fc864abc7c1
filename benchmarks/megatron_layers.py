"""Megatron's MoE layer with its own experts, of two kinds, and with Comet's, of the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from comet.config import MoEConfig
from comet.group import ExpertGroup
from comet.integrations.megatron import from_sequential, with_comet

ROTATE = 4


def start_megatron(ep: int) -> None:
    """Megatron's process groups and seeds, for a process that may have no Transformer Engine and no grouped_gemm."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # which 0.16.1 forgets to say
    if not grouped_gemm_util.grouped_gemm_is_available():
        stand_in = SimpleNamespace(ops=SimpleNamespace(gmm=torch_grouped_gemm), is_torch=True)
        grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = stand_in, stand_in.ops
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    if torch.cuda.is_available():  # what Megatron draws weights from; a test has no GPU
        model_parallel_cuda_manual_seed(7)


def grouped_gemm() -> str:
    """Whose grouped GEMM ``GroupedMLP`` has."""
    from megatron.core.transformer.moe import grouped_gemm_util

    return "torch" if hasattr(grouped_gemm_util.grouped_gemm, "is_torch") else "grouped_gemm"


def torch_grouped_gemm(rows: Tensor, weights: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """``grouped_gemm.ops.gmm`` by torch: rows ``(R, D)``, of which the next ``batch_sizes`` go with each weight.

    Args:
        rows: ``(R, D)``.
        weights: ``(E, D, N)``, or ``(E, N, D)`` with ``trans_b``.
        batch_sizes: ``(E,)``, on a CPU; an array will do.
        trans_b: See ``weights``.

    Returns:
        ``(R, N)``.
    """
    ends = torch.as_tensor(batch_sizes).cumsum(0).to(rows.device, torch.int32)
    return torch._grouped_mm(rows, weights.transpose(1, 2) if trans_b else weights, offs=ends)


def transformer_config(config: MoEConfig, ep: int) -> Any:
    """A ``TransformerConfig`` of one such layer."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=config.hidden_size,
        num_attention_heads=1,
        ffn_hidden_size=config.ffn_size,
        moe_ffn_hidden_size=config.ffn_size,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        gradient_accumulation_fusion=False,
    )


def make_layers(moe: MoEConfig, group: ExpertGroup) -> dict[str, nn.Module]:
    """The layers by name, in bf16; Megatron has to be started."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    config = transformer_config(moe, group.parallel.ep)
    spec, grouped = (
        get_gpt_layer_local_spec(moe.num_experts, moe_grouped_gemm=kind, normalization="RMSNorm")
        for kind in (False, True)
    )
    specs = {"sequential": spec, "grouped": grouped, "comet": with_comet(spec, group)}
    layers: dict[str, nn.Module] = {}
    for name, made in specs.items():
        layer = build_module(made.submodules.mlp, config=config)
        layer.set_layer_number(1)
        layers[name] = layer.to(group.device, torch.bfloat16)
    copy_weights(layers)
    return layers


@torch.no_grad()
def copy_weights(layers: dict[str, nn.Module]) -> None:
    """Give ``comet`` and ``grouped`` the weights of ``sequential``."""
    state = from_sequential(layers["sequential"].state_dict())
    layers["comet"].load_state_dict(state)
    grouped: Any = layers["grouped"]
    grouped.router.weight.copy_(state["router.weight"])
    grouped.experts.weight1.view(-1).copy_(state["experts.w1"].transpose(1, 2).flatten())
    grouped.experts.weight2.view(-1).copy_(state["experts.w2"].transpose(1, 2).flatten())


def train(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Forward and backward pass: output, gradients of the input and of the router's weights; those of experts go."""
    inputs = x.detach().requires_grad_()
    output = layer(inputs)[0]
    named = {"input": inputs, **dict(layer.named_parameters())}
    grads = dict(zip(named, torch.autograd.grad(output, list(named.values()), x), strict=True))
    return {"output": output.detach(), "input": grads["input"], "router": grads["router.weight"]}
