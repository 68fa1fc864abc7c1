"""Functions that each rank runs in a test of the whole layer."""

import random
import time

import torch
import torch.distributed as dist
from fp8_cases import compare, fp8_shard
from layer_cases import (
    LayerCase,
    Oracle,
    RankInputs,
    as_strided,
    full_biases,
    full_weights,
    gradient,
    oracle,
    oracles,
    rank_inputs,
    shard,
    wrong_numbers,
)
from torch import Tensor

import comet.layer.nodes
import comet.schedule.network
from comet.kernels.runtime.activation import SWIGLU
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.sharding import expert_parameter, local
from comet.layout import RoutedTokens
from comet.moe import MoE
from comet.quantization.formats import FP8
from comet.schedule.network import Runs

Results = dict[str, Tensor]  # tensors of a call by their names in ``Oracle``


def open_group(case: LayerCase, device: str | torch.device = "cpu", timeout_s: float = 60.0) -> ExpertGroup:
    group = make_expert_group(
        case.config,
        case.parallel,
        max_tokens=max(case.max_tokens, *case.num_tokens),
        dtype=case.dtype,
        device=device,
        timeout_s=timeout_s,
        backend=case.backend,
    )
    poison(group)
    return group


def choose_runs(runs: Runs) -> None:
    """Let this rank cut passes over nodes into these runs, whatever the model of their time says."""
    comet.layer.nodes.best_runs = comet.schedule.network.best_runs = lambda *_, **__: runs


def build_layer(case: LayerCase, rank: int, path: str, device: str | torch.device = "cpu") -> MoE:
    return make_layer(case, rank, path, open_group(case, device))


def make_layer(case: LayerCase, rank: int, path: str, group: ExpertGroup) -> MoE:
    """With the part of the case's weights that ``rank`` holds."""
    moe = MoE(case.config, group, path=path, overlap=case.overlap, param_dtype=case.dtype)
    with torch.no_grad():
        parts = shard(case, rank, *full_weights(case), *full_biases(case))
        for parameter, part in zip(moe.expert_parameters(), parts, strict=True):
            local(parameter).copy_(part)
    return moe


def poison(group: ExpertGroup) -> None:
    """Fill where rows land with NaN, while no rank sends any."""
    synchronize(group)
    poison_received(group)
    if group.nodes is not None and group.nodes.legs is not None:
        for leg in group.nodes.legs[:2]:
            leg.rows.fill_(float("nan"))
    synchronize(group)


def poison_received(group: ExpertGroup) -> None:
    """Fill where rows land with NaN, in stream order: what is read unwritten, or too early, shows in the result.

    No rank need wait: the others write to this one only after it has sent ids, or come to the barrier of a backward.
    """
    pool = group.workspace.inner or group.workspace
    for received in (pool.recv_rows, pool.combine_rows, pool.combine_grads):
        received.local.fill_(float("nan"))


def synchronize(group: ExpertGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    if dist.is_initialized():
        dist.barrier()


def pause(case: LayerCase, device: torch.device, sleeper: random.Random) -> None:
    """Hold up the host, and on a GPU the stream, each by a random time, half of the times at all."""
    if case.delay_s and sleeper.random() < 0.5:
        time.sleep(sleeper.random() * case.delay_s)
        if device.type == "cuda":
            torch.cuda._sleep(int(sleeper.random() * case.delay_s * 1e9))


def run_call(
    moe: MoE, case: LayerCase, inputs: RankInputs, sleeper: random.Random, in_fp8: tuple[FP8, FP8] | None = None
) -> Results:
    """Forward, and backward if the case has one, with pauses before each; through weights ``in_fp8`` if given."""
    given = (inputs.tokens, case.relabelled(inputs.top_k_ids), inputs.top_k_weights, inputs.grad_output)
    x, ids, weights, grad_output = (as_strided(each) if case.strided else each.clone() for each in given)
    pause(case, moe.group.device, sleeper)
    poison_received(moe.group)
    if in_fp8 is not None:
        return {"output": moe.experts.fp8(RoutedTokens(x, ids, weights), *in_fp8)}
    if not case.backward:
        with torch.no_grad():
            return {"output": moe.routed_experts(x, ids, weights)}
    x.requires_grad_()
    weights.requires_grad_()
    moe.zero_grad()
    y = moe.routed_experts(x, ids, weights)
    pause(case, moe.group.device, sleeper)
    poison_received(moe.group)
    y.backward(grad_output)
    return results(moe, y, x, weights)


def results(moe: MoE, y: Tensor, x: Tensor, weights: Tensor) -> Results:
    """Return output and gradients of a call after its backward pass."""
    found = y.detach(), *(gradient(leaf) for leaf in (x, weights, *moe.expert_parameters()))
    return dict(zip(Oracle._fields, found, strict=False))


def run_case(rank: int, world_size: int, case: LayerCase, path: str, device: str = "cpu") -> list[Tensor]:
    """All calls of the case, compared; their outputs."""
    torch.use_deterministic_algorithms(device == "cpu")
    moe = build_layer(case, rank, path, device)
    if case.strided and not case.fp8:
        moe.w1, moe.w2 = (expert_parameter(as_strided(mine), moe.group.mesh) for mine in moe.expert_weights())
    shards = [fp8_shard(case, holder, device) for holder in range(world_size if case.fp8 else 0)]
    sleeper, outputs = random.Random(rank + case.seed), []
    for call in range(case.calls):
        inputs = rank_inputs(case, rank, call).to(device)
        found = run_call(moe, case, inputs, sleeper, shards[rank] if case.fp8 else None)
        moe.group.workspace.check()
        outputs.append(found["output"].cpu())
        if case.fp8:
            where = f"{case.name}, seed {case.seed}, call {call}, rank {rank}"
            compare(case, inputs, shards, found["output"], where)
        else:
            check_call(case, rank, call, found)
    moe.group.close()
    return outputs


def run_cases(rank: int, world_size: int, cases: list[LayerCase], path: str) -> None:
    """One start of the ranks serves them all."""
    for case in cases:
        run_case(rank, world_size, case, path)


def train_call(moe: MoE, case: LayerCase, rank: int, call: int) -> Results:
    """Forward and backward pass with the inputs of that call."""
    return run_call(moe, case, rank_inputs(case, rank, call).to(moe.group.device), random.Random(rank))


def check_call(case: LayerCase, rank: int, call: int, found: Results, where: str = "") -> None:
    """Everything a call left on a rank against the oracle.

    In 16 bits gate and up are rounded before biases and activation: but for SwiGLU, norms are compared. A gate that is
    rounded past the limit has no gradient, or gets one, which costs a row most of its norm: the twentieth of the rows
    that is the farthest off stays aside, at least one.
    """
    at = f"{case.name}, seed {case.seed}, call {call}, rank {rank}, {where}"
    if case.activation == SWIGLU or case.dtype == torch.float32:
        exact, same = (oracles(case, dtype, call) for dtype in (torch.float64, case.dtype))
        wrong = wrong_numbers(case, rank, found, exact, same, at)
        assert not wrong, "\n".join(wrong)
        return
    exact = oracle(case, rank, torch.float64, call)
    for name, actual in found.items():
        wanted = getattr(exact, name)
        squares = (actual.cpu().double() - wanted).square().flatten(end_dim=-2).sum(1).sort().values
        aside = 0 if case.activation.limit is None else -(-len(squares) // 20)
        error = squares[: len(squares) - aside].sum().sqrt() / wanted.norm()
        assert error < 4 * torch.finfo(case.dtype).eps, f"{at}: {name} is off by {error:.1%} of its norm"
