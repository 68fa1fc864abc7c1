"""The folder that a model comes from: a checkpoint of the training job, or a Hugging Face model.

``model_of`` finds the shape without reading a weight, so the command line knows it before any rank starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comet.config import MoEConfig, require
from comet.models.config import NUM_BYTE_VALUES, ModelConfig
from comet.training.checkpoint_folder import Checkpoint, named_checkpoints

HF_CONFIG = "config.json"
HF_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A model on disk."""

    path: Path  # the checkpoint or the Hugging Face folder
    checkpoint: Checkpoint | None  # None for a Hugging Face folder
    skipped: tuple[str, ...] = ()  # why newer checkpoints were passed over


def find_source(source: str | None) -> Source:
    """Find the model that ``generate.source`` names."""
    require(source is not None, "generate.source must be given: a checkpoint, its output folder or a model folder")
    root = Path(str(source))
    kinds = "a checkpoint, an output folder of 'comet train' or a folder of a Hugging Face model"
    require(root.is_dir(), f"generate.source={source!r} must be an existing folder: {kinds}")
    if is_hf_folder(source) or (root / HF_ADAPTER).is_file():  # reading the configuration refuses an adapter
        return Source(root, None)
    found, skipped = named_checkpoints("generate.source", str(source))
    require(bool(found), f"generate.source={source!r} must be {kinds}; {'; '.join(skipped) or 'it holds neither'}")
    return Source(found[0].path, found[0], tuple(skipped))


def is_hf_folder(source: str | None) -> bool:
    return source is not None and (Path(source) / HF_CONFIG).is_file()


def model_of(source: Source) -> ModelConfig:
    """The shape of the model."""
    if source.checkpoint is None:
        return _hf_model(source.path)
    fields = nested(source.checkpoint.model)
    try:  # without a capacity, of which one text would take the experts of another
        return ModelConfig(**{**fields, "moe": MoEConfig(**fields["moe"] | {"capacity_factor": None})})
    except (KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {source.path} holds a model this version does not know: {error}") from error


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Undo the dots: ``{"a": 1, "moe.b": 2, "moe": {"c": 3}}`` becomes ``{"a": 1, "moe": {"b": 2, "c": 3}}``."""
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        outer, _, inner = str(name).partition(".")
        part = {inner: value} if inner else value
        known = tree.get(outer)
        tree[outer] = {**known, **part} if isinstance(part, dict) and isinstance(known, dict) else part
    return {name: nested(value) if isinstance(value, dict) else value for name, value in tree.items()}


def _hf_model(folder: Path) -> ModelConfig:
    """The closest GPT: what the launcher needs to place experts and count bytes."""
    from comet.integrations.hf.families import Family, require_transformers
    from comet.integrations.hf.settings import context_of, read_config
    from comet.integrations.hf.stored import holds_block_fp8

    require_transformers()
    config = read_config(folder)
    family = Family.of_config(config)
    holds_block_fp8(config, may_be_mxfp4=family.interleaved)  # refuses other quantisations before a rank starts
    return ModelConfig(
        name=str(config.model_type),
        vocab_size=max(config.vocab_size, NUM_BYTE_VALUES),
        context=context_of(config),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None),
        dense_layers=config.num_hidden_layers - len(family.experts),
        moe=replace(family.moe, shared_ffn_size=family.shared_ffn_size),
    )
