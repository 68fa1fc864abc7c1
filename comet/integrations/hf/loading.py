"""Load a checkpoint folder as a model whose experts Comet runs, each rank reading only its part of them.

Published checkpoints hold three matrices per expert (``experts.7.gate_proj.weight``, Mixtral: ``w1``, ``w3``, ``w2``),
others one tensor per layer for all experts (``experts.gate_up_proj``, ``experts.down_proj``). Both are understood, and
nothing is read before everything about experts is checked.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from comet.capabilities import refuse
from comet.config import MOE_DTYPES, MoEConfig, ParallelConfig, check_removed, require
from comet.decode import held_pieces
from comet.experts.budget import most_tokens, plan_budget
from comet.experts.options import ExpertStoreKind, StoreOptions
from comet.integrations.hf import gpt_oss
from comet.integrations.hf.convert import Place
from comet.integrations.hf.families import PROJECTIONS, Family, blueprint, require_transformers
from comet.integrations.hf.naming import Destination, Naming, Part, Tensors
from comet.integrations.hf.settings import device_of, read_config, read_generation_config, take_arguments
from comet.integrations.hf.stored import (
    ALL,
    BIASES,
    BLOCK_FP8,
    DTYPES,
    FUSED,
    SCALES,
    LazyShard,
    StoredTensor,
    dequantized,
    holds_block_fp8,
    join_scales,
    open_checkpoint,
    several,
    some,
)
from comet.integrations.hf.stored_experts import open_stores, take_files
from comet.layer.group import ExpertGroup
from comet.quantization.formats import FP8_BLOCK, MXType

STORE_NAMES = {"host_cores", "expert_prefetch"}  # options that are not transformers'
# transformers leaves out what does not fit, and reports it: ``_make`` says so in our words.
REPORTED = dict(ignore_mismatched_sizes=True, output_loading_info=True)
logger = logging.getLogger(__name__)
# Gate, up and down of one expert, or of a slice of it; or both in turn, and down.
Matrices = tuple[StoredTensor, ...]


def load_pretrained(
    folder: str | Path,
    group: ExpertGroup | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    decode_tokens: int | None = None,
    keep_fp8: bool = False,
    expert_budget: float | None = None,
    expert_store: ExpertStoreKind = "host",
    host_budget: float | None = None,
    expert_dtype: MXType | None = None,
    **options: Any,
) -> Any:
    """Build a causal language model from a local folder, in evaluation mode, its experts sharded over a group.

    The model is made by transformers' own ``from_pretrained``; its experts are shards from the start, and of the
    checkpoint's expert tensors only this rank's slices are read. Everything else is on every rank. Block FP8 as
    DeepSeek-V3 publishes it (``weight`` with ``weight_scale_inv``) and MXFP4 as gpt-oss does are dequantised as they
    are read.

    Args:
        folder: Holds ``config.json`` and the weights as safetensors, experts one by one or fused.
        group: The ranks that share the experts, all of which load, and later take the same tokens; ``None``: this rank
            alone. They wait for each other only before they open the checkpoint, and once more with a budget.
        dtype: Of the model; ``None`` or ``auto``: the group's, or without a group that of ``config.json``.
        device: Where the model goes; ``None``: the group's, or without a group the CPU.
        decode_tokens: As of ``convert``; 16 by default with a budget, where more tokens stream their experts.
        keep_fp8: Keep the experts of a block FP8 checkpoint as they are stored, F/TP a multiple of 128: warp decode
            reads them so, with the shared expert where the checkpoint has that in block FP8, too, and the group's path
            gets the layer it is at dequantised. For inference.
        expert_budget: As those of ``GenerateConfig``, for inference and equal on all ranks, are this option,
            ``expert_store``, ``host_budget`` and ``expert_dtype``. Files must not change while experts stay in them.
        **options: ``host_cores`` and ``expert_prefetch``, with a budget, as those of ``generate``.
            Of ``from_pretrained``: ``config``, ``subfolder``, ``variant``, ``attn_implementation``,
            ``generation_config``, ``output_loading_info``, ``trust_remote_code``, ``device_map`` with one device. All
            others are new values of fields of the configuration.

    Raises:
        NotImplementedError: If an ``expert_budget`` comes with a group without warp decode, or ``expert_prefetch=True``
            with a ``file`` store or memory that cannot be pinned.
    """
    require_transformers()
    store = StoreOptions(expert_budget, expert_store, host_budget, expert_dtype, keep_fp8, **_taken_from(options))
    decode_tokens = most_tokens(store, decode_tokens, group)
    device = device_of(device, options.pop("device_map", None))
    given = take_arguments(options)
    folder = Path(folder) / (given["subfolder"] or "")
    config = _config(folder, given, options)
    stock = blueprint(config)
    family = Family.of(stock)
    is_fp8, no_fp8 = holds_block_fp8(config, may_be_mxfp4=family.interleaved), f"config.json of {folder} has no such"
    require(
        is_fp8 or not keep_fp8, f"keep_fp8=True must come with a block FP8 checkpoint: {no_fp8} quantization_config"
    )
    vars(config).pop("quantization_config", None)  # transformers would act
    dtype, device = _settings(config, group, dtype, device)
    parallel = group.parallel if group else ParallelConfig()
    budget = plan_budget(store, family.moe, len(family.experts), dtype, parallel)
    place = Place.create(family, group, decode_tokens, keep_fp8=keep_fp8, in_store=store.in_store)
    with ExitStack() as files:
        tensors = open_checkpoint(folder, files, given["variant"])
        state, place = state_of(tensors, stock, place, dtype, is_fp8=is_fp8)
        layers = {} if budget is None else take_files(state, family.experts, dtype, place.layout, keep_fp8=keep_fp8)
        made_of = dict(config=config, state_dict=state, dtype=dtype)
        model, report = _make(type(stock), place, folder, given, made_of)
        model.to(device)
        if budget is not None:
            open_stores(model, layers, budget, family.moe, dtype, device, group, files)
    return (model, report) if given["output_loading_info"] else model


def _taken_from(options: dict[str, Any]) -> dict[str, Any]:
    former = options.get("torch_dtype")
    require("torch_dtype" not in options, f"torch_dtype={former} must be given as dtype={former}")
    check_removed({"expert_policy"} & options.keys())
    return {name: options.pop(name) for name in STORE_NAMES & options.keys()}


def _config(folder: Path, given: dict[str, Any], changes: dict[str, Any]) -> Any:
    """The configuration that the model gets, a copy."""
    if hasattr(given["config"], "model_type"):
        require(not changes, f"{', '.join(changes)} must be set in config: with config= no argument changes its fields")
        config = copy.deepcopy(given["config"])
    else:
        config = read_config(given["config"] or folder, changes)
    own, file = getattr(config, "auto_map", None) or {}, getattr(config, "transformers_weights", None)
    if "AutoModelForCausalLM" in own:
        refuse("with auto_map in config.json", trust_remote_code=given["trust_remote_code"])
    refuse("in load_pretrained", transformers_weights=file)
    return config


def _settings(
    config: Any, group: ExpertGroup | None, dtype: Any, device: torch.device | str | None
) -> tuple[torch.dtype, torch.device]:
    """The dtype and device that a model of this configuration gets."""
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    if group is None:
        found, device = dtype or config.dtype or torch.float32, torch.device(device or "cpu")
        require(found in MOE_DTYPES, f"dtype={found} must be one of {MOE_DTYPES}")
        return found, device
    for name, value, of_group in (("dtype", dtype, group.workspace.shape.dtype), ("device", device, group.device)):
        same = value is None or str(value) in (str(of_group), str(of_group).split(":")[0])
        require(same, f"{name}={value} must be the group's {of_group}, or None")
    return group.workspace.shape.dtype, group.device


def _make(
    stock_class: Any, place: Place, folder: Path, given: dict[str, Any], made_of: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model, by ``from_pretrained``, and its report.

    What ``from_pretrained`` does with a folder's name is done here: remember it, and read defaults of generation.
    """
    if given["attn_implementation"] is not None:
        made_of["attn_implementation"] = given["attn_implementation"]

    class Sharded(stock_class):  # born with this rank's shards, so that the full experts never exist
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for name in place.family.experts:
                place.install(self, name, self.get_submodule(name))

    # transformers looks up by name how a class renames the tensors of its checkpoints.
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(Sharded, attribute, getattr(stock_class, attribute))
    model, report = Sharded.from_pretrained(None, **REPORTED, **made_of)
    problems = [
        f"{kind.removesuffix('_keys')}: {some([str(found) for found in report[kind]])}"
        for kind in ("missing_keys", "mismatched_keys", "error_msgs")
        if report.get(kind)
    ]
    require(not problems, f"checkpoint {folder} must hold the tensors of its model: {'; '.join(problems)}")
    if report["unexpected_keys"] and place.layout.rank == 0:
        words = "checkpoint %s holds tensors that the model has no place for, and they are left out: %s"
        logger.warning(words, folder, some(list(report["unexpected_keys"])))
    model.__class__ = stock_class
    model.name_or_path = model.config.name_or_path = str(folder)
    defaults = given["generation_config"] or read_generation_config(folder)
    if defaults is not None:
        model.generation_config = copy.deepcopy(defaults)
    place.prepare(model)
    if place.layout.world_size > 1 or place.keep_fp8:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)
    return model, report


