"""Load a checkpoint folder as a model whose experts Comet runs, each rank reading only its part of them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comet.config import MOE_DTYPES, ParallelConfig, require
from comet.experts.budget import ExpertStoreKind, StoreOptions
from comet.integrations.hf.checkpoint import holds_block_fp8, state_of
from comet.integrations.hf.convert import Place
from comet.integrations.hf.families import check_family, moe_config, read_config, require_transformers, stock_experts
from comet.integrations.hf.stored import StoredTensor, open_checkpoint, some
from comet.integrations.hf.stored_experts import open_stores, take_files
from comet.layer.group import ExpertGroup
from comet.quantization.formats import MXType

STORE_NAMES = {"expert_policy", "host_cores", "expert_prefetch"}  # options that are not transformers'
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

    Block FP8 as DeepSeek-V3 publishes it (``weight`` beside ``weight_scale_inv``) and MXFP4 as gpt-oss does are
    dequantised as they are read.

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
        expert_budget: Share of this rank's experts (up to 1), or bytes (above 1), that its device holds; the others
            stay in the store and come when a token needs them. Experts never go to the device as a whole. For
            inference; equal on all ranks, which then wait for each other once more when all have read their experts.
            ``None``: all experts are on the device.
        expert_store: ``host``: all experts are read into host memory, one by one; ``file``: they stay in the folder's
            files, which must not change.
        host_budget: With ``file``: share of all experts, or bytes, that host memory holds.
        expert_dtype: ``mxfp8`` or ``mxfp4``: quantise each expert as it is read into host memory, D and F multiples of
            32; a budget in bytes then holds about twice or four times the experts that it holds in bfloat16. What was
            MXFP4 in the folder is the same numbers in ``mxfp4``. ``None``: as the model is, or in block FP8 with
            ``keep_fp8``.
        **options: ``expert_policy``, ``host_cores`` and ``expert_prefetch``, with a budget, as those of ``generate``.
            All others are passed on to ``from_pretrained``, such as ``attn_implementation``.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: If the family, activation, a quantisation or the group does not fit, or tensors are missing,
            superfluous or of a wrong shape; everything about experts is known before anything is read. If a budget is
            too small, too large for the device with the fewest experts that serve a token, or a file changes while it
            is read.
        NotImplementedError: If an ``expert_budget`` comes with a group over several nodes, or ``expert_prefetch=True``
            with a ``file`` store or memory that cannot be pinned.
        UnavailableError: If transformers is missing.
    """
    require_transformers()
    others = {name: options.pop(name) for name in STORE_NAMES & options.keys()}
    store = StoreOptions(expert_budget, expert_store, host_budget, expert_dtype, keep_fp8, **others)
    decode_tokens = store.most_tokens(decode_tokens, group)
    folder = Path(folder)
    config, dtype, device = _settings(folder, group, dtype, device)
    is_fp8 = _take_block_fp8(config, folder, keep_fp8)
    place = Place.create(config, group, decode_tokens, keep_fp8=keep_fp8, in_store=store.in_store)
    stock_class, modules = _blueprint(config)
    parallel = ParallelConfig() if group is None else group.parallel
    budget = store.budget(moe_config(config), len(modules), dtype, parallel)
    with ExitStack() as files:
        tensors = _wanted(open_checkpoint(folder, files), stock_class)
        state, place = state_of(tensors, modules, place, config, dtype, is_fp8=is_fp8)
        layers = {} if budget is None else take_files(state, modules, dtype, place.layout, keep_fp8=keep_fp8)
        given = dict(config=config, state_dict=state, dtype=dtype, **options)
        model = _make(stock_class, place, folder, given).to(device)
        if budget is not None:
            open_stores(model, layers, budget, store, dtype, device, group, files)
    return model


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


def _take_block_fp8(config: Any, folder: Path, keep_fp8: bool) -> bool:
    """Whether the checkpoint is block FP8, and let its configuration say no more of it: transformers would act."""
    found = holds_block_fp8(config)
    require(
        found or not keep_fp8,
        f"keep_fp8=True must come with a block FP8 checkpoint: config.json of {folder} has no such quantization_config",
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return found


def _wanted(tensors: dict[str, StoredTensor], model_class: Any) -> dict[str, StoredTensor]:
    """Without the tensors that published checkpoints hold beyond the model (DeepSeek-V3's prediction layer)."""
    patterns = model_class._keys_to_ignore_on_load_unexpected or ()
    return {
        name: tensor for name, tensor in tensors.items() if not any(re.search(pattern, name) for pattern in patterns)
    }


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


def _check_report(report: dict[str, Any], folder: Path) -> None:
    """Raise ``ValueError`` naming every tensor that transformers could not place."""
    problems = [
        f"{kind.removesuffix('_keys')}: {some([str(found) for found in report[kind]])}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if report.get(kind)
    ]
    require(not problems, f"checkpoint {folder} must hold the tensors of its model: {'; '.join(problems)}")


def _make(stock_class: type[nn.Module], place: Place, folder: Path, given: dict[str, Any]) -> Any:
    """The model, by ``from_pretrained``, and what that does with a folder's name: remember it, and read defaults."""
    from transformers import GenerationConfig

    model, report = _sharded_class(stock_class, place).from_pretrained(None, **REPORTED, **given)
    _check_report(report, folder)
    model.__class__ = stock_class
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    place.keep_from_saving(model)
    if place.layout.world_size > 1 or place.keep_fp8:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)
    return model
