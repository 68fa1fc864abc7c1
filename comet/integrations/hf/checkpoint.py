"""What a rank's model loads of a checkpoint folder; nothing is read before everything about experts is checked.

Published checkpoints hold three matrices per expert (``experts.7.gate_proj.weight``, Mixtral: ``w1``, ``w3``, ``w2``),
others one tensor per layer for all experts (``experts.gate_up_proj``, ``experts.down_proj``). Both are understood.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from comet.config import MoEConfig, require
from comet.decode import held_pieces
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.convert import Place
from comet.integrations.hf.families import moe_config, shared_ffn_size
from comet.integrations.hf.fp8.blocks import check_wide, dequantized, is_block_fp8, join_scales
from comet.integrations.hf.stored import (
    ALL,
    BIASES,
    BLOCK_FP8,
    DTYPES,
    FUSED,
    PARTS,
    SCALES,
    LazyShard,
    StoredTensor,
    several,
    some,
)
from comet.layout import ExpertLayout
from comet.quantization.formats import FP8_BLOCK

logger = logging.getLogger(__name__)

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(.+)$")
_ONE_EXPERT = re.compile(r"(\d+)\.(\w+)\.weight$")

# What a tensor holds: gate, up or down of one expert, or (expert None) gate_up_proj, down_proj or a bias of all.
Part = tuple[str, int | None]
Matrices = tuple[StoredTensor, StoredTensor, StoredTensor]  # gate, up and down of one expert, or of a slice of it
Tensors = dict[str, StoredTensor]


def state_of(
    tensors: Tensors, modules: dict[int, str], place: Place, config: Any, dtype: torch.dtype, *, is_fp8: bool
) -> tuple[dict[str, Any], Place]:
    """What the model is to load, lazily, this rank's shards among it; and the place as ``_add_pieces`` has it.

    Args:
        modules: Name of the experts module of each MoE layer.

    Raises:
        ValueError: If expert tensors are missing, superfluous, or of a wrong shape or dtype, or others are quantised
            otherwise than the configuration says; all are named.
    """
    stored = tensors
    if is_fp8:
        stored = join_scales(tensors)
        tensors = _dequantised(stored, dtype, place)
    else:
        check_wide({name: tensor for name, tensor in tensors.items() if ".experts." not in name})
    if place.family == gpt_oss.FAMILY:
        tensors = gpt_oss.read_laid_out(tensors, dtype)
    state = _shard_checkpoint(tensors, modules, moe_config(config), place)
    place = _add_pieces(state, stored, modules, place, config)
    mine = sum(shard.num_bytes for shard in state.values() if isinstance(shard, LazyShard))
    logger.info(
        "rank %d reads %.3f GB of %.3f GB of experts, and %d other tensors",
        place.layout.rank,
        mine / 1e9,
        mine * place.layout.world_size / 1e9,
        sum(".experts." not in name for name in tensors),
    )
    return state, place


def holds_block_fp8(config: Any) -> bool:
    """Whether a configuration says that its checkpoint holds block FP8; gpt-oss's may be MXFP4, as its tensors tell."""
    if config.model_type == gpt_oss.FAMILY:
        gpt_oss.check_quantisation(config)
        return False
    return is_block_fp8(config)


def _dequantised(stored: Tensors, dtype: torch.dtype, place: Place) -> Tensors:
    """Tensors that are dequantised as they are read, but for experts that are kept in block FP8."""
    found = {
        name: tensor if place.keep_fp8 and ".experts." in name else dequantized(tensor, dtype)
        for name, tensor in stored.items()
    }
    if place.layout.rank == 0:
        numbers = sum(
            math.prod(tensor.shape) / (place.layout.world_size if ".experts." in name else 1)
            for name, tensor in found.items()
            if tensor.read_as is not None
        )
        logger.log(
            logging.INFO if place.keep_fp8 else logging.WARNING,  # default log levels show what doubles the memory
            "block FP8 weights are dequantised to %s, %.3f GB per rank in place of %.3f GB; experts %s",
            str(dtype).removeprefix("torch."),
            numbers * dtype.itemsize / 1e9,
            numbers / 1e9,
            "stay as they are" if place.keep_fp8 else "as well, unless keep_fp8=True",
        )
    return found