def state_of(
    found: Tensors, stock: Any, place: Place, dtype: torch.dtype, *, is_fp8: bool
) -> tuple[dict[str, Any], Place]:
    """Return what the model is to load, lazily, with this rank's shards; and the place, where decode steps leave out
    shared experts that are not stored in block FP8 as the routed ones.

    Args:
        stock: The model without its values; tensors that it has no place for are left to transformers' report.
    """
    destination: Callable[[str], Any] = cache(Naming(stock, place.family.experts).destination)
    stored = {name: tensor for name, tensor in found.items() if destination(name)}
    if is_fp8:
        stored = join_scales(stored)
        tensors = _dequantised(stored, dtype, place)
    else:
        narrow = [f"{name} of dtype {tensor.dtype}" for name, tensor in stored.items()
                  if tensor.is_narrow and ".experts." not in name]  # fmt: skip
        rule = f"must be one of {', '.join(DTYPES)}: config.json has no quantization_config that explains them"
        require(not narrow, f"{some(narrow)} {rule}")
        tensors = stored
    if place.family.interleaved:
        tensors = gpt_oss.read_turned(tensors, dtype, gate_first=place.in_store)
    state = {name: tensor for name, tensor in found.items() if name not in stored}
    shared = _shared_experts({destination(name).target: tensor for name, tensor in stored.items()}, place)
    place = replace(place, shared_columns=0, num_pieces=0) if place.keep_fp8 and not shared else place
    return state | _shard_checkpoint(tensors, destination, place, shared), place


