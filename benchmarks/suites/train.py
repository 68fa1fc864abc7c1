"""A whole training step of a GPT of MoE layers: through Comet, and through the plain path over NCCL.

    torchrun --nproc-per-node 4 benchmarks/bench.py train --ep 4 --models qwen2_moe,qwen3_30b_a3b,deepseek_v3 \\
        --tokens 2048,8192
    torchrun --nproc-per-node 2 benchmarks/bench.py train --ep 2 --models qwen2_moe/2,qwen3_30b_a3b/2,deepseek_v3/2
    torchrun --nproc-per-node 2 benchmarks/bench.py train --device cpu --models tiny --tokens 64 --context 32 --ep 2

A step is the one of ``comet train``: a batch, forward, loss with the router's losses, backward, reduction and clipping
of the gradients, AdamW; in bf16 on GPUs, parameters too. The variants are steps of one and the same model:

    comet         every MoE layer through Comet, launched eagerly
    comet_graph   the same, forward and backward pass replayed from one CUDA graph (``train.cuda_graph``); on GPUs only
    plain         every MoE layer through all-to-all and grouped GEMMs
    rest          without routed experts: everything else of a step

A variant that fails, or whose first losses or mean gradients differ from those of ``plain`` by more than rounding
explains, is not timed and stands under ``failures``; so does a point that fails, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import require
from comet.jobs.config import TrainConfig
from comet.layer.expert_path import ExpertPath, FunctionPath
from comet.layer.group import ExpertGroup
from comet.layer.paths import make_path
from comet.layer.sharding import local
from comet.layout import Biases, RoutedTokens
from comet.models.config import NUM_BYTE_VALUES, ModelConfig
from comet.models.gpt import GPT
from comet.training.optimizer import make_optimizer
from comet.training.step import StepMetrics, TrainStep

from lib.gpt import draws_on, model_config
from lib.ranks import Ranks, attempt
from lib.report import Row, geometric_mean, over
from lib.shapes import model
from lib.steps import CHECKED_STEPS, LEARNING_RATE, ROTATE, FirstSteps, check_variants, row_norms
from lib.suite import Checked, Point, Suite, option

VARIANTS = ("comet", "comet_graph", "plain", "rest")
SCHEDULE_STEPS = 1000  # far more than the batches that are rotated: the learning rate stays where it starts
TEXT_BYTES = 2**20


class SwitchedModel:
    """A model, its optimizer and its steps; every step names the variant that runs the MoE layers.

    A rank and step has ``batch_size`` sequences of ``config.context`` tokens; all parameters have the type of the
    group's workspace; ``path`` is that of the variants ``comet`` and ``comet_graph``.
    """

    def __init__(self, config: ModelConfig, group: ExpertGroup, *, batch_size: int, path: str = "auto") -> None:
        self.group = group
        with draws_on(group.device):
            self.gpt = GPT(config, group, path=path)
        self.dtype = self.gpt.dtype
        cast_parameters(self.gpt, self.dtype)
        settings = TrainConfig(steps=SCHEDULE_STEPS, batch_size=batch_size, lr=LEARNING_RATE, warmup_steps=0)
        self.optimizer = make_optimizer(self.gpt, settings)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(NUM_BYTE_VALUES, (TEXT_BYTES,), generator=generator, dtype=torch.uint8)
        make = partial(TrainStep, self.gpt, self.optimizer, group, text)
        self.train_step, self.replaying = make(replace(settings, cuda_graph="off")), make(settings)
        self.layers = self.gpt.moe_layers()
        self.own_paths: list[ExpertPath] = [layer.experts for layer in self.layers]
        self.other_paths: dict[str, ExpertPath] = {
            "plain": make_path("plain", config.moe, group),
            "rest": FunctionPath(no_experts),
        }

    def step(self, variant: str, index: int) -> StepMetrics:
        for layer, own in zip(self.layers, self.own_paths, strict=True):
            layer.experts = self.other_paths.get(variant, own)
        return (self.replaying if variant == "comet_graph" else self.train_step)(index)

    @torch.no_grad()
    def start_anew(self) -> None:
        """Draw the initial weights again in place, and forget the moments.

        The head is drawn, too: a GPT starts it at zero, and the first loss would depend on nothing else.
        """
        with draws_on(self.group.device):
            self.gpt.reset_parameters(0)
            self.gpt.head.weight.copy_(torch.randn(self.gpt.head.weight.shape) * self.gpt.config.hidden_size**-0.5)
        for moments in self.optimizer.state.values():
            for each in moments.values():
                each.zero_()

    def first_steps(self, variant: str) -> FirstSteps:
        self.start_anew()
        losses = [self.step(variant, index).loss for index in range(CHECKED_STEPS)]
        if variant == "comet_graph" and self.replaying.graph_fallback_reason:
            raise RuntimeError(f"there are no graphs: {self.replaying.graph_fallback_reason}")
        norms = (row_norms(local(moments["exp_avg"])) for moments in self.optimizer.state.values())
        return torch.stack(losses), tuple(norms)


class NoExperts(torch.autograd.Function):
    """A stand-in for the experts that returns the tokens, so that the rest of a step is timed.

    The experts' gradients are written, with one number everywhere: zeros would make the divisions of AdamW slower.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.full_like(each, 1e-4) for each in ctx.saved_tensors)


