"""What each rank does in a whole-layer test."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from layer_cases import LayerCase, as_strided, assert_as_close, full_biases, full_weights, oracle, rank_inputs, shard

from comet.kernels.runtime.activation import SWIGLU
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.sharding import expert_parameter, local
from comet.moe import MoE


def open_group(case: LayerCase, device: str = "cpu") -> ExpertGroup:
    group = make_expert_group(
        case.config,
        case.parallel,
        max_tokens=max(1, *case.num_tokens),
        dtype=case.dtype,
        device=device,
        timeout_s=60.0,
    )
    poison(group)
    return group


def build_layer(case: LayerCase, rank: int, path: str, device: str = "cpu") -> MoE:
    group = open_group(case, device)
    moe = MoE(case.config, group, path=path, overlap=case.overlap, param_dtype=case.dtype)
    with torch.no_grad():
        parts = shard(case, rank, *full_weights(case), *full_biases(case))
        for parameter, part in zip(moe.expert_parameters(), parts, strict=True):
            local(parameter).copy_(part)
    return moe


def poison(group: ExpertGroup) -> None:
    """Fill where rows land with NaN: what is read without having been written, or too early, shows in the result."""
    synchronize(group)
    for received in (group.workspace.recv_rows, group.workspace.combine_rows, group.workspace.combine_grads):
        received.local.fill_(float("nan"))
    synchronize(group)


def synchronize(group: ExpertGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    if dist.is_initialized():
        dist.barrier()


def run_case(
    rank: int, world_size: int, case: LayerCase, path: str, device: str = "cpu", delays: bool = False
) -> list[torch.Tensor]:
    torch.use_deterministic_algorithms(device == "cpu")
    moe = build_layer(case, rank, path, device)
    if case.strided:
        moe.w1, moe.w2 = (expert_parameter(as_strided(mine), moe.group.mesh) for mine in moe.expert_weights())
    outputs = []
    for call, (x, ids, weights, grad_output) in calls_of(case, rank, device, delays):
        x.requires_grad_()
        weights.requires_grad_()
        for parameter in moe.expert_parameters():
            parameter.grad = None
        y = moe.routed_experts(x, ids, weights)
        if delays:
            time.sleep(random.Random(call - rank).random() * 0.05)
        y.backward(grad_output)
        moe.group.workspace.check()
        outputs.append(y.detach().cpu())
        compare_call(moe, case, rank, call, (y, x, weights))
    moe.group.close()
    return outputs


def train_call(moe: MoE, case: LayerCase, rank: int, call: int) -> tuple[torch.Tensor, ...]:
    """Forward and backward pass: output, tokens and routing weights, as ``compare_call`` takes them."""
    inputs = rank_inputs(case, rank, call).to(moe.group.device)
    x, weights = inputs.tokens.requires_grad_(), inputs.top_k_weights.requires_grad_()
    moe.zero_grad()
    y = moe.routed_experts(x, inputs.top_k_ids, weights)
    y.backward(inputs.grad_output)
    return y, x, weights


def calls_of(case: LayerCase, rank: int, device: str, delays: bool) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Tokens, ids, routing weights and the output's gradient of each call, which with ``delays`` comes late."""
    sleeper = random.Random(rank + case.seed)
    for call in range(case.calls):
        inputs = rank_inputs(case, rank, call)
        given = (inputs.tokens, case.relabelled(inputs.top_k_ids), inputs.top_k_weights, inputs.grad_output)
        if delays:
            time.sleep(sleeper.random() * 0.05)
        yield call, tuple(as_strided(each.to(device)) if case.strided else each.to(device) for each in given)


def compare_call(
    moe: MoE, case: LayerCase, rank: int, call: int, tensors: tuple[torch.Tensor, ...], where: str = ""
) -> None:
    """``tensors`` are output, tokens and routing weights of a call: that and all gradients against the oracle.

    In 16 bits gate and up are rounded before biases and activation: but for SwiGLU, norms are compared, with a limit
    without the twentieth of the rows that is the farthest off: a gate that is rounded past the limit has no gradient,
    or gets one, which costs a row most of its norm.
    """
    y, *leaves = *tensors, *moe.expert_parameters()
    exact, same = (oracle(case, rank, dtype, call) for dtype in (torch.float64, case.dtype))
    for leaf in leaves:
        assert leaf.grad is not None, f"{case.name}: an input of shape {tuple(leaf.shape)} has no gradient"
    found = y.detach(), *(local(leaf.grad) for leaf in leaves)
    for what, actual, wanted, plain in zip(exact._fields, found, exact, same, strict=False):
        at = f"{case.name}, seed {case.seed}, call {call}, rank {rank}, {where}: {what}"
        if case.activation == SWIGLU or case.dtype == torch.float32:
            assert_as_close(actual, wanted, plain, case.dtype, at)
        else:
            squares = (actual.cpu().double() - wanted).square().flatten(end_dim=-2).sum(1).sort().values
            aside = 0 if case.activation.limit is None else len(squares) // 20
            error = squares[: len(squares) - aside].sum().sqrt() / wanted.norm()
            assert error < 4 * torch.finfo(case.dtype).eps, f"{at} is off by {error:.1%} of its norm"


def run_cases(rank: int, world_size: int, cases: list[LayerCase], path: str) -> None:
    """One start of the ranks serves them all."""
    for case in cases:
        run_case(rank, world_size, case, path)
