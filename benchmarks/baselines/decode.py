"""Other ways to compute the experts of a decode step: transformers' modules, and grouped GEMMs over sorted rows.

Letters: T tokens, K, D, F, E experts (all held), J = T * K routed rows, B rows of a tile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm, group_gemm_torch
from comet.layout import RoutedTokens
from comet.modular.experts import tiles_of_ids
from comet.tuner.layers import reason

from lib.decode import PREFIX, Step
from lib.ranks import FAILURES

LOOP = "eager"  # the module's own loop over experts, under no name in the registry
OURS = "comet"


@dataclass(frozen=True, slots=True)
class Library:
    """The installed transformers: its version and the names of its experts implementations.

    ``unavailable`` collects implementations that cannot work here, with the reasons: they are not tried again.
    """

    version: str
    names: tuple[str, ...]
    unavailable: dict[str, str] = field(default_factory=dict)

    def runs(self, steps: Sequence[Step]) -> dict[str, Callable[[int], Tensor]]:
        ids = [step.ids.long() for step in steps]  # the library's routers give int64
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
                self.unavailable[name] = reason(error)
                raise RuntimeError(self.unavailable[name]) from error
            return output

        return run


def find_library() -> Library | None:
    try:
        import transformers
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except FAILURES as error:
        print(f"no columns of transformers: {reason(error)}", file=sys.stderr, flush=True)
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


BLOCK_ROWS = 16
# Tile shapes that are all timed; the fastest counts.
EXPERT_CONFIGS = (
    GemmConfig(block_n=64, block_k=64, num_stages=5, num_warps=4),
    GemmConfig(block_n=128, block_k=64, num_stages=4, num_warps=4),
    GemmConfig(block_n=128, block_k=128, num_stages=3, num_warps=8),
)


def torch_experts(routed: RoutedTokens, w1: Tensor, w2: Tensor) -> Tensor:
    """Sort the routed rows by expert, two of torch's grouped GEMMs, weighted sum: ``(T, D)``; no id may be masked."""
    tokens, ids, routing_weights = routed
    order = ids.flatten().argsort(stable=True)
    is_for = ids.flatten()[:, None] == torch.arange(w1.shape[0], device=ids.device)  # (J, E)
    ends = is_for.sum(0).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(tokens[order // ids.shape[1]], w1.mT, offs=ends).chunk(2, dim=1)
    rows = torch._grouped_mm(silu(gate) * up, w2.mT, offs=ends)
    outputs = torch.empty_like(rows)
    outputs[order] = rows
    return weighted_sum(outputs, routing_weights)


def triton_experts(routed: RoutedTokens, w1: Tensor, w2: Tensor, config: GemmConfig) -> Tensor:
    """Sort and pad the routed rows into tiles, Comet's grouped GEMM twice, weighted sum."""
    tokens, ids, routing_weights = routed
    gemm = group_gemm if tokens.is_cuda else group_gemm_torch
    table, places = tiles_of_ids(ids, w1.shape[0], BLOCK_ROWS)
    num_rows = len(table.row_ids)
    pre = tokens.new_empty(num_rows, w1.shape[1])
    gemm(tokens, w1, pre, table, gather=True, layout="nk", config=config)
    gate, up = pre.chunk(2, dim=1)
    rows = tokens.new_empty(num_rows, w2.shape[1])
    gemm(silu(gate) * up, w2, rows, table, gather=False, layout="nk", config=config)
    return weighted_sum(rows.index_select(0, places.flatten()), routing_weights)


def weighted_sum(outputs: Tensor, routing_weights: Tensor) -> Tensor:
    """``(J, D)`` outputs in (token, k) order, weighted in float32 and added per token."""
    by_token = outputs.view(*routing_weights.shape, -1).float()
    return (by_token * routing_weights[..., None]).sum(1).to(outputs.dtype)
