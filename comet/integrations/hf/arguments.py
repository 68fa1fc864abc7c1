"""The arguments of transformers' ``from_pretrained`` that ``load_pretrained`` takes; it refuses the others by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from comet.config import require

FOLLOWED = ("subfolder", "variant", "attn_implementation", "output_loading_info", "trust_remote_code")
IDLE = ("local_files_only", "low_cpu_mem_usage", "weights_only", "_fast_init")  # without effect on a local folder
# Arguments that must be None, or as NEUTRAL says, by the reason; else NEUTRAL is False.
REFUSED = {
    "the folder is on this machine: get it there first, as by huggingface_hub.snapshot_download":
        "cache_dir force_download proxies token revision code_revision mirror tqdm_class",
    "the weights are the safetensors of the folder, read as they are": "state_dict gguf_file use_safetensors "
        "key_mapping from_tf from_flax ignore_mismatched_sizes disable_mmap",
    "the model goes to one device; expert_budget keeps experts in host memory or in files":
        "max_memory offload_folder offload_buffers offload_state_dict",
    "ranks share experts by load_pretrained(folder, make_expert_group(...))":
        "distributed_config device_mesh tp_plan tp_size",
    "Comet computes the experts": "experts_implementation use_kernels kernel_config allow_all_kernels fusion_config",
    "config.json says how the folder is quantised; see keep_fp8 and expert_dtype": "quantization_config",
    "load the base model, and add its adapter to that": "adapter_kwargs adapter_name",
}  # fmt: skip
NEUTRAL = {"revision": "main", "use_safetensors": True, "experts_implementation": "comet", "adapter_name": "default"}


def take_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments out of ``options``; what stays there is to change fields of the configuration.

    Raises:
        ValueError: If one has to be left out.
    """
    for reason, names in REFUSED.items():
        for name in names.split():
            value = options.pop(name, None)
            require(
                value is None or value == NEUTRAL.get(name, False), f"{name}={value!r:.60} must be left out: {reason}"
            )
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
