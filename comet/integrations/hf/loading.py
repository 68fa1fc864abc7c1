"""Load a checkpoint folder as a model whose experts Comet runs, each rank reading only its part of them."""

from __future__ import annotations

import logging
import math
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comet.config import MOE_DTYPES, require
from comet.decode.runners import DECODE_TOKENS
from comet.experts import CACHED_DECODE_TOKENS
from comet.experts.budget import ExpertBudget, ExpertStoreKind
from comet.group import ExpertGroup
from comet.integrations.hf.block_fp8 import check_wide, dequantized, is_block_fp8, join_scales
from comet.integrations.hf.checkpoint import LazyShard, shard_checkpoint
from comet.integrations.hf.convert import Place, keep_from_saving
from comet.integrations.hf.families import (
    check_family,
    moe_config,
    read_config,
    require_transformers,
    shared_ffn_size,
    stock_experts,
)
from comet.integrations.hf.fp8_shared import has_fp8_pieces, piece_shards
from comet.integrations.hf.stored import StoredTensor, open_checkpoint, some
from comet.integrations.hf.stored_experts import open_stores, take_files
from comet.quantize import MXType, StoredType

logger = logging.getLogger(__name__)

# transformers leaves out what does not fit, and reports it: ``_check_report`` says so in our words.
REPORTED = dict(ignore_mismatched_sizes=True, output_loading_info=True)


def load_pretrained(
    folder: str | Path,
    group: ExpertGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    decode_tokens: int | None = None,
    keep_fp8: bool = False,
    expert_budget: float | None = None,
    expert_store: ExpertStoreKind = "host",
    host_budget: float | None = None,
    expert_dtype: MXType | None = None,
    **options: Any,
) -> Any:
    """Build a causal language model from a local folder, with its experts converted and sharded over a group.

    The model is made by transformers' own ``from_pretrained``; its experts are shards from the start, and of the
    checkpoint's expert tensors only this rank's slices are read. Everything else is on every rank.

    Block FP8 as DeepSeek-V3 publishes it (``weight`` beside ``weight_scale_inv``) is dequantised as it is read.

    Args:
        folder: Holds ``config.json`` and the weights as safetensors, experts one by one or fused.
        group: The ranks that share the experts, all of which load; ``None``: this rank alone. They wait for each other
            only before they open the checkpoint.
        dtype: Of the model; ``None``: the group's, or without a group the checkpoint's.
        device: Where the model goes; ``None``: the group's, or without a group the CPU.
        decode_tokens: Most tokens of one call that take warp decode, ``None``: 64, or 16 with a budget; more take the
            group's path, or with a budget stream their experts.
        keep_fp8: Keep the experts of a block FP8 checkpoint as they are stored, F/TP a multiple of 128: warp decode
            reads them so, with the shared expert where the checkpoint has that in block FP8, too, and the group's path
            gets the layer it is at dequantised. For inference.
        expert_budget: Share of all experts (up to 1), or bytes (above 1), that the device holds; the others stay in the
            store and come when a token needs them. Experts never go to the device as a whole. For inference on one
            rank. ``None``: all experts are on the device.
        expert_store: ``host``: all experts are read into host memory, one by one; ``file``: they stay in the folder's
            files, which must not change.
        host_budget: With ``file``: share of all experts, or bytes, that host memory holds.
        expert_dtype: ``mxfp8`` or ``mxfp4``: quantise each expert as it is read into host memory, D and F multiples of
            32; a budget in bytes then holds about twice or four times the experts that it holds in bfloat16. ``None``:
            as the model is, or in block FP8 with ``keep_fp8``.
        **options: ``expert_policy``, with a budget, as ``generate.expert_policy``. All others are passed on to
            ``from_pretrained``, such as ``attn_implementation``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: If the family, activation, a quantisation or the group does not fit, or tensors are missing,
            superfluous or of a wrong shape; everything about experts is known before anything is read. If a budget is
            too small, or a file changes while it is read.
        NotImplementedError: If an ``expert_budget`` comes with a group of several ranks, or quantised experts with a
            ``file`` store or memory that cannot be pinned.
        UnavailableError: If transformers is missing.
    """
    require_transformers()
    in_store = _is_in_store(expert_budget, expert_store, host_budget)
    stored, policy = _stored_as(expert_dtype, in_store, keep_fp8), _policy_of(options, in_store)
    if decode_tokens is None:
        decode_tokens = CACHED_DECODE_TOKENS if in_store else DECODE_TOKENS
    _check_store(in_store, group, decode_tokens, expert_store, stored)
    folder = Path(folder)
    config, dtype, device = _settings(folder, group, dtype, device)
    is_fp8 = _take_block_fp8(config, folder, keep_fp8)
    place = Place.create(config, group, decode_tokens, keep_fp8=keep_fp8, in_store=in_store)
    stock_class, modules = _blueprint(config)
    sizes = moe_config(config), len(modules), dtype
    stores: dict[str, Any] = dict(store=expert_store, host_budget=host_budget, stored=stored, policy=policy)
    budget = None if expert_budget is None else ExpertBudget.create(expert_budget, *sizes, **stores)
    with ExitStack() as files:
        tensors = _wanted(open_checkpoint(folder, files), stock_class)
        state, place = _state_of(tensors, modules, place, config, dtype if is_fp8 else None)
        layers = {} if budget is None else take_files(state, modules, keep_fp8=keep_fp8)
        model, report = _sharded_class(stock_class, place).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, **REPORTED, **options
        )
        model = _finish(model, report, stock_class, folder, place).to(device)
        if budget is not None:
            open_stores(model, layers, budget, dtype, device, files)
    return model