def _shared_experts(stored: Tensors, place: Place) -> dict[str, Matrices]:
    """The matrices of all shared experts, by the names of the routed ones; none if one is not in block FP8.

    Args:
        stored: By the names that tensors have in the model.
    """
    shared, found = place.family.shared, dict[str, Matrices]()
    if shared is None or not (place.keep_fp8 and place.shared_columns):
        return {}
    wide = shared.ffn_size, place.family.moe.hidden_size
    for module in place.family.experts:
        names = [f"{module.rpartition('.')[0]}.{shared.name}.{part}.weight" for part in PROJECTIONS]
        matrices = tuple(stored[name] for name in names if name in stored and stored[name].scales is not None)
        if [each.shape for each in matrices] != [wide, wide, wide[::-1]]:
            return {}
        found[module] = matrices
    return found


def _dequantised(stored: Tensors, dtype: torch.dtype, place: Place) -> Tensors:
    """Tensors that are dequantised as they are read, but for experts that are kept in block FP8."""
    if place.layout.rank == 0 and not place.keep_fp8:
        times = dtype.itemsize  # a weight is one byte in the checkpoint
        logger.warning(
            "block FP8 is dequantised to %s, %d times its size; experts are not with keep_fp8=True", dtype, times
        )
    return {
        name: tensor if place.keep_fp8 and ".experts." in name else dequantized(tensor, dtype)
        for name, tensor in stored.items()
    }


