"""Fine-tuning of Qwen3-MoE by LoRA of its experts: transformers with Comet's experts and with its own.

    python benchmarks/bench.py finetune --layers 48 --sequences 4
    python benchmarks/bench.py finetune --device cpu --model tiny --layers 2 --sequences 2 --context 32

A step is a batch, forward, loss, backward with recomputation of each layer, and AdamW of the adapters, on one device.
All variants are steps of one model with random weights. Its experts implementation is set by name before each step. A
variant whose first losses or first gradients differ from those of ``grouped_mm`` by more than rounding is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comet.config import require

from baselines.library import library_config
from lib.gpt import VOCABULARY, model_config
from lib.ranks import Ranks
from lib.report import Row
from lib.steps import CHECKED_STEPS, LEARNING_RATE, ROTATE, FirstSteps, check_variants, row_norms
from lib.suite import Checked, Point, Suite, option

STOCK, COMET = "grouped_mm", "comet"
RANK = 16
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class FineTuning:
    """A model with adapters of its experts, trained by any experts implementation."""

    def __init__(self, asked: Run, ranks: Ranks) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        from comet.integrations import hf

        hf.register()
        config = model_config(asked.model, asked.layers, asked.context, VOCABULARY[asked.model])
        self.dtype = ranks.dtype
        torch.manual_seed(0)
        with ranks.device:
            self.base: Any = AutoModelForCausalLM.from_config(library_config(config), dtype=ranks.dtype)
            self.ids = torch.randint(config.vocab_size, (ROTATE, asked.sequences, asked.context))
        self.base.activation_checkpointing_enable()
        settings = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=EXPERTS)
        self.model: Any = peft.get_peft_model(self.base, settings, autocast_adapter_dtype=False).train()
        self.adapters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.first = [each.detach().clone() for each in self.adapters]
        self.optimizer = torch.optim.AdamW(self.adapters, LEARNING_RATE)

    def step(self, variant: str, index: int) -> torch.Tensor:
        self.base.set_experts_implementation(variant)
        loss: torch.Tensor = self.model(input_ids=self.ids[index], labels=self.ids[index], use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def first_steps(self, variant: str) -> FirstSteps:
        """The losses of some steps, and the gradients of the first: AdamW makes whole steps of rounding alone."""
        self.optimizer.state.clear()
        for adapter, first in zip(self.adapters, self.first, strict=True):
            adapter.data.copy_(first)
        losses = [self.step(variant, 0)]
        norms = tuple(row_norms(moments["exp_avg"]) for moments in self.optimizer.state.values())
        losses += [self.step(variant, index) for index in range(1, CHECKED_STEPS)]
        return torch.stack(losses), norms


@dataclass(frozen=True, kw_only=True)
class Run(Suite):
    model: str = option("qwen3_30b_a3b", of=VOCABULARY)
    layers: int = 48
    sequences: int = option(4, "sequences of a step")
    context: int = option(2048, "tokens of a sequence")
    out: Path | None = Path("outputs/bench_finetune")

    def check(self) -> None:
        require(self.parallel.world_size == 1, f"ep={self.ep} and tp={self.tp} must be 1: one device is measured")

    def points(self, ranks: Ranks, facts: Row) -> Iterator[Point]:
        keys = {name: getattr(self, name) for name in ("model", "layers", "sequences", "context")}
        yield Point(keys, partial(self.measure, ranks))

    def measure(self, ranks: Ranks) -> Row:
        tuning, checked = FineTuning(self, ranks), Checked(ranks)
        found = check_variants(tuning, (STOCK, COMET), checked, STOCK)
        timings = checked.time(rounds=self.rounds, rotate=ROTATE, leads=False)
        num_tokens = self.sequences * self.context
        found |= {f"{name}_tokens_s": num_tokens / timing.median_ms * 1e3 for name, timing in timings.items()}
        return checked.row(timings) | found
