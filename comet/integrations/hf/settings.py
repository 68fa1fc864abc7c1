"""The settings of a model: the configuration, the defaults of generation and the tokenizer in its folder, arguments.

``load_pretrained`` takes some arguments of transformers' ``from_pretrained``, and refuses the others by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comet.capabilities import missing, refuse
from comet.config import require

ADAPTER = "adapter_config.json"
# Fields that transformers would make up where a configuration is cut off.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "vocab_size")
# Names of the number of experts and of their width, of which a configuration has the first that its class knows.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTHS = ("moe_intermediate_size", "intermediate_size")
FOLLOWED = ("subfolder", "variant", "attn_implementation", "output_loading_info", "trust_remote_code")
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")
IDLE = ("local_files_only", "low_cpu_mem_usage", "weights_only", "_fast_init")  # without effect on a local folder
LOADING = "in load_pretrained"


def read_config(folder: str | Path, changes: Mapping[str, Any] | None = None) -> Any:
    """The configuration in a model's folder, with other values of some fields."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    _refuse_adapter(path.parent)
    require(path.is_file(), f"folder={str(folder)!r} must hold a config.json")
    _require_sizes(path, read_settings(path))
    with explained(path):
        config, unknown = AutoConfig.from_pretrained(
            folder, local_files_only=True, return_unused_kwargs=True, **(changes or {})
        )
    names = ", ".join(unknown)
    require(not unknown, f"{names} must be arguments of load_pretrained or from_pretrained, or fields of {path}")
    return config.get_text_config()


def _require_sizes(path: Path, content: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless a configuration is one of a family with routed experts, and not cut off."""
    from transformers import CONFIG_MAPPING

    inner = content.get("text_config")
    content = inner if isinstance(inner, dict) else content  # A model that also sees or hears has several.
    family = content.get("model_type")
    known = isinstance(family, str) and family in CONFIG_MAPPING
    kind: Any = CONFIG_MAPPING[family] if known else object
    own: list[Any] = [next((name for name in names if hasattr(kind, name)), None) for names in (COUNTS, WIDTHS)]
    require(None not in own, f"model_type={family!r} must be one of transformers' families with routed experts")
    spelt = kind.attribute_map
    found = {spelt.get(name, name): value for name, value in content.items()}
    found.setdefault(spelt.get(own[0], own[0]), content.get("num_local_experts"))  # its name in all families
    given = {name: found.get(spelt.get(name, name)) for name in (*SIZES, *own)}
    missing = ", ".join(name for name, value in given.items() if not isinstance(value, int | list))
    require(not missing, f"{path} must hold whole numbers for {missing}, as that of a {family} model does")


def read_generation_config(folder: Path) -> Any:
    """The defaults of generation in a model's folder; ``None`` where it has none."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    end_ids(read_settings(path), str(path))
    with explained(path):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def open_tokenizer(setting: str, path: Path, end_token: str | None = None) -> Any:
    """Open the tokenizer in a folder, or a file ``tokenizer.json``; messages call it ``setting``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Without any of these files transformers hands out a tokenizer that knows no word.
    files = [path] if path.is_file() else [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    require(bool(files), f"{setting}={str(path)!r} must hold a tokenizer: one of {', '.join(TOKENIZER_FILES)}")
    try:
        if path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=end_token)
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizers raises this very class, and files of other shapes any other
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{setting}={str(path)!r} must hold a tokenizer that can be read: {said}") from error


def end_ids(settings: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens that end a sequence: ``eos_token_id`` of a configuration, which is a number or a list of them."""
    found = settings.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    usable = all(type(each) is int and each >= 0 for each in ids)  # True would be token 1
    require(usable, f"eos_token_id={found!r:.60} of {where} must be a token's number from 0 on, or a list of them")
    return frozenset(ids)


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``ValueError`` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise ValueError(f"{path} must be JSON, is it complete? {error}") from error
    require(isinstance(content, dict), f"{path} must hold settings by name, not {content!r:.40}")
    return dict(content)


@contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Name a file that transformers refuses."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path} has a value that transformers does not take: {said}") from error


def _refuse_adapter(folder: Path) -> None:
    """Raise ``ValueError`` for the folder of an adapter, which transformers would load with its base model."""
    path = folder / ADAPTER
    if path.is_file():
        base = read_settings(path).get("base_model_name_or_path")
        raise ValueError(
            f"folder={str(folder)!r} must hold a whole model, but is an adapter of {base!r} ({ADAPTER}): save the "
            "merged model (merge_and_unload), or load the base model and add the adapter (peft.PeftModel)"
        )


def context_of(config: Any) -> int:
    """Most tokens of a sequence: ``max_position_embeddings``, or more where RoPE scales the trained positions.

    Example: 40,960, and YaRN of factor 4 over 32,768 trained positions, as model cards add it: 131,072.
    """
    rope, given = getattr(config, "rope_parameters", None) or {}, int(config.max_position_embeddings)
    trained, factor = rope.get("original_max_position_embeddings") or given, rope.get("factor")
    return max(given, int(trained * factor)) if isinstance(factor, int | float) else given


def take_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments out of ``options``; what stays there is to change fields of the configuration."""
    refuse(LOADING, **{name: options.pop(name, None) for name in missing(LOADING)})
    given = {name: options.pop(name, None) for name in ("config", "generation_config", *FOLLOWED, *IDLE)}
    is_config = isinstance(given["config"], str | os.PathLike | None) or hasattr(given["config"], "model_type")
    require(is_config, f"config={given['config']!r:.60} must be a configuration of transformers, or the folder of one")
    defaults = given["generation_config"]
    rule = "must be a GenerationConfig of transformers"
    require(defaults is None or hasattr(defaults, "to_dict"), f"generation_config={defaults!r:.60} {rule}")
    return given


def device_of(device: Any, device_map: Any) -> Any:
    """``device``, or the only one that a ``device_map`` names."""
    if device_map is None:
        return device
    only = device_map.get("") if isinstance(device_map, Mapping) and len(device_map) == 1 else device_map
    several = only is None or isinstance(only, Mapping) or only in ("auto", "balanced", "sequential", "disk")
    rule = "must name one device: expert_budget keeps experts elsewhere, and make_expert_group shares them with ranks"
    require(not several and only != "balanced_low_0", f"device_map={device_map!r:.60} {rule}")
    only = f"cuda:{only}" if isinstance(only, int) else only
    require(device in (None, only), f"device={device} must be the one of device_map={device_map!r}, or be left out")
    return only
