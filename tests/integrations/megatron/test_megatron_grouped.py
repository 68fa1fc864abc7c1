"""Checkpoints of Megatron's ``TEGroupedMLP``, whose linear layers need Transformer Engine, and Comet's.

Megatron's code names and places the tensors. Only the linear layers, which need a GPU to multiply, are stand-ins: they
have the parameters ``weight0, weight1, ...``, and Megatron's code for their checkpoints.
"""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import make_config, make_group, make_layer, start, stock_spec
from ranks import in_ranks
from torch import Tensor, nn

from comet.integrations.megatron import with_comet

pytest.importorskip("megatron.core", reason="needs pip install 'comet-moe[megatron]'")

PREFIX = "decoder.layers.0.mlp.experts."
PLACE = ((0, 0, 1),)  # the only layer


def code_of(name: str) -> Any:
    """A method of ``TEGroupedLinear``, a class that exists with Transformer Engine only."""
    from megatron.core.extensions import transformer_engine

    source = ast.parse(inspect.getsource(transformer_engine))
    (method,) = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == name)
    made: dict[str, Any] = {}
    exec(compile(ast.Module([method], []), transformer_engine.__file__, "exec"), vars(transformer_engine), made)
    return made[name]


class GroupedLinear(nn.Module):
    """The parameters of ``TEColumnParallelGroupedLinear`` and ``TERowParallelGroupedLinear``."""

    def __init__(self, weight: Tensor, bias: Tensor, groups: Any, axes: dict[str, int]) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self._pg_collection, self._tp_group = len(weight), True, groups, groups.expt_tp
        self.config = SimpleNamespace()
        self.axes = {f"{index}.{name}": axis for index in range(len(weight)) for name, axis in axes.items()}
        for name, parts in (("weight", weight), ("bias", bias)):
            for index, part in enumerate(parts):
                setattr(self, f"{name}{index}", nn.Parameter(part.detach().clone()))

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: Any) -> None:
        pass

    def _split_extra_state(self, state: Any) -> list[Any]:
        return [state] * self.num_gemms

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return code_of("_sharded_state_dict_grouped")(self, self.axes, prefix, sharded_offsets, metadata)


def grouped(experts: Any, config: Any) -> Any:
    """Megatron's ``TEGroupedMLP`` with the weights of Comet's experts."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    groups = get_default_pg_collection()
    made = TEGroupedMLP.__new__(TEGroupedMLP)
    nn.Module.__init__(made)
    made.config, made.num_local_experts = config, experts.layout.experts_local
    made.ep_group, made.tp_group = groups.ep, groups.expt_tp
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    made.linear_fc1 = GroupedLinear(fc1.weight, fc1.bias, groups, {"weight": 0, "bias": 0})
    made.linear_fc2 = GroupedLinear(fc2.weight, fc2.bias, groups, {"weight": 1})
    return made


def values(module: Any) -> list[Tensor]:
    """Weights and biases of fc1 and fc2, of all local experts."""
    found = []
    for linear in (module.linear_fc1, module.linear_fc2):
        parts = dict(linear.named_parameters())
        for name in ("weight", "bias"):
            whole = parts.get(name)
            found.append(torch.stack([parts[f"{name}{i}"] for i in range(2)]) if whole is None else whole.clone())
    return found


@pytest.mark.slow
@in_ranks(2, timeout=300)
def test_checkpoints_of_either_are_read_by_the_other(rank: int, world_size: int, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    start(2)
    config = make_config(add_bias_linear=True, moe_shared_expert_intermediate_size=None)
    group = make_group(config)
    ours = make_layer(config, with_comet(stock_spec(config), group)).experts
    nn.init.normal_(ours.linear_fc1.bias)
    nn.init.normal_(ours.linear_fc2.bias)
    theirs, expected = grouped(ours, config), values(ours)
    for number, (writer, reader) in enumerate([(theirs, ours), (ours, theirs), (theirs, ours)]):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(writer.sharded_state_dict(PREFIX, PLACE), str(folder))
        for parameter in reader.parameters():
            nn.init.zeros_(parameter)
        wanted = reader.sharded_state_dict(PREFIX, PLACE)
        found = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.LOG_UNEXPECTED)
        found = {name.removeprefix(PREFIX): value for name, value in found.items()}
        reader.load_state_dict(found, strict=reader is ours)
        for value, other in zip(values(reader), expected, strict=True):
            assert torch.equal(value, other)
    group.close()