def no_experts(routed: RoutedTokens, w1: Tensor, w2: Tensor, biases: Biases | None = None) -> Tensor:
    found: Tensor = NoExperts.apply(routed.tokens, w1, w2, *(biases or ()))
    return found


@torch.no_grad()
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters a type; tables such as the rotary one keep theirs."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(parameter.to(dtype)))


FIGURES = ("tokens_s", "plain_tokens_s", "x_plain", "rest_share", "loss_error", "gradient_error")
COLUMNS = ("model", "tokens", "layers", "ep", "tp", *(f"{name}_ms" for name in VARIANTS), *FIGURES)


def measure_point(asked: Run, config: ModelConfig, group: ExpertGroup, num_tokens: int, ranks: Ranks) -> Row:
    model = SwitchedModel(config, group, batch_size=num_tokens // config.context, path=asked.path)
    names = [name for name in asked.variants if name != "comet_graph" or ranks.device.type == "cuda"]
    checked = Checked(ranks, group.workspace)
    errors = check_variants(model, names, checked)
    model.start_anew()
    timings = checked.time(rounds=asked.rounds, rotate=ROTATE)
    group.workspace.check()
    times_ms = {name: timing.median_ms for name, timing in timings.items()}
    return checked.row(timings) | figures(times_ms, model.train_step.tokens_per_step) | errors


def figures(times_ms: Mapping[str, float], num_tokens: int) -> Row:
    """Figures that follow from the times of a point; ``None`` where something was not measured.

    Example: comet 5 ms, comet_graph 4, plain 8, rest 3, 1000 tokens of all ranks: 250,000 tokens/s, the plain path
    125,000, Comet is 2 x as fast, and 0.75 of its step is not the experts.
    """
    comet = min((times_ms[name] for name in ("comet", "comet_graph") if name in times_ms), default=None)
    plain = times_ms.get("plain")
    return {
        "tokens_s": over(num_tokens * 1e3, comet),
        "plain_tokens_s": over(num_tokens * 1e3, plain),
        "x_plain": over(plain, comet),
        "rest_share": over(times_ms.get("rest"), comet),
    }


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    COLUMNS = COLUMNS

    models: tuple[str, ...] = ("qwen3_30b_a3b",)
    tokens: tuple[int, ...] = (2048, 8192)
    layers: int = 2
    context: int = option(2048, "tokens of a sequence")
    variants: tuple[str, ...] = option(VARIANTS, of=VARIANTS)
    path: str = "auto"
    out: Path | None = Path("outputs/bench_train")

    def check(self) -> None:
        self.check_models(self.models, model)
        for number in self.tokens:
            fits = number % self.context == 0
            require(fits, f"tokens={number} must be a multiple of context={self.context}")

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        for name, num_tokens in product(self.models, self.tokens):
            config = model_config(name, self.layers, self.context)
            keys = {"model": name, "tokens": num_tokens, "layers": self.layers, "ep": self.ep, "tp": self.tp}
            group, failure = attempt(partial(ranks.make_group, config.moe, self.parallel, num_tokens), ranks)
            yield Point(
                keys, failure if group is None else partial(measure_point, self, config, group, num_tokens, ranks)
            )
            if group is not None:
                group.close()

    def summary(self, rows: Sequence[Row]) -> Row:
        """Mean and least ``x_plain``: of 2, 8 and a point that failed, 4 and 2."""
        factors = [row["x_plain"] for row in rows if row.get("x_plain") is not None]
        return {"geometric_mean": {"x_plain": geometric_mean(factors)}, "least_x_plain": min(factors, default=None)}
