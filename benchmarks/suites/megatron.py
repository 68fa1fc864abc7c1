"""A layer inside Megatron-core, forward + backward: Megatron's own dispatch and experts against Comet's.

    torchrun --nproc-per-node 2 benchmarks/bench.py megatron --ep 2 --models qwen3_30b_a3b,mixtral_8x7b --tokens 4096

All variants are ``MoELayer`` with the same weights, bf16, without load-balancing losses and shared experts, and contain
Megatron's router; they are launched eagerly and interleaved by the protocol of ``comet.measure.timing``:

    sequential    all-to-all, and one expert after the other (``SequentialMLP``)
    grouped       all-to-all, and ``GroupedMLP``, with torch's grouped GEMM where the package grouped_gemm is missing
                  (the fact ``grouped_gemm`` says which); Transformer Engine's experts are not measured
    comet         ``with_comet``: Comet's dispatch, experts and combine

A variant that fails, or whose output or gradients differ from those of the first one that runs by more than rounding
explains, is not timed and stands under ``failures``. Needs GPUs and Megatron-core 0.16.1 (0.17 and later have another
``GroupedMLP``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from comet.config import MoEConfig, require
from comet.integrations.megatron import from_sequential, with_comet
from comet.launch.distributed import started_by_torchrun
from comet.layer.group import ExpertGroup, make_expert_group
from comet.layer.workspace import Workspace
from comet.measure.timing import Variant

from lib.arguments import parsed, suite_parser
from lib.moe import relative_error
from lib.ranks import Ranks, attempt, release, start_ranks
from lib.report import Row, describe, report
from lib.shapes import swiglu_model
from lib.timing import gather_facts, time_by_protocol

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
    """``grouped_gemm.ops.gmm`` by torch: of rows ``(R, D)`` the next ``batch_sizes`` go with each weight: ``(R, N)``.

    Weights are ``(E, D, N)``, or ``(E, N, D)`` with ``trans_b``; ``batch_sizes (E,)``, on a CPU, may be an array.
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
    """The layers by name, in bf16, of the same weights; Megatron has to be started."""
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
    state = from_sequential(layers["sequential"].state_dict())
    layers["comet"].load_state_dict(state)
    into: Any = layers["grouped"]
    with torch.no_grad():
        into.router.weight.copy_(state["router.weight"])
        into.experts.weight1.view(-1).copy_(state["experts.w1"].transpose(1, 2).flatten())
        into.experts.weight2.view(-1).copy_(state["experts.w2"].transpose(1, 2).flatten())
    return layers


def train(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Forward and backward pass: output, gradients of the input and of the router's weights; those of experts go."""
    inputs = x.detach().requires_grad_()
    output = layer(inputs)[0]
    named = {"input": inputs, **dict(layer.named_parameters())}
    grads = dict(zip(named, torch.autograd.grad(output, list(named.values()), x), strict=True))
    return {"output": output.detach(), "input": grads["input"], "router": grads["router.weight"]}


TOLERANCE = 0.15  # of the root mean square, the largest deviation that rounding can explain; as in ``bench.py moe``
COLUMNS = ("model", "tokens", "ep", "sequential_ms", "grouped_ms", "comet_ms", "x_sequential", "x_grouped", "failures")


def checked(
    layers: dict[str, nn.Module], xs: list[Tensor], ranks: Ranks, pool: Workspace | None = None
) -> tuple[dict[str, Variant], dict[str, str]]:
    """What agrees with the first layer that runs, as variants, and why the others are not there; collective."""
    variants: dict[str, Variant] = {}
    failures: dict[str, str] = {}
    first, wanted = "", dict[str, Tensor]()
    for name, layer in layers.items():
        found, failure = attempt(partial(train, layer, xs[0]), ranks, pool)
        if found is not None and not first:
            first, wanted = name, found
        elif found is not None:
            error = ranks.worst(relative_error(tuple(found.values()), tuple(wanted[key] for key in found)))
            failure = "" if error <= TOLERANCE else f"differs from {first} by {error:.3g} root mean squares"
        if failure:
            failures[name] = failure
        else:
            variants[name] = lambda index, layer=layer: train(layer, xs[index])  # type: ignore[misc]
    return variants, failures


def measure_point(config: MoEConfig, group: ExpertGroup, num_tokens: int, rounds: int, ranks: Ranks) -> Row:
    """Check and time all variants; collective."""
    layers = make_layers(config, group)
    draw = torch.Generator().manual_seed(ranks.rank)
    shape = (num_tokens, 1, config.hidden_size)
    xs = [torch.randn(shape, generator=draw).to(ranks.device, torch.bfloat16) for _ in range(ROTATE)]
    variants, failures = checked(layers, xs, ranks, group.workspace)
    timings = time_by_protocol(variants, ranks, rounds=rounds, rotate=ROTATE)
    group.workspace.check()
    found: Row = {f"{name}_ms": timing.median_ms for name, timing in timings.items()}
    for name in ("sequential", "grouped"):
        if name in timings and "comet" in timings:
            found[f"x_{name}"] = timings[name].median_ms / timings["comet"].median_ms
    return found | {"failures": describe(failures)}


def run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure all points; rank 0 reports."""
    start_megatron(arguments.ep)
    facts = gather_facts(ranks) | {"task": "bench_megatron", "rounds": arguments.rounds, "grouped_gemm": grouped_gemm()}
    rows, keys = measure(arguments, ranks), ("model", "tokens")
    report("bench_megatron", rows, ranks, arguments.out, keys=keys, facts=facts, columns=COLUMNS)


def measure(arguments: argparse.Namespace, ranks: Ranks) -> Iterator[Row]:
    """One row after the other; collective."""
    for name in arguments.models:
        config = swiglu_model(name)
        group = make_expert_group(
            config, arguments.parallel, max_tokens=max(arguments.tokens), dtype=torch.bfloat16, device=ranks.device
        )
        for num_tokens in arguments.tokens:
            point = {"model": name, "tokens": num_tokens, "ep": arguments.ep}
            yield point | measure_point(config, group, num_tokens, arguments.rounds, ranks)
            release(ranks)
        group.close()


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    """Read the command line; raises ``ValueError`` for an unknown model or a number that is too small."""
    parser = suite_parser(
        "megatron", __doc__, models=("qwen3_30b_a3b",), tokens=[4096], ep=1, rounds=10,
        out=Path("outputs/bench_megatron"),
    )  # fmt: skip
    arguments = parsed(parser, command_line)
    for name in arguments.models:
        arguments.parallel.check(swiglu_model(name))
    return arguments


def main(command_line: Sequence[str]) -> None:
    """One rank of the benchmark."""
    arguments = parse(command_line)
    require(started_by_torchrun(), "start the benchmark with torchrun: Megatron needs process groups, also of one rank")
    require(torch.cuda.is_available(), "Megatron-core needs GPUs")
    start_ranks(arguments.parallel, "auto", partial(run, arguments))