def _shard_checkpoint(tensors: Tensors, modules: dict[int, str], moe: MoEConfig, place: Place) -> dict[str, Any]:
    """The tensors that are no experts', and this rank's shards of those that are, all of them checked."""
    layers, surplus = _sort_by_layer(tensors, set(modules))
    problems = [f"surplus {some(surplus)}"] if surplus else []
    for layer in modules:
        problems += _layer_problems(layer, layers[layer], moe, place.keep_fp8)
    require(not problems, f"expert tensors of the checkpoint must be complete and no more: {several(problems)}")
    state: dict[str, Any] = {name: tensor.copied() for name, tensor in tensors.items() if ".experts." not in name}
    for layer, module in modules.items():
        found = layers[layer]
        state |= _shards(module, _slices(found, moe.ffn_size, place.layout))
        if place.keep_fp8:
            scales = {part: tensor.scales for part, tensor in found.items() if tensor.scales is not None}
            state |= _shards(module, _slices(scales, moe.ffn_size // FP8_BLOCK, place.layout), SCALES)
        if moe.expert_bias:
            state |= _bias_shards(module, found[BIASES[0], None], found[BIASES[1], None], place.layout)
    return state


def _sort_by_layer(tensors: Tensors, layers: set[int]) -> tuple[dict[int, dict[Part, StoredTensor]], list[str]]:
    """The expert tensors of each layer by what they hold, and the names of those that fit nowhere."""
    found: dict[int, dict[Part, StoredTensor]] = {layer: {} for layer in layers}
    surplus = []
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        match = _EXPERTS.search(name)
        layer, part = (int(match[1]), _part(match[2])) if match else (-1, None)
        if part is None or layer not in found or part in found[layer]:
            surplus.append(name)
        else:
            found[layer][part] = tensor
    return found, surplus


def _part(rest: str) -> Part | None:
    """What ``7.up_proj.weight`` or ``gate_up_proj`` holds: ``("up", 7)``, ``("gate_up_proj", None)``."""
    if rest in FUSED + BIASES:
        return rest, None
    match = _ONE_EXPERT.match(rest)
    return (PARTS[match[2]], int(match[1])) if match and match[2] in PARTS else None


def _layer_problems(layer: int, found: dict[Part, StoredTensor], moe: MoEConfig, keep_fp8: bool) -> list[str]:
    """What is wrong with the expert tensors of a layer, in words; nothing for a sound one."""
    count, deep, wide = moe.num_experts, moe.hidden_size, moe.ffn_size
    expected: dict[Part, tuple[int, ...]] = {
        (part, expert): (deep, wide) if part == "down" else (wide, deep)
        for expert in range(count)
        for part in ("gate", "up", "down")
    }
    if any(part in FUSED for part, _ in found):
        expected = {("gate_up_proj", None): (count, 2 * wide, deep), ("down_proj", None): (count, deep, wide)}
        if moe.expert_bias:
            expected |= {(BIASES[0], None): (count, 2 * wide), (BIASES[1], None): (count, deep)}
    missing = [part if expert is None else f"expert {expert}'s {part}" for part, expert in expected.keys() - found]
    surplus = [found[part].name for part in found.keys() - expected]
    problems = [f"missing in layer {layer}: {some(missing)}"] if missing else []
    problems += [f"surplus {some(surplus)}"] if surplus else []
    for part in found.keys() & expected:
        name, shape = found[part].name, found[part].shape
        if shape != expected[part]:
            problems.append(f"{name} of shape {shape} must be {expected[part]}")
        problems += _dtype_problems(found[part], keep_fp8)
    return problems


def _dtype_problems(tensor: StoredTensor, keep_fp8: bool) -> list[str]:
    named = f"{tensor.name} of dtype {tensor.dtype} must be"
    if keep_fp8:
        return [] if tensor.scales is not None else [f"{named} {BLOCK_FP8} with scales to be kept as it is"]
    return [] if tensor.dtype in DTYPES or tensor.read_as is not None else [f"{named} one of {', '.join(DTYPES)}"]


def _slices(found: dict[Part, StoredTensor], ffn_size: int, layout: ExpertLayout) -> list[Matrices]:
    """This rank's slice of each of its experts, whose matrices, or scales of them, have ``ffn_size`` columns."""
    width = ffn_size // layout.tp
    return [_columns(_expert(found, expert, ffn_size), layout.tp_rank, width) for expert in _held(layout)]


def _held(layout: ExpertLayout) -> range:
    return range(layout.first_expert, layout.first_expert + layout.experts_local)


def _expert(found: dict[Part, StoredTensor], expert: int, ffn_size: int) -> Matrices:
    """One expert, of tensors of its own or of all experts."""
    if ("gate_up_proj", None) not in found:
        return found["gate", expert], found["up", expert], found["down", expert]
    gate_up, down = (found[part, None].of_expert(expert) for part in FUSED)
    return gate_up.part(slice(ffn_size)), gate_up.part(slice(ffn_size, None)), down


def _columns(expert: Sequence[StoredTensor], number: int, width: int) -> Matrices:
    """Slice ``number`` of an expert that is cut in slices of ``width`` columns of its hidden layer."""
    gate, up, down = expert
    own = slice(number * width, (number + 1) * width)
    return gate.part(own), up.part(own), down.part(ALL, own)


def _shards(module: str, experts: Sequence[Matrices], suffix: str = "") -> dict[str, LazyShard]:
    """Parameters of a module of that name."""
    gate_up, down = tuple((gate, up) for gate, up, _ in experts), tuple((down,) for _, _, down in experts)
    return {f"{module}.gate_up_proj{suffix}": LazyShard(gate_up), f"{module}.down_proj{suffix}": LazyShard(down)}


def _bias_shards(module: str, b1: StoredTensor, b2: StoredTensor, layout: ExpertLayout) -> dict[str, LazyShard]:
    """b2 is whole on every TP rank, the first of which adds it."""
    ffn_size = b1.shape[1] // 2
    width = ffn_size // layout.tp
    firsts = [start + layout.tp_rank * width for start in (0, ffn_size)]
    halves = LazyShard(
        tuple(
            tuple(b1.of_expert(expert).part(slice(first, first + width)) for first in firsts)
            for expert in _held(layout)
        )
    )
    whole = LazyShard(tuple((b2.of_expert(expert),) for expert in _held(layout)))
    return {f"{module}.{BIASES[0]}": halves, f"{module}.{BIASES[1]}": whole}


def _add_pieces(state: dict[str, Any], stored: Tensors, modules: dict[int, str], place: Place, config: Any) -> Place:
    """Add this rank's pieces of shared experts, which decode steps read in block FP8 beside the routed ones.

    Returns:
        The place as it is, or with shared experts outside of such steps where one is stored otherwise.
    """
    if not place.keep_fp8 or not place.shared_columns or place.shared_names is None:
        return place
    width, shape = moe_config(config).ffn_size // place.layout.tp, (shared_ffn_size(config), config.hidden_size)
    held, shards = held_pieces(place.layout, width, shape[0]), dict[str, LazyShard]()
    for module in modules.values():
        prefix = f"{module.rpartition('.')[0]}.{place.shared_names[0]}"
        names = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
        matrices = [stored[name] for name in names if name in stored]
        scales = [each.scales for each in matrices if each.scales is not None]
        if len(scales) < len(names) or [each.shape for each in matrices] != [shape, shape, shape[::-1]]:
            return replace(place, shared_columns=0, num_pieces=0)
        for kind, size, suffix in ((matrices, width, ""), (scales, width // FP8_BLOCK, SCALES)):
            shards |= _shards(f"{module}.pieces", [_columns(kind, number, size) for number in held], suffix)
    if held:
        state |= shards
    return place
