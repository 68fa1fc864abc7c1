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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

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
from lib.report import Row, geometric_mean
from lib.shapes import model
from lib.suite import Checked, Point, Suite, option

VARIANTS = ("comet", "comet_graph", "plain", "rest")
CHECKED_STEPS = 3  # graphs are captured in the second and replayed from then on
LEARNING_RATE = 1e-4
SCHEDULE_STEPS = 1000  # far more than the batches that are rotated: the learning rate stays where it starts
TEXT_BYTES = 2**20
# Losses of the steps, and of each parameter the norms of the rows of its mean gradient, as the optimizer has it.
FirstSteps = tuple[Tensor, tuple[Tensor, ...]]


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


def row_norms(gradient: Tensor) -> Tensor:
    """``(N,)`` float32 of ``(N, ...)``, an expert's weights being a row; ``[[3, 4], [0, 1]]`` gives ``[5, 1]``."""
    return torch.linalg.vector_norm(gradient.reshape(gradient.shape[0], -1), dim=1, dtype=torch.float32)


ROTATE = 4  # batches
# Largest deviations from the plain path that rounding can explain (bf16 on CPUs: 1e-4, and 0.06 where tokens whose
# scores nearly tie go to other experts; a slot left out makes 1e-3 and 0.3).
TOLERANCE = {
    "loss": {torch.bfloat16: 1e-3, torch.float32: 1e-4},
    "gradient": {torch.bfloat16: 0.15, torch.float32: 1e-2},
}
FIGURES = ("tokens_s", "plain_tokens_s", "x_plain", "rest_share", "loss_error", "gradient_error")
COLUMNS = ("model", "tokens", "layers", "ep", "tp", *(f"{name}_ms" for name in VARIANTS), *FIGURES)


class Steps(Protocol):
    """Training steps of one model by variants."""

    dtype: torch.dtype

    def first_steps(self, variant: str) -> FirstSteps: ...

    def step(self, variant: str, index: int) -> object: ...


def check_variants(model: Steps, names: Sequence[str], checked: Checked, reference: str = "plain") -> Row:
    """Let the variants that run and agree with the reference be timed; the worst errors (collective)."""
    errors: Row = {}
    wanted: FirstSteps | None = None

    def judge(name: str, found: FirstSteps) -> str:
        nonlocal wanted
        wanted = found if name == reference else wanted
        if name in (reference, "rest") or wanted is None:
            return ""
        of = {part: checked.ranks.worst(error) for part, error in deviations(found, wanted).items()}
        for part, error in of.items():
            if error > TOLERANCE[part][model.dtype]:
                return f"{part} differs from that of {reference} by {error:.3g} of it"
        errors.update({f"{part}_error": max(error, errors.get(f"{part}_error", 0.0)) for part, error in of.items()})
        return ""

    for name in sorted(names, key=lambda name: name != reference):
        if checked.value(name, partial(model.first_steps, name), partial(judge, name)) is not None:
            checked.variants[name] = partial(model.step, name)
    return errors


def deviations(found: FirstSteps, wanted: FirstSteps) -> dict[str, float]:
    """Largest relative deviations: of a loss, and of the norms of a gradient's rows, taken together.

    Example: losses ``[4, 2]`` and norms ``[3, 4]`` where ``[4, 4]`` and ``[3, 5]`` are wanted: 0.5 and 1 / 34 ** 0.5.
    """
    pairs = zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True)
    errors = [((one - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs]
    finite = [error if math.isfinite(error) else math.inf for error in errors]
    return {"loss": max(finite[: len(found[0])]), "gradient": max(finite[len(found[0]) :], default=0.0)}


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
    plain, rest = times_ms.get("plain"), times_ms.get("rest")
    return {
        "tokens_s": None if comet is None else num_tokens / comet * 1e3,
        "plain_tokens_s": None if plain is None else num_tokens / plain * 1e3,
        "x_plain": None if comet is None or plain is None else plain / comet,
        "rest_share": None if comet is None or rest is None else rest / comet,
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
