"""Features that a path, a place or an integration does not have, each with the reason.

Code asks this one table, and COMPATIBILITY.md lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The place, the reason and what to do, and the names of the features that are missing there.
MISSING: Mapping[str, Mapping[str, str]] = {
    "on a CPU": {
        "path='fused' and use_kernels=True need a GPU, or TRITON_INTERPRET=1 for Triton's interpreter; "
        "path='twin' does the same in plain torch": "kernels",
    },
    "in kernels on a CPU": {
        "Triton's interpreter is wrong in bfloat16, take torch.float32 or torch.float16, or path='twin', "
        "use_kernels=False": "dtype",
    },
    "in warp decode": {
        "a decode step has no backward pass, run it under torch.no_grad()": "requires_grad",
        "it drops no rows, decode_tokens=0 takes the group's path": "capacity_factor",
    },
    "in a converted model over a group": {"it is for inference, run it under torch.no_grad()": "requires_grad"},
    "with experts in block FP8 or in a store": {"gate and up would share scales, or are copied apart": "interleaved"},
    "in generation": {"sequences would drop each other's rows": "capacity_factor"},
    "where tp spans nodes": {"warp decode needs all slices of an expert in one node": "expert_budget"},
    "with a checkpoint of comet train": {
        "only Hugging Face folders are in block FP8": "keep_fp8",
        "only Hugging Face folders are read expert by expert, host is for both": "expert_store",
    },
    "with a Hugging Face folder": {"the folder's model chooses": "moe_path overlap"},
    "with vLLM": {
        "weights go on outputs": "apply_router_weight_on_input",
        "it would be left out": "gemm1_clamp_limit gemm1_alpha gemm1_beta",
    },
    "with vLLM in block FP8": {"gate and up rows of w1 would share a scale": "activation"},
    "with Megatron's layers": {
        "experts train in the type of the tokens": "fp8 fp4 quant_recipe use_kitchen",
        "kernels and their blocks follow the number of tokens": "batch_invariant_mode",
        "Comet's kernels multiply, and its checkpoints are those of SequentialMLP": "moe_use_legacy_grouped_gemm "
        "moe_single_grouped_weight moe_single_grouped_bias",
        "tokens travel in the model's hidden size": "moe_latent_size",
        "routing weights go on outputs": "moe_apply_probs_on_input",
        "the shared expert runs before the routed ones": "moe_shared_expert_overlap",
        "experts are not padded": "moe_pad_expert_input_to_capacity moe_router_padding_for_quantization "
        "moe_router_padding_for_fp8",
        "a rank drops no tokens": "moe_expert_rank_capacity_factor",
        "all gate rows of an expert come before its up rows": "moe_mlp_glu_interleave_size",
        "Comet overlaps inside the layer": "overlap_moe_expert_parallel_comm "
        "overlap_dispatch_backward_with_experts_wgrad",
        "the backward pass makes all gradients at once": "delay_wgrad_compute",
        "weights are made where they stay": "init_model_with_meta_device",
        "Megatron's graphs cut the layer in pieces, 'none' does not": "cuda_graph_impl",
        "the layer runs as a whole": "intermediate_tensors",
        "experts are stored as one tensor per layer": "singleton_local_shards",
        "gate and up are split": "flattened_range",
    },
    "with biases of Megatron's experts": {"it would take them, which have two dimensions, for matrices": "use_mup"},
    "without activation_func=quick_gelu": {
        "only experts of a clamped SwiGLU have them": "activation_func_clamp_value glu_linear_offset"
    },
    "with auto_map in config.json": {
        "it names a model of the folder's own, and Comet runs the one of transformers": "trust_remote_code"
    },
    "in load_pretrained": {
        "the folder is on this machine, get it there first, as by huggingface_hub.snapshot_download": "cache_dir "
        "force_download proxies token revision code_revision mirror tqdm_class",
        "the weights are the safetensors of the folder, read as they are": "state_dict gguf_file use_safetensors "
        "key_mapping from_tf from_flax ignore_mismatched_sizes disable_mmap",
        "the model goes to one device; expert_budget keeps experts in host memory or in files": "max_memory "
        "offload_folder offload_buffers offload_state_dict",
        "ranks share experts by load_pretrained(folder, make_expert_group(...))": "distributed_config device_mesh "
        "tp_plan tp_size",
        "Comet computes the experts": "experts_implementation use_kernels kernel_config allow_all_kernels "
        "fusion_config",
        "config.json says how the folder is quantised; see keep_fp8 and expert_dtype": "quantization_config",
        "load the base model, and add its adapter to that": "adapter_kwargs adapter_name",
        "rename that file": "transformers_weights",
    },
}
# Values that are as good as none.
NEUTRAL = {
    "moe_path": "auto", "expert_store": "host", "cuda_graph_impl": "none", "revision": "main", "use_safetensors": True,
    "experts_implementation": "comet", "adapter_name": "default",
}  # fmt: skip


def missing(where: str) -> dict[str, str]:
    """The features that are not there, each with its reason."""
    return {name: reason for reason, names in MISSING[where].items() for name in names.split()}


def refuse(where: str, **features: Any) -> None:
    """Raise ``ValueError`` for the first of the features that is asked for, of those that are missing there."""
    for name, value in features.items():
        if value is not None and value != NEUTRAL.get(name, False):
            raise ValueError(f"{name}={value!r:.60} must be left out {where}: {missing(where)[name]}")
