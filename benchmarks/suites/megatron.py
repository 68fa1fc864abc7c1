"""A layer inside Megatron-core, forward + backward: Megatron's own dispatch and experts against Comet's.

    torchrun --nproc-per-node 2 benchmarks/bench.py megatron --ep 2 --models qwen3_30b_a3b,mixtral_8x7b --tokens 4096

All variants are ``MoELayer`` with the same weights, bf16, without load-balancing losses and shared experts, and contain
Megatron's router; they are launched eagerly and interleaved by the protocol of ``comet.tuner.timing``:

    sequential    all-to-all, and one expert after the other (``SequentialMLP``)
    grouped       all-to-all, and ``GroupedMLP``, with torch's grouped GEMM where the package grouped_gemm is missing
                  (the fact ``grouped_gemm`` says which); Transformer Engine's experts are not measured
    comet         ``with_comet``: Comet's dispatch, experts and combine

A variant that fails, or whose output or gradients differ from those of the first one that runs by more than rounding
explains, is not timed and stands under ``failures``. Needs GPUs and Megatron-core 0.16.1 (0.17 and later have another
``GroupedMLP``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from comet.config import MoEConfig, require
from comet.integrations.megatron import from_sequential, with_comet
from comet.launch.messages import started_by_torchrun
from comet.layer.group import ExpertGroup, make_expert_group

from lib.moe import relative_error
from lib.ranks import Ranks
from lib.report import Row, over
from lib.shapes import swiglu_model
from lib.suite import Checked, Point, Suite

ROTATE = 4


def start_megatron(ep: int) -> None:
    """Megatron's process groups and seeds, for a process that may have no Transformer Engine and no grouped_gemm."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 forgets to define it
    if not grouped_gemm_util.grouped_gemm_is_available():
        stand_in = SimpleNamespace(ops=SimpleNamespace(gmm=torch_grouped_gemm), is_torch=True)
        grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = stand_in, stand_in.ops
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    if torch.cuda.is_available():  # Megatron draws weights from this; a test has no GPU
        model_parallel_cuda_manual_seed(7)


def grouped_gemm() -> str:
    from megatron.core.transformer.moe import grouped_gemm_util

    return "torch" if hasattr(grouped_gemm_util.grouped_gemm, "is_torch") else "grouped_gemm"


def torch_grouped_gemm(rows: Tensor, weights: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """``grouped_gemm.ops.gmm`` by torch: of rows ``(R, D)`` the next ``batch_sizes`` go with each weight: ``(R, N)``.

    Weights are ``(E, D, N)``, or ``(E, N, D)`` with ``trans_b``; ``batch_sizes (E,)``, on a CPU, may be an array.
    """
    ends = torch.as_tensor(batch_sizes).cumsum(0).to(rows.device, torch.int32)
    return torch._grouped_mm(rows, weights.transpose(1, 2) if trans_b else weights, offs=ends)


def transformer_config(config: MoEConfig, ep: int) -> Any:
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
        into.experts.weight1.view(-1).copy_(state["experts.linear_fc1.weight"].transpose(1, 2).flatten())
        into.experts.weight2.view(-1).copy_(state["experts.linear_fc2.weight"].transpose(1, 2).flatten())
    return layers


def train(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Forward and backward pass: output, gradients of the input and of the router's weights; those of experts go."""
    inputs = x.detach().requires_grad_()
    output = layer(inputs)[0]
    named = {"input": inputs, **dict(layer.named_parameters())}
    grads = dict(zip(named, torch.autograd.grad(output, list(named.values()), x), strict=True))
    return {"output": output.detach(), "input": grads["input"], "router": grads["router.weight"]}


# The largest deviation that rounding can explain, in root mean squares, as in ``bench.py moe``.
TOLERANCE = 0.15
COLUMNS = ("model", "tokens", "ep", "sequential_ms", "grouped_ms", "comet_ms", "x_sequential", "x_grouped")


def check_variants(layers: dict[str, nn.Module], xs: list[Tensor], checked: Checked) -> None:
    """Let the layers be timed that agree with the first one that runs (collective)."""
    first, wanted = "", dict[str, Tensor]()

    def judge(name: str, found: dict[str, Tensor]) -> str:
        nonlocal first, wanted
        if not first:
            first, wanted = name, found
        error = checked.ranks.worst(relative_error(tuple(found.values()), tuple(wanted[key] for key in found)))
        return "" if error <= TOLERANCE else f"differs from {first} by {error:.3g} root mean squares"

    for name, layer in layers.items():
        if checked.value(name, partial(train, layer, xs[0]), partial(judge, name)) is not None:
            checked.variants[name] = lambda index, layer=layer: train(layer, xs[index])  # type: ignore[misc]


def measure_point(config: MoEConfig, group: ExpertGroup, num_tokens: int, rounds: int, ranks: Ranks) -> Row:
    layers = make_layers(config, group)
    draw = torch.Generator().manual_seed(ranks.rank)
    shape = (num_tokens, 1, config.hidden_size)
    xs = [torch.randn(shape, generator=draw).to(ranks.device, torch.bfloat16) for _ in range(ROTATE)]
    checked = Checked(ranks, group.workspace)
    check_variants(layers, xs, checked)
    timings = checked.time(rounds=rounds, rotate=ROTATE)
    group.workspace.check()
    row = checked.row(timings)
    return row | {f"x_{name}": over(row.get(f"{name}_ms"), row.get("comet_ms")) for name in ("sequential", "grouped")}


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    COLUMNS = COLUMNS

    models: tuple[str, ...] = ("qwen3_30b_a3b",)
    tokens: tuple[int, ...] = (4096,)
    out: Path | None = Path("outputs/bench_megatron")

    def check(self) -> None:
        require(self.tp == 1, f"tp={self.tp} must be 1")
        self.check_models(self.models)

    def facts(self, ranks: Ranks) -> Row:
        start_megatron(self.ep)
        return super().facts(ranks) | {"grouped_gemm": grouped_gemm()}

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        for name in self.models:
            config = swiglu_model(name)
            group = make_expert_group(
                config, self.parallel, max_tokens=max(self.tokens), dtype=torch.bfloat16, device=ranks.device
            )
            for num_tokens in self.tokens:
                measure = partial(measure_point, config, group, num_tokens, self.rounds, ranks)
                yield Point({"model": name, "tokens": num_tokens, "ep": self.ep}, measure, group.workspace)
            group.close()

    @classmethod
    def main(cls, command_line: Sequence[str]) -> int:
        needs = "start the benchmark with torchrun: Megatron needs process groups, also of one rank"
        cls.parse(command_line)
        require(started_by_torchrun(), needs)
        require(torch.cuda.is_available(), "Megatron-core needs GPUs")
        return super().main(command_line)
