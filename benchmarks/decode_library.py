"""The experts of transformers, run by its own code: the decode benchmark's best known rival.

A ``Qwen3MoeExperts`` module holds the benchmark's weights (its layout is Comet's), and the library picks the function
by the name in the module's configuration. It is given float32 routing weights, as every path is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from decode_steps import Step
from points import FAILURES
from torch import Tensor, nn

PREFIX = "transformers_"
LOOP = "eager"  # the module's own loop over experts, under no name in the registry
OURS = "comet"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed transformers: its version and the names of its experts implementations.

    ``unavailable`` collects, during a run, those that cannot work here, and why: they are not tried again.
    """

    version: str
    names: tuple[str, ...]
    unavailable: dict[str, str] = field(default_factory=dict)

    def runs(self, steps: Sequence[Step]) -> dict[str, Callable[[int], Tensor]]:
        """Every implementation as a function of the number of the step."""
        ids = [step.ids.long() for step in steps]  # what the library's routers give
        return {f"{PREFIX}{name}": self._run(name, steps, ids) for name in self.names}

    def _run(self, name: str, steps: Sequence[Step], ids: Sequence[Tensor]) -> Callable[[int], Tensor]:
        modules = [make_experts(name, step) for step in steps]

        def run(index: int) -> Tensor:
            if name in self.unavailable:
                raise RuntimeError(self.unavailable[name])
            try:
                output: Tensor = modules[index](steps[index].tokens, ids[index], steps[index].routing_weights)
            except (RuntimeError, ValueError):
                raise  # this shape, or the memory of this moment
            except Exception as error:  # a package or a downloaded kernel is missing: anything may be raised
                lines = str(error).strip().splitlines() or [""]
                self.unavailable[name] = f"{type(error).__name__}: {lines[0]}"
                raise RuntimeError(self.unavailable[name]) from error
            return output

        return run


def find_library() -> Library | None:
    """The transformers installed here; ``None``, and a line that says so, without one that has implementations."""
    try:
        import transformers
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except FAILURES as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        print(f"no columns of transformers: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        return None
    assert issubclass(Qwen3MoeExperts, nn.Module)
    names = [name for name in ALL_EXPERTS_FUNCTIONS if name not in (LOOP, OURS)]
    return Library(transformers.__version__, (LOOP, *names))


def make_experts(name: str, step: Step) -> nn.Module:
    """The library's module over the weights of a step, not a copy, that computes by the implementation ``name``."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    weights = step.set.plain
    config = Qwen3MoeConfig(
        num_experts=weights.num_experts,
        num_experts_per_tok=step.ids.shape[1],
        hidden_size=weights.hidden_size,
        moe_intermediate_size=weights.ffn_size,
        hidden_act="silu",
    )
    config._experts_implementation = name
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    for field_name, weight in (("gate_up_proj", weights.w1), ("down_proj", weights.w2)):
        wanted = tuple(getattr(experts, field_name).shape)
        if wanted != tuple(weight.shape):
            raise ValueError(f"{field_name} of shape {tuple(weight.shape)} must be {wanted} for transformers")
        setattr(experts, field_name, nn.Parameter(weight, requires_grad=False))
    module: nn.Module = experts.eval()
    return module
