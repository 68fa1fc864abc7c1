"""The arguments of transformers' ``from_pretrained`` that ``load_pretrained`` takes; it refuses the others by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from comet.config import require

# Arguments without an effect on a local folder of safetensors, whatever their value.
IDLE = ("local_files_only", "low_cpu_mem_usage", "weights_only", "_fast_init")
# Arguments that must be None, or as NEUTRAL says, by the reason; else NEUTRAL is False.
REFUSED = {
    "load_pretrained reads a folder of this machine: get it there first, as by huggingface_hub.snapshot_download": (
        "cache_dir", "force_download", "proxies", "token", "revision", "code_revision", "mirror", "tqdm_class",
    ),
    "the weights are the safetensors of the folder, read as they are": (
        "state_dict", "gguf_file", "use_safetensors", "key_mapping", "from_tf", "from_flax", "ignore_mismatched_sizes",
        "disable_mmap",
    ),
    "the model goes to one device; expert_budget keeps experts in host memory or in files": (
        "max_memory", "offload_folder", "offload_buffers", "offload_state_dict",
    ),
    "ranks share the experts of a group: load_pretrained(folder, make_expert_group(...))": (
        "distributed_config", "device_mesh", "tp_plan", "tp_size",
    ),
    "Comet computes the experts": (
        "experts_implementation", "use_kernels", "kernel_config", "allow_all_kernels", "fusion_config",
    ),
    "Comet reads the quantisation of config.json; see keep_fp8 and expert_dtype": ("quantization_config",),
    "load the base model, and add its adapter to that": ("adapter_kwargs", "adapter_name"),
}  # fmt: skip
NEUTRAL = {"revision": "main", "use_safetensors": True, "experts_implementation": "comet", "adapter_name": "default"}
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")  # values of device_map for several devices


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedArguments:
    """The arguments of ``from_pretrained`` that ``load_pretrained`` follows."""

    config: Any = None  # the configuration, or the folder of one; None: that of the model's folder
    subfolder: str = ""
    variant: str | None = None
    generation_config: Any = None
    output_loading_info: bool = False
    attn_implementation: Any = None
    trust_remote_code: bool | None = None

    @classmethod
    def take(cls, options: dict[str, Any]) -> PretrainedArguments:
        """Take the arguments out of ``options``; what stays there is to change fields of the configuration.

        Raises:
            ValueError: If one has to be left out.
        """
        for reason, names in REFUSED.items():
            for name in names:
                value = options.pop(name, None)
                require(
                    value is None or value == NEUTRAL.get(name, False),
                    f"{name}={value!r:.60} must be left out: {reason}",
                )
        for name in IDLE:
            options.pop(name, None)
        found = {each.name: options.pop(each.name) for each in fields(cls) if each.name in options}
        given = cls(**{name: value for name, value in found.items() if value is not None})
        known = isinstance(given.config, str | os.PathLike | None) or hasattr(given.config, "model_type")
        rule = "must be a configuration of transformers, or the folder that holds one"
        require(known, f"config={given.config!r:.60} {rule}")
        known = given.generation_config is None or hasattr(given.generation_config, "to_dict")
        require(known, f"generation_config={given.generation_config!r:.60} must be a GenerationConfig of transformers")
        return given

    def check_code(self, config: Any) -> None:
        """Raise ``ValueError`` if the folder's own code is asked for."""
        own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        require(
            not (self.trust_remote_code and own),
            f"trust_remote_code={self.trust_remote_code} must be left out: auto_map of config.json names a model of "
            f"the folder's own, and Comet runs the {config.model_type} of transformers",
        )


def device_of(device: Any, device_map: Any) -> Any:
    """``device``, or the only one that a ``device_map`` names."""
    if device_map is None:
        return device
    only = device_map.get("") if isinstance(device_map, Mapping) and len(device_map) == 1 else device_map
    require(
        only is not None and not isinstance(only, Mapping) and only not in (*SPREADING, "disk"),
        f"device_map={device_map!r:.60} must name one device, as device='cuda:0' does: expert_budget keeps experts in "
        "host memory, and make_expert_group shares them with other ranks",
    )
    only = f"cuda:{only}" if isinstance(only, int) else only
    require(device in (None, only), f"device={device} must be the one of device_map={device_map!r}, or be left out")
    return only
