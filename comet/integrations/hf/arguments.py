"""The arguments of transformers' ``from_pretrained`` that ``load_pretrained`` takes; it refuses the others by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from comet.capabilities import missing, refuse
from comet.config import require

FOLLOWED = ("subfolder", "variant", "attn_implementation", "output_loading_info", "trust_remote_code")
IDLE = ("local_files_only", "low_cpu_mem_usage", "weights_only", "_fast_init")  # without effect on a local folder
LOADING = "in load_pretrained"


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