def _state_of(
    tensors: dict[str, StoredTensor], modules: dict[int, str], place: Place, config: Any, fp8_as: torch.dtype | None
) -> tuple[dict[str, Any], Place]:
    """What the model is to load, lazily, this rank's shards among it; and the place, as ``_with_fp8_pieces`` has it."""
    if fp8_as is None:
        check_wide({name: tensor for name, tensor in tensors.items() if ".experts." not in name})
    else:
        tensors = _read_fp8(tensors, fp8_as, place)
        place = _with_fp8_pieces(place, tensors, modules, config)
    state = shard_checkpoint(tensors, modules, moe_config(config), place.layout, keep_fp8=place.keep_fp8)
    state |= _piece_shards(place, tensors, modules, config)
    _log_bytes(state, tensors, place)
    return state, place


def _settings(
    folder: Path, group: ExpertGroup | None, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[Any, torch.dtype, torch.device]:
    """The checked configuration of a folder, and the dtype and device its model gets."""
    config = read_config(folder)
    check_family(config)
    if group is None:
        dtype, device = dtype or config.dtype or torch.float32, torch.device(device or "cpu")
        require(dtype in MOE_DTYPES, f"dtype={dtype} must be one of {MOE_DTYPES}")
        return config, dtype, device
    for name, value, of_group in (("dtype", dtype, group.workspace.shape.dtype), ("device", device, group.device)):
        same = value is None or str(value) in (str(of_group), str(of_group).split(":")[0])
        require(same, f"{name}={value} must be the group's {of_group}, or None")
    return config, group.workspace.shape.dtype, group.device


def _is_in_store(expert_budget: float | None, expert_store: ExpertStoreKind, host_budget: float | None) -> bool:
    alone = expert_store == "host" and host_budget is None
    require(
        alone or expert_budget is not None,
        "expert_budget=None must be a share or bytes with an expert_store='file' or a host_budget",
    )
    return expert_budget is not None


def _policy_of(options: dict[str, Any], in_store: bool) -> str:
    """Take whose slot a missing expert takes out of the options."""
    policy = options.pop("expert_policy", "lru")
    require(in_store or policy == "lru", f"expert_policy={policy!r} must come with an expert_budget")
    return policy


def _stored_as(expert_dtype: MXType | None, in_store: bool, keep_fp8: bool) -> StoredType | None:
    """What experts in a store are quantised to."""
    require(in_store or expert_dtype is None, f"expert_dtype={expert_dtype} must come with an expert_budget")
    require(not keep_fp8 or expert_dtype is None, f"expert_dtype={expert_dtype} must be None with keep_fp8=True")
    return "fp8" if keep_fp8 else expert_dtype


def _check_store(
    in_store: bool,
    group: ExpertGroup | None,
    decode_tokens: int,
    expert_store: ExpertStoreKind,
    stored: StoredType | None,
) -> None:
    """Raise ``NotImplementedError`` or ``ValueError`` for what a store does not go with, where there is one."""
    if not in_store:
        return
    if group is not None and group.parallel.world_size > 1:
        raise NotImplementedError("expert_budget is for one rank: leave ep and tp of the group at 1")
    if expert_store == "file" and stored is not None:
        raise NotImplementedError(f"expert_store='file' does not bring experts in {stored} yet: use 'host'")
    require(decode_tokens >= 1, f"decode_tokens={decode_tokens} must be at least 1 with an expert_budget")


def _take_block_fp8(config: Any, folder: Path, keep_fp8: bool) -> bool:
    """Whether the checkpoint is block FP8, which its configuration does not say any more: transformers would act."""
    found = is_block_fp8(config)
    require(
        found or not keep_fp8,
        f"keep_fp8=True must come with a block FP8 checkpoint: config.json of {folder} has no quantization_config",
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


def _blueprint(config: Any) -> tuple[type[nn.Module], dict[int, str]]:
    """The model's class, and by layer the names of its experts modules; allocates nothing."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = {}
    for name in stock_experts(model):
        layer = re.search(r"\blayers\.(\d+)\.", name)
        assert layer is not None, f"the experts module {name} is in no layer"
        modules[int(layer[1])] = name
    return type(model), modules


def _wanted(tensors: dict[str, StoredTensor], model_class: Any) -> dict[str, StoredTensor]:
    """Without the tensors that published checkpoints hold beyond the model (DeepSeek-V3's prediction layer)."""
    patterns = model_class._keys_to_ignore_on_load_unexpected or ()
    return {
        name: tensor for name, tensor in tensors.items() if not any(re.search(pattern, name) for pattern in patterns)
    }


def _sharded_class(stock_class: Any, place: Place) -> Any:
    """The model's class, but born with this rank's shards, so that the full experts never exist."""

    class Sharded(stock_class):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for name, experts in stock_experts(self).items():
                place.install(self, name, experts)

    # transformers looks up by name how a class renames the tensors of its checkpoints.
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(Sharded, attribute, getattr(stock_class, attribute))
    return Sharded


def _log_bytes(state: dict[str, Any], tensors: dict[str, StoredTensor], place: Place) -> None:
    mine = sum(shard.num_bytes for shard in state.values() if isinstance(shard, LazyShard))
    logger.info(
        "rank %d reads %.3f GB of %.3f GB of experts, and %d other tensors",
        place.layout.rank,
        mine / 1e9,
        mine * place.layout.world_size / 1e9,
        sum(".experts." not in name for name in tensors),
    )


def _check_report(report: dict[str, Any], folder: Path) -> None:
    """Raise ``ValueError`` naming every tensor that transformers could not place."""
    problems = [
        f"{kind.removesuffix('_keys')}: {some([str(found) for found in report[kind]])}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if report.get(kind)
    ]
    require(not problems, f"checkpoint {folder} must hold the tensors of its model: {'; '.join(problems)}")


def _finish(model: Any, report: dict[str, Any], stock_class: type[nn.Module], folder: Path, place: Place) -> Any:
    """What ``from_pretrained`` does with a folder's name: remember it, and read the generation defaults."""
    from transformers import GenerationConfig

    _check_report(report, folder)
    model.__class__ = stock_class
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    keep_from_saving(model, place.layout, keep_fp8=place.keep_fp8, in_store=place.in_store)
    if place.layout.world_size > 1 or place.keep_fp8:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)
    return model