def _shard_checkpoint(
    tensors: Tensors, destination: Callable[[str], Any], place: Place, shared: dict[str, Matrices]
) -> dict[str, Any]:
    """The tensors that are no experts', and this rank's shards of those that are, all of them checked.

    Behind shards of experts that are kept in block FP8 come this rank's pieces of ``shared`` experts.
    """
    moe, surplus = place.family.moe, []
    layers: dict[str, dict[Part, StoredTensor]] = {module: {} for module in place.family.experts}
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own: Destination = destination(name)
        if own.experts is None:
            state[name] = tensor.copied()
        elif own.part is None or own.part in layers[own.experts]:
            surplus.append(name)
        else:
            layers[own.experts][own.part] = tensor
    problems = [f"surplus {some(surplus)}"] if surplus else []
    for module, found in layers.items():
        problems += _layer_problems(module, found, moe, place.keep_fp8)
    require(not problems, f"expert tensors of the checkpoint must be complete and no more: {several(problems)}")
    for module, found in layers.items():
        pieces = shared.get(module, ())
        state |= _shards(module, _slices(found, moe.ffn_size, place, pieces), is_transposed=place.in_turn)
        if place.keep_fp8:
            scales = {part: tensor.scales for part, tensor in found.items() if tensor.scales is not None}
            pieces = tuple(each.scales for each in pieces if each.scales is not None)
            state |= _shards(module, _slices(scales, moe.ffn_size // FP8_BLOCK, place, pieces), SCALES)
        if moe.expert_bias:
            biases: dict[Part, StoredTensor] = {(name, None): found[f"{name}_bias", None] for name in FUSED}
            state |= _shards(module, _slices(biases, moe.ffn_size, place), "_bias")
    return state


def _layer_problems(module: str, found: dict[Part, StoredTensor], moe: MoEConfig, keep_fp8: bool) -> list[str]:
    """Say what is wrong with the expert tensors of a layer; nothing for a sound one."""
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
    problems = [f"missing in {module}: {some(missing)}"] if missing else []
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


def _slices(found: dict[Part, StoredTensor], ffn_size: int, place: Place, shared: Matrices = ()) -> list[Matrices]:
    """Return this rank's slice of each of its experts, then its pieces of a shared one.

    Their matrices, or the scales of these, have ``ffn_size`` columns.
    """
    layout, width = place.layout, ffn_size // place.layout.tp
    held = range(layout.first_expert, layout.first_expert + layout.experts_local)
    pieces = held_pieces(layout, width, shared[0].shape[0]) if shared else ()
    experts = (_expert(found, expert, ffn_size, in_turn=place.in_turn) for expert in held)
    own = [_columns(expert, layout.tp_rank, width) for expert in experts]
    return own + [_columns(shared, number, width) for number in pieces]


def _expert(found: dict[Part, StoredTensor], expert: int, ffn_size: int, *, in_turn: bool) -> Matrices:
    """One expert, of tensors of its own or of all experts."""
    if ("gate_up_proj", None) not in found:
        return found["gate", expert], found["up", expert], found["down", expert]
    gate_up, down = (found[part, None].of_expert(expert) for part in FUSED)
    return (gate_up, down) if in_turn else (gate_up.part(slice(ffn_size)), gate_up.part(slice(ffn_size, None)), down)


def _columns(expert: Sequence[StoredTensor], number: int, width: int) -> Matrices:
    """Slice ``number`` of an expert, or of its biases, cut in slices of ``width`` columns of its hidden layer."""
    *gate_up, down = expert
    own, is_bias = slice(number * width, (number + 1) * width), len(down.shape) == 1  # b2 is whole on every TP rank
    height = 2 * width // len(gate_up)  # twice the width where gate and up are in turn
    rows = (part.part(slice(number * height, (number + 1) * height)) for part in gate_up)
    return *rows, down if is_bias else down.part(ALL, own)


def _shards(
    module: str, experts: Sequence[Matrices], suffix: str = "", *, is_transposed: bool = False
) -> dict[str, LazyShard]:
    parts = tuple(tuple(gate_up) for *gate_up, _ in experts), tuple((down,) for *_, down in experts)
    return {f"{module}.{name}{suffix}": LazyShard(part, is_transposed) for name, part in zip(FUSED, parts, strict=True)}
