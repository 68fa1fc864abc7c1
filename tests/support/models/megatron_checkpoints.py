"""Distributed checkpoints of Megatron's model and of Comet's, each read by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_cases import make_config, make_gpt, make_group, start, stock_spec, twins
from torch import Tensor

from comet.integrations.megatron import from_sequential, with_comet
from comet.layer.group import ExpertGroup


def begin(ep: int, device: str, fields: dict[str, Any]) -> tuple[Any, ExpertGroup]:
    """A configuration, in bf16 on GPUs, whose process groups are started, and Comet's group."""
    start(ep, device=device)
    on_gpu = dict(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=False)
    config = make_config(**fields, **({} if device == "cpu" else on_gpu))
    return config, make_group(config, device=device, dtype=config.params_dtype)


def save_and_load(rank: int, world_size: int, folder: Path, device: str, fields: dict[str, Any] | None = None) -> None:
    """Checkpoints of each model read by the other, then by Comet on one EP shard per rank less."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    config, group = begin(world_size, device, fields or {})
    stock, ours = twins(make_gpt, config, group, rank)
    expected = {name: value.clone() for name, value in ours.state_dict().items() if torch.is_tensor(value)}
    for name, model in (("stock", stock), ("ours", ours)):
        if rank == 0:
            (folder / name).mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder / name))

    def read(model: Any, name: str) -> dict[str, Tensor]:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        missing = model is stock and name == "ours"  # the extra states of its experts, which are all empty
        strict = StrictHandling.LOG_UNEXPECTED if missing else StrictHandling.RAISE_UNEXPECTED
        wanted = model.sharded_state_dict()
        model.load_state_dict(dist_checkpointing.load(wanted, str(folder / name), strict=strict), strict=not missing)
        return from_sequential(model.state_dict())

    for name in ("stock", "ours"):
        for model in (stock, ours):
            found = read(model, name)
            for key, value in expected.items():
                assert torch.equal(found[key], value), f"{key} of {name} read by {type(model).__name__}"
    group.close()
    check_wider(folder, read, expected, device, fields or {})


def check_wider(folder: Path, read: Any, expected: dict[str, Tensor], device: str, fields: dict[str, Any]) -> None:
    """The checkpoint of two EP shards in a model that holds all experts."""
    config, group = begin(1, device, fields)
    model = make_gpt(config, with_comet(stock_spec(config), group))
    found = read(model, "ours")
    for key, value in expected.items():
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, value)
        whole = torch.cat(gathered) if ".mlp.experts." in key else value
        assert torch.equal(found[key], whole), key
    group.close()
