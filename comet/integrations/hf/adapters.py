"""LoRA adapters of experts that transformers divides over ranks, as peft makes them.

peft adds the product of two plain tensors to a weight. Where the weight is a ``DTensor``, torch refuses the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from comet.config import require
from comet.integrations.hf.stored import FUSED, some
from comet.reference.plain import Adapters, LowRank


def share_adapters(model: nn.Module) -> nn.Module:
    """Let adapters of experts train where transformers divides the experts over ranks; returns the model (collective).

    Call it after ``peft.get_peft_model``, before an optimizer is made. Each adapter becomes a ``DTensor`` with the same
    values on all ranks, those of the first one. State dicts hold plain tensors, as peft saves and loads them.
    """
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = [each for each in model.modules() if isinstance(each, ParamWrapper)]
    divided = [each for each in wrappers if isinstance(each.get_param(), DTensor)]
    rule = "must have LoRA adapters of experts that are divided over ranks: from_pretrained(distributed_config=...)"
    require(bool(divided), f"model={type(model).__name__} {rule}")
    ranks: Any = model.config.distributed_config  # type: ignore[union-attr]
    advice = "adapters of experts are not divided by FSDP: give dp_replicate_size for more ranks"
    rule = f"must equal fsdp_size * tp_size = {ranks.fsdp_size * ranks.tp_size}"
    require(ranks.efsdp_size == 1, f"ep_size={ranks.ep_size} {rule}: {advice}")
    for wrapper in divided:
        mesh, adapters = wrapper.get_param().device_mesh, (*wrapper.lora_A.values(), *wrapper.lora_B.values())
        for linear in adapters:
            weight: Any = linear.weight
            shared = distribute_tensor(weight.detach(), mesh, [Replicate()] * mesh.ndim)
            linear.weight = nn.Parameter(shared, weight.requires_grad)
            if weight.requires_grad:
                linear.weight.register_hook(partial(_mean, float(ranks.dp_size)))
            linear.register_state_dict_post_hook(_save_plain)
            linear.register_load_state_dict_pre_hook(_load_plain)
    lone = [name for name, each in model.named_parameters() if each.requires_grad and not isinstance(each, DTensor)]
    advice = "no rank takes their mean with the others, leave these adapters out"
    require(not lone, f"{some(lone)} must not be trained over ranks: {advice}")
    return model


def _mean(batches: float, gradient: Tensor) -> Tensor:
    """The mean over the ranks' batches, as FSDP takes it of other gradients."""
    return gradient / batches


def _save_plain(linear: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    weight = state[f"{prefix}weight"]
    state[f"{prefix}weight"] = weight.to_local() if isinstance(weight, DTensor) else weight


def _load_plain(linear: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    weight = state.get(f"{prefix}weight")
    if weight is not None and not isinstance(weight, DTensor):
        mesh = linear.weight.device_mesh
        state[f"{prefix}weight"] = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)


def own_part(weight: Tensor) -> Tensor:
    """This rank's experts of an adapted weight ``(E, ...)``; the weight itself where it is no ``DTensor``.

    The last dimension of the mesh divides experts over ranks; the others, of FSDP, divide the parts for storage only.
    """
    if not isinstance(weight, DTensor):
        return weight
    others = weight.device_mesh.ndim - 1
    whole = weight.redistribute(placements=[Replicate()] * others + [Shard(0)])
    local: Tensor = whole.to_local(grad_placements=[Partial()] * others + [Shard(0)])
    return local


def unadapted(experts: Any, name: str) -> Any:
    """The weight of experts to which peft adds the product of an adapter's factors; ``None`` where there is none."""
    added = getattr(experts, "parametrizations", {})
    return added[name].original if name in added else getattr(experts, name, None)


def trained_adapters(experts: Any) -> Adapters | None:
    """The factors of experts' adapters in training; ``None`` where weights have to be read with their adapters.

    Rows times both factors cost less than a sum and a gradient of the whole weights. Grouped GEMMs on a GPU take ranks
    that 8 divides.
    """
    found: list[LowRank | None] = []
    parametrized = getattr(experts, "parametrizations", {})
    for name in FUSED:
        if name not in parametrized:
            found.append(None)
            continue
        added = parametrized[name]
        factors: Any = added[0]
        if len(added) > 1 or not hasattr(factors, "lhs") or isinstance(added.original, DTensor):
            return None
        is_turned = getattr(experts, "is_transposed", False)
        up, down = (factors.rhs.mT, factors.lhs.mT) if is_turned else (factors.lhs, factors.rhs)
        if not up.requires_grad or up.shape[2] % 8:
            return None
        found.append(LowRank(down.contiguous(), (up * factors.scaling).contiguous()))
    first, second = found
    return None if first is second is None else (first, second)
