"""The routed experts of a Megatron layer: this rank's weights, as Megatron's optimizers and checkpoints want them.

In a distributed checkpoint the experts of a layer are two tensors, ``experts.linear_fc1.weight (E, 2F, h)`` and
``experts.linear_fc2.weight (E, h, F)``, and where they have biases two more, ``bias (E, 2F)`` and ``(E, h)``, as
``SequentialMLP`` writes them. Its extra states, which are empty, are not written: it reads Comet's checkpoints with
``strict=StrictHandling.LOG_UNEXPECTED``. Comet reads its as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet.config import OverlapConfig, Path, require
from comet.integrations.megatron.rules import moe_config
from comet.layer.group import ExpertGroup
from comet.layer.paths import ExpertPath, make_path
from comet.layout import Biases

LOCAL_EXPERT = re.compile(r"(.*)local_experts\.(\d+)\.(.+)")
FUSED = {"linear_fc1.weight": "w1", "linear_fc2.weight": "w2", "linear_fc1.bias": "b1", "linear_fc2.bias": "b2"}


def from_sequential(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a model with Megatron's ``SequentialMLP``, for the same model with Comet, on the same ranks.

    Example: ``mlp.experts.local_experts.0.linear_fc1.weight (2F, h)`` and ``...local_experts.1...`` become
    ``mlp.experts.w1 (2, 2F, h)``; ``mlp.router.weight`` stays.

    Raises:
        ValueError: If an expert has parameters that Comet has not, or lacks one.
    """
    made: dict[str, Any] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, value in state.items():
        found = LOCAL_EXPERT.fullmatch(key)
        if found is None:
            made[key] = value
        elif not found[3].endswith("._extra_state"):
            require(found[3] in FUSED, f"{key} must be one of {', '.join(FUSED)}: Comet's experts have no other")
            experts.setdefault(found[1] + FUSED[found[3]], {})[int(found[2])] = value
    for key, parts in experts.items():
        missing = sorted(set(range(max(parts) + 1)) - set(parts))
        require(not missing, f"{key} lacks the local experts {missing}")
        made[key] = torch.stack([parts[index] for index in range(len(parts))])
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What ``with_comet`` was told of the routed experts of all layers."""

    group: ExpertGroup  # the ranks that share the experts, and their memory; one for all layers
    path: Path | str
    overlap: OverlapConfig | None
    max_imbalance: float | None


class CometExperts(nn.Module):
    """``w1 (e, 2F/TP, h)``, gate rows first, and ``w2 (e, h, F/TP)``, computed by one of Comet's paths.

    With ``add_bias_linear`` there are ``b1 (e, 2F)`` and ``b2 (e, h)``; Megatron allows them without expert TP.

    Every expert gets a gradient, also without tokens. Weights are drawn per global expert, with a seed from torch's
    CPU generator, which Megatron seeds alike on all ranks that hold the layer: the model does not depend on EP.

    Args:
        num_local_experts: As Megatron counts them: e.
        config: A ``TransformerConfig``.
        **kwargs: What newer versions give to experts, such as a name.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        *,
        choices: Choices,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        moe, group = moe_config(config, max_imbalance=choices.max_imbalance), choices.group
        self.layout = group.layout(moe)
        assert num_local_experts == self.layout.experts_local
        self.compute: ExpertPath = make_path(choices.path, moe, group, choices.overlap)
        self.expert_data_group = pg_collection.expt_dp
        self.ffn_size = moe.ffn_size
        device = torch.device("cpu") if config.use_cpu_initialization else group.device
        width, made = moe.ffn_size // self.layout.tp, dict(device=device, dtype=config.params_dtype)
        self.w1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, moe.hidden_size, **made))
        self.w2 = nn.Parameter(torch.empty(num_local_experts, moe.hidden_size, width, **made))
        self.b1 = self.b2 = None
        if moe.expert_bias:
            self.b1 = nn.Parameter(torch.zeros(num_local_experts, 2 * width, **made))
            self.b2 = nn.Parameter(torch.zeros(num_local_experts, moe.hidden_size, **made))
        self._mark(config.tensor_model_parallel_size)
        if config.perform_initialization:
            self.reset_parameters(config.init_method, config.output_layer_init_method)

    def _mark(self, tensor_parallel: int) -> None:
        """Say who shares a parameter's gradient (``allreduce``: all data-parallel ranks, not those of ``expt_dp``).

        All would mix parts of an expert where its TP is not the model's, as Megatron-core 0.16's own experts do.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        alike = self.layout.ep == 1 and self.layout.tp == tensor_parallel
        for name, parameter in self.named_parameters():
            parameter.allreduce = alike  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=2 if name == "w2" else 1, stride=1)

    @torch.no_grad()
    def reset_parameters(self, init_w1: Callable[[Tensor], Any], init_w2: Callable[[Tensor], Any]) -> None:
        """Draw the matrices: of each expert ``(2F, h)`` and ``(h, F)`` as a whole, of which this slice is kept."""
        layout, width = self.layout, self.w2.shape[2]
        columns = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        seed = int(torch.randint(2**48, ()))
        for local in range(layout.experts_local):
            with seeded(seed + layout.first_expert + local, self.w1.device):
                w1 = self.w1.new_empty(2, self.ffn_size, self.w1.shape[2])
                w2 = self.w2.new_empty(self.w2.shape[1], self.ffn_size)
                init_w1(w1.view(-1, w1.shape[2]))
                init_w2(w2)
            self.w1[local].copy_(w1[:, columns].flatten(0, 1))
            self.w2[local].copy_(w2[:, columns])

    def forward(self, tokens: Tensor, top_k_ids: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum ``(T, h)`` of each token's experts, by ids ``(T, K)`` int32, -1 masks, and weights ``(T,
        K)`` float32.
        """
        w1, w2, *biases = (weight.to(tokens.dtype) for weight in self.parameters())
        return self.compute(tokens, top_k_ids, top_k_weights, w1, w2, Biases(*biases) if biases else None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weights for Megatron's distributed checkpoints, under the names and shapes of ``SequentialMLP``."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        require(
            not (metadata or {}).get("singleton_local_shards"),
            "singleton_local_shards=True of the metadata must be False: experts are stored as one tensor per layer",
        )
        axis, layout = len(sharded_offsets), self.layout
        whole = (0, 0, self.expert_data_group.rank())

        def part(key: str, tensor: Tensor, replica: Any, *columns: tuple[int, int, int]) -> Any:
            offsets = (*sharded_offsets, (axis, layout.ep_rank, layout.ep), *columns)
            return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=axis)

        def split(key: str, tensor: Tensor, replica: Any, flattened_range: slice | None = None) -> list[Any]:
            require(flattened_range is None, f"flattened_range={flattened_range} must be None: gate and up are split")
            halves = enumerate(tensor.detach().chunk(2, dim=1))
            places = [(half.contiguous(), number * layout.tp + layout.tp_rank) for number, half in halves]
            return [part(key, half, replica, (axis + 1, place, 2 * layout.tp)) for half, place in places]

        found: dict[str, Any] = {}
        for stored, name in FUSED.items():
            tensor, key = getattr(self, name), f"{prefix}experts.{stored}"
            if tensor is None:
                continue
            if name in ("w1", "b1"):
                found[prefix + name] = ShardedTensorFactory(key, tensor, split, partial(torch.cat, dim=1), whole)
            else:
                columns = [(axis + 2, layout.tp_rank, layout.tp)] if name == "w2" else []
                found[prefix + name] = part(key, tensor, whole, *columns)
        return found


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed for a while, on the CPU and on ``device``; what is drawn afterwards does not know of it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
