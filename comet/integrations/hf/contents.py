"""What a rank's model loads of a checkpoint folder, each tensor read, and made wide, when it is asked for."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from comet.config import require
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.checkpoint import LazyShard, shard_checkpoint
from comet.integrations.hf.convert import Place
from comet.integrations.hf.families import moe_config, shared_ffn_size
from comet.integrations.hf.fp8.blocks import check_wide, dequantized, is_block_fp8, join_scales
from comet.integrations.hf.fp8.shared import has_fp8_pieces, piece_shards
from comet.integrations.hf.stored import StoredTensor

logger = logging.getLogger(__name__)


def state_of(
    tensors: dict[str, StoredTensor],
    modules: dict[int, str],
    place: Place,
    config: Any,
    dtype: torch.dtype,
    *,
    is_fp8: bool,
) -> tuple[dict[str, Any], Place]:
    """What the model is to load, lazily, this rank's shards among it; and the place, as ``_with_fp8_pieces`` has it."""
    if is_fp8:
        tensors = _read_fp8(tensors, dtype, place)
        place = _with_fp8_pieces(place, tensors, modules, config)
    else:
        check_wide({name: tensor for name, tensor in tensors.items() if ".experts." not in name})
    if place.family == gpt_oss.FAMILY:
        tensors = gpt_oss.read_laid_out(tensors, dtype)
    state = shard_checkpoint(tensors, modules, moe_config(config), place.layout, keep_fp8=place.keep_fp8)
    state |= _piece_shards(place, tensors, modules, config)
    _log_bytes(state, tensors, place)
    return state, place


def holds_block_fp8(config: Any) -> bool:
    """Whether a configuration says that its checkpoint holds block FP8; gpt-oss's may be MXFP4, as its tensors tell."""
    if config.model_type == gpt_oss.FAMILY:
        gpt_oss.check_quantisation(config)
        return False
    return is_block_fp8(config)


def take_block_fp8(config: Any, folder: Path, keep_fp8: bool) -> bool:
    """Whether the checkpoint is block FP8, and let its configuration say no more of it: transformers would act."""
    found = holds_block_fp8(config)
    require(
        found or not keep_fp8,
        f"keep_fp8=True must come with a block FP8 checkpoint: config.json of {folder} has no such quantization_config",
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return found


def _read_fp8(tensors: dict[str, StoredTensor], dtype: torch.dtype, place: Place) -> dict[str, StoredTensor]:
    """The tensors with their scales, dequantised as they are read, but for experts that are kept."""
    found = {}
    for name, tensor in join_scales(tensors).items():
        is_kept = place.keep_fp8 and ".experts." in name
        found[name] = tensor if is_kept else dequantized(tensor, dtype)
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


def _with_fp8_pieces(place: Place, tensors: dict[str, StoredTensor], modules: dict[int, str], config: Any) -> Place:
    """The place as it is, or with shared experts outside of decode steps that are to read FP8, where these are not."""
    shape = shared_ffn_size(config), config.hidden_size
    fits = place.shared_names is None or has_fp8_pieces(tensors, modules, place.shared_names[0], shape)
    return place if fits or not place.keep_fp8 else replace(place, shared_columns=0, num_pieces=0)


def _piece_shards(
    place: Place, tensors: dict[str, StoredTensor], modules: dict[int, str], config: Any
) -> dict[str, LazyShard]:
    """This rank's pieces of shared experts that decode steps read in block FP8."""
    if not place.keep_fp8 or not place.num_pieces or place.shared_names is None:
        return {}
    width = moe_config(config).ffn_size // place.layout.tp
    found: dict[str, LazyShard] = {}
    for module in modules.values():
        found |= piece_shards(tensors, module, place.shared_names[0], place.layout, width)
    return found


def wanted(tensors: dict[str, StoredTensor], model_class: Any) -> dict[str, StoredTensor]:
    """Without the tensors that published checkpoints hold beyond the model (DeepSeek-V3's prediction layer)."""
    patterns = model_class._keys_to_ignore_on_load_unexpected or ()
    return {
        name: tensor for name, tensor in tensors.items() if not any(re.search(pattern, name) for pattern in patterns)
    }


def _log_bytes(state: dict[str, Any], tensors: dict[str, StoredTensor], place: Place) -> None:
    mine = sum(shard.num_bytes for shard in state.values() if isinstance(shard, LazyShard))
    logger.info(
        "rank %d reads %.3f GB of %.3f GB of experts, and %d other tensors",
        place.layout.rank,
        mine / 1e9,
        mine * place.layout.world_size / 1e9,
        sum(".experts." not in name for name in tensors),
    )
