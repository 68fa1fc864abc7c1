"""Expert weights in and out: Megatron's distributed checkpoints, and state dicts of its ``SequentialMLP``.

In a distributed checkpoint the experts of a layer are two tensors, ``experts.linear_fc1.weight (E, 2F, h)`` and
``experts.linear_fc2.weight (E, h, F)``, as ``SequentialMLP`` writes them. Its extra states, which are empty, are not
written: it reads Comet's checkpoints with ``strict=StrictHandling.LOG_UNEXPECTED``. Comet reads its as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comet.config import require
from comet.layout import ExpertLayout

LOCAL_EXPERT = re.compile(r"(.*)local_experts\.(\d+)\.(.+)")
FUSED = {"linear_fc1.weight": "w1", "linear_fc2.weight": "w2"}


def sharded_experts(
    w1: Tensor,
    w2: Tensor,
    layout: ExpertLayout,
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    replica: tuple[int, int, int],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """This rank's part of both tensors; see ``CometExperts.sharded_state_dict``.

    Args:
        w1: ``(e, 2F/TP, h)``; gate and up are two parts of the tensor in the checkpoint.
        w2: ``(e, h, F/TP)``.
        layout: This rank's place among the experts.
        prefix: Of the names.
        sharded_offsets: Place among the layers.
        replica: Which copy of the part this is.
        metadata: Megatron's.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    require(
        not metadata.get("singleton_local_shards"),
        "singleton_local_shards=True of the metadata must be False: experts are stored as one tensor per layer",
    )
    axis, tp = len(sharded_offsets), layout.tp

    def part(key: str, tensor: Tensor, replica: Any, *columns: int) -> Any:
        offsets = (*sharded_offsets, (axis, layout.ep_rank, layout.ep), tuple(columns))
        return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=axis)

    def split(key: str, tensor: Tensor, replica: Any, flattened_range: slice | None = None) -> list[Any]:
        require(flattened_range is None, f"flattened_range={flattened_range} must be None: gate and up are split")
        gate, up = (half.contiguous() for half in tensor.detach().chunk(2, dim=1))
        shards = ((gate, layout.tp_rank), (up, tp + layout.tp_rank))
        return [part(key, half, replica, axis + 1, place, 2 * tp) for half, place in shards]

    keys = {name: f"{prefix}experts.{stored}" for stored, name in FUSED.items()}
    factory = ShardedTensorFactory(keys["w1"], w1, split, lambda halves: torch.cat(halves, dim=1), replica)
    return {
        f"{prefix}w1": factory,
        f"{prefix}w2": part(keys["w2"], w2, replica, axis + 2, layout.tp_rank, tp),
    }


def from_sequential(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a model with Megatron's ``SequentialMLP``, for the same model with Comet, on the same ranks.

    Example: ``mlp.experts.local_experts.0.linear_fc1.weight (2F, h)`` and ``...local_experts.1...`` become
    ``mlp.experts.w1 (2, 2F, h)``; ``mlp.router.weight`` stays.

    Args:
        state: Of a layer or a whole model.

    Returns:
        A state dict whose expert weights are copies.

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
